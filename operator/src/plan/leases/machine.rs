//! The machine: all leases, and how events move them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use branchpool_agent_api::PoolName;
use branchpool_crds::{BranchLeaseStatus, LeasePhase};

use super::{
    Action, AgentEvent, Call, Event, LeaseObject, ObjectRef, Operation, PoolTerms,
    decide::{Context, Next},
    entry::{Doing, Entry, Failure, Place, Presence, condition},
    fleet::Fleet,
    names::{Names, Outdated, Standing},
    parse_agent_id,
    queues::Queues,
    status,
};
use crate::plan::{Millis, NodeName, SECOND, Uid};

#[derive(Debug, Default)]
pub struct Machine {
    pub(super) entries: HashMap<Uid, Entry>,
    pub(super) pools: BTreeMap<PoolName, PoolTerms>,
    pub(super) fleet: Fleet,
    pub(super) queues: Queues,
    pub(super) names: Names,
    pub(super) wakeups: BTreeSet<(Millis, Uid)>,
    pub(super) pool_wakeups: BTreeSet<(Millis, PoolName)>,
    pub(super) positions_at: Millis,
    listed: bool,
    pub(super) settled: bool,
    /// To be looked at before the event is done with.
    pub(super) touched: BTreeSet<Uid>,
    pub(super) actions: Vec<Action>,
}

/// For metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub queued: BTreeMap<PoolName, u32>,
    pub pending: u32,
    pub bound: u32,
    pub finished: u32,
}

impl Machine {
    pub fn handle(&mut self, event: Event, now: Millis) -> Vec<Action> {
        match event {
            Event::Seen(object) => self.seen(object),
            Event::Opaque(id, version) => self.opaque(&id, version),
            Event::Deleted(uid) => self.gone(&uid),
            Event::Listed(uids) => self.listed(&uids),
            Event::Pool(terms) => {
                let name = terms.name.clone();
                self.pools.insert(name.clone(), *terms);
                self.touch_queue(&name);
            }
            Event::PoolDeleted(name) => {
                self.pools.remove(&name);
                self.touch_queue(&name);
            }
            Event::Settled => {
                self.settled = true;
                self.touched.extend(self.entries.keys().cloned());
                self.queues.all_dirty();
            }
            Event::Nodes(nodes) => self.nodes(nodes),
            Event::Closed(nodes) => {
                self.fleet.set_closed(nodes);
                self.queues.all_dirty();
            }
            Event::Agent(node, event) => self.agent(&node, event, now),
            Event::Done(uid, outcome) => self.done(&uid, outcome, now),
            Event::Ask(uid) => {
                if let Some(entry) = self.entries.get_mut(&uid) {
                    entry.asked = true;
                    self.touched.insert(uid);
                } else {
                    let gone = Failure::new("LeaseDeleted", "the lease was deleted");
                    self.actions.push(Action::Answer(uid, Err(gone)));
                }
            }
            Event::Tick => self.tick(now),
        }
        self.settle_touched(now);
        std::mem::take(&mut self.actions)
    }

    /// When a [`Event::Tick`] is due.
    pub fn deadline(&self) -> Option<Millis> {
        let entry = self.wakeups.first().map(|(at, _)| *at);
        let pool = self.pool_wakeups.first().map(|(at, _)| *at);
        let positions = (!self.queues.is_empty()).then_some(self.positions_at + SECOND);
        [entry, pool, positions].into_iter().flatten().min()
    }

    pub fn counts(&self) -> Counts {
        let mut counts = Counts {
            queued: self
                .queues
                .lengths()
                .map(|(pool, length)| (pool.clone(), u32::try_from(length).unwrap_or(u32::MAX)))
                .collect(),
            ..Counts::default()
        };
        for object in self.entries.values().filter_map(Entry::live) {
            match object.status.phase {
                LeasePhase::Pending => counts.pending += 1,
                LeasePhase::Bound => counts.bound += 1,
                _ => counts.finished += 1,
            }
        }
        counts
    }

    pub(super) fn entry(&mut self, uid: &Uid) -> &mut Entry {
        self.entries
            .entry(uid.clone())
            .or_insert_with(|| Entry::new(uid.clone()))
    }

    fn seen(&mut self, object: Box<LeaseObject>) {
        let id = object.id.clone();
        if !self.takes_name(&id, object.version, true) {
            return;
        }
        // Of a lease that was created while this process leads nobody else made a Secret.
        let is_new = self.listed && !self.entries.contains_key(&id.uid);
        let entry = self.entry(&id.uid);
        if let Presence::Live(known) = &entry.presence
            && object.version < known.version
        {
            return;
        }
        entry.may_have_secret &= object.wants_secret && !is_new;
        if entry.place == Place::Nowhere
            && object.status.phase == LeasePhase::Bound
            && let Some(node) = &object.status.node
        {
            entry.place = Place::Home(node.as_str().into());
        }
        let moved = entry
            .live()
            .is_some_and(|known| known.priority != object.priority);
        let status = object.status.clone();
        entry.presence = Presence::Live(object);
        if moved {
            self.leave_queue(&id.uid);
        }
        self.status_known(&id, &status);
    }

    /// What a lease's status tells of its Secret, which is made before `Bound` and deleted before the end.
    pub(super) fn status_known(&mut self, id: &ObjectRef, status: &BranchLeaseStatus) {
        if status.phase.is_finished() {
            self.entry(&id.uid).may_have_secret = false;
        } else if status.phase == LeasePhase::Bound && status.binding.is_some() {
            self.names.told(id);
        }
        self.touch_name(id);
    }

    fn opaque(&mut self, id: &ObjectRef, version: u64) {
        if self.takes_name(id, version, false) {
            self.leave_queue(&id.uid);
            self.entry(&id.uid).presence = Presence::Opaque(id.clone());
            self.touch_name(id);
        }
    }

    /// A name is one object's at a time: which had it before is gone. `false`: the object is gone, and
    /// what was seen of it is old.
    fn takes_name(&mut self, id: &ObjectRef, version: u64, read: bool) -> bool {
        let known = self.entries.get(&id.uid);
        if known.is_some_and(|entry| matches!(entry.presence, Presence::Gone(_))) {
            return false;
        }
        match self.names.hold(id, version, read) {
            Ok(former) => {
                if let Some(former) = former {
                    self.gone(&former);
                }
                true
            }
            Err(Outdated) => false,
        }
    }

    pub(super) fn gone(&mut self, uid: &Uid) {
        self.leave_queue(uid);
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        self.touched.insert(uid.clone());
        // Whoever waits on an error need wait no longer.
        entry.succeeded();
        let Some(id) = entry.id() else {
            entry.presence = Presence::Unknown;
            return;
        };
        entry.presence = Presence::Gone(id.clone());
        self.names.release(&id);
        self.touch_name(&id);
    }

    /// The lease, and who had its name before: what is known of the Secret there has changed.
    pub(super) fn touch_name(&mut self, id: &ObjectRef) {
        self.touched.insert(id.uid.clone());
        self.touched.extend(self.names.of(&id.key()).cloned());
    }

    fn listed(&mut self, uids: &BTreeSet<Uid>) {
        self.listed = true;
        let mut missing = Vec::new();
        for (uid, entry) in &self.entries {
            if uids.contains(uid) {
                continue;
            }
            if let Presence::Live(_) | Presence::Opaque(_) = &entry.presence {
                missing.extend(entry.id());
            }
            self.touched.insert(uid.clone());
        }
        for id in missing {
            self.missing(id);
        }
    }

    /// It is to be confirmed that it is gone.
    pub(super) fn missing(&mut self, id: ObjectRef) {
        self.leave_queue(&id.uid);
        self.names.doubt(&id);
        self.touched.insert(id.uid.clone());
        let uid = id.uid.clone();
        self.entry(&uid).presence = Presence::Missing(id);
    }

    fn nodes(&mut self, nodes: BTreeSet<NodeName>) {
        self.fleet.set_cluster(nodes);
        for node in self.fleet.drop_gone() {
            for entry in self.entries.values_mut() {
                entry.records.remove(&node);
            }
        }
        let homeless = self.entries.values().filter(|entry| match &entry.place {
            Place::Home(node) | Place::Assigned(node) => self.fleet.is_gone(node),
            Place::Nowhere => false,
        });
        self.touched.extend(homeless.map(|entry| entry.uid.clone()));
    }

    fn agent(&mut self, node: &NodeName, event: AgentEvent, now: Millis) {
        match event {
            AgentEvent::Snapshot { pools, leases } => {
                let known: HashSet<Uid> = leases
                    .iter()
                    .map(|lease| parse_agent_id(&lease.uid).0)
                    .collect();
                self.fleet.snapshot(node, &pools, &known);
                for lease in leases {
                    let (uid, _) = parse_agent_id(&lease.uid);
                    self.entry(&uid).records.insert(node.clone(), lease);
                }
                for entry in self.entries.values_mut() {
                    let mut changed = known.contains(&entry.uid) || entry.home() == Some(node);
                    if !known.contains(&entry.uid) {
                        changed |= entry.records.remove(node).is_some();
                    }
                    if changed {
                        self.touched.insert(entry.uid.clone());
                    }
                }
                self.queues.all_dirty();
            }
            AgentEvent::Pool(pool) => {
                self.fleet.pool(node, &pool);
                self.queues.dirty.insert(pool.name.clone());
                let waiting = self
                    .entries
                    .values()
                    .filter(|entry| entry.reset_waits.is_some() && entry.home() == Some(node));
                self.touched.extend(waiting.map(|entry| entry.uid.clone()));
            }
            AgentEvent::PoolGone(uid) => self.fleet.pool_gone(node, &uid),
            AgentEvent::Lease(lease) => {
                let (uid, _) = parse_agent_id(&lease.uid);
                self.fleet.lease_seen(node, &lease.pool, &uid);
                self.entry(&uid).records.insert(node.clone(), *lease);
                self.touched.insert(uid);
            }
            AgentEvent::LeaseGone(id) => {
                let (uid, _) = parse_agent_id(&id);
                if let Some(entry) = self.entries.get_mut(&uid) {
                    entry.records.remove(node);
                    self.touched.insert(uid);
                }
            }
            AgentEvent::Resumed => {
                self.fleet.resumed(node);
                self.touch_at(node);
                self.queues.all_dirty();
            }
            AgentEvent::Silent => {
                self.fleet.silent(node, now);
                self.touch_at(node);
            }
        }
    }

    /// Leases that have something to do with the node.
    fn touch_at(&mut self, node: &NodeName) {
        let affected = self
            .entries
            .values()
            .filter(|entry| entry.home() == Some(node) || entry.records.contains_key(node));
        self.touched.extend(affected.map(|entry| entry.uid.clone()));
    }

    fn settle_touched(&mut self, now: Millis) {
        let mut waiting = BTreeSet::new();
        loop {
            while let Some(uid) = self.touched.pop_first() {
                self.advance(&uid, now);
                waiting.insert(uid);
            }
            let Some(pool) = self.queues.dirty.pop_first() else {
                break;
            };
            self.allocate(&pool, now);
        }
        for uid in waiting {
            self.announce(&uid, now);
        }
    }

    pub(super) fn advance(&mut self, uid: &Uid, now: Millis) {
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        if entry.name.is_none() {
            entry.name = entry.id().map(|id| id.key());
            if let Some(name) = &entry.name {
                self.names.join(name.clone(), uid);
            }
        }
        // A branch that an agent already gave it, perhaps to a former leader's call.
        let may_adopt = entry.place == Place::Nowhere
            && entry.failure.is_none()
            && entry
                .live()
                .is_some_and(|object| !object.status.phase.is_finished());
        if may_adopt && let Some(node) = entry.first_bound().or_else(|| entry.records.keys().next())
        {
            entry.place = Place::Home(node.clone());
        }
        let name = entry.name.as_ref();
        let secret = name.map_or(Standing::Unclear, |name| self.names.standing(name, uid));
        if secret == Standing::NotIts {
            entry.may_have_secret = false;
        }
        let entry = &self.entries[uid];
        let next = entry.decide(&self.context(entry, secret, now));
        if entry.busy.is_none() && !matches!(next, Next::Queue { .. }) {
            self.leave_queue(uid);
        }
        match next {
            Next::Do(operation) => self.begin(uid, operation, now),
            Next::Queue { until } => {
                let object = self.entries[uid].live();
                if let Some((pool, rank)) =
                    object.map(|object| (object.pool.clone(), object.rank()))
                {
                    self.queues.insert(&pool, rank);
                }
                self.wake_at(uid, until.max(now + 1));
            }
            Next::At(at) => self.wake_at(uid, at),
            Next::Idle => {}
            Next::Drop => {
                if let Some(entry) = self.entries.remove(uid) {
                    if let Some(at) = entry.wake {
                        self.wakeups.remove(&(at, uid.clone()));
                    }
                    if let Some(name) = entry.name {
                        self.names.leave(&name, uid);
                    }
                }
                let freed = self.fleet.forget(uid);
                self.queues.dirty.extend(freed);
                return;
            }
        }
        self.answer(uid);
    }

    fn context(&self, entry: &Entry, secret: Standing, now: Millis) -> Context<'_> {
        let pool = entry.live().and_then(|object| self.pools.get(&object.pool));
        Context {
            fleet: &self.fleet,
            pool,
            listed: self.listed,
            settled: self.settled,
            secret,
            now,
        }
    }

    pub(super) fn begin(&mut self, uid: &Uid, operation: Operation, now: Millis) {
        let operation = match operation {
            Operation::Patch(id, status) => {
                Operation::Patch(id, Box::new(status::stamped(*status, now)))
            }
            other => other,
        };
        if let Operation::CreateSecret(lease, _) | Operation::DeleteSecret { lease, .. } =
            &operation
        {
            self.names.begun(lease);
        }
        let entry = self.entry(uid);
        entry.busy = Some(match &operation {
            Operation::Call(_, _, call) => match call {
                Call::Lease(_) => Doing::Lease,
                Call::Fetch => Doing::Fetch,
                Call::Renew { .. } => {
                    Doing::Renew(entry.live().map_or(0, |object| object.generation))
                }
                Call::Reset { .. } => Doing::Reset,
                Call::Release | Call::Forget => Doing::Other,
            },
            // It may be there, whatever the answer is.
            Operation::CreateSecret(..) => {
                entry.may_have_secret = true;
                Doing::Other
            }
            _ => Doing::Other,
        });
        self.actions.push(Action::Do(uid.clone(), operation));
    }

    /// Tells who asked what became of the lease, when it is known.
    fn answer(&mut self, uid: &Uid) {
        let Some(entry) = self.entries.get_mut(uid).filter(|entry| entry.asked) else {
            return;
        };
        let answer = if let Some(lease) = &entry.credentials {
            Ok(lease.clone())
        } else if let Some(failure) = &entry.failure {
            Err(failure.clone())
        } else {
            match &entry.presence {
                Presence::Live(object) if object.status.phase.is_finished() => {
                    let ready = condition(&object.status.conditions, status::READY);
                    let (reason, message) = ready.map_or_else(Default::default, |ready| {
                        (ready.reason.clone(), ready.message.clone())
                    });
                    Err(Failure { reason, message })
                }
                Presence::Gone(_) | Presence::Missing(_) => {
                    Err(Failure::new("LeaseDeleted", "the lease was deleted"))
                }
                _ => return,
            }
        };
        entry.asked = false;
        self.actions.push(Action::Answer(uid.clone(), answer));
    }

    fn wake_at(&mut self, uid: &Uid, at: Millis) {
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        if let Some(old) = entry.wake.replace(at) {
            self.wakeups.remove(&(old, uid.clone()));
        }
        self.wakeups.insert((at, uid.clone()));
    }

    pub(super) fn leave_queue(&mut self, uid: &Uid) {
        let pool = self
            .entries
            .get(uid)
            .and_then(|entry| entry.live())
            .map(|object| object.pool.clone());
        if let Some(pool) = pool {
            self.queues.remove(&pool, uid);
        }
    }

    fn touch_queue(&mut self, pool: &PoolName) {
        self.touched.extend(self.queues.of(pool).cloned());
        self.queues.dirty.insert(pool.clone());
    }
}
