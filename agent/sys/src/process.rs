//! Processes by descriptor, signals by descriptor.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal},
};
use snafu::{ResultExt, Snafu};

use crate::raw;

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)))]
pub enum Error {
    #[snafu(display("{pid} is no process id"))]
    NoPid { pid: u32 },
    #[snafu(display("cannot open process {pid}: it has ended or Linux is older than 5.3"))]
    Open { pid: u32, source: io::Error },
    #[snafu(display("cannot send signal {signal} to a process"))]
    Send { signal: i32, source: io::Error },
    #[snafu(display("{signal} is no signal"))]
    NoSignal { signal: i32 },
    #[snafu(display("cannot wait for a process by its descriptor"))]
    Wait { source: io::Error },
    #[snafu(display("cannot become the parent of orphaned processes"))]
    Subreaper { source: io::Error },
    #[snafu(display("cannot mark descriptors close-on-exec"))]
    CloseOnExec { source: io::Error },
    #[snafu(display("cannot receive signals by a descriptor"))]
    Signals { source: io::Error },
}

/// A descriptor that stands for the process, also when its id is used again later.
pub fn open(pid: u32) -> Result<OwnedFd, Error> {
    let id = i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .ok_or(Error::NoPid { pid })?;
    rustix::process::pidfd_open(id, PidfdFlags::empty())
        .map_err(io::Error::from)
        .context(OpenSnafu { pid })
}

/// Sends a signal. `false`: the process has ended already.
pub fn signal(pidfd: impl AsFd, signal: i32) -> Result<bool, Error> {
    let sent = rustix::process::pidfd_send_signal(
        pidfd,
        Signal::from_named_raw(signal).ok_or(Error::NoSignal { signal })?,
    );
    match sent {
        Ok(()) => Ok(true),
        Err(Errno::SRCH) => Ok(false),
        Err(error) => Err(error.into()).context(SendSnafu { signal }),
    }
}

/// Waits until the process has ended, without reaping it. `None` waits for ever; `false`: time is up.
pub fn wait(pidfd: impl AsFd, timeout: Option<std::time::Duration>) -> Result<bool, Error> {
    let deadline = timeout.map(|timeout| std::time::Instant::now() + timeout);
    loop {
        let left = deadline.map(|at| at.saturating_duration_since(std::time::Instant::now()));
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        match poll(&mut fds, left.map(timespec).as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()).context(WaitSnafu),
        }
    }
}

pub(crate) fn timespec(duration: std::time::Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// Orphaned descendants become children of this process, which then has to reap them.
pub fn become_subreaper() -> Result<(), Error> {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(io::Error::from)
        .context(SubreaperSnafu)
}

/// From now on no program that is started gets a descriptor above stderr that this process has now.
pub fn close_rest_on_exec() -> Result<(), Error> {
    raw::close_rest_on_exec().context(CloseOnExecSnafu)
}

/// Signals as something to read, instead of handlers.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
}

impl Signals {
    /// Blocks the signals of the calling thread; only for a process of one thread.
    pub fn new(signals: &[i32]) -> Result<Self, Error> {
        Ok(Self {
            fd: raw::signal_fd(signals).context(SignalsSnafu)?,
        })
    }

    /// The number of the next signal that has come, without waiting.
    pub fn next(&self) -> Result<Option<i32>, Error> {
        let mut record = [0_u8; raw::SIGNAL_RECORD];
        loop {
            match rustix::io::read(&self.fd, &mut record) {
                Ok(_) => {
                    let number = [record[0], record[1], record[2], record[3]];
                    return Ok(Some(i32::from_ne_bytes(number)));
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()).context(SignalsSnafu),
            }
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
