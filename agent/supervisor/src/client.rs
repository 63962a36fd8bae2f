//! The agent's side: asks for programs to be run, and hears of their end.

use std::{
    collections::HashMap,
    env, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use branchpool_sys::process;
use rustix::{
    fs::{Mode, OFlags, open},
    io::fcntl_dupfd_cloexec,
    net::{SocketType, sockopt::socket_type},
    process::Signal,
    stdio::{dup2_stdin, stdin},
};
use snafu::{OptionExt, ResultExt, Snafu};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{oneshot, watch},
};

use crate::{
    FD_VARIABLE,
    protocol::{Answer, Command, Message, Outcome, Request, Spawn},
    wire,
};

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display(
        "there is no supervisor to talk to ({FD_VARIABLE}): start the agent by its command line, which starts the supervisor first"
    ))]
    NoSupervisor,
    #[snafu(display("cannot set up the connection to the supervisor"))]
    Connect { source: io::Error },
    #[snafu(display("cannot ask the supervisor"))]
    Ask { source: wire::Error },
    #[snafu(display("the supervisor is gone: the agent has to end, so that both start anew"))]
    Lost,
    #[snafu(display("{reason}"))]
    Refused {
        /// The supervisor's words.
        reason: String,
    },
    #[snafu(display("the supervisor gave another answer than was asked for"))]
    Confused,
    #[snafu(display("cannot wait for a process"))]
    Wait { source: io::Error },
    #[snafu(display("cannot signal a process"))]
    Signal { source: process::Error },
}

/// The connection to the supervisor. Clones share it.
#[derive(Clone, Debug)]
pub struct Supervisor {
    shared: Arc<Shared>,
    closed: watch::Receiver<bool>,
}

#[derive(Debug)]
struct Shared {
    socket: AsyncFd<OwnedFd>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last_id: u64,
    lost: bool,
    /// One for each call that waits.
    asked: HashMap<u64, oneshot::Sender<Result<Answered, Error>>>,
    /// One for each program that runs.
    running: HashMap<u32, oneshot::Sender<Outcome>>,
}

#[derive(Debug)]
enum Answered {
    Spawned(Unclaimed),
    Unmounted,
}

/// A child that nobody has taken yet. Dropped as such, it is killed: who asked for it is gone.
#[derive(Debug)]
struct Unclaimed(Option<Child>);

/// A program that the supervisor runs. Dropping it leaves the program alone.
#[derive(Debug)]
pub struct Child {
    pub pid: u32,
    pub pidfd: Arc<OwnedFd>,
    exit: oneshot::Receiver<Outcome>,
    outcome: Option<Outcome>,
}

impl Supervisor {
    /// Takes the connection that the supervisor left for this process, once. Needs a tokio runtime.
    pub fn from_env() -> Result<Self, Error> {
        env::var_os(FD_VARIABLE).context(NoSupervisorSnafu)?;
        // It comes as stdin, the one descriptor that can be taken over without doubt about owners.
        let is_ours = socket_type(stdin()).is_ok_and(|kind| kind == SocketType::SEQPACKET);
        snafu::ensure!(is_ours, NoSupervisorSnafu);
        Self::from_fd(take_stdin().context(ConnectSnafu)?)
    }

    /// Over the agent's end of the supervisor's socket pair. Needs a tokio runtime.
    pub fn from_fd(socket: OwnedFd) -> Result<Self, Error> {
        rustix::io::ioctl_fionbio(&socket, true)
            .map_err(io::Error::from)
            .context(ConnectSnafu)?;
        let (closing, closed) = watch::channel(false);
        let shared = Arc::new(Shared {
            socket: watch_fd(socket, Interest::READABLE | Interest::WRITABLE)
                .context(ConnectSnafu)?,
            state: Mutex::default(),
        });
        tokio::spawn(Arc::clone(&shared).listen(closing));
        Ok(Self { shared, closed })
    }

    /// Runs a program. `stdio` is stdin, stdout, stderr; an absent one is `/dev/null`.
    ///
    /// Answers when the program runs, or with the step that failed. Dropped before that, it kills
    /// what it started.
    pub async fn spawn(
        &self,
        spawn: Spawn,
        stdio: [Option<BorrowedFd<'_>>; 3],
    ) -> Result<Child, Error> {
        let command = Command::Spawn {
            spawn: Box::new(spawn),
            stdio: stdio.map(|fd| fd.is_some()),
        };
        let fds: Vec<_> = stdio.into_iter().flatten().collect();
        match self.shared.ask(command, &fds).await? {
            Answered::Spawned(mut unclaimed) => unclaimed.0.take().context(ConfusedSnafu),
            Answered::Unmounted => ConfusedSnafu.fail(),
        }
    }

    /// Detaches a mount that an earlier spawn made. Not mounted is no error.
    pub async fn unmount(&self, target: &Path) -> Result<(), Error> {
        let target = target.to_owned();
        match self.shared.ask(Command::Unmount { target }, &[]).await? {
            Answered::Unmounted => Ok(()),
            Answered::Spawned(_) => ConfusedSnafu.fail(),
        }
    }

    /// Returns when the supervisor is gone, or cannot be understood any more.
    pub async fn closed(&self) {
        let mut closed = self.closed.clone();
        // An error means that the listener has ended, which it does only then.
        let _ = closed.wait_for(|closed| *closed).await;
    }
}

impl Shared {
    async fn ask(&self, command: Command, fds: &[BorrowedFd<'_>]) -> Result<Answered, Error> {
        let (id, answer) = self.expect_answer()?;
        let waiting = Waiting { shared: self, id };
        let bytes = wire::encode(&Request { id, command }).context(AskSnafu)?;
        self.send(&bytes, fds).await?;
        let answer = answer.await.unwrap_or(Err(Error::Lost));
        drop(waiting);
        answer
    }

    fn expect_answer(&self) -> Result<(u64, oneshot::Receiver<Result<Answered, Error>>), Error> {
        let mut state = self.state();
        snafu::ensure!(!state.lost, LostSnafu);
        state.last_id += 1;
        let id = state.last_id;
        let (sender, receiver) = oneshot::channel();
        state.asked.insert(id, sender);
        Ok((id, receiver))
    }

    async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        loop {
            let mut ready = self.socket.writable().await.context(ConnectSnafu)?;
            match wire::send(self.socket.get_ref(), bytes, fds) {
                Err(error) if error.would_block() => ready.clear_ready(),
                Err(wire::Error::Send { source }) if source.kind() == io::ErrorKind::BrokenPipe => {
                    return LostSnafu.fail();
                }
                other => return other.context(AskSnafu),
            }
        }
    }

    async fn listen(self: Arc<Self>, closing: watch::Sender<bool>) {
        let mut buffer = vec![0; wire::MESSAGE_MAX];
        while let Some((message, fds)) = self.next_message(&mut buffer).await {
            self.handle(message, fds);
        }
        {
            let mut state = self.state();
            state.lost = true;
            state.asked.clear();
            state.running.clear();
        }
        let _ = closing.send(true);
    }

    async fn next_message(&self, buffer: &mut [u8]) -> Option<(Message, Vec<OwnedFd>)> {
        let received = self
            .socket
            .async_io(Interest::READABLE, |socket| {
                match wire::receive(socket, buffer) {
                    Err(error) if error.would_block() => Err(io::ErrorKind::WouldBlock.into()),
                    other => Ok(other),
                }
            })
            .await;
        let message = received.map_err(|source| wire::Error::Receive { source });
        match message.and_then(|received| received) {
            Ok(None) => None,
            Ok(Some((length, fds))) => match wire::decode(&buffer[..length]) {
                Ok(message) => Some((message, fds)),
                Err(error) => {
                    tracing::error!(error = &error as &dyn std::error::Error, "supervisor lost");
                    None
                }
            },
            Err(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "supervisor lost");
                None
            }
        }
    }

    fn handle(&self, message: Message, fds: Vec<OwnedFd>) {
        match message {
            Message::Exited { pid, outcome } => {
                let waiting = self.state().running.remove(&pid);
                if let Some(waiting) = waiting {
                    // Nobody has to wait for a child.
                    let _ = waiting.send(outcome);
                }
            }
            Message::Done { id, result } => {
                let result = match result {
                    Ok(answer) => self.answered(answer, fds),
                    Err(reason) => RefusedSnafu { reason }.fail(),
                };
                let asked = self.state().asked.remove(&id);
                if let Some(asked) = asked {
                    // If the asker is gone, dropping the answer kills what was started for it.
                    let _ = asked.send(result);
                }
            }
        }
    }

    fn answered(&self, answer: Answer, fds: Vec<OwnedFd>) -> Result<Answered, Error> {
        match answer {
            Answer::Unmounted => Ok(Answered::Unmounted),
            Answer::Spawned { pid } => {
                let pidfd = fds.into_iter().next().context(ConfusedSnafu)?;
                let (sender, exit) = oneshot::channel();
                // Before the next message, which may already tell of its end.
                self.state().running.insert(pid, sender);
                Ok(Answered::Spawned(Unclaimed(Some(Child {
                    pid,
                    pidfd: Arc::new(pidfd),
                    exit,
                    outcome: None,
                }))))
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change of the state is whole, so a panic elsewhere leaves it usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Forgets a question whose asker goes away before the answer.
struct Waiting<'a> {
    shared: &'a Shared,
    id: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.shared.state().asked.remove(&self.id);
    }
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if let Some(child) = &self.0 {
            let _ = process::signal(&child.pidfd, Signal::KILL.as_raw());
        }
    }
}

impl Child {
    /// Waits for the end. May be dropped and called again, and says the same each time.
    pub async fn wait(&mut self) -> Result<Outcome, Error> {
        if let Some(outcome) = self.outcome {
            return Ok(outcome);
        }
        let outcome = (&mut self.exit).await.ok().context(LostSnafu)?;
        self.outcome = Some(outcome);
        Ok(outcome)
    }

    /// Sends a signal to this process alone. `false`: it has ended.
    pub fn signal(&self, signal: i32) -> Result<bool, Error> {
        signal_pidfd(&self.pidfd, signal)
    }
}

/// Sends a signal to this process alone. `false`: it has ended.
pub fn signal_pidfd(pidfd: impl AsFd, signal: i32) -> Result<bool, Error> {
    process::signal(pidfd, signal).context(SignalSnafu)
}

/// Waits for the end of a process that need not be a child, such as one of a former agent.
pub async fn wait_pidfd(pidfd: impl AsFd) -> Result<(), Error> {
    // A copy: the runtime takes each descriptor once.
    let copy = fcntl_dupfd_cloexec(pidfd, 3)
        .map_err(io::Error::from)
        .context(WaitSnafu)?;
    let ended = watch_fd(copy, Interest::READABLE).context(WaitSnafu)?;
    ended.readable().await.context(WaitSnafu)?.retain_ready();
    Ok(())
}

#[expect(
    deprecated,
    reason = "its successor is unsafe because other types may change their descriptor; an OwnedFd cannot"
)]
fn watch_fd(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd, interest)
}

fn take_stdin() -> io::Result<OwnedFd> {
    let socket = fcntl_dupfd_cloexec(stdin(), 3)?;
    dup2_stdin(open("/dev/null", OFlags::RDONLY, Mode::empty())?)?;
    Ok(socket)
}
