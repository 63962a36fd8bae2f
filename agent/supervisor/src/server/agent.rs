//! The agent's life: start, back-off, end.

use std::{
    env,
    ffi::OsString,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use branchpool_sys::{
    cgroup::Membership,
    process,
    spawn::{self, Starting},
};
use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::Signal,
    stdio::{stderr, stdout},
};
use snafu::{ResultExt, Snafu};

use crate::{FD_VARIABLE, protocol::Outcome};

#[derive(Debug, Snafu)]
pub enum StartError {
    #[snafu(display("cannot make the connection between supervisor and agent"))]
    Socket { source: io::Error },
    #[snafu(display("cannot start the agent"))]
    Spawn { source: spawn::Error },
}

/// An agent that ran this long before it crashed is started again at once.
const GOOD_RUN: Duration = Duration::from_mins(1);
const DELAY_MAX: Duration = Duration::from_secs(30);
/// What an agent has after a second termination signal.
const LAST_GRACE: Duration = Duration::from_secs(2);
/// Exit codes (sysexits.h) that say that the same again would end the same.
const FINAL_CODES: std::ops::RangeInclusive<i32> = 64..=78;

/// The agent's command line. Its stdin is the connection to the supervisor.
#[derive(Clone, Debug)]
pub struct Program {
    pub path: PathBuf,
    pub args: Vec<OsString>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Exit(u8),
    Restart(Duration),
}

#[derive(Debug)]
pub(super) struct Agent {
    program: Program,
    running: Option<Running>,
    /// When to start it again.
    start_at: Option<Instant>,
    /// Crashes in a row.
    crashes: u32,
    /// Termination signals so far.
    terminations: u32,
    kill_at: Option<Instant>,
}

#[derive(Debug)]
struct Running {
    pid: u32,
    pidfd: OwnedFd,
    since: Instant,
}

impl Agent {
    pub(super) fn new(program: Program) -> Self {
        Self {
            program,
            running: None,
            start_at: None,
            crashes: 0,
            terminations: 0,
            kill_at: None,
        }
    }

    /// Gives this side's end of the connection to the new agent.
    pub(super) fn start(&mut self, now: Instant) -> Result<OwnedFd, StartError> {
        self.start_at = None;
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(io::Error::from)
        .context(SocketSnafu)?;
        let child = self.spawn(theirs.as_fd()).context(SpawnSnafu)?;
        let pid = child.pid;
        let pidfd = child.finish().context(SpawnSnafu)?;
        let since = now;
        self.running = Some(Running { pid, pidfd, since });
        Ok(ours)
    }

    /// In a session of its own, so that a terminal's Ctrl-C reaches the supervisor alone, which
    /// passes it on once.
    fn spawn(&self, socket: BorrowedFd<'_>) -> Result<Starting, spawn::Error> {
        let inherited: Vec<_> = env::vars_os().collect();
        let mut env: Vec<_> = inherited
            .iter()
            .map(|(name, value)| (name.as_os_str(), value.as_os_str()))
            .collect();
        env.push((FD_VARIABLE.as_ref(), "0".as_ref()));
        let command = spawn::Command {
            program: &self.program.path,
            args: self.program.args.iter().map(OsString::as_os_str).collect(),
            env,
            cwd: Path::new("."),
            user: None,
            no_new_privileges: false,
            cgroup: &Membership::default(),
            ipc_namespace: false,
            network_namespace: None,
            landlock: None,
            oom_score_adj: None,
            stdio: [Some(socket), Some(stdout()), Some(stderr())],
        };
        command.start()
    }

    /// A new start did not even get to the program: as a crash.
    pub(super) fn could_not_start(&mut self, now: Instant) {
        self.start_at = Some(now + back_off(self.crashes));
        self.crashes = self.crashes.saturating_add(1);
    }

    pub(super) fn is(&self, pid: u32) -> bool {
        self.running
            .as_ref()
            .is_some_and(|running| running.pid == pid)
    }

    pub(super) fn ended(&mut self, outcome: Outcome, now: Instant) -> Next {
        let ran = self
            .running
            .take()
            .map_or(Duration::ZERO, |running| now.duration_since(running.since));
        let next = self.next(outcome, ran);
        if let Next::Restart(delay) = next {
            self.start_at = Some(now + delay);
        }
        next
    }

    fn next(&mut self, outcome: Outcome, ran: Duration) -> Next {
        let is_final = match outcome {
            Outcome::Code(code) => code == 0 || FINAL_CODES.contains(&code),
            Outcome::Signal(_) => false,
        };
        if is_final || self.terminations > 0 {
            return Next::Exit(exit_code(outcome));
        }
        self.crashes = if ran >= GOOD_RUN { 0 } else { self.crashes };
        let delay = back_off(self.crashes);
        self.crashes = self.crashes.saturating_add(1);
        Next::Restart(delay)
    }

    /// Passes a termination signal on. After the second one the agent has two seconds, after the
    /// third none.
    pub(super) fn terminate(&mut self, signal: i32) -> Result<(), process::Error> {
        self.terminations = self.terminations.saturating_add(1);
        let Some(running) = &self.running else {
            return Ok(());
        };
        match self.terminations {
            1 => {}
            2 => self.kill_at = Some(Instant::now() + LAST_GRACE),
            _ => self.kill_at = Some(Instant::now()),
        }
        process::signal(running.pidfd.as_fd(), signal)?;
        Ok(())
    }

    pub(super) fn kill_if_overdue(&mut self, now: Instant) -> Result<(), process::Error> {
        if self.kill_at.is_some_and(|at| at <= now) {
            self.kill_at = None;
            if let Some(running) = &self.running {
                process::signal(running.pidfd.as_fd(), Signal::KILL.as_raw())?;
            }
        }
        Ok(())
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.terminations == 0 && self.start_at.is_some_and(|at| at <= now)
    }

    /// Asked to end, and nothing runs that could.
    pub(super) fn is_over(&self) -> bool {
        self.terminations > 0 && self.running.is_none()
    }

    /// When something is to be done without an event.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.start_at.into_iter().chain(self.kill_at).min()
    }
}

/// 0, 1, 2, 4 … 30 seconds.
fn back_off(crashes: u32) -> Duration {
    match crashes {
        0 => Duration::ZERO,
        n => Duration::from_secs(1 << (n - 1).min(5)).min(DELAY_MAX),
    }
}

fn exit_code(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Code(code) => u8::try_from(code).unwrap_or(1),
        Outcome::Signal(signal) => u8::try_from(128 + signal).unwrap_or(255),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent() -> Agent {
        Agent::new(Program {
            path: "/bin/false".into(),
            args: Vec::new(),
        })
    }

    #[test]
    fn the_first_crash_costs_no_time_and_later_ones_more() {
        let mut agent = agent();
        let delays: Vec<_> = (0..8)
            .map(|_| match agent.next(Outcome::Signal(11), Duration::ZERO) {
                Next::Restart(delay) => delay.as_secs(),
                Next::Exit(code) => panic!("{code}"),
            })
            .collect();
        assert_eq!(delays, [0, 1, 2, 4, 8, 16, 30, 30]);
    }

    #[test]
    fn a_long_run_is_forgiven() {
        let mut agent = agent();
        for _ in 0..5 {
            agent.next(Outcome::Code(1), Duration::ZERO);
        }
        let next = agent.next(Outcome::Code(1), GOOD_RUN);
        assert_eq!(next, Next::Restart(Duration::ZERO));
        let next = agent.next(Outcome::Code(1), Duration::ZERO);
        assert_eq!(next, Next::Restart(Duration::from_secs(1)));
    }

    #[test]
    fn final_codes_end_the_supervisor() {
        for code in [0, 64, 70, 78] {
            let next = agent().next(Outcome::Code(code), Duration::ZERO);
            assert_eq!(next, Next::Exit(u8::try_from(code).unwrap()));
        }
        for code in [1, 2, 63, 79, 101, 255] {
            let next = agent().next(Outcome::Code(code), Duration::ZERO);
            assert_eq!(next, Next::Restart(Duration::ZERO), "{code}");
        }
    }

    #[test]
    fn after_a_termination_signal_any_end_is_final() {
        let mut agent = agent();
        agent.terminate(15).unwrap();
        assert!(agent.is_over());
        assert_eq!(agent.next(Outcome::Code(1), Duration::ZERO), Next::Exit(1));
        let killed = agent.next(Outcome::Signal(9), Duration::ZERO);
        assert_eq!(killed, Next::Exit(137));
    }
}
