//! Running a command with a branch.

use std::{ffi::OsString, os::unix::process::ExitStatusExt, process::ExitStatus, time::Duration};

use rustix::process::Pid;
use snafu::ResultExt;
use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};

use crate::{
    environment,
    error::{CliError, CodeSnafu, SpawnSnafu, WaitSnafu},
    output,
    signals::{self, Signals},
};

/// An exit is not held up for longer by an agent that does not answer: the lease's time runs out
/// by itself.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// Between attempts to renew through an agent that is away.
const RETRY_RENEWAL: Duration = Duration::from_secs(1);

/// A lease that is bound: what a command finds its branch by, and what keeps it.
pub(crate) trait Held {
    fn id(&self) -> &str;

    fn variables(&self) -> Vec<(&'static str, String)>;

    /// Milliseconds since 1970, as is the end.
    fn bound_at(&self) -> u64;

    fn expires_at(&self) -> u64;

    /// Starts the term anew and returns its end. Without `ttl` the term is as it was asked for.
    async fn renew(&self, ttl: Option<Duration>) -> Result<u64, RenewError>;

    /// `Err` with the reason why not.
    async fn release(&self) -> Result<(), String>;
}

#[derive(Debug)]
pub(crate) struct RenewError {
    pub(crate) message: String,
    /// As when the other side restarts.
    pub(crate) may_pass: bool,
}

/// Runs the command, keeps the lease alive meanwhile, and releases it however the command ends.
/// `Err(Code)` with the command's exit code when that is not 0.
pub(crate) async fn with_lease(
    held: &impl Held,
    ttl: Option<Duration>,
    command: &[OsString],
    signals: &mut Signals,
) -> Result<(), CliError> {
    let ended = tokio::select! {
        ended = command_alone(held, command, signals) => ended,
        never = keep_alive(held, ttl) => match never {},
    };
    match timeout(RELEASE_TIMEOUT, held.release()).await {
        Ok(Ok(())) => {}
        Ok(Err(why)) => warn_not_released(held, &why),
        Err(_) => warn_not_released(held, "there is no answer"),
    }
    ended
}

/// Runs the command on the lease's branch and leaves the lease as it is.
pub(crate) async fn command_alone(
    held: &impl Held,
    command: &[OsString],
    signals: &mut Signals,
) -> Result<(), CliError> {
    let mut child = spawn(held, command)?;
    loop {
        tokio::select! {
            status = child.wait() => return outcome(status.context(WaitSnafu)?),
            signal = signals.next() => {
                if let Some(pid) = pid(&child) {
                    signals::pass_on(signal, pid);
                }
            }
        }
    }
}

fn spawn(held: &impl Held, command: &[OsString]) -> Result<Child, CliError> {
    let (program, arguments) = command.split_first().ok_or_else(|| CliError::Usage {
        message: "there is no command to run".to_owned(),
    })?;
    let mut command = Command::new(program);
    command.args(arguments);
    for name in environment::REMOVED {
        command.env_remove(name);
    }
    command.envs(held.variables());
    command.spawn().context(SpawnSnafu { program })
}

fn pid(child: &Child) -> Option<Pid> {
    Pid::from_raw(i32::try_from(child.id()?).ok()?)
}

fn outcome(status: ExitStatus) -> Result<(), CliError> {
    let code = match (status.code(), status.signal()) {
        (Some(0), _) => return Ok(()),
        (Some(code), _) => u8::try_from(code).unwrap_or(u8::MAX),
        (None, Some(signal)) => signals::exit_code(signal),
        (None, None) => 1,
    };
    CodeSnafu { code }.fail()
}

fn warn_not_released(held: &impl Held, why: &str) {
    eprintln!(
        "warning: lease {} was not released ({why}); it ends by itself in {}",
        held.id(),
        output::span(output::now(), held.expires_at())
    );
}

enum Never {}

/// Renews at half of the term. When that cannot be done any more it says so and leaves the command
/// alone: what to do about it is the command's own affair.
async fn keep_alive(held: &impl Held, ttl: Option<Duration>) -> Never {
    let warning = renew_while_possible(held, ttl).await;
    eprintln!(
        "warning: lease {} is not renewed any more: {warning}",
        held.id()
    );
    std::future::pending().await
}

/// Ends with the reason why not.
async fn renew_while_possible(held: &impl Held, ttl: Option<Duration>) -> String {
    let mut expires_at = held.expires_at();
    let pause = ttl.unwrap_or_else(|| term(held.bound_at(), expires_at, output::now())) / 2;
    loop {
        sleep(pause).await;
        let renewed = match renew_in_time(held, ttl, expires_at).await {
            Ok(renewed) => renewed,
            Err(error) => return error.message,
        };
        if renewed <= expires_at {
            let left = output::span(output::now(), renewed);
            return format!("the pool's limit is reached, it ends in {left}");
        }
        expires_at = renewed;
    }
}

/// Another side that is away, as while it restarts, is asked again until the time is up.
async fn renew_in_time(
    held: &impl Held,
    ttl: Option<Duration>,
    expires_at: u64,
) -> Result<u64, RenewError> {
    loop {
        match held.renew(ttl).await {
            Err(error) if error.may_pass && output::now() < expires_at => {
                sleep(RETRY_RENEWAL).await;
            }
            result => return result,
        }
    }
}

/// The lease may have been renewed before, so its whole span says too much; the agent's clock may
/// be behind ours, so what is left says too much as well. The shorter one is safe.
fn term(bound_at: u64, expires_at: u64, now: u64) -> Duration {
    let whole = expires_at.saturating_sub(bound_at);
    let left = expires_at.saturating_sub(now);
    Duration::from_millis(whole.min(left)).max(RETRY_RENEWAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::tests::lease;

    #[test]
    fn the_term_is_the_shorter_of_both_views() {
        let lease = lease("l1");
        let seconds = |now| term(lease.bound_at, lease.expires_at, now).as_secs();
        assert_eq!(seconds(1_000_000), 1_800);
        assert_eq!(seconds(900_000), 1_800);
        assert_eq!(seconds(2_000_000), 800);
        assert_eq!(
            seconds(9_000_000),
            1,
            "an expired lease is not renewed in a tight loop"
        );
    }
}
