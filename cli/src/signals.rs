//! Signals that end things, passed on to the command that runs.

use std::{
    fs::{self, File},
    future::poll_fn,
    task::Poll,
};

use rustix::{
    process::{Pid, Signal, getpgrp, kill_process},
    termios::tcgetpgrp,
};
use snafu::ResultExt;
use tokio::signal::unix::{self, SignalKind};

use crate::error::{CliError, SignalsSnafu};

const PASSED_ON: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT];

#[derive(Debug)]
pub(crate) struct Signals {
    streams: Vec<(Signal, unix::Signal)>,
}

impl Signals {
    /// From now on these signals no longer end this process. One that is ignored, as under
    /// `nohup`, stays ignored.
    pub(crate) fn catch() -> Result<Self, CliError> {
        let ignored = ignored_mask();
        let mut streams = Vec::new();
        for signal in PASSED_ON {
            let number = signal.as_raw();
            if ignored >> (number - 1) & 1 == 0 {
                let stream = unix::signal(SignalKind::from_raw(number)).context(SignalsSnafu)?;
                streams.push((signal, stream));
            }
        }
        Ok(Self { streams })
    }

    /// The next signal. Safe to drop and call again.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            for (signal, stream) in &mut self.streams {
                if stream.poll_recv(context).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// A shell's exit code for a process that the signal ended.
pub(crate) fn exit_code(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// Sends the signal to the child, unless it has it already: the terminal's keys signal the whole
/// foreground group, and two of them are not the same as one to many programs.
pub(crate) fn pass_on(signal: Signal, child: Pid) {
    let is_key = matches!(signal, Signal::INT | Signal::QUIT);
    if is_key && is_in_foreground() {
        return;
    }
    // Fails when the child has ended meanwhile, which the caller is about to see.
    let _ = kill_process(child, signal);
}

fn is_in_foreground() -> bool {
    File::open("/dev/tty").is_ok_and(|terminal| tcgetpgrp(terminal) == Ok(getpgrp()))
}

/// Bit N-1 is set when signal N is ignored.
fn ignored_mask() -> u64 {
    fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("SigIgn:"))?;
            u64::from_str_radix(line.trim(), 16).ok()
        })
        .unwrap_or_default()
}
