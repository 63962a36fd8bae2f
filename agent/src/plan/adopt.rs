//! The start: what the journal says, what is there, and what follows.

use std::collections::{BTreeMap, BTreeSet};

use branchpool_agent_api::{LeasePhase, Quarantined};
use rand::rngs::StdRng;

use super::{
    Action, After, Branch, BranchRecord, Entry, Failure, Generation, GenerationState, LeaseState,
    LeaseUid, Limits, Node, Now, Pool, PoolUid, Records, Server, Slot, Stage, State, StopMode,
    branch::Meanwhile, node::Effects,
};
use crate::storage::{
    ids::{BranchId, NodeKey},
    layout::shard,
};

/// A subvolume found among the branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservedBranch {
    /// A server runs on it: it is in the cgroup of the slot that the journal gives the branch, and
    /// the pid file of the data directory names it.
    pub running: bool,
    /// That pid file says `ready`.
    pub ready: bool,
}

/// What was found on the node.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    pub branches: BTreeMap<BranchId, ObservedBranch>,
    pub tombstones: BTreeSet<BranchId>,
    /// Sealed images that are there, by pool and generation.
    pub golden: BTreeSet<(PoolUid, u64)>,
    /// Everything else in our directories.
    pub strays: Vec<Quarantined>,
    /// The node was started anew since the journal was last written.
    pub rebooted: bool,
    /// Names this start of the node; journalled together with what follows from it.
    pub boot_id: String,
}

impl Node {
    /// Rebuilds the node from journal and observation. Nothing is handed out twice, leased branches
    /// go on, and what nobody recorded is named, not touched.
    pub fn adopt(
        limits: Limits,
        key: NodeKey,
        rng: StdRng,
        records: Records,
        observed: Observed,
        now: Now,
    ) -> (Self, Effects) {
        let mut node = Self::new(limits, key, rng);
        let mut effects = Effects::default();
        node.epoch = records.epoch;
        effects.journal(Entry::Boot(observed.boot_id.clone()));
        node.strays.clone_from(&observed.strays);
        node.restore_pools(&records, &observed, &mut effects);
        for (uid, record) in &records.leases {
            node.leases
                .insert(uid.clone(), LeaseState::restore(record.clone(), now));
        }
        for (id, record) in records.branches {
            node.adopt_branch(id, record, &observed, now, &mut effects);
        }
        node.adopt_unrecorded(&observed);
        node.retire_orphans(now, &mut effects);
        node.settle_leases(now, &mut effects);
        for id in observed.tombstones {
            node.trash.add(id, None, 0, now.mono);
        }
        node.advance(now, &mut effects);
        (node, effects)
    }

    fn restore_pools(&mut self, records: &Records, observed: &Observed, effects: &mut Effects) {
        for (uid, record) in &records.pools {
            let mut pool = Pool::new(record.spec.clone(), record.body.clone());
            pool.removed = record.removed;
            pool.mixed = true;
            self.pools.insert(uid.clone(), pool);
        }
        for ((uid, number), record) in &records.generations {
            let there = observed.golden.contains(&(uid.clone(), *number));
            let Some(pool) = self.pools.get_mut(uid) else {
                continue;
            };
            pool.last_generation = pool.last_generation.max(*number);
            match &record.image {
                Some(image) if there => {
                    let state = GenerationState::Sealed(image.clone());
                    let image_key = record.image_key.clone();
                    pool.generations.insert(
                        *number,
                        Generation {
                            number: *number,
                            image_key,
                            state,
                        },
                    );
                }
                // A build that did not end, or an image that is gone.
                _ => effects.journal(Entry::GenerationGone(uid.clone(), *number)),
            }
        }
    }

    fn adopt_branch(
        &mut self,
        id: BranchId,
        record: BranchRecord,
        observed: &Observed,
        now: Now,
        effects: &mut Effects,
    ) {
        self.next_serial = self.next_serial.max(record.serial + 1);
        let seen = observed.branches.get(&id).copied();
        // Moved into the trash before the record was dropped, or never made.
        let Some(seen) = seen else {
            effects.unlink(record.endpoint);
            self.lose_branch(id, &record, "BranchMissing", now, effects);
            effects.journal(Entry::BranchGone(id));
            return;
        };
        if !self.pools.contains_key(&record.pool) {
            self.strays.push(Quarantined {
                path: path_of(&id),
                reason: "PoolUnknown".to_owned(),
                message: format!(
                    "branch {id} belongs to pool {}, which the journal does not know",
                    record.pool
                ),
            });
            return;
        }
        let stopping = State::Stopping {
            after: After::Trash,
            mode: StopMode::Immediate,
            due: now.mono,
            working: false,
            failures: 0,
        };
        let state = match &record.stage {
            Stage::Warming if seen.running && seen.ready && !observed.rebooted => State::Started,
            Stage::Warming | Stage::Stopping => stopping,
            Stage::Quarantined { reason, message } => State::Quarantined(Failure {
                reason: reason.clone(),
                message: message.clone(),
            }),
            Stage::Leased {
                lease,
                parked,
                suspended,
            } => {
                let durable = self
                    .pools
                    .get(&record.pool)
                    .is_some_and(|pool| pool.spec.durable);
                if observed.rebooted && !durable && !parked {
                    self.lose_branch(id, &record, "NodeRebooted", now, effects);
                    stopping
                } else {
                    let server = if seen.running {
                        take_over(id, &record, effects);
                        Server::Running
                    } else if *suspended {
                        Server::Suspended
                    } else {
                        Server::Down {
                            failures: 0,
                            retry_at: now.mono,
                        }
                    };
                    let lease = lease.clone();
                    State::Leased { lease, server }
                }
            }
        };
        if matches!(state, State::Stopping { .. }) {
            effects.unlink(record.endpoint);
        }
        self.take_slot(record.slot);
        if state.is_down() {
            self.down.insert(id);
        }
        if let Some(pool) = self.pools.get_mut(&record.pool) {
            pool.enter(id, record.serial, &state);
        }
        self.branches.insert(
            id,
            Branch {
                id,
                pool: record.pool,
                generation: record.generation,
                settings_key: record.settings_key,
                slot: record.slot,
                endpoint: record.endpoint,
                serial: record.serial,
                created: now.mono,
                state,
                retire: None,
                meanwhile: Meanwhile::default(),
                restarted: None,
                early_deaths: 0,
                waking: false,
                used_at: now.mono,
                idle_look: None,
            },
        );
        self.count_idle_from(id, now.mono);
    }

    fn take_slot(&mut self, slot: Slot) {
        self.free_slots.remove(&slot);
    }

    /// Ends the lease of a branch that cannot serve it any more.
    fn lose_branch(
        &mut self,
        id: BranchId,
        record: &BranchRecord,
        reason: &'static str,
        now: Now,
        effects: &mut Effects,
    ) {
        let Stage::Leased { lease, .. } = &record.stage else {
            return;
        };
        let held = self
            .leases
            .get(lease)
            .is_some_and(|l| l.is_bound() && l.branch == id);
        if held {
            let message = match reason {
                "NodeRebooted" => {
                    "the node was started anew, and data written without fsync is not to be trusted; lease again"
                }
                _ => "the branch's data is no longer on the node; lease again",
            };
            let why = Some((reason, message.to_owned()));
            self.end_lease(lease, LeasePhase::Lost, why, now, effects);
        }
    }

    /// Branches on disk that no record names.
    fn adopt_unrecorded(&mut self, observed: &Observed) {
        for id in observed.branches.keys() {
            let known = self.branches.contains_key(id)
                || self.strays.iter().any(|stray| stray.path == path_of(id));
            if known {
                continue;
            }
            self.strays.push(Quarantined {
                path: path_of(id),
                reason: "Unrecorded".to_owned(),
                message: format!(
                    "branch {id} is on disk, but not in the journal; delete its subvolume by hand if nothing needs it"
                ),
            });
        }
    }

    /// Leased branches that are no lease's: it ended, or it has moved to another branch and took the
    /// address along, which [`Node::settle_leases`] points to the right one after this.
    fn retire_orphans(&mut self, now: Now, effects: &mut Effects) {
        let is_orphan = |branch: &&Branch| match &branch.state {
            State::Leased { lease, .. } => !self
                .leases
                .get(lease)
                .is_some_and(|lease| lease.is_bound() && lease.branch == branch.id),
            _ => false,
        };
        let orphans: Vec<_> = self
            .branches
            .values()
            .filter(is_orphan)
            .map(|branch| (branch.id, branch.endpoint))
            .collect();
        for (id, endpoint) in orphans {
            effects.unlink(endpoint);
            self.retire(id, After::Trash, StopMode::Immediate, now, effects);
        }
    }

    /// Every bound lease has its branch.
    fn settle_leases(&mut self, now: Now, effects: &mut Effects) {
        let uids: Vec<_> = self.leases.keys().cloned().collect();
        for uid in uids {
            let Some(lease) = self.leases.get(&uid) else {
                continue;
            };
            if !lease.is_bound() {
                if let Some(forget_at) = lease.forget_at {
                    self.lease_times.insert((forget_at, uid));
                }
                continue;
            }
            let serves = self.branches.get(&lease.branch).is_some_and(
                |branch| matches!(&branch.state, State::Leased { lease, .. } if *lease == uid),
            );
            if serves {
                self.lease_times.insert((lease.deadline, uid.clone()));
                effects.link(lease.endpoint, lease.branch);
                self.tell_server(&uid, now, effects);
                let Some(lease) = self.leases.get(&uid) else {
                    continue;
                };
                if let Some(branch) = self.branches.get_mut(&lease.branch) {
                    branch.endpoint = lease.endpoint;
                }
            } else {
                let why = Some((
                    "BranchMissing",
                    "the branch's data is no longer on the node; lease again".to_owned(),
                ));
                self.end_lease(&uid, LeasePhase::Lost, why, now, effects);
            }
        }
    }

    /// The server may have come back since the journal was written, or be on its way.
    fn tell_server(&mut self, uid: &LeaseUid, now: Now, effects: &mut Effects) {
        let Some(lease) = self.leases.get_mut(uid) else {
            return;
        };
        let state = self.branches.get(&lease.branch).map(|branch| &branch.state);
        let Some(State::Leased { server, .. }) = state else {
            return;
        };
        match server {
            Server::Running if lease.reason.is_some() => {
                lease.reason = None;
                lease.message = None;
                effects.journal(Entry::Lease(uid.clone(), Box::new(lease.record(now))));
            }
            Server::Down { .. } | Server::Restarting { .. } if lease.reason.is_none() => {
                lease.reason = Some("Restarting".to_owned());
                lease.message =
                    Some("the server is being started again on the same data".to_owned());
                effects.lease_changed(uid);
            }
            _ => {}
        }
    }
}

/// A leased branch whose server runs.
fn take_over(id: BranchId, record: &BranchRecord, effects: &mut Effects) {
    if let Stage::Leased {
        lease,
        parked: true,
        ..
    } = &record.stage
    {
        let stage = Stage::Leased {
            lease: lease.clone(),
            parked: false,
            suspended: false,
        };
        let record = BranchRecord {
            stage,
            ..record.clone()
        };
        effects.journal(Entry::Branch(id, record));
    }
    // The hand-over may have been cut short, and a second one changes nothing.
    effects.act(Action::HandOver { branch: id });
}

/// Relative to the root of the branch filesystem.
fn path_of(id: &BranchId) -> String {
    format!("branches/{}/{id}", shard(id))
}
