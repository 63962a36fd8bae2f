//! SQL over HTTP, by two doors: `POST /v1/leases/{uid}/sql`, and `POST /sql` as Neon's driver speaks it.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::Body,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{CONTENT_LENGTH, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
};
use branchpool_agent_api::{Problem, SqlRequest};
use bytes::Bytes;
use futures_util::stream;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{
    Service,
    answer::{Refusal, json},
    input,
    routes::{Answer, Segment, Shared, checked_uid},
};
use crate::sql::{
    Address, Admission, Failure, Isolation, Job, Limits, Shape, Sql, Statement, Transaction, Work,
    parameter, parse_address,
};

/// The path that Neon's driver posts to. The connection string it sends is its credentials.
pub(super) const NEON_PATH: &str = "/sql";
/// Bytes of an answer that are handed on at a time.
const CHUNK: usize = 64 << 10;

/// These end by limits of their own.
pub(super) fn bounds_itself(path: &str) -> bool {
    path == NEON_PATH || (path.starts_with("/v1/leases/") && path.ends_with("/sql"))
}

pub(super) async fn of_lease<S: Service>(
    State(context): Shared<S>,
    uid: Segment,
    request: Request,
) -> Answer {
    let sql = context.service.sql();
    let answer = counted(sql, answer_own(&context.service, sql, uid, request)).await;
    answer.map_err(|failure| failure.into_problem(sql.limits()).into())
}

async fn answer_own<S: Service>(
    service: &S,
    sql: &Sql,
    uid: Segment,
    request: Request,
) -> Result<Served, Failure> {
    let uid = checked_uid(uid)?;
    input::no_query(request.uri())?;
    // Before the body, for whoever has the wrong lease.
    service.sql_target(&uid)?;
    let admission = sql.admit()?;
    let body: SqlRequest = input::json(request, sql.limits().body).await?;
    let job = own_job(body, sql.limits())?;
    let text = sql.run(&uid, job, service.sql_enter(&uid)).await?;
    Ok(Served { text, admission })
}

/// A result, and the right to hold it in memory.
struct Served {
    text: Vec<u8>,
    admission: Admission,
}

/// Counts the request, also when its client does not wait for the answer.
async fn counted(
    sql: &Sql,
    answer: impl Future<Output = Result<Served, Failure>>,
) -> Result<Response, Failure> {
    let request = sql.metrics().request();
    let answer = answer.await;
    request.answered(answer.as_ref().map(|served| &*served.text));
    answer.map(result)
}

fn own_job(request: SqlRequest, limits: &Limits) -> Result<Job, Problem> {
    let timeout = match request.timeout_ms {
        None => limits.timeout,
        Some(milliseconds) => {
            let most = limits.max_timeout.as_millis();
            if milliseconds == 0 || u128::from(milliseconds) > most {
                return Err(Problem::invalid_field(
                    "timeoutMs",
                    format!("must be from 1 to {most}, is {milliseconds}"),
                ));
            }
            Duration::from_millis(milliseconds)
        }
    };
    let statement = statement(request.query, &request.params, request.array_mode)
        .map_err(|(index, why)| Problem::invalid_field(format!("params[{index}]"), why))?;
    Ok(Job {
        work: Work::One {
            statement,
            read_only: request.read_only,
        },
        shape: Shape::Own,
        database: None,
        parameters: Vec::new(),
        timeout,
    })
}

/// `Err`: which parameter is wrong, and why.
fn statement(
    sql: String,
    params: &[Box<RawValue>],
    array_mode: bool,
) -> Result<Statement, (usize, String)> {
    let params = params
        .iter()
        .enumerate()
        .map(|(index, param)| parameter(param).map_err(|why| (index, why)));
    Ok(Statement {
        sql,
        params: params.collect::<Result<_, _>>()?,
        array_mode,
    })
}

pub(super) async fn as_neon<S: Service>(State(context): Shared<S>, request: Request) -> Response {
    let sql = context.service.sql();
    match counted(sql, answer_neon(&context.service, sql, request)).await {
        Ok(response) => response,
        Err(failure) => match failure.into_error(sql.limits()) {
            Ok(error) => json(StatusCode::BAD_REQUEST, &error),
            Err(problem) => Refusal(problem).into_response(),
        },
    }
}

async fn answer_neon<S: Service>(
    service: &S,
    sql: &Sql,
    request: Request,
) -> Result<Served, Failure> {
    let address = address(request.headers())?;
    let lease = service.sql_login(&address.user, &address.password);
    // One answer for unknown users, wrong passwords and leases that have ended.
    let lease = lease.ok_or(Failure::Denied { user: address.user })?;
    let options = Options::read(request.headers())?;
    let admission = sql.admit()?;
    // Its media type is whatever fetch makes of a string.
    let body = input::read(request, sql.limits().body).await?;
    let job = Job {
        work: options.work(&body)?,
        shape: Shape::Neon { raw: options.raw },
        database: Some(address.database),
        parameters: address.parameters,
        timeout: sql.limits().timeout,
    };
    let text = sql.run(&lease, job, service.sql_enter(&lease)).await?;
    Ok(Served { text, admission })
}

fn address(headers: &HeaderMap) -> Result<Address, Failure> {
    let mut values = headers.get_all("neon-connection-string").iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return Err(malformed(
            "the request must have one header Neon-Connection-String",
        ));
    };
    let text = value.to_str().map_err(|_| "it is not ASCII text");
    text.and_then(parse_address).map_err(|why| {
        malformed(format!(
            "the header Neon-Connection-String is no address: {why}"
        ))
    })
}

fn malformed(message: impl Into<String>) -> Failure {
    let message = message.into();
    Failure::Malformed { message }
}

/// What Neon's driver says in headers.
struct Options {
    raw: bool,
    array_mode: bool,
    transaction: Transaction,
}

impl Options {
    fn read(headers: &HeaderMap) -> Result<Self, Failure> {
        let is_true = |name: &str| headers.get(name).is_some_and(|value| value == "true");
        let isolation = headers
            .get("neon-batch-isolation-level")
            .map(|value| match value.as_bytes() {
                b"ReadUncommitted" => Ok(Isolation::ReadUncommitted),
                b"ReadCommitted" => Ok(Isolation::ReadCommitted),
                b"RepeatableRead" => Ok(Isolation::RepeatableRead),
                b"Serializable" => Ok(Isolation::Serializable),
                _ => Err(malformed(
                    "the header Neon-Batch-Isolation-Level must be ReadUncommitted, ReadCommitted, RepeatableRead or Serializable",
                )),
            });
        Ok(Self {
            raw: is_true("neon-raw-text-output"),
            array_mode: is_true("neon-array-mode"),
            transaction: Transaction {
                isolation: isolation.transpose()?,
                read_only: is_true("neon-batch-read-only"),
                deferrable: is_true("neon-batch-deferrable"),
            },
        })
    }

    fn work(&self, body: &[u8]) -> Result<Work, Failure> {
        let body: NeonBody = serde_json::from_slice(body)
            .map_err(|error| malformed(format!("the body is not as expected: {error}")))?;
        match (body.query, body.queries) {
            (Some(query), None) => Ok(Work::One {
                statement: self.statement(NeonQuery {
                    query,
                    params: body.params,
                    array_mode: body.array_mode,
                })?,
                read_only: false,
            }),
            (None, Some(queries)) => Ok(Work::Batch {
                statements: queries
                    .into_iter()
                    .map(|query| self.statement(query))
                    .collect::<Result<_, _>>()?,
                transaction: self.transaction,
            }),
            _ => Err(malformed("the body must hold either query or queries")),
        }
    }

    fn statement(&self, query: NeonQuery) -> Result<Statement, Failure> {
        let array_mode = query.array_mode.unwrap_or(self.array_mode);
        statement(query.query, &query.params, array_mode)
            .map_err(|(index, why)| malformed(format!("parameter ${} {why}", index + 1)))
    }
}

/// One query, or `queries`. Further fields are for newer servers and are let pass.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct NeonBody {
    query: Option<String>,
    #[serde(default)]
    params: Vec<Box<RawValue>>,
    array_mode: Option<bool>,
    queries: Option<Vec<NeonQuery>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct NeonQuery {
    query: String,
    #[serde(default)]
    params: Vec<Box<RawValue>>,
    array_mode: Option<bool>,
}

/// The admission is held until the client has read most of the answer, which stays in memory for so long.
fn result(Served { text, admission }: Served) -> Response {
    let length = HeaderValue::from(text.len());
    let state = (Bytes::from(text), admission);
    let body = Body::from_stream(stream::unfold(state, async |(mut rest, admission)| {
        if rest.is_empty() {
            return None;
        }
        let chunk = rest.split_to(CHUNK.min(rest.len()));
        Some((Ok::<_, Infallible>(chunk), (rest, admission)))
    }));
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CONTENT_LENGTH, length);
    response
}
