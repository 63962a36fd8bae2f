//! Actions that ended, and servers and sessions that ended by themselves.

use std::collections::BTreeMap;

use super::{
    Action, After, Entry, Failure, Image, Millis, Node, Now, PoolUid, Preconnect, Server, State,
    StopMode, Suspension, Use, backoff, node::Effects,
};
use crate::storage::ids::BranchId;

/// How a stop went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stopped {
    /// What the branch had written, which its deletion will give back.
    pub bytes: u64,
    /// The server shut down by itself, and its data is flushed.
    pub clean: bool,
}

/// How an [`Action`] ended.
#[derive(Clone, Debug)]
pub enum Completion {
    Built {
        pool: PoolUid,
        generation: u64,
        result: Result<Image, String>,
    },
    GoldenDropped {
        pool: PoolUid,
        generation: u64,
        id: BranchId,
        result: Result<(), String>,
    },
    Snapshotted {
        branch: BranchId,
        result: Result<(), Failure>,
    },
    Started {
        branch: BranchId,
        result: Result<(), Failure>,
    },
    Preconnected {
        branch: BranchId,
        result: Result<(), Failure>,
    },
    Restarted {
        branch: BranchId,
        result: Result<(), Failure>,
    },
    Looked {
        branch: BranchId,
        found: Use,
    },
    Suspended {
        branch: BranchId,
        result: Result<Suspension, String>,
    },
    /// `Ok`: no process is left, and with [`After::Trash`] the branch is in the trash.
    Stopped {
        branch: BranchId,
        result: Result<Stopped, String>,
    },
    Deleted {
        id: BranchId,
        result: Result<(), String>,
    },
}

impl Node {
    pub(super) fn done(&mut self, completion: Completion, now: Now, effects: &mut Effects) {
        match completion {
            Completion::Built {
                pool,
                generation,
                result,
            } => {
                self.built(&pool, generation, result, now, effects);
            }
            Completion::GoldenDropped {
                pool,
                generation,
                id,
                result,
            } => {
                self.golden_dropped(&pool, generation, id, result, now, effects);
            }
            Completion::Snapshotted { branch, result } => {
                self.warmed(branch, result, State::Snapshotted, now, effects);
            }
            Completion::Started { branch, result } => {
                let next = self.after_start(branch);
                self.warmed(branch, result, next, now, effects);
            }
            Completion::Preconnected { branch, result } => {
                self.warmed(branch, result, State::Ready, now, effects);
            }
            Completion::Restarted { branch, result } => {
                self.restarted(branch, result, now, effects);
            }
            Completion::Looked { branch, found } => self.looked(branch, found, now, effects),
            Completion::Suspended { branch, result } => {
                self.suspended(branch, &result, now, effects);
            }
            Completion::Stopped { branch, result } => self.stopped(branch, result, now, effects),
            Completion::Deleted { id, result } => self.deleted(id, result, now, effects),
        }
    }

    fn after_start(&self, id: BranchId) -> State {
        let pool = self
            .branches
            .get(&id)
            .and_then(|branch| self.pools.get(&branch.pool));
        match pool.map(|pool| pool.spec.warming.preconnect) {
            Some(Preconnect::WhileWarming) => State::Started,
            _ => State::Ready,
        }
    }

    /// A warming step ended.
    fn warmed(
        &mut self,
        id: BranchId,
        result: Result<(), Failure>,
        next: State,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(branch) = self.branches.get_mut(&id) else {
            return;
        };
        if !branch.is_busy() || !branch.is_warming() {
            return;
        }
        let retire = branch.retire.take();
        let endpoint = branch.endpoint;
        let in_snapshot = branch.state == State::Snapshotting;
        let meanwhile = std::mem::take(&mut branch.meanwhile);
        let result = match meanwhile.server_exited {
            Some(detail) => result.and(Err(died_waiting(&detail))),
            None => result,
        };
        let next = if meanwhile.session_closed && next == State::Ready {
            State::Started
        } else {
            next
        };
        match (result, retire) {
            (_, Some((after, mode))) => self.begin_stop(id, after, mode, 0, now, effects),
            (Ok(()), None) => {
                if next == State::Ready {
                    self.became_ready(id);
                    effects.link(endpoint, id);
                }
                self.set_state(id, next, effects);
            }
            (Err(failure), None) => self.warming_failed(id, failure, in_snapshot, now, effects),
        }
    }

    fn became_ready(&mut self, id: BranchId) {
        let Some(branch) = self.branches.get(&id) else {
            return;
        };
        if let Some(pool) = self.pools.get_mut(&branch.pool) {
            pool.failures = 0;
            pool.retry_at = 0;
            pool.last_failure = None;
            pool.proven = true;
        }
    }

    fn warming_failed(
        &mut self,
        id: BranchId,
        failure: Failure,
        in_snapshot: bool,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(branch) = self.branches.get(&id) else {
            return;
        };
        let Some(pool) = self.pools.get_mut(&branch.pool) else {
            return;
        };
        pool.failures = pool.failures.saturating_add(1);
        pool.retry_at = now.mono + backoff::WARMING.after(pool.failures);
        pool.last_failure = Some(failure.message.clone());
        effects.warn(format!(
            "branch {id} of pool {}: {}",
            pool.spec.name.name, failure.message
        ));
        // A failed snapshot left nothing to look at; of the others the first few are kept.
        let on_the_way = pool
            .stopping
            .iter()
            .filter_map(|id| self.branches.get(id))
            .filter(|b| {
                matches!(
                    b.state,
                    State::Stopping {
                        after: After::Quarantine(_),
                        ..
                    }
                )
            });
        let kept = pool.counts().quarantined as usize + on_the_way.count();
        let keep = !in_snapshot && kept < self.limits.quarantine as usize;
        let after = if keep {
            After::Quarantine(failure)
        } else {
            After::Trash
        };
        self.begin_stop(id, after, StopMode::Immediate, 0, now, effects);
    }

    pub(super) fn server_exited(
        &mut self,
        id: BranchId,
        detail: &str,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(branch) = self.branches.get(&id) else {
            return;
        };
        match branch.state.clone() {
            State::Started | State::Ready => {
                self.warming_failed(id, died_waiting(detail), false, now, effects);
            }
            State::Starting
            | State::Preconnecting
            | State::Leased {
                server: Server::Restarting { .. } | Server::Suspending,
                ..
            } => {
                if let Some(branch) = self.branches.get_mut(&id) {
                    branch.meanwhile.server_exited = Some(detail.to_owned());
                }
            }
            State::Leased {
                lease,
                server: Server::Running,
            } => {
                if let Some(state) = self.leases.get_mut(&lease) {
                    state.reason = Some("Restarting".to_owned());
                    state.message = Some(format!(
                        "the server ended ({detail}) and is being started again on the same data"
                    ));
                }
                effects.lease_changed(&lease);
                effects.warn(format!("server of lease {lease} ended: {detail}"));
                if let Some(branch) = self.branches.get_mut(&id) {
                    let server = branch.down(now.mono);
                    self.set_state(id, State::Leased { lease, server }, effects);
                }
            }
            // Being stopped, or without a server.
            _ => {}
        }
    }

    pub(super) fn session_closed(&mut self, id: BranchId, effects: &mut Effects) {
        let Some(branch) = self.branches.get_mut(&id) else {
            return;
        };
        match branch.state {
            // Its address stays: nobody knows it yet, and it is to be ready again.
            State::Ready => {
                self.set_state(id, State::Started, effects);
            }
            State::Preconnecting => branch.meanwhile.session_closed = true,
            _ => {}
        }
    }

    /// Starts leased servers that are down and due, no more at once than the pool starts.
    pub(super) fn plan_restarts(&mut self, now: Now, effects: &mut Effects) {
        if self.draining || self.down.is_empty() {
            return;
        }
        let mut under_way: BTreeMap<PoolUid, u32> = BTreeMap::new();
        let mut due = Vec::new();
        for branch in self.down.iter().filter_map(|id| self.branches.get(id)) {
            match &branch.state {
                State::Leased {
                    server: Server::Restarting { .. },
                    ..
                } => {
                    *under_way.entry(branch.pool.clone()).or_default() += 1;
                }
                State::Leased {
                    lease,
                    server: Server::Down { failures, retry_at },
                } if *retry_at <= now.mono => {
                    due.push((
                        branch.id,
                        branch.slot,
                        branch.pool.clone(),
                        lease.clone(),
                        *failures,
                    ));
                }
                _ => {}
            }
        }
        let mut begun = Vec::new();
        for (id, slot, pool, lease, failures) in due {
            let most = self
                .pools
                .get(&pool)
                .map_or(1, |pool| pool.spec.warming.start_concurrency);
            let count = under_way.entry(pool.clone()).or_default();
            if *count >= most {
                continue;
            }
            *count += 1;
            let server = Server::Restarting { failures };
            self.set_state(id, State::Leased { lease, server }, effects);
            // Before it runs: a branch that was parked cleanly is not to be trusted after a reboot
            // any more.
            if let Some(branch) = self.branches.get(&id) {
                effects.journal(Entry::Branch(id, branch.record()));
            }
            begun.push(Action::Restart {
                branch: id,
                slot,
                pool,
            });
        }
        effects.flush();
        for action in begun {
            effects.act(action);
        }
    }

    pub(super) fn restart_times(&self) -> impl Iterator<Item = Millis> {
        let down = self.down.iter().filter_map(|id| self.branches.get(id));
        down.filter_map(|branch| match branch.state {
            State::Leased {
                server: Server::Down { retry_at, .. },
                ..
            } => Some(retry_at),
            _ => None,
        })
    }

    fn restarted(
        &mut self,
        id: BranchId,
        result: Result<(), Failure>,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(branch) = self.branches.get_mut(&id) else {
            return;
        };
        let State::Leased {
            lease,
            server: Server::Restarting { failures },
        } = branch.state.clone()
        else {
            return;
        };
        let meanwhile = std::mem::take(&mut branch.meanwhile);
        if let Some((after, mode)) = branch.retire.take() {
            self.begin_stop(id, after, mode, 0, now, effects);
            return;
        }
        let result = match meanwhile.server_exited {
            Some(detail) => result.and(Err(Failure {
                reason: "ServerDied".to_owned(),
                message: format!("the server ended again as soon as it had started: {detail}"),
            })),
            None => result,
        };
        if result.is_ok() {
            branch.restarted = Some(now.mono);
        }
        let endpoint = branch.endpoint;
        let repaired = !std::mem::take(&mut branch.waking);
        effects.lease_changed(&lease);
        let Some(state) = self.leases.get_mut(&lease) else {
            return;
        };
        let server = match result {
            Ok(()) => {
                state.reason = None;
                state.message = None;
                state.restarts = state.restarts.saturating_add(u32::from(repaired));
                effects.link(endpoint, id);
                effects.journal(Entry::Lease(lease.clone(), Box::new(state.record(now))));
                Server::Running
            }
            Err(failure) => {
                let failures = failures.saturating_add(1);
                state.reason = Some("RestartFailed".to_owned());
                state.message = Some(failure.message);
                Server::Down {
                    failures,
                    retry_at: now.mono + backoff::RESTART.after(failures),
                }
            }
        };
        self.set_state(id, State::Leased { lease, server }, effects);
        self.count_idle_from(id, now.mono);
    }
}

fn died_waiting(detail: &str) -> Failure {
    Failure {
        reason: "ServerDied".to_owned(),
        message: format!("its server ended while it waited to be handed out: {detail}"),
    }
}
