//! A node made of plain values: a disk, a journal, servers, and actions under way.

mod check;
mod io;

use std::collections::{BTreeMap, BTreeSet};

use branchpool_agent::{
    plan::{
        Action, After, Answer, Cleanup, Command, Completion, Effects, Entry, Event, Failure, Image,
        LeaseState, LeaseTerms, LeaseUid, Limits, LinkChange, Millis, Node, Now, Observed,
        ObservedBranch, PoolSpec, PoolUid, Preconnect, Records, Refusal, Server, Stage, State,
        StopMode, Stopped, Suspension, Token, Tombstones, Use, Warming, WarmingMode,
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
            idle_timeout: None,
            open_connections_count: true,
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
}

fn branch_of(action: &Action) -> Option<BranchId> {
    match action {
        Action::Snapshot { branch, .. }
        | Action::Start { branch, .. }
        | Action::Preconnect { branch, .. }
        | Action::Restart { branch, .. }
        | Action::Suspend { branch, .. }
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
        | Completion::Suspended { branch, .. }
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
