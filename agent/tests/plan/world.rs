//! A node made of plain values: a disk, a journal, servers, and actions under way.

use std::collections::{BTreeMap, BTreeSet};

use branchpool_agent::{
    plan::{
        Action, After, Answer, Cleanup, Command, Completion, Effects, Entry, Event, Failure, Image,
        LeaseState, LeaseTerms, LeaseUid, Limits, LinkChange, Millis, Node, Now, Observed,
        ObservedBranch, PoolSpec, PoolUid, Preconnect, Records, Refusal, Stage, State, StopMode,
        Stopped, Token, Tombstones, Warming, WarmingMode,
    },
    storage::ids::{BranchId, EndpointId, NodeKey},
};
use branchpool_agent_api::{LeasePhase, PoolName, Quarantined};
use rand::{SeedableRng, rngs::StdRng};

pub const KEY: [u8; 32] = [7; 32];

pub fn pool_uid() -> PoolUid {
    "pool-1".parse().unwrap()
}

pub fn pool_name() -> PoolName {
    PoolName {
        namespace: "default".into(),
        name: "shop".into(),
    }
}

pub fn spec(target: u32, max_branches: u32, mode: WarmingMode) -> PoolSpec {
    PoolSpec {
        uid: pool_uid(),
        name: pool_name(),
        observed_generation: 1,
        image_key: "image-1".into(),
        settings_key: "settings-1".into(),
        target,
        max_branches,
        database: "shop".into(),
        role: "shop".into(),
        durable: false,
        replace_stale: true,
        warming: Warming {
            mode,
            snapshot_concurrency: 16,
            start_concurrency: 3,
            preconnect_concurrency: 3,
            preconnect: Preconnect::WhileWarming,
            stale_after: 120_000,
        },
        lease: LeaseTerms {
            default_ttl: 60_000,
            max_ttl: 600_000,
            max_lifetime: 6_000_000,
            retain_finished: 30_000,
            admission_wait: 10_000,
        },
        cleanup: Cleanup {
            concurrency: 4,
            start_delay: 0,
            stop_mode: StopMode::Immediate,
            tombstones: Tombstones {
                delay: 5_000,
                concurrency: 1,
                max_count: 8,
                max_bytes: 1 << 30,
            },
        },
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct OnDisk {
    pub running: bool,
    pub ready: bool,
}

/// The outside of a [`Node`].
pub struct World {
    pub node: Node,
    pub now: Now,
    pub limits: Limits,
    pub pending: Vec<Action>,
    /// Carried out, and the node does not know yet.
    pub unheard: Vec<Completion>,
    pub journal: Records,
    pub branches: BTreeMap<BranchId, OnDisk>,
    pub trash: BTreeSet<BranchId>,
    pub golden: BTreeSet<(PoolUid, u64)>,
    pub links: BTreeMap<EndpointId, BranchId>,
    /// Put there by somebody else; must stay.
    pub foreign: BTreeSet<String>,
    /// Leases that were answered, with the branch and address of the last answer.
    pub answered: BTreeMap<LeaseUid, (BranchId, EndpointId)>,
    /// Leases that have ended, or may have: released by their holder, expired, lost in a reboot.
    pub ended: BTreeSet<LeaseUid>,
    /// Leases whose reset was asked for and not answered.
    pub moving: BTreeSet<LeaseUid>,
    pub refused: Vec<Refusal>,
    pub waiting: BTreeMap<Token, LeaseUid>,
    pub log: Vec<String>,
    pub drained: bool,
    next_token: u64,
    seed: u64,
}

impl World {
    pub fn new(spec: PoolSpec, limits: Limits) -> Self {
        let node = Node::new(limits, NodeKey::from_bytes(KEY), StdRng::seed_from_u64(1));
        let mut world = Self {
            node,
            now: Now {
                mono: 1_000,
                wall: 1_700_000_000_000,
            },
            limits,
            pending: Vec::new(),
            unheard: Vec::new(),
            journal: Records::default(),
            branches: BTreeMap::new(),
            trash: BTreeSet::new(),
            golden: BTreeSet::new(),
            links: BTreeMap::new(),
            foreign: BTreeSet::new(),
            answered: BTreeMap::new(),
            ended: BTreeSet::new(),
            moving: BTreeSet::new(),
            refused: Vec::new(),
            waiting: BTreeMap::new(),
            log: Vec::new(),
            drained: false,
            next_token: 0,
            seed: 1,
        };
        world.apply(spec);
        world
    }

    pub fn apply(&mut self, spec: PoolSpec) {
        let body = serde_json::Value::Null;
        self.command(
            None,
            Command::Apply {
                spec: Box::new(spec),
                body,
                epoch: None,
            },
        );
    }

    pub fn command(&mut self, lease: Option<LeaseUid>, command: Command) {
        self.next_token += 1;
        let token = Token(self.next_token);
        match &command {
            Command::Reset { uid, .. } => drop(self.moving.insert(uid.clone())),
            // From now on it may be gone, even if the answer does not arrive.
            Command::Release { uid, .. } => drop(self.ended.insert(uid.clone())),
            _ => {}
        }
        if let Some(lease) = lease {
            self.waiting.insert(token, lease);
        }
        self.event(Event::Command(token, command));
    }

    pub fn event(&mut self, event: Event) {
        let effects = self.node.handle(event, self.now);
        self.take(effects);
    }

    fn take(&mut self, effects: Effects) {
        for action in effects.actions {
            self.log.push(describe(&action));
            match action {
                Action::Reply {
                    token,
                    answer: Err(refusal),
                } => {
                    self.waiting.remove(&token);
                    self.refused.push(refusal);
                }
                Action::HandOver { branch } => {
                    assert!(
                        self.branches.contains_key(&branch),
                        "{branch} handed over, not there"
                    );
                }
                Action::Drained => self.drained = true,
                action => {
                    self.assert_alone(&action);
                    if let Action::Snapshot { entry, .. } | Action::Build { entry, .. } = &action {
                        let entries = vec![entry.clone()];
                        self.pending.push(Action::Journal {
                            entries,
                            links: Vec::new(),
                            reply: None,
                        });
                    }
                    self.pending.push(action);
                }
            }
        }
    }

    /// Two actions on one branch must never be under way at once.
    fn assert_alone(&self, action: &Action) {
        if let Some(id) = branch_of(action) {
            let other = self
                .pending
                .iter()
                .find(|other| branch_of(other) == Some(id));
            assert!(other.is_none(), "{action:?} while {other:?} is under way");
            let ended = self
                .unheard
                .iter()
                .find(|completion| step_of(completion) == Some(id));
            assert!(ended.is_none(), "{action:?} before the news of {ended:?}");
        }
    }

    pub fn tick(&mut self, by: Millis) {
        self.now.mono += by;
        self.now.wall += by;
        self.event(Event::Tick);
        self.note_expired();
    }

    fn note_expired(&mut self) {
        for (uid, lease) in &self.node.leases {
            if lease.phase == LeasePhase::Expired {
                assert!(lease.deadline <= self.now.mono, "{uid} expired early");
                self.ended.insert(uid.clone());
            }
        }
    }

    /// Ends the `pick`-th action under way. Journal writes end in their order, and a stop or
    /// deletion waits for the journal writes before it.
    pub fn finish(&mut self, pick: usize, success: bool) {
        if let Some(completion) = self.carry_out(pick, success) {
            self.event(Event::Done(completion));
        }
    }

    /// As [`World::finish`] with success, but what comes before [`World::hear`] finds the node not
    /// knowing of it.
    pub fn finish_unheard(&mut self, pick: usize) {
        let completion = self.carry_out(pick, true);
        self.unheard.extend(completion);
    }

    /// The news of a step that ended earlier.
    pub fn hear(&mut self) -> bool {
        if self.unheard.is_empty() {
            return false;
        }
        let completion = self.unheard.remove(0);
        self.event(Event::Done(completion));
        true
    }

    fn carry_out(&mut self, pick: usize, success: bool) -> Option<Completion> {
        if self.pending.is_empty() {
            return None;
        }
        let mut index = pick % self.pending.len();
        if needs_order(&self.pending[index])
            && let Some(first) = self.pending.iter().position(writes_journal)
            && first < index
        {
            index = first;
        }
        let action = self.pending.remove(index);
        self.perform(action, success, true)
    }

    /// Does the IO of an action. `told` is false when the agent dies before it hears of it.
    fn perform(&mut self, action: Action, success: bool, told: bool) -> Option<Completion> {
        let failed = || Failure {
            reason: "Injected".into(),
            message: "injected failure".into(),
        };
        match action {
            Action::Build {
                pool, generation, ..
            } => {
                let result = if success {
                    self.golden.insert((pool.clone(), generation));
                    Ok(Image {
                        bytes: 1,
                        database: format!("shop-{generation}"),
                        role: "shop".into(),
                        facts: serde_json::Value::Null,
                    })
                } else {
                    Err("injected failure".into())
                };
                Some(Completion::Built {
                    pool,
                    generation,
                    result,
                })
            }
            Action::DropGolden {
                pool,
                generation,
                id,
            } => {
                let used = self.branches.keys().any(|id| {
                    self.journal.branches.get(id).is_some_and(|branch| {
                        branch.generation == generation && !matches!(branch.stage, Stage::Stopping)
                    })
                });
                assert!(
                    !used || !success,
                    "image {generation} dropped while branches use it"
                );
                if success && self.golden.remove(&(pool.clone(), generation)) {
                    self.trash.insert(id);
                }
                let result = if success {
                    Ok(())
                } else {
                    Err("injected failure".into())
                };
                Some(Completion::GoldenDropped {
                    pool,
                    generation,
                    id,
                    result,
                })
            }
            Action::Snapshot {
                branch,
                pool,
                generation,
                ..
            } => {
                if success {
                    assert!(
                        self.golden.contains(&(pool, generation)),
                        "snapshot of nothing"
                    );
                    let before = self.branches.insert(branch, OnDisk::default());
                    assert!(
                        before.is_none() && !self.trash.contains(&branch),
                        "id used twice"
                    );
                }
                let result = if success { Ok(()) } else { Err(failed()) };
                Some(Completion::Snapshotted { branch, result })
            }
            Action::Start { branch, .. } => {
                let result = self.run(branch, success).map_err(|()| failed());
                Some(Completion::Started { branch, result })
            }
            Action::Restart { branch, .. } => {
                let result = self.run(branch, success).map_err(|()| failed());
                Some(Completion::Restarted { branch, result })
            }
            Action::Preconnect { branch, .. } => {
                let running = self.branches.get(&branch).is_some_and(|disk| disk.running);
                let result = if success && running {
                    Ok(())
                } else {
                    Err(failed())
                };
                Some(Completion::Preconnected { branch, result })
            }
            Action::Stop { branch, after, .. } => {
                if !success {
                    let result = Err("injected failure".into());
                    return Some(Completion::Stopped { branch, result });
                }
                if let Some(disk) = self.branches.get_mut(&branch) {
                    *disk = OnDisk::default();
                }
                if after == After::Trash && self.branches.remove(&branch).is_some() {
                    self.trash.insert(branch);
                }
                Some(Completion::Stopped {
                    branch,
                    result: Ok(Stopped {
                        bytes: 1,
                        clean: true,
                    }),
                })
            }
            Action::Delete { id, .. } => {
                assert!(
                    id.is_authentic(&NodeKey::from_bytes(KEY)),
                    "{id} is not ours to delete"
                );
                assert!(
                    !self.branches.contains_key(&id),
                    "{id} deleted from among the branches"
                );
                if success {
                    self.trash.remove(&id);
                }
                let result = if success {
                    Ok(())
                } else {
                    Err("injected failure".into())
                };
                Some(Completion::Deleted { id, result })
            }
            Action::Journal {
                entries,
                links,
                reply,
            } => {
                self.write(entries);
                for link in links {
                    match link {
                        LinkChange::Point { endpoint, branch } => {
                            self.links.insert(endpoint, branch);
                        }
                        LinkChange::Remove { endpoint } => {
                            self.links.remove(&endpoint);
                        }
                    }
                }
                if told && let Some((token, answer)) = reply {
                    self.answer(token, *answer);
                }
                None
            }
            Action::CancelBuild { .. } => None,
            other => unreachable!("{other:?} is not pending"),
        }
    }

    fn run(&mut self, branch: BranchId, success: bool) -> Result<(), ()> {
        let disk = self.branches.get_mut(&branch).ok_or(())?;
        if !success {
            return Err(());
        }
        *disk = OnDisk {
            running: true,
            ready: true,
        };
        Ok(())
    }

    fn answer(&mut self, token: Token, answer: Answer) {
        let Answer::Lease { uid, lease, .. } = answer else {
            return;
        };
        let Some(asked) = self.waiting.remove(&token) else {
            return;
        };
        assert_eq!(asked, uid, "the answer went to another caller");
        let now = self.node.leases.get(&uid);
        if now.is_some_and(|now| now.endpoint != lease.endpoint) && self.ended.contains(&uid) {
            // A late answer about a lease that has ended; its uid is another's by now.
            return;
        }
        if now.is_none_or(|now| now.branch == lease.branch) {
            self.moving.remove(&uid);
        }
        if lease.phase == LeasePhase::Bound {
            let was = self
                .answered
                .insert(uid.clone(), (lease.branch, lease.endpoint));
            // A forgotten lease's uid may be used again, for another lease.
            let anew = self.ended.contains(&uid);
            if now.is_some_and(LeaseState::is_bound) {
                self.ended.remove(&uid);
            }
            if let Some((_, endpoint)) = was
                && !anew
            {
                assert_eq!(endpoint, lease.endpoint, "the address of {uid} changed");
            }
        } else {
            self.ended.insert(uid);
        }
    }

    fn write(&mut self, entries: Vec<Entry>) {
        let journal = &mut self.journal;
        for entry in entries {
            match entry {
                Entry::Pool(uid, record) => drop(journal.pools.insert(uid, *record)),
                Entry::PoolGone(uid) => drop(journal.pools.remove(&uid)),
                Entry::Generation(uid, number, record) => {
                    drop(journal.generations.insert((uid, number), record));
                }
                Entry::GenerationGone(uid, number) => {
                    drop(journal.generations.remove(&(uid, number)));
                }
                Entry::Branch(id, record) => drop(journal.branches.insert(id, record)),
                Entry::BranchGone(id) => drop(journal.branches.remove(&id)),
                Entry::Lease(uid, record) => drop(journal.leases.insert(uid, *record)),
                Entry::LeaseGone(uid) => drop(journal.leases.remove(&uid)),
                Entry::Epoch(epoch) => journal.epoch = epoch,
                Entry::Boot(_) => {}
            }
        }
    }

    /// The agent dies. Of the actions under way, those in `done` were carried out, untold.
    pub fn crash(&mut self, done: u64, reboot: bool) {
        let pending = std::mem::take(&mut self.pending);
        let mut journal_stopped = false;
        for (index, action) in pending.into_iter().enumerate() {
            let carried_out = done >> (index % 64) & 1 == 1;
            let in_order = !needs_order(&action) || !journal_stopped;
            if carried_out && in_order {
                let _ = self.perform(action, true, false);
            } else if writes_journal(&action) {
                journal_stopped = true;
            }
        }
        self.waiting.clear();
        self.unheard.clear();
        if reboot {
            for disk in self.branches.values_mut() {
                *disk = OnDisk::default();
            }
        }
        let rebooted = reboot;
        let observed = Observed {
            branches: self
                .branches
                .iter()
                .map(|(id, disk)| {
                    (
                        *id,
                        ObservedBranch {
                            running: disk.running,
                            ready: disk.ready,
                        },
                    )
                })
                .collect(),
            tombstones: self.trash.clone(),
            golden: self.golden.clone(),
            strays: self
                .foreign
                .iter()
                .map(|path| Quarantined {
                    path: path.clone(),
                    reason: "Unknown".into(),
                    message: String::new(),
                })
                .collect(),
            rebooted,
            boot_id: self.seed.to_string(),
        };
        if reboot {
            let lost = self.journal.leases.iter().filter(|(_, lease)| {
                lease.phase == LeasePhase::Bound
                    && !self
                        .journal
                        .branches
                        .get(&lease.branch)
                        .is_some_and(|branch| {
                            matches!(branch.stage, Stage::Leased { parked: true, .. })
                        })
            });
            self.ended.extend(lost.map(|(uid, _)| uid.clone()));
        }
        self.seed += 1;
        self.now.mono += 7;
        self.now.wall += 7;
        let (node, effects) = Node::adopt(
            self.limits,
            NodeKey::from_bytes(KEY),
            StdRng::seed_from_u64(self.seed),
            self.journal.clone(),
            observed,
            self.now,
        );
        self.node = node;
        self.drained = false;
        self.take(effects);
        self.note_expired();
    }

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
                assert_eq!(
                    self.links.get(&lease.endpoint),
                    Some(&lease.branch),
                    "link of {uid}"
                );
                let running = self
                    .branches
                    .get(&lease.branch)
                    .is_some_and(|disk| disk.running);
                assert!(running, "server of {uid} is down");
            } else {
                assert!(
                    !self.links.contains_key(&lease.endpoint),
                    "address of {uid} still there"
                );
            }
        }
    }
}

fn branch_of(action: &Action) -> Option<BranchId> {
    match action {
        Action::Snapshot { branch, .. }
        | Action::Start { branch, .. }
        | Action::Preconnect { branch, .. }
        | Action::Restart { branch, .. }
        | Action::Stop { branch, .. } => Some(*branch),
        Action::Delete { id, .. } => Some(*id),
        _ => None,
    }
}

pub fn step_of(completion: &Completion) -> Option<BranchId> {
    match completion {
        Completion::Snapshotted { branch, .. }
        | Completion::Started { branch, .. }
        | Completion::Preconnected { branch, .. }
        | Completion::Restarted { branch, .. }
        | Completion::Stopped { branch, .. } => Some(*branch),
        Completion::Deleted { id, .. } => Some(*id),
        _ => None,
    }
}

fn writes_journal(action: &Action) -> bool {
    matches!(action, Action::Journal { .. })
}

fn needs_order(action: &Action) -> bool {
    !matches!(action, Action::Start { .. } | Action::Preconnect { .. })
}

fn describe(action: &Action) -> String {
    match action {
        Action::Snapshot { branch, .. } => format!("snapshot {branch}"),
        Action::Start { branch, .. } => format!("start {branch}"),
        Action::Preconnect { branch, .. } => format!("preconnect {branch}"),
        Action::Stop { branch, .. } => format!("stop {branch}"),
        Action::HandOver { branch } => format!("hand over {branch}"),
        Action::Build { generation, .. } => format!("build {generation}"),
        _ => "other".into(),
    }
}
