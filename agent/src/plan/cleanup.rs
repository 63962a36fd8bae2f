//! Stopping branches, and deleting what is left of them: late, slowly and within bounds.

use std::collections::BTreeMap;

use super::{
    Action, After, Entry, Millis, Node, Now, PoolUid, Server, Stage, State, StopMode, Stopped,
    Tombstones, backoff, node::Effects,
};
use crate::storage::ids::BranchId;

/// Reclaiming is asked for with every n-th deletion, and with the last one.
const KICK_EVERY: u64 = 8;

/// How soon a deletion is to give its space back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kick {
    /// With the filesystem's next commit, which is asked for.
    Soon,
    /// At once, though everything that is dirty has to be written for it.
    Now,
}

/// A branch or image in the trash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tombstone {
    /// Absent for what was found in the trash at the start.
    pub pool: Option<PoolUid>,
    pub since: Millis,
    pub bytes: u64,
    pub retry_at: Millis,
    pub failures: u32,
    pub deleting: bool,
}

/// Everything that waits for deletion.
#[derive(Debug, Default)]
pub(super) struct Trash {
    pub(super) entries: BTreeMap<BranchId, Tombstone>,
    /// Space is short: delays and spacing are off.
    pub(super) reclaim: bool,
    next_at: Millis,
    deleted: u64,
}

impl Trash {
    pub(super) fn contains(&self, id: &BranchId) -> bool {
        self.entries.contains_key(id)
    }

    pub(super) fn add(&mut self, id: BranchId, pool: Option<PoolUid>, bytes: u64, now: Millis) {
        let entry = Tombstone {
            pool,
            since: now,
            bytes,
            retry_at: 0,
            failures: 0,
            deleting: false,
        };
        self.entries.entry(id).or_insert(entry);
    }

    pub(super) fn of_pool<'a>(&'a self, uid: &'a PoolUid) -> impl Iterator<Item = &'a Tombstone> {
        self.entries
            .values()
            .filter(move |entry| entry.pool.as_ref() == Some(uid))
    }
}

impl Node {
    /// Ends a branch: at once if it is idle, else when the step under way ends.
    pub(super) fn retire(
        &mut self,
        id: BranchId,
        after: After,
        mode: StopMode,
        now: Now,
        effects: &mut Effects,
    ) {
        self.retire_after(id, after, mode, 0, now, effects);
    }

    /// As [`Node::retire`], not before `delay` is over.
    pub(super) fn retire_after(
        &mut self,
        id: BranchId,
        after: After,
        mode: StopMode,
        delay: Millis,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(branch) = self.branches.get_mut(&id) else {
            return;
        };
        if matches!(branch.state, State::Stopping { .. }) {
            return;
        }
        if branch.is_busy() {
            // What is to be thrown away is not kept for anybody after all.
            if !matches!(branch.retire, Some((After::Trash, _))) {
                branch.retire = Some((after, mode));
            }
        } else {
            self.begin_stop(id, after, mode, delay, now, effects);
        }
    }

    /// Queues the stop of a branch that nothing else works on.
    pub(super) fn begin_stop(
        &mut self,
        id: BranchId,
        after: After,
        mode: StopMode,
        delay: Millis,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(branch) = self.branches.get(&id) else {
            return;
        };
        // A lease takes its address along; a branch may have been ready before this agent came.
        let is_leased = matches!(branch.state, State::Leased { .. } | State::Parked { .. });
        let endpoint = branch.endpoint;
        let mut record = branch.record();
        if after != After::Park {
            record.stage = Stage::Stopping;
        }
        if !is_leased {
            effects.unlink(endpoint);
        }
        effects.journal(Entry::Branch(id, record));
        let due = now.mono + delay;
        self.set_state(
            id,
            State::Stopping {
                after,
                mode,
                due,
                working: false,
                failures: 0,
            },
            effects,
        );
    }

    pub(super) fn plan_cleanup(&mut self, now: Now, effects: &mut Effects) {
        let uids: Vec<PoolUid> = self.pools.keys().cloned().collect();
        for uid in uids {
            self.issue_stops(&uid, now, effects);
        }
        self.issue_deletions(now, effects);
    }

    fn issue_stops(&mut self, uid: &PoolUid, now: Now, effects: &mut Effects) {
        let Some(pool) = self.pools.get(uid) else {
            return;
        };
        let idle = pool
            .spec
            .cleanup
            .concurrency
            .saturating_sub(pool.counts().stopping_now);
        let due: Vec<BranchId> = pool
            .stopping
            .iter()
            .filter(
                |id| match self.branches.get(id).map(|branch| &branch.state) {
                    Some(State::Stopping {
                        due,
                        working: false,
                        failures,
                        ..
                    }) => *due <= now.mono || (self.draining && *failures == 0),
                    _ => false,
                },
            )
            .take(idle as usize)
            .copied()
            .collect();
        for id in due {
            let Some(branch) = self.branches.get(&id) else {
                continue;
            };
            let State::Stopping {
                after,
                mode,
                due,
                failures,
                ..
            } = branch.state.clone()
            else {
                continue;
            };
            effects.act(Action::Stop {
                branch: id,
                mode,
                after: after.clone(),
            });
            self.set_state(
                id,
                State::Stopping {
                    after,
                    mode,
                    due,
                    working: true,
                    failures,
                },
                effects,
            );
        }
    }

    pub(super) fn stopped(
        &mut self,
        id: BranchId,
        result: Result<Stopped, String>,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(branch) = self.branches.get(&id) else {
            return;
        };
        let State::Stopping {
            after,
            mode,
            failures,
            working: true,
            ..
        } = branch.state.clone()
        else {
            return;
        };
        let pool = branch.pool.clone();
        let Stopped { bytes, clean } = match result {
            Ok(stopped) => stopped,
            Err(message) => {
                let failures = failures.saturating_add(1);
                let due = now.mono + backoff::CLEANUP.after(failures);
                effects.warn(format!(
                    "branch {id} could not be stopped, trying again: {message}"
                ));
                let state = State::Stopping {
                    after,
                    mode,
                    due,
                    working: false,
                    failures,
                };
                self.set_state(id, state, effects);
                return;
            }
        };
        match after {
            After::Trash => {
                self.trash.add(id, Some(pool.clone()), bytes, now.mono);
                self.remove_branch(id, effects);
                if let Some(pool) = self.pools.get_mut(&pool) {
                    pool.tombstones_scheduled += 1;
                }
            }
            After::Quarantine(failure) => {
                let mut record = branch.record();
                record.stage = Stage::Quarantined {
                    reason: failure.reason.clone(),
                    message: failure.message.clone(),
                };
                effects.journal(Entry::Branch(id, record));
                effects.node = true;
                self.set_state(id, State::Quarantined(failure), effects);
            }
            After::Park => self.parked(id, clean, now, effects),
        }
    }

    fn parked(&mut self, id: BranchId, clean: bool, now: Now, effects: &mut Effects) {
        let holder = self
            .leases
            .iter()
            .find(|(_, lease)| lease.is_bound() && lease.branch == id);
        let Some((lease, _)) = holder else {
            // The lease ended while its server was being stopped.
            self.begin_stop(id, After::Trash, StopMode::Immediate, 0, now, effects);
            return;
        };
        let lease = lease.clone();
        let Some(branch) = self.branches.get(&id) else {
            return;
        };
        let mut record = branch.record();
        if clean {
            record.stage = Stage::Leased {
                lease: lease.clone(),
                parked: true,
                suspended: false,
            };
            effects.journal(Entry::Branch(id, record));
        }
        self.set_state(id, State::Parked { lease }, effects);
    }

    /// Oldest first, each when its delay is over or a bound is passed.
    fn issue_deletions(&mut self, now: Now, effects: &mut Effects) {
        if self.trash.next_at > now.mono && !self.trash.reclaim {
            return;
        }
        let due = self.due_tombstones(now.mono);
        let spacing = self.limits.deletion_spacing;
        let one_by_one = spacing > 0 && !self.trash.reclaim;
        let count = if one_by_one { 1 } else { due.len() };
        for id in due.into_iter().take(count) {
            self.trash.deleted += 1;
            let last = self
                .trash
                .entries
                .values()
                .filter(|entry| !entry.deleting)
                .count()
                <= 1;
            let kick = if self.trash.reclaim {
                Some(Kick::Now)
            } else if last || self.trash.deleted.is_multiple_of(KICK_EVERY) {
                Some(Kick::Soon)
            } else {
                None
            };
            if let Some(entry) = self.trash.entries.get_mut(&id) {
                entry.deleting = true;
            }
            self.trash.next_at = now.mono + spacing;
            effects.act(Action::Delete { id, kick });
        }
    }

    fn tombstone_terms(&self, pool: Option<&PoolUid>) -> Tombstones {
        pool.and_then(|uid| self.pools.get(uid))
            .map(|pool| pool.spec.cleanup.tombstones.clone())
            .unwrap_or_default()
    }

    /// Tombstones to be deleted now, oldest first, within each pool's concurrency.
    fn due_tombstones(&self, now: Millis) -> Vec<BranchId> {
        let mut by_pool: BTreeMap<Option<&PoolUid>, Vec<(&BranchId, &Tombstone)>> = BTreeMap::new();
        for (id, entry) in &self.trash.entries {
            by_pool
                .entry(entry.pool.as_ref())
                .or_default()
                .push((id, entry));
        }
        let mut due: Vec<(Millis, BranchId)> = Vec::new();
        for (pool, mut entries) in by_pool {
            let terms = self.tombstone_terms(pool);
            entries.sort_by_key(|(id, entry)| (entry.since, **id));
            let active = entries.iter().filter(|(_, entry)| entry.deleting).count();
            let mut idle = (terms.concurrency as usize).saturating_sub(active);
            let mut count = entries.len();
            let mut bytes: u64 = entries.iter().map(|(_, entry)| entry.bytes).sum();
            for (id, entry) in entries {
                let over = count > terms.max_count as usize || bytes > terms.max_bytes;
                let old = entry.since + terms.delay <= now;
                count -= 1;
                bytes -= entry.bytes;
                if entry.deleting || entry.retry_at > now || idle == 0 {
                    continue;
                }
                if over || old || self.trash.reclaim {
                    due.push((entry.since, *id));
                    idle -= 1;
                }
            }
        }
        due.sort_unstable();
        due.into_iter().map(|(_, id)| id).collect()
    }

    pub(super) fn trash_times(&self) -> Vec<Millis> {
        let waiting = self.trash.entries.values().filter(|entry| !entry.deleting);
        let mut times: Vec<Millis> = waiting
            .map(|entry| {
                let delay = self.tombstone_terms(entry.pool.as_ref()).delay;
                (entry.since + delay).max(entry.retry_at)
            })
            .collect();
        times.push(self.trash.next_at);
        times
    }

    pub(super) fn deleted(
        &mut self,
        id: BranchId,
        result: Result<(), String>,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(entry) = self.trash.entries.get_mut(&id) else {
            return;
        };
        if let Some(pool) = &entry.pool {
            effects.pool_changed(pool);
        }
        match result {
            Ok(()) => drop(self.trash.entries.remove(&id)),
            Err(message) => {
                entry.deleting = false;
                entry.failures = entry.failures.saturating_add(1);
                entry.retry_at = now.mono + backoff::CLEANUP.after(entry.failures);
                effects.warn(format!(
                    "tombstone {id} could not be deleted, trying again: {message}"
                ));
            }
        }
    }

    /// Nothing new from now on. What is leased is parked, all else goes.
    pub(super) fn drain(&mut self, now: Now, effects: &mut Effects) {
        if self.draining {
            return;
        }
        self.draining = true;
        effects.node = true;
        for (uid, pool) in &mut self.pools {
            effects.pool_changed(uid);
            if let Some(building) = pool.building() {
                pool.build_cancelled = true;
                effects.act(Action::CancelBuild {
                    pool: uid.clone(),
                    generation: building,
                });
            }
        }
        let ids: Vec<BranchId> = self.branches.keys().copied().collect();
        for id in ids {
            match self.branches.get(&id).map(|branch| branch.state.clone()) {
                Some(State::Leased {
                    server: Server::Down { .. } | Server::Suspended,
                    lease,
                }) => {
                    // Its server is already gone, cleanly or not: it stays as the journal has it.
                    self.set_state(id, State::Parked { lease }, effects);
                }
                Some(State::Leased { .. }) => {
                    self.retire(id, After::Park, StopMode::Fast, now, effects);
                }
                Some(State::Quarantined(_) | State::Parked { .. }) | None => {}
                Some(_) => self.retire(id, After::Trash, StopMode::Immediate, now, effects),
            }
        }
    }
}
