//! The supervisor's loop: one thread, one `poll`.
//!
//! It starts the agent and starts it again when it crashes, runs programs for it, reaps them, and
//! passes signals on. It keeps nothing that a new agent would have to know.

mod agent;
mod requests;

use std::{
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use branchpool_sys::{
    namespace,
    process::{self, Signals},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, Signal, WaitOptions, WaitStatus, wait},
};
use snafu::{ResultExt, Snafu};

use agent::{Agent, Next};
pub use agent::{Program, StartError};
use requests::Requests;

use crate::protocol::Outcome;

/// What asks the agent to end.
const TERMINATION: [Signal; 4] = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot set up the supervisor"))]
    Process { source: process::Error },
    #[snafu(display("cannot set up the supervisor"))]
    Namespace { source: namespace::Error },
    #[snafu(transparent)]
    StartAgent { source: StartError },
    #[snafu(display("cannot signal the agent"))]
    SignalAgent { source: process::Error },
    #[snafu(display("the supervisor cannot wait for events"))]
    Poll { source: io::Error },
    #[snafu(display("the supervisor cannot reap its children"))]
    Reap { source: io::Error },
}

/// Runs the agent until it ends for good: after a termination signal, by itself with 0, or with a
/// code that says that a new try would not help (64 to 78). Returns the exit code, for one that was
/// killed 128 and the signal.
///
/// Only for a process of one thread. Its mounts become its own, and orphans its children.
pub fn supervise(program: Program) -> Result<u8, Error> {
    process::become_subreaper().context(ProcessSnafu)?;
    namespace::private_mounts().context(NamespaceSnafu)?;
    let watched: Vec<i32> = [Signal::CHILD]
        .into_iter()
        .chain(TERMINATION)
        .map(Signal::as_raw)
        .collect();
    let mut supervisor = Supervisor {
        signals: Signals::new(&watched).context(ProcessSnafu)?,
        agent: Agent::new(program),
        requests: Requests::new(),
    };
    supervisor.start_agent()?;
    loop {
        supervisor.wait()?;
        if let Some(code) = supervisor.step()? {
            return Ok(code);
        }
    }
}

struct Supervisor {
    signals: Signals,
    agent: Agent,
    requests: Requests,
}

impl Supervisor {
    /// Sleeps until a signal, a request, room for an answer, the end of a start, or a deadline.
    fn wait(&self) -> Result<(), Error> {
        let mut fds = vec![PollFd::from_borrowed_fd(
            self.signals.as_fd(),
            PollFlags::IN,
        )];
        fds.extend(self.requests.interests());
        let timeout = self.agent.deadline().map(until);
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()).context(PollSnafu),
        }
    }

    /// Does what can be done without waiting. Each part tries for itself instead of looking at what
    /// poll said, so the order matters only where written.
    fn step(&mut self) -> Result<Option<u8>, Error> {
        while let Some(signal) = self.signals.next().context(ProcessSnafu)? {
            if TERMINATION.iter().any(|known| known.as_raw() == signal) {
                self.agent.terminate(signal).context(SignalAgentSnafu)?;
            }
        }
        // Starts that are through are answered before their children may be reaped.
        self.requests.finish_starts();
        if let Some(code) = self.reap()? {
            return Ok(Some(code));
        }
        self.requests.receive();
        self.requests.send();
        if self.agent.is_due(Instant::now())
            && let Err(error) = self.start_agent()
        {
            // The servers must not go down with it.
            let error: &(dyn std::error::Error + 'static) = &error;
            tracing::error!(error, "the agent cannot be started again yet");
            self.agent.could_not_start(Instant::now());
        }
        self.agent
            .kill_if_overdue(Instant::now())
            .context(SignalAgentSnafu)?;
        if self.agent.is_over() {
            // Asked to end while no agent ran.
            return Ok(Some(0));
        }
        Ok(None)
    }

    fn start_agent(&mut self) -> Result<(), Error> {
        let socket = self.agent.start(Instant::now())?;
        self.requests.connect(socket);
        Ok(())
    }

    fn reap(&mut self) -> Result<Option<u8>, Error> {
        loop {
            let (pid, outcome) = match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => (raw(pid), outcome(status)),
                Ok(None) | Err(Errno::CHILD) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()).context(ReapSnafu),
            };
            if !self.agent.is(pid) {
                self.requests.ended(pid, outcome);
                continue;
            }
            self.requests.disconnect();
            match self.agent.ended(outcome, Instant::now()) {
                Next::Exit(code) => return Ok(Some(code)),
                Next::Restart(delay) => {
                    tracing::error!(?outcome, ?delay, "the agent crashed and is started again");
                }
            }
        }
    }
}

fn raw(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().cast_unsigned()
}

fn outcome(status: WaitStatus) -> Outcome {
    status.terminating_signal().map_or_else(
        || Outcome::Code(status.exit_status().unwrap_or(0)),
        Outcome::Signal,
    )
}

fn until(deadline: Instant) -> Timespec {
    let left: Duration = deadline.saturating_duration_since(Instant::now());
    // Rounded up, so that the deadline has passed when poll returns.
    let left = left + Duration::from_millis(1);
    Timespec {
        tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    }
}
