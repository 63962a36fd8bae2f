//! From a client that has proved its password to a session of the branch's server.

use std::{io, sync::Arc, time::Instant};

use bytes::{Buf, Bytes, BytesMut};
use postgres_protocol::message::{
    backend::{
        AUTHENTICATION_TAG, BACKEND_KEY_DATA_TAG, COMMAND_COMPLETE_TAG, ERROR_RESPONSE_TAG, Message,
    },
    frontend,
};
use tokio::{io::AsyncWriteExt, net::UnixStream, time::timeout};

use crate::{
    branch::{Branch, Link, State, Unavailable},
    cancel::Registered,
    login::{self, Shared, Stop, not_a_proof},
    messages::{
        Fatal, authentication, put_backend_key, put_parameter_status, put_ready_for_query,
        put_sasl, put_startup,
    },
    metrics::{Counted, Phase},
    scram,
    session::{self, CancelKey, Frame, Session, next_frame},
    startup::Startup,
    stream::Wire,
    takeover::{self, Offer, Verdict},
};

/// What is collected for a client before it is sent, in bytes.
const COLLECT: usize = 16 << 10;

/// An open session. The stream is closed before the link is given back.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) stream: UnixStream,
    /// Read from the server, not yet sent to the client.
    pub(crate) buffer: BytesMut,
    _link: Link,
    _cancel: Option<Registered>,
}

/// Waits for a suspended branch.
pub(crate) async fn wake(
    shared: &Shared,
    branch: &Branch,
    counted: &mut Counted,
) -> Result<(), Stop> {
    let suspended = branch.state() == State::Suspended;
    let started = Instant::now();
    if suspended {
        counted.enter(Phase::Waking);
    }
    let result = branch.serving(shared.limits.wake_time).await;
    if suspended {
        counted.enter(Phase::Startup);
        let waited = started.elapsed().as_secs_f64();
        shared.metrics.wake.observe(waited);
    }
    result.map_err(|unavailable| match unavailable {
        Unavailable::Ended => Fatal::terminated().into(),
        Unavailable::Restarting | Unavailable::NotAwake => {
            not_available(&unavailable.to_string()).into()
        }
    })
}

fn not_available(why: &str) -> Fatal {
    Fatal::new("57P03", "the database system is starting up").hint(format!("Try again: {why}."))
}

/// The preconnected session for the first faithful client, a fresh one for any other. The client
/// is told everything up to and with `ReadyForQuery`.
pub(crate) async fn attach(
    shared: &Shared,
    wire: &mut Wire,
    startup: &Startup,
    branch: &Arc<Branch>,
) -> Result<Backend, Stop> {
    let role = &branch.facts().role;
    let decide = |session: &Session| {
        let offer = Offer {
            first_session: true,
            role,
            database: &branch.facts().database,
            profile: &session.profile,
            parameters: &session.parameters,
        };
        match takeover::decide(startup, role, &offer) {
            Verdict::TakeOver { application_name } => Some(application_name),
            Verdict::Fresh(reason) => {
                tracing::debug!(?reason, "the preconnected session does not fit");
                None
            }
        }
    };
    if let Some((session, link, application_name)) = branch.take_if(decide) {
        return hand_over(
            shared,
            wire,
            startup,
            branch,
            (session, link),
            application_name,
        )
        .await;
    }
    branch.close_session().await;
    shared.metrics.fresh_backends.inc();
    let mut opened = open(branch, startup, role).await?;
    let frame = opened.first_frame().await?;
    if frame.tag == AUTHENTICATION_TAG && frame.body() != authentication::OK.to_be_bytes() {
        tracing::error!("a branch's server asks for a password where it should trust the agent");
        let message = "the branch's server does not trust the gateway";
        return Err(Fatal::new("XX000", message).into());
    }
    greet(shared, wire, startup, branch, opened, frame).await
}

/// Gives the preconnected session to the client. Statements that have to run first are sent ahead
/// of the client's own, and their answers are taken out while the client reads its greeting.
async fn hand_over(
    shared: &Shared,
    wire: &mut Wire,
    startup: &Startup,
    branch: &Arc<Branch>,
    (mut session, link): (Session, Link),
    application_name: Option<String>,
) -> Result<Backend, Stop> {
    shared.metrics.handovers.inc();
    session.stream = here(session.stream).map_err(|source| session::Error::Io { source })?;
    let set = application_name
        .as_deref()
        .map(takeover::set_application_name);
    let statements: Vec<String> = session.at_hand_over.take().into_iter().chain(set).collect();
    if !statements.is_empty() {
        let mut query = BytesMut::new();
        frontend::query(&statements.join("; "), &mut query)?;
        let sent = session.stream.write_all(&query).await;
        sent.map_err(|source| session::Error::Io { source })?;
    }
    if let Some(name) = application_name {
        let key = "application_name".to_owned();
        session.parameters.insert(key, name);
    }

    let cancels = shared.directory.cancels();
    let cancel = cancels.register(branch, session.cancel_key, startup.spoken_minor());
    for (name, value) in &session.parameters {
        put_parameter_status(&mut wire.output, name, value);
    }
    for notice in &session.notices {
        wire.output.extend_from_slice(notice);
    }
    put_backend_key(&mut wire.output, &cancel.key);
    put_ready_for_query(&mut wire.output);
    wire.flush().await?;

    let mut backend = Backend {
        stream: session.stream,
        buffer: session.buffer,
        _link: link,
        _cancel: Some(cancel),
    };
    if !statements.is_empty() {
        let told = backend.take_answer().await?;
        backend.put_back(&told);
    }
    Ok(backend)
}

impl Backend {
    /// Reads the answer to statements of the gateway's own, and returns what in it concerns the
    /// client.
    async fn take_answer(&mut self) -> Result<BytesMut, Stop> {
        let mut told = BytesMut::new();
        loop {
            let frame = next_frame(&mut self.stream, &mut self.buffer).await?;
            match frame.tag {
                _ if frame.is_ready_for_query() => return Ok(told),
                ERROR_RESPONSE_TAG => {
                    tracing::warn!("a statement at the hand-over of a session failed");
                }
                COMMAND_COMPLETE_TAG => {}
                _ => told.extend_from_slice(&frame.bytes),
            }
        }
    }

    fn put_back(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            let rest = self.buffer.split();
            self.buffer.extend_from_slice(bytes);
            self.buffer.extend_from_slice(&rest);
        }
    }
}

/// A session that is being opened.
struct Opened<'a> {
    stream: UnixStream,
    buffer: BytesMut,
    link: Link,
    permit: Option<tokio::sync::SemaphorePermit<'a>>,
}

async fn open<'a>(
    branch: &'a Arc<Branch>,
    startup: &Startup,
    role: &str,
) -> Result<Opened<'a>, Stop> {
    let (stream, link, permit) = branch.connect().await.map_err(|error| {
        tracing::debug!(%error, "no session for a client");
        not_available("the branch's server does not take connections")
    })?;
    let pools = &branch.facts().database;
    let database = match &startup.database {
        Some(database) if !takeover::is_pools(startup, pools) => &database[..],
        _ => pools.as_bytes(),
    };
    let mut packet = BytesMut::with_capacity(256);
    put_startup(&mut packet, role, database, &startup.parameters);
    let mut opened = Opened {
        stream,
        buffer: BytesMut::with_capacity(2048),
        link,
        permit: Some(permit),
    };
    opened.send(&packet).await?;
    Ok(opened)
}

impl Opened<'_> {
    /// The server's first answer: from then on it has taken the connection out of its queue.
    async fn first_frame(&mut self) -> Result<Frame, Stop> {
        let frame = self.next_frame().await?;
        self.permit = None;
        Ok(frame)
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        let sent = self.stream.write_all(bytes).await;
        Ok(sent.map_err(|source| session::Error::Io { source })?)
    }

    async fn next_frame(&mut self) -> Result<Frame, Stop> {
        Ok(next_frame(&mut self.stream, &mut self.buffer).await?)
    }
}

impl From<session::Error> for Stop {
    fn from(error: session::Error) -> Self {
        tracing::debug!(%error, "a session did not open");
        let message = "the branch's server ended the session while it was opened";
        Fatal::new("57P02", message).hint("Connect again.").into()
    }
}

/// The same stream, waited for by the thread that serves its client.
fn here(stream: UnixStream) -> io::Result<UnixStream> {
    UnixStream::from_std(stream.into_std()?)
}

/// Passes the server's greeting on, beginning with `frame`, with a cancel key of the gateway's.
async fn greet(
    shared: &Shared,
    wire: &mut Wire,
    startup: &Startup,
    branch: &Arc<Branch>,
    mut opened: Opened<'_>,
    mut frame: Frame,
) -> Result<Backend, Stop> {
    let mut cancel = None;
    loop {
        match frame.tag {
            AUTHENTICATION_TAG => {}
            BACKEND_KEY_DATA_TAG => {
                let Ok(Message::BackendKeyData(body)) = frame.parse() else {
                    return Err(session::Error::Closed.into());
                };
                let key = CancelKey {
                    process_id: body.process_id(),
                    secret: body.secret_key(),
                };
                let cancels = shared.directory.cancels();
                let own = cancels.register(branch, key, startup.spoken_minor());
                put_backend_key(&mut wire.output, &own.key);
                cancel = Some(own);
            }
            _ => wire.output.extend_from_slice(&frame.bytes),
        }
        if frame.is_ready_for_query() {
            break;
        }
        if frame.tag == ERROR_RESPONSE_TAG {
            wire.flush().await?;
            return Err(Stop::Told);
        }
        if wire.output.len() > COLLECT {
            wire.flush().await?;
        }
        frame = opened.next_frame().await?;
    }
    wire.flush().await?;
    Ok(Backend {
        stream: opened.stream,
        buffer: opened.buffer,
        _link: opened.link,
        _cancel: cancel,
    })
}

/// Opens a session for a role that the branch's server has to check, and relays the exchange.
pub(crate) async fn relay_proof<'a>(
    shared: &Shared,
    wire: &mut Wire,
    startup: &Startup,
    (branch, role): (&'a Arc<Branch>, &str),
) -> Result<Proved<'a>, Stop> {
    let answered = async {
        let mut opened = open(branch, startup, role).await?;
        let frame = opened.first_frame().await?;
        Ok::<_, Stop>((opened, frame))
    };
    let (mut opened, frame) = timeout(shared.limits.backend_time, answered)
        .await
        .map_err(|_| slow_server())??;
    let exchange = exchange(shared, wire, startup, branch, &mut opened, frame);
    timeout(shared.limits.startup_time, exchange)
        .await
        .map_err(|_| Stop::Told)??;
    Ok(Proved { branch, opened })
}

/// A session whose server is satisfied with the client's proof.
pub(crate) struct Proved<'a> {
    branch: &'a Arc<Branch>,
    opened: Opened<'a>,
}

impl Proved<'_> {
    /// Tells the client everything up to and with `ReadyForQuery`.
    pub(crate) async fn finish(
        mut self,
        shared: &Shared,
        wire: &mut Wire,
        startup: &Startup,
    ) -> Result<Backend, Stop> {
        // Not earlier: a stranger shall not cost the branch its warm session.
        self.branch.close_session().await;
        shared.metrics.fresh_backends.inc();
        let rest = async {
            let frame = self.opened.next_frame().await?;
            greet(shared, wire, startup, self.branch, self.opened, frame).await
        };
        timeout(shared.limits.backend_time, rest)
            .await
            .map_err(|_| slow_server())?
    }
}

pub(crate) fn slow_server() -> Fatal {
    not_available("the branch's server did not open a session in time")
}

/// The SASL exchange between client and server, up to and with `AuthenticationOk`.
async fn exchange(
    shared: &Shared,
    wire: &mut Wire,
    startup: &Startup,
    branch: &Arc<Branch>,
    opened: &mut Opened<'_>,
    mut frame: Frame,
) -> Result<(), Stop> {
    let mut proven = false;
    let mut asked = false;
    loop {
        match (
            frame.tag,
            Bytes::copy_from_slice(frame.body()).try_get_u32(),
        ) {
            (AUTHENTICATION_TAG, Ok(authentication::SASL)) if !asked => {
                asked = true;
                login::put_negotiation_if_needed(wire, startup);
                put_sasl(&mut wire.output, scram::mechanisms(None));
                wire.flush().await?;
                let message = wire.proof().await?.ok_or_else(not_a_proof)?;
                scram::initial_response(&message[5..]).ok_or_else(not_a_proof)?;
                opened.send(&message).await?;
            }
            (AUTHENTICATION_TAG, Ok(authentication::SASL_CONTINUE)) => {
                wire.output.extend_from_slice(&frame.bytes);
                wire.flush().await?;
                let message = wire.proof().await?.ok_or_else(not_a_proof)?;
                opened.send(&message).await?;
            }
            (AUTHENTICATION_TAG, Ok(authentication::SASL_FINAL)) => {
                proven = true;
                wire.output.extend_from_slice(&frame.bytes);
            }
            // Without a proof the server would only believe that the agent asks.
            (AUTHENTICATION_TAG, Ok(authentication::OK)) if proven => {
                wire.output.extend_from_slice(&frame.bytes);
                return Ok(());
            }
            (ERROR_RESPONSE_TAG, _) if asked && is_denial(&frame) => {
                shared.metrics.authentication_failures.inc();
                return Err(Fatal::denied(&startup.user).into());
            }
            (ERROR_RESPONSE_TAG, _) if asked || !is_denial(&frame) => {
                wire.output.extend_from_slice(&frame.bytes);
                wire.flush().await?;
                return Err(Stop::Told);
            }
            // No exchange to relay: let the client find no difference.
            _ if !asked => {
                let route = login::Route::Other(Arc::clone(branch), String::new());
                login::authenticate(shared, wire, startup, &route).await?;
                return Err(Fatal::denied(&startup.user).into());
            }
            _ => return Err(session::Error::Closed.into()),
        }
        frame = opened.next_frame().await?;
    }
}

/// Whether an error is of the class "invalid authorization specification".
fn is_denial(frame: &Frame) -> bool {
    use fallible_iterator::FallibleIterator;
    let Ok(Message::ErrorResponse(body)) = frame.parse() else {
        return false;
    };
    body.fields()
        .any(|field| Ok(field.type_() == b'C' && field.value_bytes().starts_with(b"28")))
        .unwrap_or(false)
}
