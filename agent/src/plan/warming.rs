//! Filling pools: how many branches are wanted, and whose step begins now.
//!
//! Level-triggered: every decision follows from counts, none from a clock or from how long an
//! earlier branch took.

use super::{
    Action, After, Branch, BranchRecord, Entry, Node, Now, PoolUid, Stage, State, StopMode,
    branch::Meanwhile, node::Effects, pool::Phase,
};
use crate::storage::ids::{BranchId, EndpointId};

/// Most branches whose snapshots run ahead of their starts.
pub const WINDOW: u32 = 256;

/// Branches of a pool that count toward its target.
struct Holding {
    /// Ready or in the making, and what new branches would be.
    current: u32,
    /// Ready, but of an older image or older settings.
    stale: Vec<BranchId>,
}

impl Node {
    fn holding(&mut self, uid: &PoolUid) -> Option<Holding> {
        let pool = self.pools.get_mut(uid)?;
        let counts = pool.counts();
        if !pool.mixed {
            return Some(Holding {
                current: counts.warming() + counts.ready,
                stale: Vec::new(),
            });
        }
        let pool = self.pools.get(uid)?;
        let is_current = |id: &BranchId| self.branches.get(id).is_some_and(|b| pool.is_current(b));
        let stale: Vec<BranchId> = pool
            .ready
            .values()
            .filter(|id| !is_current(id))
            .copied()
            .collect();
        let warming = self
            .branches
            .values()
            .filter(|b| b.pool == *uid && b.is_warming());
        let old_warming = warming.filter(|branch| !pool.is_current(branch)).count();
        let old = u32::try_from(stale.len() + old_warming).unwrap_or(u32::MAX);
        let current = (counts.warming() + counts.ready).saturating_sub(old);
        if old == 0
            && let Some(pool) = self.pools.get_mut(uid)
        {
            pool.mixed = false;
        }
        Some(Holding { current, stale })
    }

    /// Retires what is too much or too old, without going below what is ready.
    pub(super) fn plan_replacement(&mut self, now: Now, effects: &mut Effects) {
        if self.draining {
            return;
        }
        let uids: Vec<PoolUid> = self.pools.keys().cloned().collect();
        for uid in uids {
            let Some(holding) = self.holding(&uid) else {
                continue;
            };
            let Some(pool) = self.pools.get(&uid) else {
                continue;
            };
            let counts = pool.counts();
            let target = if pool.removed { 0 } else { pool.spec.target };
            let replace = pool.spec.replace_stale || pool.removed;
            let wanted = target.saturating_sub(holding.current);
            let at_cap = counts.existing() >= pool.spec.max_branches;
            let surplus = (counts.ready + counts.warming()).saturating_sub(target);
            // Stale branches first, then those that only wait, then the oldest ready ones.
            let mut goers: Vec<BranchId> = Vec::new();
            if replace {
                let ready_beyond = counts.ready.saturating_sub(target);
                let make_room = u32::from(wanted > 0 && at_cap && counts.stopping == 0);
                goers.extend(
                    holding
                        .stale
                        .iter()
                        .take(ready_beyond.max(make_room) as usize),
                );
            }
            let current_surplus = if replace {
                holding.current.saturating_sub(target)
            } else {
                surplus
            };
            let waiting = pool.snapshotted.values().rev().chain(pool.ready.values());
            let current = waiting.filter(|id| !holding.stale.contains(id) || !replace);
            goers.extend(current.take(current_surplus as usize));
            for id in goers {
                self.retire(id, After::Trash, StopMode::Immediate, now, effects);
            }
        }
    }

    /// Asks for the next snapshots, starts and sessions.
    pub(super) fn plan_warming(&mut self, now: Now, effects: &mut Effects) {
        if self.draining || !self.gates.is_empty() {
            return;
        }
        let mut uids: Vec<PoolUid> = self.pools.keys().cloned().collect();
        // The pool with the fewest starts under way goes first, so that none waits for another.
        uids.sort_by_key(|uid| self.pools.get(uid).map(|pool| pool.counts().starting));
        for uid in &uids {
            self.plan_pool(uid, now, effects);
        }
    }

    fn plan_pool(&mut self, uid: &PoolUid, now: Now, effects: &mut Effects) {
        let mut wanted = self.wanted(uid, now);
        if !self.pools.get(uid).is_some_and(super::Pool::is_phased) {
            self.issue_snapshots(uid, wanted, now, effects);
            self.issue_starts(uid, effects);
            self.issue_sessions(uid, effects);
            return;
        }
        // At most one turn from starts to snapshots and one back: each half ends by its own count.
        for _ in 0..3 {
            let Some(pool) = self.pools.get_mut(uid) else {
                return;
            };
            match pool.phase {
                Phase::Snapshots { issued } => {
                    let room = WINDOW.saturating_sub(issued);
                    let asked = self.issue_snapshots(uid, wanted.min(room), now, effects);
                    wanted -= asked;
                    let Some(pool) = self.pools.get_mut(uid) else {
                        return;
                    };
                    let issued = issued + asked;
                    let complete = wanted == 0 || issued >= WINDOW;
                    if !(complete && issued > 0) {
                        pool.phase = Phase::Snapshots { issued };
                        break;
                    }
                    pool.phase = Phase::Starts;
                }
                Phase::Starts => {
                    self.issue_starts(uid, effects);
                    let Some(pool) = self.pools.get_mut(uid) else {
                        return;
                    };
                    let counts = pool.counts();
                    if counts.snapshotted + counts.snapshotting > 0 {
                        break;
                    }
                    pool.phase = Phase::Snapshots { issued: 0 };
                    if wanted == 0 {
                        break;
                    }
                }
            }
        }
        self.issue_sessions(uid, effects);
    }

    /// Branches to be made beyond those in the making, and allowed now.
    fn wanted(&mut self, uid: &PoolUid, now: Now) -> u32 {
        let Some(holding) = self.holding(uid) else {
            return 0;
        };
        let Some(pool) = self.pools.get(uid) else {
            return 0;
        };
        if pool.removed || pool.serving().is_none() || pool.retry_at > now.mono {
            return 0;
        }
        let counts = pool.counts();
        let held = if pool.spec.replace_stale {
            holding.current
        } else {
            counts.warming() + counts.ready
        };
        let deficit = pool.spec.target.saturating_sub(held);
        // After a failure one branch at a time shows whether the cause is gone.
        let deficit = if pool.failures > 0 {
            deficit.min(1_u32.saturating_sub(counts.warming()))
        } else {
            deficit
        };
        let slots = u32::try_from(self.free_slots.len()).unwrap_or(u32::MAX);
        deficit
            .min(pool.spec.max_branches.saturating_sub(counts.existing()))
            .min(slots)
    }

    /// Returns how many were asked for.
    fn issue_snapshots(
        &mut self,
        uid: &PoolUid,
        wanted: u32,
        now: Now,
        effects: &mut Effects,
    ) -> u32 {
        let Some(pool) = self.pools.get(uid) else {
            return 0;
        };
        let Some(generation) = pool.serving() else {
            return 0;
        };
        let idle = pool
            .spec
            .warming
            .snapshot_concurrency
            .saturating_sub(pool.counts().snapshotting);
        let settings_key = pool.spec.settings_key.clone();
        let deadline = now.mono.saturating_add(pool.spec.warming.stale_after);
        let count = wanted.min(idle);
        for _ in 0..count {
            let Some(slot) = self.free_slots.pop_first() else {
                return 0;
            };
            let id = self.fresh_id();
            let endpoint = EndpointId::generate(&mut self.rng);
            let serial = self.next_serial;
            self.next_serial += 1;
            let record = BranchRecord {
                pool: uid.clone(),
                generation,
                settings_key: settings_key.clone(),
                slot,
                endpoint,
                serial,
                stage: Stage::Warming,
            };
            self.branches.insert(
                id,
                Branch {
                    id,
                    pool: uid.clone(),
                    generation,
                    settings_key: settings_key.clone(),
                    slot,
                    endpoint,
                    serial,
                    created: now.mono,
                    state: State::Snapshotting,
                    retire: None,
                    meanwhile: Meanwhile::default(),
                    restarted: None,
                    early_deaths: 0,
                    waking: false,
                    used_at: now.mono,
                    idle_look: None,
                },
            );
            if let Some(pool) = self.pools.get_mut(uid) {
                pool.enter(id, serial, &State::Snapshotting);
            }
            effects.pool_changed(uid);
            let entry = Entry::Branch(id, record);
            effects.act(Action::Snapshot {
                branch: id,
                pool: uid.clone(),
                generation,
                entry,
                deadline,
            });
        }
        count
    }

    pub(super) fn fresh_id(&mut self) -> BranchId {
        loop {
            let id = BranchId::generate(&self.key, &mut self.rng);
            if !self.branches.contains_key(&id) && !self.trash.contains(&id) {
                return id;
            }
        }
    }

    fn issue_starts(&mut self, uid: &PoolUid, effects: &mut Effects) {
        let most = self
            .pools
            .values()
            .map(|pool| pool.spec.warming.start_concurrency)
            .max();
        loop {
            // The node has no more starts under way than its most eager pool asks for.
            let on_node: u32 = self.pools.values().map(|pool| pool.counts().starting).sum();
            let Some(pool) = self.pools.get(uid) else {
                return;
            };
            if pool.counts().starting >= pool.spec.warming.start_concurrency
                || on_node >= most.unwrap_or(0)
            {
                return;
            }
            let Some((_, id)) = pool.snapshotted.first_key_value() else {
                return;
            };
            let (id, stale_after) = (*id, pool.spec.warming.stale_after);
            let Some(branch) = self.branches.get(&id) else {
                return;
            };
            let (slot, deadline) = (branch.slot, branch.created.saturating_add(stale_after));
            self.set_state(id, State::Starting, effects);
            effects.act(Action::Start {
                branch: id,
                slot,
                pool: uid.clone(),
                deadline,
            });
        }
    }

    fn issue_sessions(&mut self, uid: &PoolUid, effects: &mut Effects) {
        loop {
            let Some(pool) = self.pools.get(uid) else {
                return;
            };
            let warming = &pool.spec.warming;
            if pool.counts().preconnecting >= warming.preconnect_concurrency {
                return;
            }
            let Some((_, id)) = pool.started.first_key_value() else {
                return;
            };
            let (id, stale_after) = (*id, warming.stale_after);
            let Some(branch) = self.branches.get(&id) else {
                return;
            };
            let deadline = branch.created.saturating_add(stale_after);
            self.set_state(id, State::Preconnecting, effects);
            effects.act(Action::Preconnect {
                branch: id,
                pool: uid.clone(),
                deadline,
            });
        }
    }
}
