//! A session of its own for one request, spoken in the extended protocol with text both ways.

use std::{path::PathBuf, time::Duration};

use branchpool_agent_api::SqlError;
use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::{
    IsNull,
    message::{
        backend::{ErrorFields, Header, Message, RowDescriptionBody},
        frontend,
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};

use super::{
    Failure, Statement,
    answer::{Answer, Field, Shape, Tag},
};
use crate::postgres::session::{self, CancelKey, Session, Startup};

/// How long a server may take to end a session that was cancelled or said goodbye to.
const FAREWELL: Duration = Duration::from_secs(5);
/// Room for what is no row: descriptions of columns, errors, notices.
const OTHER_MESSAGES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Wire {
    stream: UnixStream,
    buffer: BytesMut,
    cancel_key: Option<CancelKey>,
    socket_dir: PathBuf,
}

impl Wire {
    pub(super) async fn open(socket_dir: PathBuf, startup: Startup) -> Result<Self, Failure> {
        let session = Session::open(&socket_dir, startup).await.map_err(refused)?;
        let (stream, buffer, cancel_key) = session.into_stream();
        Ok(Self {
            stream,
            buffer,
            cancel_key,
            socket_dir,
        })
    }

    /// Runs a statement of the agent's own that returns nothing.
    pub(super) async fn command(&mut self, sql: &str) -> Result<(), Failure> {
        let mut unread = Answer::new(Shape::Own, OTHER_MESSAGES);
        let statement = Statement {
            sql: sql.to_owned(),
            params: Vec::new(),
            array_mode: false,
        };
        self.run(&statement, &mut unread).await
    }

    /// Runs a statement and appends its result.
    pub(super) async fn run(
        &mut self,
        statement: &Statement,
        answer: &mut Answer,
    ) -> Result<(), Failure> {
        self.send(statement).await?;
        let mut failed = None;
        loop {
            let message = match self.next(answer.room()).await {
                // A server that ends the session says why first.
                Err(Failure::Lost) => return Err(failed.unwrap_or(Failure::Lost)),
                message => message?,
            };
            match message {
                Message::RowDescription(body) => {
                    answer.begin(fields(&body)?, statement.array_mode)?;
                }
                Message::NoData => answer.begin(Vec::new(), statement.array_mode)?,
                Message::DataRow(row) => {
                    let buffer = row.buffer();
                    let ranges: Vec<_> = row.ranges().collect().map_err(broken)?;
                    let values = ranges.into_iter();
                    answer.row(values.map(|range| range.and_then(|range| buffer.get(range))))?;
                }
                Message::CommandComplete(body) => {
                    answer.end(&Tag::parse(body.tag().map_err(broken)?))?;
                }
                Message::EmptyQueryResponse => answer.end(&Tag::parse(""))?,
                Message::ErrorResponse(body) => {
                    failed = Some(Failure::Postgres(Box::new(read_error(body.fields()))));
                }
                Message::CopyInResponse(_) | Message::CopyOutResponse(_) => {
                    return Err(Failure::Copy);
                }
                Message::ReadyForQuery(_) => return failed.map_or(Ok(()), Err),
                // Notices, notifications and changed settings concern nobody here.
                _ => {}
            }
        }
    }

    /// Ends the session in order.
    pub(super) async fn close(mut self) {
        let mut message = BytesMut::new();
        frontend::terminate(&mut message);
        // One that is gone already is closed as well.
        let _ = self.stream.write_all(&message).await;
        self.until_closed().await;
    }

    /// Ends whatever runs, in whatever state the session is.
    pub(super) async fn abort(mut self) {
        if let Some(key) = self.cancel_key {
            let cancelled = session::cancel(&self.socket_dir, key);
            // Without it the server notices that nobody reads.
            let _ = timeout(FAREWELL, cancelled).await;
        }
        // What was sent may end inside a message, after which nothing can be said.
        let _ = self.stream.shutdown().await;
        self.until_closed().await;
    }

    async fn until_closed(&mut self) {
        let closed = async {
            loop {
                self.buffer.clear();
                match self.stream.read_buf(&mut self.buffer).await {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
            }
        };
        let _ = timeout(FAREWELL, closed).await;
    }

    async fn send(&mut self, statement: &Statement) -> Result<(), Failure> {
        let mut message = BytesMut::with_capacity(statement.sql.len() + 64);
        frontend::parse("", &statement.sql, [], &mut message).map_err(invalid)?;
        let bound = frontend::bind(
            "",
            "",
            [],
            &statement.params,
            |param, message| {
                Ok(match param {
                    Some(text) => {
                        message.extend_from_slice(text.as_bytes());
                        IsNull::No
                    }
                    None => IsNull::Yes,
                })
            },
            [],
            &mut message,
        );
        bound.map_err(|error| match error {
            frontend::BindError::Conversion(error) => invalid(error),
            frontend::BindError::Serialization(error) => invalid(error),
        })?;
        frontend::describe(b'P', "", &mut message).map_err(invalid)?;
        frontend::execute("", 0, &mut message).map_err(invalid)?;
        frontend::sync(&mut message);
        self.stream.write_all(&message).await.map_err(broken)
    }

    /// A row that is longer than `room` is not read.
    async fn next(&mut self, room: usize) -> Result<Message, Failure> {
        loop {
            if let Some(header) = Header::parse(&self.buffer).map_err(broken)? {
                let length = usize::try_from(header.len()).unwrap_or(usize::MAX);
                if length > room.max(OTHER_MESSAGES) {
                    return Err(Failure::TooLong);
                }
            }
            if let Some(message) = Message::parse(&mut self.buffer).map_err(broken)? {
                return Ok(message);
            }
            if self
                .stream
                .read_buf(&mut self.buffer)
                .await
                .map_err(broken)?
                == 0
            {
                return Err(Failure::Lost);
            }
        }
    }
}

fn fields(body: &RowDescriptionBody) -> Result<Vec<Field>, Failure> {
    let fields = body.fields().map(|field| {
        Ok(Field {
            name: field.name().to_owned(),
            type_id: field.type_oid(),
            table_id: field.table_oid(),
            column_id: field.column_id(),
            type_size: field.type_size(),
            type_modifier: field.type_modifier(),
            format: "text",
        })
    });
    fields.collect().map_err(broken)
}

fn read_error(mut fields: ErrorFields<'_>) -> SqlError {
    let mut error = SqlError::default();
    let mut localised = None;
    while let Ok(Some(field)) = fields.next() {
        let value = String::from_utf8_lossy(field.value_bytes()).into_owned();
        let place = match field.type_() {
            b'M' => {
                error.message = value;
                continue;
            }
            b'S' => &mut localised,
            b'V' => &mut error.severity,
            b'C' => &mut error.code,
            b'D' => &mut error.detail,
            b'H' => &mut error.hint,
            b'P' => &mut error.position,
            b'p' => &mut error.internal_position,
            b'q' => &mut error.internal_query,
            b'W' => &mut error.context,
            b's' => &mut error.schema,
            b't' => &mut error.table,
            b'c' => &mut error.column,
            b'd' => &mut error.data_type,
            b'n' => &mut error.constraint,
            b'F' => &mut error.file,
            b'L' => &mut error.line,
            b'R' => &mut error.routine,
            _ => continue,
        };
        *place = Some(value);
    }
    error.severity = error.severity.or(localised);
    error
}

/// No session: the server's own refusal is the client's to read, unless it is about to serve.
fn refused(error: session::Error) -> Failure {
    match error {
        session::Error::Server { error } if error.sqlstate != "57P03" => {
            Failure::Postgres(Box::new(SqlError {
                severity: Some(error.severity),
                code: Some(error.sqlstate),
                message: error.message,
                detail: error.detail,
                hint: error.hint,
                ..SqlError::default()
            }))
        }
        error => Failure::Unreachable {
            detail: error.to_string(),
        },
    }
}

fn broken(error: impl std::fmt::Display) -> Failure {
    tracing::debug!(%error, "a session for SQL over HTTP broke");
    Failure::Lost
}

/// A text with a zero byte, or more parameters than the protocol counts.
fn invalid(error: impl std::fmt::Display) -> Failure {
    let message = format!("the query cannot be sent to the server: {error}");
    Failure::Postgres(Box::new(SqlError::new("08P01", message)))
}
