//! Servers that nobody uses: stopped after a while, started again for whoever wants them.

use super::{Action, Entry, Millis, Node, Now, PoolUid, Server, State, node::Effects};
use crate::storage::ids::BranchId;

/// The use of a leased branch, as its gateway saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// Somebody is connected.
    pub open: bool,
    /// Monotonic time of the last byte or request of a holder. Absent: there was none.
    pub last: Option<Millis>,
}

/// How a suspension ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspension {
    /// The server was stopped cleanly, and its data synced.
    Asleep,
    /// Somebody came while it was begun, so the server goes on.
    Used,
}

impl Node {
    /// The branch counts as used at `at`; when its time is over it is looked at.
    pub(super) fn count_idle_from(&mut self, id: BranchId, at: Millis) {
        let Some(branch) = self.branches.get_mut(&id) else {
            return;
        };
        let pool = self.pools.get(&branch.pool);
        let Some(timeout) = pool.and_then(|pool| pool.spec.lease.idle_timeout) else {
            return;
        };
        branch.used_at = branch.used_at.max(at);
        let due = at.saturating_add(timeout);
        branch.idle_look = Some(due);
        self.idle_times.insert((due, id));
    }

    /// Another time may be in force for leased branches of the pool.
    pub(super) fn recount_idle(&mut self, pool: &PoolUid) {
        let leased = self
            .branches
            .values()
            .filter(|branch| branch.pool == *pool && is_up(&branch.state));
        let leased: Vec<_> = leased.map(|branch| (branch.id, branch.used_at)).collect();
        for (id, used_at) in leased {
            self.count_idle_from(id, used_at);
        }
    }

    pub(super) fn plan_idle(&mut self, now: Now, effects: &mut Effects) {
        while let Some((due, id)) = self.idle_times.first().copied() {
            if due > now.mono {
                return;
            }
            self.idle_times.pop_first();
            let Some(branch) = self.branches.get_mut(&id) else {
                continue;
            };
            // A later look may have taken the place of this one.
            if branch.idle_look == Some(due) && is_up(&branch.state) && !self.draining {
                branch.idle_look = None;
                effects.act(Action::LookIdle { branch: id });
            }
        }
    }

    pub(super) fn looked(&mut self, id: BranchId, found: Use, now: Now, effects: &mut Effects) {
        let Some(branch) = self.branches.get_mut(&id) else {
            return;
        };
        let Some(terms) = self.pools.get(&branch.pool).map(|pool| &pool.spec.lease) else {
            return;
        };
        let Some(timeout) = terms.idle_timeout else {
            return;
        };
        let State::Leased {
            lease,
            server: Server::Running,
        } = branch.state.clone()
        else {
            return;
        };
        if found.open && terms.open_connections_count {
            branch.used_at = now.mono;
        }
        let used_at = branch.used_at.max(found.last.unwrap_or(0));
        if used_at.saturating_add(timeout) > now.mono || self.draining {
            self.count_idle_from(id, used_at);
            return;
        }
        let server = Server::Suspending;
        self.set_state(id, State::Leased { lease, server }, effects);
        effects.act(Action::Suspend {
            branch: id,
            unused_since: used_at,
        });
    }

    pub(super) fn suspended(
        &mut self,
        id: BranchId,
        result: &Result<Suspension, String>,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(branch) = self.branches.get_mut(&id) else {
            return;
        };
        let State::Leased {
            lease,
            server: Server::Suspending,
        } = branch.state.clone()
        else {
            return;
        };
        let meanwhile = std::mem::take(&mut branch.meanwhile);
        let retire = branch.retire.take();
        let server = match result {
            Ok(Suspension::Asleep) => Server::Suspended,
            Ok(Suspension::Used) => Server::Running,
            // A restart ends whatever is left of it first.
            Err(_) => Server::Down {
                failures: 0,
                retry_at: now.mono,
            },
        };
        if let Err(message) = result {
            effects.warn(format!(
                "the unused server of lease {lease} could not be suspended: {message}"
            ));
        }
        let asleep = server == Server::Suspended;
        let running = server == Server::Running;
        if let Some(state) = self.leases.get_mut(&lease)
            && asleep
        {
            state.reason = Some("Suspended".to_owned());
            state.message = Some(
                "nobody used it, so its server is stopped; the next connection starts it"
                    .to_owned(),
            );
        }
        effects.lease_changed(&lease);
        let uid = lease.clone();
        self.set_state(id, State::Leased { lease, server }, effects);
        if asleep
            && let (Some(branch), Some(state)) = (self.branches.get(&id), self.leases.get(&uid))
        {
            effects.journal(Entry::Branch(id, branch.record()));
            effects.journal(Entry::Lease(uid, Box::new(state.record(now))));
        }
        if let Some((after, mode)) = retire {
            self.begin_stop(id, after, mode, 0, now, effects);
        } else if running {
            match meanwhile.server_exited {
                Some(detail) => self.server_exited(id, &detail, now, effects),
                None => self.count_idle_from(id, now.mono),
            }
        } else if meanwhile.wanted {
            self.wake(id, now, effects);
        }
    }

    /// Somebody waits for the branch's server.
    pub(super) fn wake(&mut self, id: BranchId, now: Now, effects: &mut Effects) {
        let Some(branch) = self.branches.get_mut(&id) else {
            return;
        };
        match branch.state.clone() {
            State::Leased {
                server: Server::Suspending,
                ..
            } => branch.meanwhile.wanted = true,
            State::Leased {
                lease,
                server: Server::Suspended,
            } => {
                branch.waking = true;
                if let Some(state) = self.leases.get_mut(&lease) {
                    state.reason = Some("Waking".to_owned());
                    state.message =
                        Some("somebody connects, so its server is being started".to_owned());
                }
                effects.lease_changed(&lease);
                let server = Server::Down {
                    failures: 0,
                    retry_at: now.mono,
                };
                self.set_state(id, State::Leased { lease, server }, effects);
            }
            _ => {}
        }
    }
}

fn is_up(state: &State) -> bool {
    matches!(
        state,
        State::Leased {
            server: Server::Running,
            ..
        }
    )
}
