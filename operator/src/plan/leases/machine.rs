//! The machine: all leases, and how events move them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use branchpool_agent_api::PoolName;
use branchpool_crds::LeasePhase;

use super::{
    Action, AgentEvent, Call, Event, LeaseObject, ObjectRef, Operation, PoolTerms,
    decide::{Context, Name, Next},
    entry::{Doing, Entry, Failure, Place, Presence, SecretState, condition},
    fleet::Fleet,
    parse_agent_id,
    queues::Queues,
    status,
};
use crate::plan::{Millis, NodeName, SECOND, Uid};

/// Namespace and name.
pub(super) type Key = (String, String);

#[derive(Debug, Default)]
pub struct Machine {
    pub(super) entries: HashMap<Uid, Entry>,
    pub(super) pools: BTreeMap<PoolName, PoolTerms>,
    pub(super) fleet: Fleet,
    pub(super) queues: Queues,
    /// Who has a name now.
    names: HashMap<Key, Uid>,
    /// Leases that are over and wait until it is known whose Secret is under their name.
    former_holders: HashMap<Key, BTreeSet<Uid>>,
    /// Names whose Secret is being created or deleted.
    pub(super) secrets_under_way: HashSet<Key>,
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
            Event::Opaque(uid) => {
                self.leave_queue(&uid);
                self.entry(&uid).presence = Presence::Opaque;
            }
            Event::Deleted(uid) => self.deleted(&uid),
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
        let uid = object.id.uid.clone();
        let key = (object.id.namespace.clone(), object.id.name.clone());
        let entry = self.entry(&uid);
        if let Presence::Live(known) = &entry.presence
            && object.version < known.version
        {
            return;
        }
        if entry.place == Place::Nowhere
            && object.status.phase == LeasePhase::Bound
            && let Some(node) = &object.status.node
        {
            entry.place = Place::Home(node.as_str().into());
        }
        let moved = entry
            .live()
            .is_some_and(|known| known.priority != object.priority);
        entry.presence = Presence::Live(object);
        if moved {
            self.leave_queue(&uid);
        }
        self.names.insert(key, uid.clone());
        self.touched.insert(uid);
    }

    fn deleted(&mut self, uid: &Uid) {
        self.leave_queue(uid);
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        let Some(id) = entry.id() else {
            entry.presence = Presence::Unknown;
            self.touched.insert(uid.clone());
            return;
        };
        // A finished lease has no Secret any more.
        let wanted = entry
            .live()
            .is_none_or(|object| object.wants_secret && !object.status.phase.is_finished());
        let secret = wanted && (entry.secret_may_exist() || entry.place != Place::Nowhere);
        entry.presence = Presence::Gone {
            id: id.clone(),
            secret,
        };
        // Whoever waits on an error need wait no longer.
        entry.succeeded();
        let key = (id.namespace, id.name);
        if self.names.get(&key) == Some(uid) {
            self.names.remove(&key);
            self.touched
                .extend(self.former_holders.remove(&key).unwrap_or_default());
        }
        self.touched.insert(uid.clone());
    }

    fn listed(&mut self, uids: &BTreeSet<Uid>) {
        self.listed = true;
        let mut missing = Vec::new();
        for (uid, entry) in &mut self.entries {
            if uids.contains(uid) {
                continue;
            }
            match &entry.presence {
                Presence::Live(object) => {
                    entry.presence = Presence::Missing(object.id.clone());
                    missing.push(uid.clone());
                }
                Presence::Opaque => entry.presence = Presence::Unknown,
                _ => {}
            }
            self.touched.insert(uid.clone());
        }
        for uid in missing {
            self.leave_queue(&uid);
        }
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
        self.wake_former_holders(uid);
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
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
        let entry = &self.entries[uid];
        let next = entry.decide(&self.context(entry, now));
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
            Next::AwaitHolder => {
                if let Some(key) = self.entries[uid].key() {
                    let former = self.former_holders.entry(key).or_default();
                    former.insert(uid.clone());
                }
            }
            Next::Idle => {}
            Next::Drop => {
                if let Some(at) = self.entries.remove(uid).and_then(|entry| entry.wake) {
                    self.wakeups.remove(&(at, uid.clone()));
                }
                let freed = self.fleet.forget(uid);
                self.queues.dirty.extend(freed);
                return;
            }
        }
        self.answer(uid);
    }

    /// What was learned of a lease may tell those that had its name before whose Secret is there.
    fn wake_former_holders(&mut self, uid: &Uid) {
        let key = self.entries.get(uid).and_then(Entry::key);
        if let Some(key) = key
            && self.names.get(&key) == Some(uid)
            && let Some(former) = self.former_holders.remove(&key)
        {
            self.touched.extend(former);
        }
    }

    fn context(&self, entry: &Entry, now: Millis) -> Context<'_> {
        let pool = entry.live().and_then(|object| self.pools.get(&object.pool));
        let holder = entry
            .key()
            .and_then(|key| self.names.get(&key))
            .filter(|holder| **holder != entry.uid);
        let name = holder
            .and_then(|holder| self.entries.get(holder))
            .map_or(Name::Own, Entry::name_for_former);
        Context {
            fleet: &self.fleet,
            pool,
            listed: self.listed,
            settled: self.settled,
            name,
            now,
        }
    }

    pub(super) fn begin(&mut self, uid: &Uid, operation: Operation, now: Millis) {
        let key = |id: &ObjectRef| (id.namespace.clone(), id.name.clone());
        let operation = match operation {
            // What a former lease of this name does with its Secret goes first.
            Operation::CreateSecret(id, _) if self.secrets_under_way.contains(&key(&id)) => return,
            Operation::Patch(id, status) => {
                Operation::Patch(id, Box::new(status::stamped(*status, now)))
            }
            other => other,
        };
        if let Operation::CreateSecret(lease, _) | Operation::DeleteSecret { lease, .. } =
            &operation
        {
            self.secrets_under_way.insert(key(lease));
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
                entry.secret = SecretState::Unknown;
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
                Presence::Gone { .. } | Presence::Missing(_) => {
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

    pub(super) fn holder_of(&self, key: &Key) -> Option<Uid> {
        self.names.get(key).cloned()
    }
}
