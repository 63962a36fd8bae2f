//! A pool on this node and its bookkeeping.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Branch, Generation, GenerationState, Millis, PoolSpec, State, WarmingMode, golden::BuildFailure,
};
use crate::storage::ids::BranchId;

/// Branches of a pool by what they are doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub snapshotting: u32,
    pub snapshotted: u32,
    pub starting: u32,
    pub started: u32,
    pub preconnecting: u32,
    pub ready: u32,
    pub leased: u32,
    pub stopping: u32,
    /// Of `stopping`, those that a worker has.
    pub stopping_now: u32,
    pub quarantined: u32,
}

impl Counts {
    pub fn warming(&self) -> u32 {
        self.snapshotting + self.snapshotted + self.starting + self.started + self.preconnecting
    }

    /// All that exist and are not tombstones.
    pub fn existing(&self) -> u32 {
        self.warming() + self.ready + self.leased + self.stopping + self.quarantined
    }

    /// Adds or takes away one branch.
    fn tally(&mut self, state: &State, change: i32) {
        let add = |count: &mut u32| *count = count.saturating_add_signed(change);
        match state {
            State::Snapshotting => add(&mut self.snapshotting),
            State::Snapshotted => add(&mut self.snapshotted),
            State::Starting => add(&mut self.starting),
            State::Started => add(&mut self.started),
            State::Preconnecting => add(&mut self.preconnecting),
            State::Ready => add(&mut self.ready),
            State::Leased { .. } | State::Parked { .. } => add(&mut self.leased),
            State::Stopping { working, .. } => {
                add(&mut self.stopping);
                if *working {
                    add(&mut self.stopping_now);
                }
            }
            State::Quarantined(_) => add(&mut self.quarantined),
        }
    }
}

/// Which half of a batch is under way (`Phased` only).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Snapshots are asked for; `issued` of this batch so far.
    Snapshots { issued: u32 },
    /// Starts are asked for, until none waits.
    Starts,
}

#[derive(Clone, Debug)]
pub struct Pool {
    pub spec: PoolSpec,
    /// The desired state as received.
    pub body: serde_json::Value,
    /// No longer wanted: what is leased stays until its lease ends.
    pub removed: bool,
    pub generations: BTreeMap<u64, Generation>,
    /// Highest number ever used, so that no number comes twice.
    pub last_generation: u64,
    pub build_failure: Option<BuildFailure>,
    pub(super) build_cancelled: bool,
    /// Ready branches by age (their serial).
    pub(super) ready: BTreeMap<u64, BranchId>,
    /// Branches whose next step may begin, by age.
    pub(super) snapshotted: BTreeMap<u64, BranchId>,
    pub(super) started: BTreeMap<u64, BranchId>,
    pub(super) stopping: BTreeSet<BranchId>,
    counts: Counts,
    pub(super) phase: Phase,
    /// Some branches may be of an older image or older settings.
    pub(super) mixed: bool,
    /// Branches in a row that could not be made.
    pub failures: u32,
    pub retry_at: Millis,
    pub last_failure: Option<String>,
    /// Whether a branch was ever ready under the image that serves.
    pub proven: bool,
    pub tombstones_scheduled: u64,
}

impl Pool {
    pub(super) fn new(spec: PoolSpec, body: serde_json::Value) -> Self {
        Self {
            spec,
            body,
            removed: false,
            generations: BTreeMap::new(),
            last_generation: 0,
            build_failure: None,
            build_cancelled: false,
            ready: BTreeMap::new(),
            snapshotted: BTreeMap::new(),
            started: BTreeMap::new(),
            stopping: BTreeSet::new(),
            counts: Counts::default(),
            phase: Phase::Snapshots { issued: 0 },
            mixed: false,
            failures: 0,
            retry_at: 0,
            last_failure: None,
            proven: false,
            tombstones_scheduled: 0,
        }
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The newest generation that is being built or sealed.
    pub fn newest(&self) -> Option<&Generation> {
        self.generations
            .values()
            .rev()
            .find(|generation| generation.state != GenerationState::Dropping)
    }

    pub fn building(&self) -> Option<u64> {
        self.generations
            .values()
            .find(|generation| generation.state == GenerationState::Building)
            .map(|generation| generation.number)
    }

    /// The newest sealed generation: new branches come from it.
    pub fn serving(&self) -> Option<u64> {
        self.generations
            .values()
            .rev()
            .find(|generation| matches!(generation.state, GenerationState::Sealed(_)))
            .map(|generation| generation.number)
    }

    /// Made from the image and with the settings that new branches get.
    pub fn is_current(&self, branch: &Branch) -> bool {
        Some(branch.generation) == self.serving() && branch.settings_key == self.spec.settings_key
    }

    pub fn is_phased(&self) -> bool {
        self.spec.warming.mode == WarmingMode::Phased
    }

    /// Takes a branch with this state into the books.
    pub(super) fn enter(&mut self, id: BranchId, serial: u64, state: &State) {
        self.counts.tally(state, 1);
        match state {
            State::Ready => drop(self.ready.insert(serial, id)),
            State::Snapshotted => drop(self.snapshotted.insert(serial, id)),
            State::Started => drop(self.started.insert(serial, id)),
            State::Stopping { .. } => drop(self.stopping.insert(id)),
            _ => {}
        }
    }

    /// Takes it out again.
    pub(super) fn leave(&mut self, id: &BranchId, serial: u64, state: &State) {
        self.counts.tally(state, -1);
        match state {
            State::Ready => drop(self.ready.remove(&serial)),
            State::Snapshotted => drop(self.snapshotted.remove(&serial)),
            State::Started => drop(self.started.remove(&serial)),
            State::Stopping { .. } => drop(self.stopping.remove(id)),
            _ => {}
        }
    }
}
