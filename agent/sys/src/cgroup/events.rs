//! Waiting for what a cgroup file says, woken by the kernel where it tells of changes.

use std::{
    fs::File,
    io::{self, Read, Seek},
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};
use snafu::ResultExt;

use super::{Error, TimedOutSnafu, WaitSnafu, hierarchy::is_gone};
use crate::process::timespec;

/// What of cgroup.events to wait for.
pub(super) const FROZEN: (&str, &str) = ("frozen", "1");
pub(super) const THAWED: (&str, &str) = ("frozen", "0");
pub(super) const EMPTY: (&str, &str) = ("populated", "0");

/// Waits until `cgroup.events` has the value. A group that is gone counts as there: it has no
/// process that could be in any other state.
pub(super) fn wait_for(
    events: &Path,
    (key, value): (&'static str, &'static str),
    wanted: &'static str,
    timeout: Duration,
) -> Result<(), Error> {
    let deadline = Instant::now() + timeout;
    let mut file = match File::open(events) {
        Ok(file) => file,
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(error).context(WaitSnafu { path: events }),
    };
    loop {
        // A read arms the next notice.
        match read(&mut file) {
            Ok(text) if has(&text, key, value) => return Ok(()),
            Ok(_) => {}
            Err(error) if is_gone(&error) => return Ok(()),
            Err(error) => return Err(error).context(WaitSnafu { path: events }),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let path = events.to_owned();
            return TimedOutSnafu {
                path,
                wanted,
                timeout,
            }
            .fail();
        }
        let mut fds = [PollFd::from_borrowed_fd(file.as_fd(), PollFlags::PRI)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()).context(WaitSnafu { path: events }),
        }
    }
}

fn read(file: &mut File) -> io::Result<String> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text)
}

pub(super) fn has(text: &str, key: &str, value: &str) -> bool {
    text.lines()
        .any(|line| line.split_once(' ') == Some((key, value)))
}
