//! What is around the machine.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use branchpool_agent_api::{Lease, LeasePhase as Phase};

use super::super::{sample, *};
use crate::plan::SECOND;

/// An agent with ready branches and leases.
#[derive(Debug, Default)]
pub(super) struct Agent {
    pub(super) ready: VecDeque<String>,
    pub(super) leases: BTreeMap<String, Lease>,
    /// Its watch, not yet heard.
    events: VecDeque<AgentEvent>,
    pub(super) cut: bool,
    made: u32,
}

impl Agent {
    fn counts(&self) -> PoolStatus {
        let bound = self
            .leases
            .values()
            .filter(|lease| lease.phase == Phase::Bound);
        let count = |n: usize| u32::try_from(n).unwrap();
        sample::pool(count(self.ready.len()), count(bound.count()))
    }

    fn report(&mut self, id: &str) {
        let event = match self.leases.get(id) {
            Some(lease) => AgentEvent::Lease(Box::new(lease.clone())),
            None => AgentEvent::LeaseGone(id.to_owned()),
        };
        self.events.push_back(event);
        self.events
            .push_back(AgentEvent::Pool(Box::new(self.counts())));
    }
}

/// The name of the Secret that it changes.
fn secret_of(operation: &Operation) -> Option<&str> {
    match operation {
        Operation::CreateSecret(lease, _) | Operation::DeleteSecret { lease, .. } => {
            Some(&lease.name)
        }
        _ => None,
    }
}

/// How a call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Works,
    /// Done, and the answer is lost.
    Deaf,
    NotDone,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) machine: Machine,
    pub(super) now: Millis,
    pub(super) agents: BTreeMap<NodeName, Agent>,
    pub(super) objects: BTreeMap<Uid, LeaseObject>,
    /// Objects that this version cannot decode.
    pub(super) opaque: BTreeSet<Uid>,
    /// By name: UIDs of Secret and lease.
    pub(super) secrets: BTreeMap<String, (Uid, Uid)>,
    pub(super) events: VecDeque<Event>,
    pub(super) under_way: Vec<(Uid, Operation)>,
    pub(super) answers: Vec<(Uid, Result<Box<Lease>, Failure>)>,
    pub(super) warnings: Vec<String>,
    /// In the order in which they came into the hands of a lease.
    pub(super) handed: Vec<Uid>,
    /// Secrets and statuses written, leases deleted by the machine.
    pub(super) writes: u32,
    version: u64,
}

impl World {
    pub(super) fn new(branches: &[(&str, u32)]) -> Self {
        let agents = branches.iter().map(|(name, count)| {
            let mut agent = Agent {
                made: *count,
                ..Agent::default()
            };
            agent.ready = (0..*count).map(|n| format!("{name}-{n}")).collect();
            (NodeName::from(*name), agent)
        });
        let mut world = Self {
            machine: Machine::default(),
            now: 1_000 * SECOND,
            agents: agents.collect(),
            objects: BTreeMap::new(),
            opaque: BTreeSet::new(),
            secrets: BTreeMap::new(),
            events: VecDeque::new(),
            under_way: Vec::new(),
            answers: Vec::new(),
            warnings: Vec::new(),
            handed: Vec::new(),
            writes: 0,
            version: 1,
        };
        world.start();
        world
    }

    /// A leader that knows nothing: everything is listed.
    pub(super) fn start(&mut self) {
        self.machine = Machine::default();
        self.under_way.clear();
        self.events.clear();
        let nodes: BTreeSet<_> = self.agents.keys().cloned().collect();
        self.tell(Event::Nodes(nodes));
        self.tell(Event::Pool(Box::new(sample::terms())));
        for object in self.objects.values().cloned().collect::<Vec<_>>() {
            let event = self.shown(object);
            self.tell(event);
        }
        self.tell(Event::Listed(self.objects.keys().cloned().collect()));
        for node in self.agents.keys().cloned().collect::<Vec<_>>() {
            if !self.agents[&node].cut {
                self.resync(&node);
            }
        }
        self.tell(Event::Settled);
    }

    pub(super) fn resync(&mut self, node: &NodeName) {
        let agent = self.agents.get_mut(node).unwrap();
        agent.cut = false;
        agent.events.clear();
        let snapshot = AgentEvent::Snapshot {
            pools: vec![agent.counts()],
            leases: agent.leases.values().cloned().collect(),
        };
        self.tell(Event::Agent(node.clone(), snapshot));
    }

    pub(super) fn cut(&mut self, node: &NodeName) {
        self.agents.get_mut(node).unwrap().cut = true;
        self.tell(Event::Agent(node.clone(), AgentEvent::Silent));
    }

    pub(super) fn tell(&mut self, event: Event) {
        for action in self.machine.handle(event, self.now) {
            match action {
                Action::Do(uid, operation) => {
                    let busy = self.under_way.iter().any(|(other, _)| *other == uid);
                    assert!(!busy, "two operations of {uid} at a time");
                    if let Some(name) = secret_of(&operation) {
                        let mut others = self.under_way.iter();
                        let other = others.find(|(_, other)| secret_of(other) == Some(name));
                        assert!(other.is_none(), "{operation:?} beside {other:?}");
                    }
                    self.under_way.push((uid, operation));
                }
                Action::Answer(uid, answer) => self.answers.push((uid, answer)),
                Action::Warn { reason, .. } => self.warnings.push(reason),
                Action::Deposed { epoch } => panic!("deposed by {epoch:?}"),
            }
        }
    }

    pub(super) fn create(&mut self, object: LeaseObject) {
        self.version += 1;
        let object = LeaseObject {
            version: self.version,
            ..object
        };
        self.events.push_back(self.shown(object.clone()));
        self.objects.insert(object.id.uid.clone(), object);
    }

    fn shown(&self, object: LeaseObject) -> Event {
        if self.opaque.contains(&object.id.uid) {
            Event::Opaque(object.id, object.version)
        } else {
            Event::Seen(Box::new(object))
        }
    }

    pub(super) fn change(&mut self, uid: &str, change: impl FnOnce(&mut LeaseObject)) {
        self.version += 1;
        let object = self.objects.get_mut(uid).unwrap();
        object.generation += 1;
        object.version = self.version;
        change(object);
        self.events.push_back(Event::Seen(Box::new(object.clone())));
    }

    pub(super) fn delete(&mut self, uid: &str) {
        if let Some((uid, _)) = self.objects.remove_entry(uid) {
            self.events.push_back(Event::Deleted(uid));
        }
    }

    /// The agent ends a lease, or is back with another branch.
    pub(super) fn at_agent(&mut self, node: &str, id: &str, change: impl FnOnce(&mut Lease)) {
        let agent = self.agents.get_mut(node).unwrap();
        change(agent.leases.get_mut(id).unwrap());
        agent.report(id);
    }

    pub(super) fn add_branch(&mut self, node: &str) {
        let agent = self.agents.get_mut(node).unwrap();
        agent.ready.push_back(format!("{node}-{}", agent.made));
        agent.made += 1;
        agent
            .events
            .push_back(AgentEvent::Pool(Box::new(agent.counts())));
    }

    /// One event of the API server's watch.
    pub(super) fn hear(&mut self) -> bool {
        let event = self.events.pop_front();
        event.map(|event| self.tell(event)).is_some()
    }

    pub(super) fn hear_agent(&mut self, node: &NodeName) -> bool {
        let agent = self.agents.get_mut(node).unwrap();
        if agent.cut {
            return false;
        }
        let event = agent.events.pop_front();
        event
            .map(|event| self.tell(Event::Agent(node.clone(), event)))
            .is_some()
    }

    pub(super) fn finish(&mut self, index: usize, fate: Fate) {
        let (uid, operation) = self.under_way.remove(index);
        let outcome = self.perform(operation, fate);
        self.tell(Event::Done(uid, outcome));
    }

    pub(super) fn pass(&mut self, time: Millis) {
        self.now += time;
        self.tell(Event::Tick);
    }

    /// Until nothing happens any more but by time.
    pub(super) fn settle(&mut self) {
        for _ in 0..100_000 {
            let heard = self.hear()
                || self
                    .agents
                    .keys()
                    .cloned()
                    .collect::<Vec<_>>()
                    .iter()
                    .any(|node| self.hear_agent(node));
            if heard {
            } else if !self.under_way.is_empty() {
                self.finish(0, Fate::Works);
            } else {
                return;
            }
        }
        panic!("it does not come to rest: {:?}", self.under_way);
    }

    /// Lets pauses pass as well, up to a minute.
    pub(super) fn settle_patiently(&mut self) {
        let end = self.now + 60 * SECOND;
        self.settle();
        while self.now < end {
            self.pass(SECOND);
            self.settle();
        }
    }

    fn perform(&mut self, operation: Operation, fate: Fate) -> Outcome {
        let later = || WriteError::Later("the API server is away".into());
        let lost = fate != Fate::Works;
        match operation {
            Operation::Call(node, id, call) => {
                let unreachable = CallError::Unreachable("no route".into());
                let cut = self.agents[&node].cut;
                let result = if cut || fate == Fate::NotDone {
                    Err(unreachable)
                } else {
                    let result = self.call(&node, &id, &call);
                    if lost { Err(unreachable) } else { result }
                };
                if call == Call::Forget {
                    Outcome::Forgotten(node, result.map(|_| ()))
                } else {
                    Outcome::Called(node, result)
                }
            }
            _ if fate == Fate::NotDone => match operation {
                Operation::CreateSecret(..) => Outcome::SecretCreated(Err(later())),
                Operation::DeleteSecret { .. } => Outcome::SecretDeleted(Err(later())),
                Operation::Patch(_, status) => Outcome::Patched(status, Err(later())),
                Operation::DeleteLease(_) => Outcome::LeaseDeleted(Err(later())),
                _ => Outcome::Confirmed(Err(later())),
            },
            Operation::CreateSecret(lease, _) => {
                self.version += 1;
                self.writes += 1;
                let secret = Uid::from(format!("secret-{}", self.version));
                // Of an older lease of the name, or of a call whose answer was lost: replaced.
                self.secrets.insert(lease.name, (secret.clone(), lease.uid));
                Outcome::SecretCreated(if lost { Err(later()) } else { Ok(secret) })
            }
            Operation::DeleteSecret { lease, secret } => {
                self.writes += 1;
                let there = self.secrets.get(&lease.name);
                let fits =
                    |(uid, _): &(Uid, Uid)| secret.as_ref().is_none_or(|wanted| wanted == uid);
                let found = there.is_some_and(fits);
                if found {
                    self.secrets.remove(&lease.name);
                }
                Outcome::SecretDeleted(match (lost, found) {
                    (true, _) => Err(later()),
                    (false, true) => Ok(()),
                    (false, false) => Err(WriteError::NotFound),
                })
            }
            Operation::Patch(lease, status) => {
                let Some(object) = self.objects.get_mut(&lease.uid) else {
                    return Outcome::Patched(status, Err(WriteError::NotFound));
                };
                self.writes += 1;
                self.version += 1;
                object.version = self.version;
                object.status = *status.clone();
                self.events.push_back(Event::Seen(Box::new(object.clone())));
                let result = if lost { Err(later()) } else { Ok(self.version) };
                Outcome::Patched(status, result)
            }
            Operation::DeleteLease(lease) => {
                self.writes += 1;
                self.delete(lease.uid.as_str());
                Outcome::LeaseDeleted(if lost { Err(later()) } else { Ok(()) })
            }
            Operation::Confirm(lease) => Outcome::Confirmed(if lost {
                Err(later())
            } else if self.objects.contains_key(&lease.uid) {
                Ok(Existence::Exists)
            } else {
                Ok(Existence::Gone)
            }),
        }
    }

    fn call(&mut self, node: &NodeName, id: &str, call: &Call) -> Result<Box<Lease>, CallError> {
        let now = self.now;
        let agent = self.agents.get_mut(node).unwrap();
        let refused = |reason: &str| CallError::Refused {
            reason: reason.to_owned(),
            message: reason.to_owned(),
            retry_after: Some(200),
            epoch: None,
        };
        if let Call::Lease(request) = call
            && !agent.leases.contains_key(id)
        {
            let Some(branch) = agent.ready.pop_front() else {
                return Err(refused("NoBranchReady"));
            };
            let ttl = request.ttl_seconds.unwrap_or(3_600) * SECOND;
            let lease = Lease {
                branch,
                expires_at: now + ttl,
                ..sample::bound(id, now)
            };
            agent.leases.insert(id.to_owned(), lease);
            agent.report(id);
            self.handed.push(parse_agent_id(id).0);
        }
        let agent = self.agents.get_mut(node).unwrap();
        let Some(lease) = agent.leases.get_mut(id) else {
            return Err(refused("LeaseNotFound"));
        };
        let is_bound = lease.phase == Phase::Bound;
        match call {
            Call::Forget if is_bound => return Err(refused("StillBound")),
            Call::Forget => {
                let lease = agent.leases.remove(id).unwrap();
                agent.report(id);
                return Ok(Box::new(lease));
            }
            Call::Lease(_) | Call::Renew { .. } | Call::Reset { .. } if !is_bound => {
                return Err(refused("LeaseEnded"));
            }
            Call::Lease(_) | Call::Fetch => {}
            Call::Renew { ttl_seconds } => lease.expires_at = now + ttl_seconds * SECOND,
            Call::Reset { token } => {
                let Some(branch) = agent.ready.pop_front() else {
                    return Err(refused("NoBranchReady"));
                };
                lease.branch = branch;
                lease.observed_reset_token = Some(token.clone());
            }
            Call::Release => {
                if is_bound {
                    lease.phase = Phase::Released;
                }
            }
        }
        let answer = Lease {
            password: is_bound.then(|| "secret".to_owned()),
            ..lease.clone()
        };
        agent.report(id);
        Ok(Box::new(answer))
    }
}
