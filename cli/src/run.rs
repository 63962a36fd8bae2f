//! Running a command with a branch.

use std::{ffi::OsString, os::unix::process::ExitStatusExt, process::ExitStatus, time::Duration};

use branchpool_agent_api::{Client, ClientError, Lease, RenewRequest};
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

/// Runs the command, keeps the lease alive meanwhile, and releases it however the command ends.
/// `Err(Code)` with the command's exit code when that is not 0.
pub(crate) async fn with_lease(
    client: &Client,
    lease: &Lease,
    ttl: Option<Duration>,
    command: &[OsString],
    signals: &mut Signals,
) -> Result<(), CliError> {
    let ended = tokio::select! {
        ended = command_alone(lease, command, signals) => ended,
        never = keep_alive(client, lease, ttl) => match never {},
    };
    match timeout(RELEASE_TIMEOUT, client.release(&lease.uid, None)).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => warn_not_released(lease, &error.to_string()),
        Err(_) => warn_not_released(lease, "the agent does not answer"),
    }
    ended
}

/// Runs the command on the lease's branch and leaves the lease as it is.
pub(crate) async fn command_alone(
    lease: &Lease,
    command: &[OsString],
    signals: &mut Signals,
) -> Result<(), CliError> {
    let mut child = spawn(lease, command)?;
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

fn spawn(lease: &Lease, command: &[OsString]) -> Result<Child, CliError> {
    let (program, arguments) = command.split_first().ok_or_else(|| CliError::Usage {
        message: "there is no command to run".to_owned(),
    })?;
    let mut command = Command::new(program);
    command.args(arguments);
    for name in environment::REMOVED {
        command.env_remove(name);
    }
    command.envs(environment::of(lease));
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

fn warn_not_released(lease: &Lease, why: &str) {
    eprintln!(
        "warning: lease {} was not released ({why}); it ends by itself in {}",
        lease.uid,
        output::span(output::now(), lease.expires_at)
    );
}

enum Never {}

/// Renews at half of the term. When that cannot be done any more it says so and leaves the command
/// alone: what to do about it is the command's own affair.
async fn keep_alive(client: &Client, lease: &Lease, ttl: Option<Duration>) -> Never {
    let warning = renew_while_possible(client, lease, ttl).await;
    eprintln!(
        "warning: lease {} is not renewed any more: {warning}",
        lease.uid
    );
    std::future::pending().await
}

/// Ends with the reason why not.
async fn renew_while_possible(client: &Client, lease: &Lease, ttl: Option<Duration>) -> String {
    let request = RenewRequest {
        ttl_seconds: ttl.map(|ttl| ttl.as_secs()),
        epoch: None,
    };
    let pause = ttl.unwrap_or_else(|| term(lease, output::now())) / 2;
    let mut expires_at = lease.expires_at;
    loop {
        sleep(pause).await;
        let renewed = match renew_in_time(client, &lease.uid, &request, expires_at).await {
            Ok(renewed) => renewed,
            Err(error) => return error.to_string(),
        };
        if renewed.expires_at <= expires_at {
            let left = output::span(output::now(), renewed.expires_at);
            return format!("the pool's limit is reached, it ends in {left}");
        }
        expires_at = renewed.expires_at;
    }
}

/// An agent that is away, as it is while it restarts, is asked again until the time is up.
async fn renew_in_time(
    client: &Client,
    id: &str,
    request: &RenewRequest,
    expires_at: u64,
) -> Result<Lease, ClientError> {
    loop {
        match client.renew(id, request).await {
            Err(error) if error.is_transport() && output::now() < expires_at => {
                sleep(RETRY_RENEWAL).await;
            }
            result => return result,
        }
    }
}

/// The lease may have been renewed before, so its whole span says too much; the agent's clock may
/// be behind ours, so what is left says too much as well. The shorter one is safe.
fn term(lease: &Lease, now: u64) -> Duration {
    let whole = lease.expires_at.saturating_sub(lease.bound_at);
    let left = lease.expires_at.saturating_sub(now);
    Duration::from_millis(whole.min(left)).max(RETRY_RENEWAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::tests::lease;

    #[test]
    fn the_term_is_the_shorter_of_both_views() {
        let lease = lease("l1");
        let seconds = |now| term(&lease, now).as_secs();
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
