//! The operator's side of enrolment.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE},
    },
    response::{IntoResponse, Response},
    routing::post,
};
use branchpool_agent_api::problem::{PROBLEM_MEDIA_TYPE, Problem};
use http_body_util::{BodyExt, Limited};
use time::OffsetDateTime;
use tokio::{
    sync::{Semaphore, watch},
    time::timeout,
};
use tracing::{info, warn};

use super::{EnrolAnswer, EnrolRequest, PATH};
use crate::{Authority, authority};

const MAX_BODY: usize = 16 << 10;
/// Longer than any token of an API server, and shorter than the headers that are read.
const MAX_TOKEN: usize = 16 << 10;
/// At a time. Each asks the API server once; agents that are turned away come back.
const MAX_ENROLMENTS: usize = 16;
/// For the body, and then for the review.
const BODY_TIME: Duration = Duration::from_secs(5);
const REVIEW_TIME: Duration = Duration::from_secs(10);
const RETRY_MS: u64 = 1000;

/// The token that an agent has sent. Not shown when it is printed.
#[derive(Clone, PartialEq, Eq)]
pub struct PodToken(String);

impl PodToken {
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for PodToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("PodToken(…)")
    }
}

/// Whose a token is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reviewed {
    /// Name of the node that the Pod is on.
    pub node: String,
    pub pod_uid: String,
}

/// Why there is no certificate. One sentence each, which goes to the agent and its log: nothing secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The token is not one of an agent's Pod: expired, for another audience, of another account.
    Denied(String),
    /// That could not be found out now.
    Unavailable(String),
}

/// Who decides whose a token is.
pub trait Reviewer: Clone + Send + Sync + 'static {
    /// The future may be dropped at any await, because the agent went away or its time was up.
    fn review(&self, token: &PodToken) -> impl Future<Output = Result<Reviewed, Refusal>> + Send;
}

#[derive(Clone)]
struct Office<R> {
    reviewer: R,
    authority: watch::Receiver<Arc<Authority>>,
    places: Arc<Semaphore>,
}

/// `POST /v1/enrol`, to be served by TLS alone. Bounded in itself: 16 at a time, 16 KiB of body, 15 s.
pub fn router<R: Reviewer>(reviewer: R, authority: watch::Receiver<Arc<Authority>>) -> Router {
    let office = Office {
        reviewer,
        authority,
        places: Arc::new(Semaphore::new(MAX_ENROLMENTS)),
    };
    Router::new()
        .route(PATH, post(enrol::<R>))
        .with_state(office)
}

async fn enrol<R: Reviewer>(State(office): State<Office<R>>, request: Request) -> Response {
    match office.answer(request).await {
        Ok(answer) => {
            let mut response = axum::Json(answer).into_response();
            let no_store = HeaderValue::from_static("no-store");
            response.headers_mut().insert(CACHE_CONTROL, no_store);
            response
        }
        Err(problem) => refused(&problem),
    }
}

impl<R: Reviewer> Office<R> {
    async fn answer(&self, request: Request) -> Result<EnrolAnswer, Problem> {
        let token = bearer(request.headers())?;
        let _place = self.places.try_acquire().map_err(|_| {
            let detail = format!("{MAX_ENROLMENTS} agents enrol at this moment; try again");
            Problem::new(503, "TooManyEnrolments", detail).with_retry_after_ms(RETRY_MS)
        })?;
        let request = body(request).await?;
        let reviewed = match timeout(REVIEW_TIME, self.reviewer.review(&token)).await {
            Ok(Ok(reviewed)) => reviewed,
            Ok(Err(Refusal::Denied(why))) => {
                warn!("an enrolment was refused: {why}");
                return Err(Problem::new(403, "TokenRefused", why));
            }
            Ok(Err(Refusal::Unavailable(why))) => {
                return Err(
                    Problem::new(503, "ReviewUnavailable", why).with_retry_after_ms(RETRY_MS)
                );
            }
            Err(_) => {
                let detail = "the API server did not say in time whose the token is; try again";
                let problem = Problem::new(503, "ReviewUnavailable", detail);
                return Err(problem.with_retry_after_ms(RETRY_MS));
            }
        };
        let Reviewed { node, pod_uid } = reviewed;
        let authority = Arc::clone(&self.authority.borrow());
        let certified = authority.certify_agent(&request.csr, &node, OffsetDateTime::now_utc());
        let certificate = certified.map_err(|error| {
            warn!(node, pod_uid, "no certificate was issued: {error}");
            not_certified(&error)
        })?;
        info!(node, pod_uid, "an agent has a new certificate");
        Ok(EnrolAnswer { certificate, node })
    }
}

fn not_certified(error: &authority::Error) -> Problem {
    match error {
        authority::Error::Request { .. } => Problem::invalid_field("csr", error.to_string()),
        authority::Error::Node { .. } => Problem::new(422, "NodeName", error.to_string()),
        _ => Problem::new(500, "NotCertified", error.to_string()),
    }
}

fn bearer(headers: &HeaderMap) -> Result<PodToken, Problem> {
    let value = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
    let token = value.and_then(|value| {
        let (scheme, token) = value.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
    });
    let token = token
        .filter(|token| (1..=MAX_TOKEN).contains(&token.len()))
        .filter(|token| token.iter().all(u8::is_ascii_graphic))
        .and_then(|token| String::from_utf8(token.to_vec()).ok());
    token.map(PodToken).ok_or_else(|| {
        Problem::new(
            401,
            "Unauthorized",
            "this path wants the header Authorization: Bearer TOKEN, with a token of the agent's Pod",
        )
    })
}

async fn body(request: Request) -> Result<EnrolRequest, Problem> {
    let media_type = request.headers().get(CONTENT_TYPE);
    if media_type.is_none_or(|value| value.as_bytes() != b"application/json") {
        let detail = "the body must be of Content-Type application/json";
        return Err(Problem::new(415, "UnsupportedMediaType", detail));
    }
    let reading = Limited::new(request.into_body(), MAX_BODY).collect();
    let bytes = match timeout(BODY_TIME, reading).await {
        Ok(Ok(collected)) => collected.to_bytes(),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            let detail = format!("the body is longer than {MAX_BODY} bytes");
            return Err(Problem::new(413, "BodyTooLarge", detail));
        }
        Ok(Err(_)) => {
            return Err(Problem::new(
                400,
                "BrokenBody",
                "the body did not arrive whole",
            ));
        }
        Err(_) => {
            let detail = format!("the body did not arrive within {} s", BODY_TIME.as_secs());
            return Err(Problem::new(408, "BodyTimeout", detail));
        }
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| Problem::new(400, "MalformedJson", format!("the body: {error}")))
}

fn refused(problem: &Problem) -> Response {
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let json = serde_json::to_vec(problem).unwrap_or_default();
    let mut response = Response::new(Body::from(json));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_MEDIA_TYPE));
    if let Some(milliseconds) = problem.retry_after_ms {
        headers.insert(RETRY_AFTER, milliseconds.div_ceil(1000).into());
    }
    if status == StatusCode::UNAUTHORIZED {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_not_shown_when_it_is_printed() {
        let token = PodToken("secret".into());
        assert!(!format!("{token:?}").contains("secret"));
    }
}
