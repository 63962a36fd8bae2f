//! Getting a lease, waiting for the pool when it has no branch ready.

use std::time::Duration;

use branchpool_agent_api::{
    Change, Client, ClientError, Lease, LeasePhase, LeaseRequest, PoolName, PoolStatus, Problem,
    client::Watch, problem::reason,
};
use tokio::time::{Instant, sleep, timeout_at};

use crate::{
    error::{CliError, CodeSnafu, FinishedSnafu, NotReadySnafu, PoolGoneSnafu},
    output,
    progress::Progress,
    signals::{self, Signals},
};

/// Between attempts to reach an agent that went away, as it does to restart.
const RECONNECT: Duration = Duration::from_millis(500);
/// When the agent names no time to try again although branches are ready.
const RETRY: Duration = Duration::from_secs(1);

/// The lease `id`, bound. A signal meanwhile gives it back and ends with the signal's exit code.
pub(crate) async fn obtain(
    client: &Client,
    id: &str,
    request: &LeaseRequest,
    wait: Duration,
    signals: &mut Signals,
) -> Result<Lease, CliError> {
    let lease = tokio::select! {
        lease = wait_for_lease(client, id, request, wait) => lease?,
        signal = signals.next() => {
            // The request may have been answered, and the answer lost with it. That the lease is
            // unknown is the usual outcome here.
            let _ = client.release(id, None).await;
            let code = signals::exit_code(signal.as_raw());
            return CodeSnafu { code }.fail();
        }
    };
    if lease.phase == LeasePhase::Bound {
        return Ok(lease);
    }
    FinishedSnafu {
        id,
        phase: lease.phase,
    }
    .fail()
}

async fn wait_for_lease(
    client: &Client,
    id: &str,
    request: &LeaseRequest,
    wait: Duration,
) -> Result<Lease, CliError> {
    let deadline = Instant::now() + wait;
    let mut follower = Follower::new(client, &request.pool);
    loop {
        let why = match client.lease(id, request).await {
            Ok((lease, _)) => return Ok(lease),
            Err(error) if error.is(reason::POOL_NOT_FOUND) => {
                return Err(pool_not_found(client, &request.pool).await);
            }
            Err(error) if error.is(reason::NO_BRANCH_READY) => error,
            // An agent that was there a moment ago comes back.
            Err(error) if error.is_transport() && follower.has_watched() => error,
            Err(error) => return Err(error.into()),
        };
        let retry = why.problem().and_then(|problem| problem.retry_after_ms);
        let retry = retry.map_or(RETRY, Duration::from_millis);
        match timeout_at(deadline, follower.branch_ready(retry)).await {
            Ok(result) => result?,
            Err(_) => {
                return NotReadySnafu {
                    pool: request.pool.clone(),
                    waited: wait,
                    why: follower.summary().unwrap_or_else(|| why.to_string()),
                }
                .fail();
            }
        }
    }
}

/// Lists the pools there are, whatever the agent's answer said.
pub(crate) async fn pool_not_found(client: &Client, pool: &PoolName) -> CliError {
    match client.pools().await {
        Ok(pools) => {
            let problem = Problem::pool_not_found(pool, pools.iter().map(|pool| &pool.name));
            ClientError::Refused {
                problem: Box::new(problem),
            }
            .into()
        }
        Err(error) => error.into(),
    }
}

/// Follows one pool through the watch.
struct Follower<'a> {
    client: &'a Client,
    name: &'a PoolName,
    watch: Option<Watch>,
    last: Option<PoolStatus>,
    progress: Progress,
}

impl<'a> Follower<'a> {
    fn new(client: &'a Client, name: &'a PoolName) -> Self {
        Self {
            client,
            name,
            watch: None,
            last: None,
            progress: Progress::new(),
        }
    }

    fn has_watched(&self) -> bool {
        self.last.is_some()
    }

    fn summary(&self) -> Option<String> {
        self.last.as_ref().map(output::progress)
    }

    /// Returns when the pool has news of a ready branch: in the watch's first snapshot, or in an
    /// event after the last call. A branch that was ready then may be taken by now; so that news
    /// merged into one report are not missed, an attempt is also due after `retry` if the last
    /// report had some.
    async fn branch_ready(&mut self, retry: Duration) -> Result<(), CliError> {
        let retry_at = Instant::now() + retry;
        loop {
            let had_ready = self.last.as_ref().is_some_and(|pool| pool.ready > 0);
            let event = if had_ready && self.watch.is_some() {
                match timeout_at(retry_at, self.next()).await {
                    Ok(event) => event?,
                    Err(_) => return Ok(()),
                }
            } else {
                self.next().await?
            };
            if self.take(event)? {
                return Ok(());
            }
        }
    }

    /// The next event, over as many connections as it takes.
    async fn next(&mut self) -> Result<Change, CliError> {
        loop {
            if let Some(watch) = &mut self.watch {
                match watch.next().await {
                    Ok(Some(event)) => return Ok(event.change),
                    Ok(None) => {}
                    Err(error) if error.is_transport() => {}
                    Err(error) => return Err(error.into()),
                }
                self.watch = None;
                sleep(RECONNECT).await;
            }
            match self.client.watch(None).await {
                Ok(watch) => self.watch = Some(watch),
                Err(error) if error.is_transport() || error.is(reason::TOO_MANY_WATCHERS) => {
                    sleep(RECONNECT).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whether the event shows a ready branch.
    fn take(&mut self, change: Change) -> Result<bool, CliError> {
        match change {
            Change::Snapshot { pools, .. } => {
                match pools.into_iter().find(|pool| pool.name == *self.name) {
                    Some(pool) => Ok(self.see(pool)),
                    // A starting agent learns of its pools after it answers.
                    None => Ok(false),
                }
            }
            Change::Pool(pool) if pool.name == *self.name => Ok(self.see(*pool)),
            Change::PoolGone { uid } if self.last.as_ref().is_some_and(|last| last.uid == uid) => {
                let pool = self.name.clone();
                PoolGoneSnafu { pool }.fail()
            }
            _ => Ok(false),
        }
    }

    fn see(&mut self, pool: PoolStatus) -> bool {
        self.progress.show(&output::progress(&pool));
        let is_ready = pool.ready > 0;
        self.last = Some(pool);
        is_ready
    }
}
