//! What the gateway knows of one branch, and how its connections are counted and ended.

use std::{
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use snafu::{OptionExt, ResultExt, Snafu};
use tokio::{
    net::UnixStream,
    sync::{Semaphore, SemaphorePermit, watch},
};

use crate::{scram::Verifier, session::Session};

/// The file in the socket directory; the port is part of the name only.
pub const SOCKET_NAME: &str = ".s.PGSQL.5432";
/// Longest path in a Unix socket's address, in bytes: `sun_path` less its terminator.
pub const MAX_SOCKET_PATH: usize = 107;
/// Sessions of one branch that are opened at once. A server's queue of connections is short, and
/// a full one refuses instead of waiting.
const OPENING: usize = 32;

#[derive(Debug, Snafu)]
pub(crate) enum ConnectError {
    #[snafu(display("the branch has ended"))]
    NoLonger,

    #[snafu(display("no connection to the server's socket in {}: {source}", socket_dir.display()))]
    Socket {
        socket_dir: PathBuf,
        source: std::io::Error,
    },
}

/// Why a branch cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Snafu)]
pub enum Unavailable {
    #[snafu(display("the branch has ended"))]
    Ended,

    #[snafu(display("the branch's server is being restarted"))]
    Restarting,

    #[snafu(display("the branch's server did not wake in time"))]
    NotAwake,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The server takes connections.
    Serving,
    /// New connections are answered with `57P03`.
    Restarting,
    /// The server is stopped; a new connection asks for it ([`Branch::wake_requested`]) and waits.
    /// Stays until it serves again.
    Suspended,
    /// Final. Nobody gets in, nobody stays.
    Ended,
}

/// What never changes.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Name of the pool, unique on the node; learned profiles are kept by it.
    pub pool: String,
    /// The pool's role, whose password is checked here, and its database.
    pub role: String,
    pub database: String,
    pub verifier: Verifier,
    /// Holds the server's socket. There this process is let in as the pool's role (peer), and
    /// every other role needs its password (scram-sha-256).
    pub socket_dir: PathBuf,
}

/// The use of a branch, for idle rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activity {
    /// Clients that have proved their password and are still there.
    pub connections: usize,
    /// When a client last logged in or sent anything. `None`: never.
    pub last_client_byte: Option<SystemTime>,
    /// Somebody has used the branch.
    pub used: bool,
}

/// The binding of one lease to one branch.
#[derive(Debug)]
pub struct Branch {
    facts: Facts,
    verifier: Mutex<Verifier>,
    state: watch::Sender<State>,
    /// Somebody waits for a suspended server.
    wanted: watch::Sender<bool>,
    /// Descriptors that are open to the server.
    links: watch::Sender<usize>,
    preconnected: Mutex<Option<(Session, Link)>>,
    /// Held while the unused preconnected session is closed: fresh backends wait for it.
    closing: tokio::sync::Mutex<()>,
    opening: Semaphore,
    used: AtomicBool,
    clients: AtomicUsize,
    made: (Instant, SystemTime),
    /// Microseconds after `made`, plus one; 0 is never.
    last_client_byte: AtomicU64,
}

impl Branch {
    /// Starts as [`State::Serving`].
    pub fn new(facts: Facts) -> Arc<Self> {
        Arc::new(Self {
            verifier: Mutex::new(facts.verifier.clone()),
            facts,
            state: watch::Sender::new(State::Serving),
            wanted: watch::Sender::new(false),
            links: watch::Sender::new(0),
            preconnected: Mutex::new(None),
            closing: tokio::sync::Mutex::new(()),
            opening: Semaphore::new(OPENING),
            used: AtomicBool::new(false),
            clients: AtomicUsize::new(0),
            made: (Instant::now(), SystemTime::now()),
            last_client_byte: AtomicU64::new(0),
        })
    }

    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// What a password is checked against now.
    pub fn verifier(&self) -> Verifier {
        self.verifier
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Another endpoint leads here from now on, with a password of its own.
    pub fn set_verifier(&self, verifier: Verifier) {
        *self.verifier.lock().unwrap_or_else(PoisonError::into_inner) = verifier;
    }

    pub fn state(&self) -> State {
        *self.state.borrow()
    }

    /// Every state but [`State::Serving`] closes an unused preconnected session. Without effect
    /// once the branch has ended. Connections that are open are not touched but by
    /// [`State::Ended`]: they end with their server.
    pub fn set_state(&self, state: State) {
        let changed = self.state.send_if_modified(|current| {
            let change = *current != State::Ended && *current != state;
            if change {
                // Before anybody can see the new state, or a wish for it would be lost.
                self.wanted.send_replace(false);
                *current = state;
            }
            change
        });
        if changed && state != State::Serving {
            // Outside of the lock: closing wakes others.
            let session = self.preconnected().take();
            drop(session);
        }
    }

    /// Lets nobody in any more, closes every descriptor to the server, and ends the clients with
    /// `57P01`. See [`Branch::closed`].
    pub fn end(&self) {
        self.set_state(State::Ended);
    }

    /// Resolves when the branch has ended and no descriptor to its server is left.
    pub async fn closed(&self) {
        self.ended().await;
        let mut links = self.links.subscribe();
        let _ = links.wait_for(|links| *links == 0).await;
    }

    /// Resolves when the branch has ended.
    pub async fn ended(&self) {
        let mut state = self.state.subscribe();
        let _ = state.wait_for(|state| *state == State::Ended).await;
    }

    /// Resolves when somebody waits for a suspended server.
    pub async fn wake_requested(&self) {
        let mut wanted = self.wanted.subscribe();
        let _ = wanted.wait_for(|wanted| *wanted).await;
    }

    /// Waits, for at most `limit`, until the server takes connections; asks for it if it is
    /// suspended.
    pub async fn serving(&self, limit: Duration) -> Result<(), Unavailable> {
        match self.state() {
            State::Serving => return Ok(()),
            State::Restarting => return RestartingSnafu.fail(),
            State::Ended => return EndedSnafu.fail(),
            State::Suspended => {}
        }
        let mut state = self.state.subscribe();
        self.wanted.send_replace(true);
        let awake = state.wait_for(|state| matches!(state, State::Serving | State::Ended));
        match tokio::time::timeout(limit, awake).await {
            Ok(Ok(state)) if *state == State::Serving => Ok(()),
            Ok(_) => EndedSnafu.fail(),
            Err(_) => NotAwakeSnafu.fail(),
        }
    }

    /// Gives the session that waits for the first client. One that cannot be used any more, since
    /// somebody has used the branch or the server does not serve, is given back.
    pub fn offer_session(&self, session: Session) -> Result<(), Box<Session>> {
        let mut slot = self.preconnected();
        if self.used() || self.state() != State::Serving || slot.is_some() {
            return Err(Box::new(session));
        }
        *slot = Some((session, self.link()));
        Ok(())
    }

    /// Closes the preconnected session, and waits until its backend is gone. To be called before
    /// another session of the branch is opened: an unused one would hinder `DROP DATABASE`.
    pub(crate) async fn close_session(&self) {
        self.note_session();
        let _waiting = self.closing.lock().await;
        let taken = self.preconnected().take();
        if let Some((session, _link)) = taken {
            session.terminate().await;
        }
    }

    /// From now on no session is offered.
    fn note_session(&self) {
        self.used.store(true, Ordering::Release);
    }

    pub fn activity(&self) -> Activity {
        let last = self.last_client_byte.load(Ordering::Relaxed);
        Activity {
            connections: self.clients.load(Ordering::Relaxed),
            last_client_byte: last
                .checked_sub(1)
                .map(|micros| self.made.1 + Duration::from_micros(micros)),
            used: self.used(),
        }
    }

    fn used(&self) -> bool {
        self.used.load(Ordering::Acquire)
    }

    /// Notes that a client has just used the branch.
    pub(crate) fn touch(&self) {
        let micros = self.made.0.elapsed().as_micros();
        let micros = u64::try_from(micros).unwrap_or(u64::MAX - 1);
        self.last_client_byte.store(micros + 1, Ordering::Relaxed);
    }

    /// Takes the preconnected session if `decide` says so of it.
    pub(crate) fn take_if<T>(
        &self,
        decide: impl FnOnce(&Session) -> Option<T>,
    ) -> Option<(Session, Link, T)> {
        let mut slot = self.preconnected();
        if self.used() {
            return None;
        }
        let (session, _) = slot.as_mut()?;
        if let Err(error) = session.catch_up() {
            tracing::warn!(%error, "the preconnected session is dead");
            *slot = None;
            return None;
        }
        let decision = decide(session)?;
        self.note_session();
        slot.take().map(|(session, link)| (session, link, decision))
    }

    /// Connects to the server's socket. The permit is to be held until the server has answered.
    pub(crate) async fn connect(
        self: &Arc<Self>,
    ) -> Result<(UnixStream, Link, SemaphorePermit<'_>), ConnectError> {
        let Ok(permit) = self.opening.acquire().await else {
            return NoLongerSnafu.fail();
        };
        let link = self.hold().context(NoLongerSnafu)?;
        let socket_dir = &self.facts.socket_dir;
        let stream = connect(socket_dir)
            .await
            .context(SocketSnafu { socket_dir })?;
        Ok((stream, link, permit))
    }

    /// Counts a descriptor to the server that is about to be opened, so that [`Branch::closed`]
    /// waits for it. `None` when the branch has ended. Whoever holds it has to let go when the
    /// branch ends.
    fn hold(&self) -> Option<Link> {
        // Counted first: whoever ends the branch waits for it or is seen here.
        let link = self.link();
        (self.state() != State::Ended).then_some(link)
    }

    fn link(&self) -> Link {
        self.links.send_modify(|links| *links += 1);
        Link {
            links: self.links.clone(),
        }
    }

    /// Lets in who comes by another way than through this gateway, once the server takes connections
    /// and the preconnected session is closed.
    pub async fn admit(self: &Arc<Self>, limit: Duration) -> Result<Guest, Unavailable> {
        let client = self.client();
        self.serving(limit).await?;
        let link = self.hold().context(EndedSnafu)?;
        self.close_session().await;
        Ok(Guest {
            _link: link,
            client,
        })
    }

    /// Counts a client in [`Activity`] until it is dropped.
    pub(crate) fn client(self: &Arc<Self>) -> Client {
        self.clients.fetch_add(1, Ordering::Relaxed);
        self.touch();
        Client {
            branch: Arc::clone(self),
        }
    }

    fn preconnected(&self) -> MutexGuard<'_, Option<(Session, Link)>> {
        self.preconnected
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts one descriptor to a branch's server; to be dropped after it.
#[derive(Debug)]
pub struct Link {
    links: watch::Sender<usize>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.links.send_modify(|links| *links -= 1);
    }
}

/// Counts one client of a branch.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) branch: Arc<Branch>,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.branch.clients.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A client that does not come through the gateway. To be dropped after its session, and when the
/// branch ends.
#[derive(Debug)]
pub struct Guest {
    _link: Link,
    client: Client,
}

impl Guest {
    /// Resolves when the branch ends.
    pub async fn ended(&self) {
        self.client.branch.ended().await;
    }
}

/// Connects to the server whose socket is in the directory; through a descriptor of that where the
/// path itself does not fit.
pub async fn connect(socket_dir: &Path) -> std::io::Result<UnixStream> {
    let path = socket_dir.join(SOCKET_NAME);
    if path.as_os_str().len() <= MAX_SOCKET_PATH {
        return UnixStream::connect(path).await;
    }
    let dir = std::fs::File::open(socket_dir)?;
    let path = format!("/proc/self/fd/{}/{SOCKET_NAME}", dir.as_raw_fd());
    UnixStream::connect(path).await
}
