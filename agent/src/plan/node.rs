//! What the agent knows of its node, and the one function that changes it.

use std::collections::{BTreeMap, BTreeSet};

use branchpool_agent_api::{Gate, Quarantined};
use rand::rngs::StdRng;

use super::{
    After, Answer, Branch, Command, Completion, Entry, LeaseState, LeaseUid, Millis, Pool, PoolUid,
    Refusal, Slot, State, StopMode,
    cleanup::{Kick, Trash},
};
use crate::storage::ids::{BranchId, EndpointId, NodeKey};

/// Both clocks, read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Monotonic, counted from any fixed point.
    pub mono: Millis,
    /// Since the Unix epoch.
    pub wall: u64,
}

/// Names the caller that waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// Bounds of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most branches with a server, over all pools.
    pub slots: u32,
    /// Most failed branches kept for people to look at, per pool.
    pub quarantine: u32,
    /// Most leases known at a time, finished ones included.
    pub leases: u32,
    /// Least span between two physical deletions; 0 spaces nothing.
    pub deletion_spacing: Millis,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            slots: 1_000,
            quarantine: 3,
            leases: 20_000,
            deletion_spacing: 20,
        }
    }
}

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A caller asks; the answer goes to the token.
    Command(Token, Command),
    /// An action ended.
    Done(Completion),
    /// The server of a branch is gone though nobody stopped it.
    ServerExited { branch: BranchId, detail: String },
    /// The preconnected session of a ready branch ended.
    SessionClosed { branch: BranchId },
    /// Somebody waits for the server of a branch that is suspended.
    Wanted { branch: BranchId },
    /// What holds back refill now. `reclaim`: space is short, so tombstones go at once.
    Gates { gates: Vec<Gate>, reclaim: bool },
    /// A time asked for by [`Node::deadline`] has come.
    Tick,
    /// The agent is to stop: nothing new, ready branches go, leased ones are parked.
    Drain,
}

/// Something to be done. Each comes back as a [`Completion`] unless it says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Journal `entry`, then build. Answered by `Built`.
    Build {
        pool: PoolUid,
        generation: u64,
        entry: Entry,
    },
    /// Ends a build, which then answers with a failure.
    CancelBuild { pool: PoolUid, generation: u64 },
    /// Moves an image into the trash under the name `id`.
    DropGolden {
        pool: PoolUid,
        generation: u64,
        id: BranchId,
    },
    /// Journal `entry`, then snapshot, done before `deadline`.
    Snapshot {
        branch: BranchId,
        pool: PoolUid,
        generation: u64,
        entry: Entry,
        deadline: Millis,
    },
    Start {
        branch: BranchId,
        slot: Slot,
        pool: PoolUid,
        deadline: Millis,
    },
    /// Opens the session that waits for the first client.
    Preconnect {
        branch: BranchId,
        pool: PoolUid,
        deadline: Millis,
    },
    /// Makes the branch the holder's: full weight, the pool's own settings. No answer.
    HandOver { branch: BranchId },
    /// Starts the server of a leased branch again, after the journal's earlier entries are written
    /// and after proof that nothing runs on its data.
    Restart {
        branch: BranchId,
        slot: Slot,
        pool: PoolUid,
    },
    /// Looks at the use of a leased branch. Answered by `Looked`.
    LookIdle { branch: BranchId },
    /// Stops the server of a leased branch cleanly, unless it was used after `unused_since`. Answered
    /// by `Suspended`.
    Suspend {
        branch: BranchId,
        unused_since: Millis,
    },
    /// After the journal's earlier entries are written: stops the server and, with `Trash`, renames the branch into the trash.
    Stop {
        branch: BranchId,
        mode: StopMode,
        after: After,
    },
    /// Deletes a tombstone for good, and may ask the filesystem to reclaim its space.
    Delete { id: BranchId, kick: Option<Kick> },
    /// Writes entries together; then changes addresses; then answers. All of these are carried out in
    /// the order in which they were asked for. When the journal refuses, the answer is
    /// `JournalFailed`.
    Journal {
        entries: Vec<Entry>,
        links: Vec<LinkChange>,
        reply: Option<(Token, Box<Answer>)>,
    },
    Reply {
        token: Token,
        answer: Result<Box<Answer>, Refusal>,
    },
    /// The drain is complete. No answer.
    Drained,
}

/// A change of where an address leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkChange {
    Point {
        endpoint: EndpointId,
        branch: BranchId,
    },
    Remove {
        endpoint: EndpointId,
    },
}

/// What an event led to.
#[derive(Debug, Default)]
pub struct Effects {
    pub actions: Vec<Action>,
    pub pools: BTreeSet<PoolUid>,
    pub leases: BTreeSet<LeaseUid>,
    pub node: bool,
    pub warnings: Vec<String>,
    entries: Vec<Entry>,
    links: Vec<LinkChange>,
}

impl Effects {
    /// Whether the answer to this caller is a refusal.
    pub fn refuses(&self, token: Token) -> bool {
        self.actions.iter().any(|action| {
            matches!(action, Action::Reply { token: other, answer: Err(_) } if *other == token)
        })
    }

    pub(super) fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    /// Journalled at the end of the event, together with what else it led to.
    pub(super) fn journal(&mut self, entry: Entry) {
        self.entries.push(entry);
    }

    pub(super) fn link(&mut self, endpoint: EndpointId, branch: BranchId) {
        self.links.push(LinkChange::Point { endpoint, branch });
    }

    pub(super) fn unlink(&mut self, endpoint: EndpointId) {
        self.links.push(LinkChange::Remove { endpoint });
    }

    pub(super) fn pool_changed(&mut self, uid: &PoolUid) {
        if !self.pools.contains(uid) {
            self.pools.insert(uid.clone());
        }
    }

    pub(super) fn lease_changed(&mut self, uid: &LeaseUid) {
        if !self.leases.contains(uid) {
            self.leases.insert(uid.clone());
        }
    }

    pub(super) fn warn(&mut self, message: String) {
        self.warnings.push(message);
    }

    /// Journals what the event changed and then answers.
    pub(super) fn commit(&mut self, reply: Option<(Token, Answer)>) {
        let entries = std::mem::take(&mut self.entries);
        let links = std::mem::take(&mut self.links);
        let reply = reply.map(|(token, answer)| (token, Box::new(answer)));
        self.act(Action::Journal {
            entries,
            links,
            reply,
        });
    }

    /// Journals what the event changed so far, for what has to come after it.
    pub(super) fn flush(&mut self) {
        if !(self.entries.is_empty() && self.links.is_empty()) {
            self.commit(None);
        }
    }
}

/// The state of the node.
#[derive(Debug)]
pub struct Node {
    pub limits: Limits,
    pub pools: BTreeMap<PoolUid, Pool>,
    pub branches: BTreeMap<BranchId, Branch>,
    pub leases: BTreeMap<LeaseUid, LeaseState>,
    pub gates: Vec<Gate>,
    /// Things in our directories that are not ours; never touched.
    pub strays: Vec<Quarantined>,
    pub epoch: u64,
    pub(super) trash: Trash,
    pub(super) free_slots: BTreeSet<Slot>,
    pub(super) draining: bool,
    pub(super) drained: bool,
    pub(super) next_serial: u64,
    pub(super) key: NodeKey,
    pub(super) rng: StdRng,
    /// Leased branches whose server does not run.
    pub(super) down: BTreeSet<BranchId>,
    /// Deadlines of bound leases and forget times of finished ones.
    pub(super) lease_times: BTreeSet<(Millis, LeaseUid)>,
    /// When leased branches are to be looked at, whether anybody uses them.
    pub(super) idle_times: BTreeSet<(Millis, BranchId)>,
}

impl Node {
    /// An empty node. `rng` makes ids; `key` signs them.
    pub fn new(limits: Limits, key: NodeKey, rng: StdRng) -> Self {
        Self {
            limits,
            pools: BTreeMap::new(),
            branches: BTreeMap::new(),
            leases: BTreeMap::new(),
            gates: Vec::new(),
            strays: Vec::new(),
            epoch: 0,
            trash: Trash::default(),
            free_slots: (0..limits.slots).map(Slot).collect(),
            draining: false,
            drained: false,
            next_serial: 1,
            key,
            rng,
            down: BTreeSet::new(),
            lease_times: BTreeSet::new(),
            idle_times: BTreeSet::new(),
        }
    }

    /// Takes in what happened and says what is to be done now.
    pub fn handle(&mut self, event: Event, now: Now) -> Effects {
        let mut effects = Effects::default();
        match event {
            Event::Command(token, command) => self.command(token, command, now, &mut effects),
            Event::Done(completion) => self.done(completion, now, &mut effects),
            Event::ServerExited { branch, detail } => {
                self.server_exited(branch, &detail, now, &mut effects);
            }
            Event::Wanted { branch } => self.wake(branch, now, &mut effects),
            Event::SessionClosed { branch } => self.session_closed(branch, &mut effects),
            Event::Gates { gates, reclaim } => {
                self.trash.reclaim = reclaim;
                if self.gates != gates {
                    self.gates = gates;
                    effects.node = true;
                    effects.pools.extend(self.pools.keys().cloned());
                }
            }
            Event::Tick => {}
            Event::Drain => self.drain(now, &mut effects),
        }
        self.advance(now, &mut effects);
        effects
    }

    /// Everything that follows from the state and the time alone.
    pub(super) fn advance(&mut self, now: Now, effects: &mut Effects) {
        self.expire_leases(now, effects);
        self.plan_golden(now, effects);
        self.plan_replacement(now, effects);
        self.plan_warming(now, effects);
        self.plan_restarts(now, effects);
        self.plan_idle(now, effects);
        // A stop begins after what it follows from is in the journal.
        effects.flush();
        self.plan_cleanup(now, effects);
        self.drop_finished_pools(effects);
        effects.flush();
        if self.draining && !self.drained && self.is_quiet() {
            self.drained = true;
            effects.act(Action::Drained);
        }
    }

    /// The earliest monotonic time after `now` at which time alone changes a decision.
    pub fn deadline(&self, now: Now) -> Option<Millis> {
        let leases = self.lease_times.first().map(|(time, _)| *time);
        let idle = self.idle_times.first().map(|(time, _)| *time);
        let pools = self.pools.values().flat_map(|pool| {
            let build = pool.build_failure.as_ref().map(|failure| failure.retry_at);
            [Some(pool.retry_at), build].into_iter().flatten()
        });
        let waiting = self.pools.values().flat_map(|pool| &pool.stopping);
        let stops = waiting.filter_map(|id| match &self.branches.get(id)?.state {
            State::Stopping {
                due,
                working: false,
                ..
            } => Some(*due),
            _ => None,
        });
        let restarts = self.restart_times();
        leases
            .into_iter()
            .chain(idle)
            .chain(pools)
            .chain(stops)
            .chain(restarts)
            .chain(self.trash_times())
            .filter(|time| *time > now.mono)
            .min()
    }

    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// The one place where a branch changes its state.
    pub(super) fn set_state(&mut self, id: BranchId, state: State, effects: &mut Effects) {
        let Some(branch) = self.branches.get_mut(&id) else {
            return;
        };
        if let Some(pool) = self.pools.get_mut(&branch.pool) {
            pool.leave(&id, branch.serial, &branch.state);
            pool.enter(id, branch.serial, &state);
        }
        effects.pool_changed(&branch.pool);
        if state.is_down() {
            self.down.insert(id);
        } else {
            self.down.remove(&id);
        }
        branch.state = state;
    }

    /// Takes a branch off the books and frees its slot.
    pub(super) fn remove_branch(&mut self, id: BranchId, effects: &mut Effects) {
        let Some(branch) = self.branches.remove(&id) else {
            return;
        };
        if let Some(pool) = self.pools.get_mut(&branch.pool) {
            pool.leave(&id, branch.serial, &branch.state);
        }
        effects.pool_changed(&branch.pool);
        self.down.remove(&id);
        // The node may have been given fewer since.
        if branch.slot.0 < self.limits.slots {
            self.free_slots.insert(branch.slot);
        }
        effects.journal(Entry::BranchGone(id));
    }

    /// Nothing is under way and nothing runs any more.
    fn is_quiet(&self) -> bool {
        let building = self.pools.values().any(|pool| pool.building().is_some());
        !building
            && self
                .branches
                .values()
                .all(|branch| matches!(branch.state, State::Parked { .. } | State::Quarantined(_)))
    }
}
