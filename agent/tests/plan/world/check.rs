//! What must hold at any time, and once nothing is left to do.

use super::*;

impl World {
    /// Everything that must hold at any time.
    pub fn check(&self) {
        let mut held = BTreeMap::new();
        for (uid, lease) in self
            .node
            .leases
            .iter()
            .filter(|(_, lease)| lease.is_bound())
        {
            let other = held.insert(lease.branch, uid);
            assert!(
                other.is_none(),
                "{uid} and {other:?} both hold {}",
                lease.branch
            );
            assert!(
                !self.trash.contains(&lease.branch),
                "leased branch of {uid} is in the trash"
            );
            assert!(
                self.links.get(&lease.endpoint) == Some(&lease.branch)
                    || self.pending.iter().any(writes_journal),
                "the address of {uid} leads elsewhere"
            );
        }
        let mut slots = BTreeSet::new();
        for branch in self.node.branches.values() {
            assert!(
                slots.insert(branch.slot),
                "slot {:?} used twice",
                branch.slot
            );
        }
        for pool in self.node.pools.values() {
            let branches = self
                .node
                .branches
                .values()
                .filter(|branch| branch.pool == pool.spec.uid)
                .count();
            assert_eq!(
                branches,
                pool.counts().existing() as usize,
                "counts do not add up"
            );
            assert!(
                branches <= pool.spec.max_branches as usize,
                "more than maxBranches"
            );
        }
        for (uid, (branch, endpoint)) in &self.answered {
            if self.ended.contains(uid) {
                continue;
            }
            let Some(lease) = self.node.leases.get(uid) else {
                // Only a finished lease is forgotten.
                panic!("lease {uid} was answered and is unknown now")
            };
            if lease.is_bound() {
                assert_eq!(lease.endpoint, *endpoint, "address of {uid} moved");
                let moving = self.moving.contains(uid);
                assert!(
                    lease.branch == *branch || moving,
                    "branch of {uid} changed unasked"
                );
                assert!(
                    self.branches.contains_key(&lease.branch),
                    "data of {uid} is gone"
                );
            } else {
                panic!("lease {uid} ended as {:?} for no reason", lease.phase);
            }
        }
    }

    /// Lets everything end well until nothing is left to do, then checks what must be so.
    pub fn settle(&mut self) {
        self.event(Event::Gates {
            gates: Vec::new(),
            reclaim: false,
        });
        for _ in 0..20_000 {
            if self.hear() {
            } else if self.pending.is_empty() {
                let Some(deadline) = self.node.deadline(self.now) else {
                    break;
                };
                // Leases still held run out only if nothing else is left to wait for.
                let leases = self.node.leases.values();
                let next_lease = leases
                    .map(|lease| lease.forget_at.unwrap_or(lease.deadline))
                    .min()
                    .unwrap_or(Millis::MAX);
                if deadline >= next_lease && self.trash.is_empty() {
                    break;
                }
                self.tick(deadline - self.now.mono);
            } else {
                self.finish(0, true);
            }
            self.check();
        }
        assert!(
            self.pending.is_empty(),
            "still under way: {:?}",
            self.pending
        );
        self.check_settled();
    }

    /// Lets everything end well until the node is drained.
    pub fn drain_out(&mut self) {
        for _ in 0..20_000 {
            if self.drained {
                return;
            }
            if self.hear() {
            } else if self.pending.is_empty() {
                let deadline = self.node.deadline(self.now);
                let deadline = deadline.expect("a drain that goes on waits for something");
                self.tick(deadline - self.now.mono);
            } else {
                self.finish(0, true);
            }
        }
        panic!("never drained: {:?}", self.node.branches);
    }

    fn check_settled(&self) {
        for pool in self.node.pools.values() {
            let counts = pool.counts();
            let bound = counts.existing() - counts.ready;
            let room = pool.spec.max_branches.saturating_sub(bound);
            let expected = pool.spec.target.min(room);
            assert_eq!(counts.ready, expected, "deficit not closed: {counts:?}");
            assert_eq!(counts.stopping + counts.warming(), 0, "{counts:?}");
        }
        for branch in self.node.branches.values() {
            let record = self
                .journal
                .branches
                .get(&branch.id)
                .expect("every branch is recorded");
            assert_eq!(
                *record,
                branch.record(),
                "journal differs for {}",
                branch.id
            );
            if matches!(branch.state, State::Ready) {
                assert_eq!(self.links.get(&branch.endpoint), Some(&branch.id));
                assert!(
                    self.branches[&branch.id].running,
                    "ready {} is dead",
                    branch.id
                );
            }
        }
        for (endpoint, id) in &self.links {
            let branch = self.node.branches.get(id);
            let used = branch.is_some_and(|branch| {
                branch.endpoint == *endpoint
                    && matches!(branch.state, State::Ready | State::Leased { .. })
            });
            assert!(
                used,
                "the address {endpoint} of {id} is left over: {branch:?}"
            );
        }
        let known: BTreeSet<_> = self.node.branches.keys().copied().collect();
        let recorded: BTreeSet<_> = self.journal.branches.keys().copied().collect();
        assert_eq!(known, recorded, "the journal knows other branches");
        for (uid, lease) in &self.node.leases {
            assert_eq!(
                self.journal.leases.get(uid),
                Some(&lease.record(self.now)),
                "lease {uid}"
            );
            if lease.is_bound() {
                let running = self
                    .branches
                    .get(&lease.branch)
                    .is_some_and(|disk| disk.running);
                let asleep = self.node.branches[&lease.branch].state
                    == State::Leased {
                        lease: uid.clone(),
                        server: Server::Suspended,
                    };
                assert_ne!(running, asleep, "server of {uid}");
            } else {
                assert!(
                    !self.links.contains_key(&lease.endpoint),
                    "address of {uid} still there"
                );
            }
        }
    }
}
