//! A session on a server's Unix socket, spoken in the raw protocol, so that another party can
//! take the connection over later.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use branchpool_gateway::connect;
pub use branchpool_gateway::{MAX_SOCKET_PATH, SOCKET_NAME};
use bytes::{BufMut, Bytes, BytesMut};
use fallible_iterator::FallibleIterator;
use postgres_protocol::message::{
    backend::{DataRowBody, ErrorFields, Header, Message},
    frontend,
};
use snafu::{ResultExt, Snafu};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

/// Longest accepted message of a server, in bytes; a branch's superuser decides what it sends.
const MAX_MESSAGE: i32 = 16 << 20;
/// Longest accepted answer to a query of the agent's own, in bytes.
const MAX_ANSWER: usize = 32 << 20;
/// Most notices kept for whoever takes the session over.
const MAX_NOTICES: usize = 16;
/// A setting of the image must not cut what waits, and counts again for whom it is handed to.
pub const WAIT_FOR_EVER: &str = "SET idle_session_timeout = 0";
const WAIT_AS_SET: &str = "RESET idle_session_timeout";
/// How long a polite goodbye may take.
const TERMINATE_TIMEOUT: Duration = Duration::from_millis(200);

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("no connection to the server's socket in {}: {source}", socket_dir.display()))]
    Connect {
        socket_dir: PathBuf,
        source: io::Error,
    },

    #[snafu(display("the server ended the session: {source}"))]
    Io { source: io::Error },

    #[snafu(display("the server ended the session"))]
    Closed,

    #[snafu(display("{error}"))]
    Server { error: Box<ServerError> },

    #[snafu(display(
        "the server asks for a password or another proof of identity where it should trust the agent's OS user; check hba_file and ident_file"
    ))]
    AuthenticationRequired,

    #[snafu(display("the server broke the protocol: {detail}"))]
    Protocol { detail: String },
}

impl Error {
    /// The SQLSTATE when the server itself refused.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Self::Server { error } => Some(&error.sqlstate),
            _ => None,
        }
    }
}

/// An error that the server reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerError {
    pub severity: String,
    /// Five characters.
    pub sqlstate: String,
    pub message: String,
    pub detail: Option<String>,
    pub hint: Option<String>,
}

impl std::fmt::Display for ServerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}: {} (SQLSTATE {})",
            self.severity, self.message, self.sqlstate
        )?;
        for more in [&self.detail, &self.hint].into_iter().flatten() {
            write!(f, "; {more}")?;
        }
        Ok(())
    }
}

impl ServerError {
    /// As a `NoticeResponse` on the wire.
    fn notice(&self) -> Bytes {
        let mut fields = BytesMut::new();
        let (detail, hint) = (self.detail.as_deref(), self.hint.as_deref());
        for (tag, value) in [
            (b'S', Some(&*self.severity)),
            (b'V', Some(&*self.severity)),
            (b'C', Some(&*self.sqlstate)),
            (b'M', Some(&*self.message)),
            (b'D', detail),
            (b'H', hint),
        ] {
            if let Some(value) = value {
                fields.put_u8(tag);
                fields.put_slice(value.as_bytes());
                fields.put_u8(0);
            }
        }
        fields.put_u8(0);
        let mut message = BytesMut::with_capacity(fields.len() + 5);
        message.put_u8(b'N');
        // The length counts itself.
        message.put_u32(u32::try_from(fields.len() + 4).unwrap_or(u32::MAX));
        message.put_slice(&fields);
        message.freeze()
    }

    fn read(mut fields: ErrorFields<'_>) -> Self {
        let mut error = Self::default();
        while let Ok(Some(field)) = fields.next() {
            let value = String::from_utf8_lossy(field.value_bytes()).into_owned();
            match field.type_() {
                b'S' => error.severity = value,
                b'C' => error.sqlstate = value,
                b'M' => error.message = value,
                b'D' => error.detail = Some(value),
                b'H' => error.hint = Some(value),
                _ => {}
            }
        }
        error
    }
}

/// With what a session is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Startup {
    pub user: String,
    pub database: String,
    /// Further startup parameters.
    pub parameters: Vec<(String, String)>,
}

/// What the server wants to see in a `CancelRequest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CancelKey {
    pub process_id: i32,
    pub secret: i32,
}

/// A session that waits for queries.
#[derive(Debug)]
pub struct Session {
    stream: UnixStream,
    buffer: BytesMut,
    startup: Startup,
    parameters: BTreeMap<String, String>,
    cancel_key: Option<CancelKey>,
    notices: Vec<ServerError>,
}

impl Session {
    /// Opens a session on the socket in `socket_dir`, where this process's OS user must be
    /// trusted to be `startup.user`. Takes as long as the server does: put a limit around it.
    pub async fn open(socket_dir: &Path, startup: Startup) -> Result<Self, Error> {
        let stream = connect(socket_dir)
            .await
            .context(ConnectSnafu { socket_dir })?;
        let mut session = Self {
            stream,
            buffer: BytesMut::with_capacity(4096),
            startup,
            parameters: BTreeMap::new(),
            cancel_key: None,
            notices: Vec::new(),
        };
        session.send_startup().await?;
        session.read_greeting().await?;
        Ok(session)
    }

    /// The first column of the first row, `None` when there is no row or when it is NULL.
    pub async fn query_one(&mut self, sql: &str) -> Result<Option<String>, Error> {
        let rows = self.query(sql).await?;
        Ok(rows
            .into_iter()
            .next()
            .and_then(|row| row.into_iter().next())
            .flatten())
    }

    /// Runs statements, discarding rows.
    pub async fn execute(&mut self, sql: &str) -> Result<(), Error> {
        self.query(sql).await.map(|_| ())
    }

    /// Runs statements by the simple protocol and returns all rows in text. For the agent's own
    /// small queries: the answer is held in memory.
    pub async fn query(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>, Error> {
        let mut message = BytesMut::with_capacity(sql.len() + 8);
        frontend::query(sql, &mut message).context(IoSnafu)?;
        self.stream.write_all(&message).await.context(IoSnafu)?;
        let mut rows = Vec::new();
        let mut held = 0;
        let mut failed = None;
        loop {
            match self.next_message().await? {
                Message::DataRow(row) => {
                    held += row.buffer().len();
                    if held > MAX_ANSWER {
                        let detail = format!("an answer of more than {MAX_ANSWER} bytes");
                        return ProtocolSnafu { detail }.fail();
                    }
                    rows.push(read_row(&row)?);
                }
                Message::ErrorResponse(body) => failed = Some(ServerError::read(body.fields())),
                Message::ReadyForQuery(_) => break,
                Message::CopyInResponse(_) => self.refuse_copy().await?,
                other => self.note(&other)?,
            }
        }
        match failed {
            Some(error) => ServerSnafu { error }.fail(),
            None => Ok(rows),
        }
    }

    /// Resolves when the server ends the idle session, with the reason. What the server tells
    /// meanwhile is kept. May be dropped and called again.
    pub async fn closed(&mut self) -> Error {
        loop {
            let noted = match self.next_message().await {
                Ok(Message::ErrorResponse(body)) => {
                    let error = Box::new(ServerError::read(body.fields()));
                    return Error::Server { error };
                }
                Ok(message) => self.note(&message),
                Err(error) => return error,
            };
            if let Err(error) = noted {
                return error;
            }
        }
    }

    /// Says goodbye and closes; takes a bounded time even if the server hangs.
    pub async fn terminate(mut self) {
        let mut message = BytesMut::new();
        frontend::terminate(&mut message);
        let goodbye = async {
            self.stream.write_all(&message).await?;
            // The server closes when its backend has left all shared state.
            while self.stream.read_buf(&mut self.buffer).await? > 0 {
                self.buffer.clear();
            }
            Ok::<_, io::Error>(())
        };
        let _ = tokio::time::timeout(TERMINATE_TIMEOUT, goodbye).await;
    }

    pub fn parameters(&self) -> &BTreeMap<String, String> {
        &self.parameters
    }

    pub fn cancel_key(&self) -> Option<CancelKey> {
        self.cancel_key
    }

    pub fn startup(&self) -> &Startup {
        &self.startup
    }

    /// For who speaks the protocol itself: the stream, what was read ahead of it, and the key.
    pub fn into_stream(self) -> (UnixStream, BytesMut, Option<CancelKey>) {
        (self.stream, self.buffer, self.cancel_key)
    }

    /// For the gateway's first client. Comes back when the server gave no key to cancel by.
    pub fn into_gateway(self) -> Result<branchpool_gateway::Session, Box<Self>> {
        let Some(key) = self.cancel_key else {
            return Err(Box::new(self));
        };
        Ok(branchpool_gateway::Session {
            stream: self.stream,
            buffer: self.buffer,
            profile: self.startup.parameters,
            parameters: self.parameters,
            cancel_key: branchpool_gateway::CancelKey {
                process_id: key.process_id,
                secret: key.secret,
            },
            notices: self.notices.iter().map(ServerError::notice).collect(),
            at_hand_over: Some(WAIT_AS_SET.to_owned()),
        })
    }

    async fn send_startup(&mut self) -> Result<(), Error> {
        let own = [
            ("user", self.startup.user.as_str()),
            ("database", self.startup.database.as_str()),
        ];
        let more = &self.startup.parameters;
        let parameters = own.into_iter().chain(
            more.iter()
                .map(|(name, value)| (name.as_str(), value.as_str())),
        );
        let mut message = BytesMut::with_capacity(128);
        frontend::startup_message(parameters, &mut message).context(IoSnafu)?;
        self.stream.write_all(&message).await.context(IoSnafu)
    }

    async fn read_greeting(&mut self) -> Result<(), Error> {
        loop {
            match self.next_message().await? {
                Message::AuthenticationOk => {}
                Message::BackendKeyData(body) => {
                    self.cancel_key = Some(CancelKey {
                        process_id: body.process_id(),
                        secret: body.secret_key(),
                    });
                }
                Message::ReadyForQuery(_) => return Ok(()),
                Message::ErrorResponse(body) => {
                    let error = ServerError::read(body.fields());
                    return ServerSnafu { error }.fail();
                }
                Message::AuthenticationSasl(_)
                | Message::AuthenticationMd5Password(_)
                | Message::AuthenticationCleartextPassword
                | Message::AuthenticationGss
                | Message::AuthenticationSspi => return AuthenticationRequiredSnafu.fail(),
                other => self.note(&other)?,
            }
        }
    }

    /// Keeps what a server may say at any time.
    fn note(&mut self, message: &Message) -> Result<(), Error> {
        match message {
            Message::ParameterStatus(body) => {
                let name = body.name().context(IoSnafu)?.to_owned();
                let value = body.value().context(IoSnafu)?.to_owned();
                self.parameters.insert(name, value);
            }
            Message::NoticeResponse(body) if self.notices.len() < MAX_NOTICES => {
                self.notices.push(ServerError::read(body.fields()));
            }
            _ => {}
        }
        Ok(())
    }

    /// A statement of ours never copies in; a script's does not come here.
    async fn refuse_copy(&mut self) -> Result<(), Error> {
        let mut message = BytesMut::new();
        frontend::copy_fail("no data", &mut message).context(IoSnafu)?;
        self.stream.write_all(&message).await.context(IoSnafu)
    }

    async fn next_message(&mut self) -> Result<Message, Error> {
        loop {
            if let Some(header) = Header::parse(&self.buffer).context(IoSnafu)?
                && header.len() > MAX_MESSAGE
            {
                let detail = format!("a message of {} bytes", header.len());
                return ProtocolSnafu { detail }.fail();
            }
            if let Some(message) = Message::parse(&mut self.buffer).context(IoSnafu)? {
                return Ok(message);
            }
            let read = self
                .stream
                .read_buf(&mut self.buffer)
                .await
                .context(IoSnafu)?;
            if read == 0 {
                return ClosedSnafu.fail();
            }
        }
    }
}

fn read_row(row: &DataRowBody) -> Result<Vec<Option<String>>, Error> {
    let buffer = row.buffer();
    row.ranges()
        .map(|range| {
            Ok(range
                .and_then(|range| buffer.get(range))
                .map(|bytes| String::from_utf8_lossy(bytes).into_owned()))
        })
        .collect()
        .context(IoSnafu)
}

/// Asks the server to cancel what the session of this key runs. The answer comes in that session.
pub async fn cancel(socket_dir: &Path, key: CancelKey) -> io::Result<()> {
    let mut message = BytesMut::new();
    frontend::cancel_request(key.process_id, key.secret, &mut message);
    let mut stream = connect(socket_dir).await?;
    stream.write_all(&message).await?;
    // The server closes when it has passed the request on.
    stream.read_to_end(&mut Vec::new()).await?;
    Ok(())
}
