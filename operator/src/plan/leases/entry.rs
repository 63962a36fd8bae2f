//! Everything known about one lease.

use std::collections::BTreeMap;

use branchpool_agent_api::{Lease, LeasePhase};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::{Call, LeaseObject, ObjectRef, Operation, decide::Name, machine::Key};
use crate::plan::{Millis, NodeName, SECOND, Uid};

/// Why a lease cannot be served, for its status and for who asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// CamelCase word for programs.
    pub reason: String,
    /// One sentence that says what to do.
    pub message: String,
}

impl Failure {
    pub(super) fn new(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            message: message.into(),
        }
    }
}

/// What is known of the object.
#[derive(Clone, Debug)]
pub(super) enum Presence {
    /// Only an agent speaks of it so far.
    Unknown,
    /// It exists and cannot be decoded.
    Opaque,
    Live(Box<LeaseObject>),
    /// Not in a complete list any more; to be confirmed.
    Missing(ObjectRef),
    /// Gone for sure. `secret`: one may be there under its name.
    Gone {
        id: ObjectRef,
        secret: bool,
    },
}

/// Where its branch is, or is to come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Nowhere,
    /// A branch there is counted on, and the agent has not answered.
    Assigned(NodeName),
    Home(NodeName),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SecretState {
    /// Perhaps a former leader made it.
    Unknown,
    Written(Uid),
    /// Deleted by this process, or never made.
    Absent,
}

/// The operation that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    Lease,
    Fetch,
    /// Of the object's generation then.
    Renew(i64),
    Reset,
    Other,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) uid: Uid,
    pub(super) presence: Presence,
    /// What agents say of it, without the password.
    pub(super) records: BTreeMap<NodeName, Lease>,
    pub(super) place: Place,
    /// An agent's answer with the password, until the connection is written.
    pub(super) credentials: Option<Box<Lease>>,
    pub(super) secret: SecretState,
    pub(super) failure: Option<Failure>,
    /// Its agent does not know it, asked for just this lease.
    pub(super) lost: bool,
    /// A renewal that was refused, and the generation that asked for it.
    pub(super) renewal: Option<(i64, Option<Failure>)>,
    /// A reset that has to wait for a branch.
    pub(super) reset_waits: Option<String>,
    pub(super) busy: Option<Doing>,
    /// When it is to be looked at again.
    pub(super) wake: Option<Millis>,
    pub(super) retry_at: Millis,
    pub(super) failures: u32,
    /// When the queue position was written last.
    pub(super) position_at: Millis,
    /// Somebody waits for an answer.
    pub(super) asked: bool,
}

impl Entry {
    pub(super) fn new(uid: Uid) -> Self {
        Self {
            uid,
            presence: Presence::Unknown,
            records: BTreeMap::new(),
            place: Place::Nowhere,
            credentials: None,
            secret: SecretState::Unknown,
            failure: None,
            lost: false,
            renewal: None,
            reset_waits: None,
            busy: None,
            wake: None,
            retry_at: 0,
            failures: 0,
            position_at: 0,
            asked: false,
        }
    }

    pub(super) fn live(&self) -> Option<&LeaseObject> {
        match &self.presence {
            Presence::Live(object) => Some(object),
            _ => None,
        }
    }

    /// The object under the lease's name, as far as it is known.
    pub(super) fn id(&self) -> Option<ObjectRef> {
        match &self.presence {
            Presence::Live(object) => Some(object.id.clone()),
            Presence::Missing(id) | Presence::Gone { id, .. } => Some(id.clone()),
            Presence::Unknown | Presence::Opaque => self.named_by_record(),
        }
    }

    pub(super) fn key(&self) -> Option<Key> {
        self.id().map(|id| (id.namespace, id.name))
    }

    /// What a lease that had this one's name before is to think of a Secret there.
    pub(super) fn name_for_former(&self) -> Name {
        match &self.presence {
            Presence::Gone { .. } => Name::Own,
            Presence::Live(object) => {
                let told = object.status.phase == branchpool_crds::LeasePhase::Bound
                    && object.status.binding.is_some();
                if told || matches!(self.secret, SecretState::Written(_)) {
                    Name::Taken
                } else if self.secret_may_exist() {
                    Name::Shared
                } else {
                    Name::Own
                }
            }
            Presence::Unknown | Presence::Opaque | Presence::Missing(_) => Name::Shared,
        }
    }

    /// Agents keep the name for a leader that knows nothing else.
    fn named_by_record(&self) -> Option<ObjectRef> {
        self.records.values().find_map(|record| {
            Some(ObjectRef {
                namespace: record.pool.namespace.clone(),
                name: super::parse_agent_id(&record.uid).1?.to_owned(),
                uid: self.uid.clone(),
            })
        })
    }

    pub(super) fn call(&self, node: &NodeName, call: Call) -> Operation {
        let id = self.id().map(|id| super::agent_id(&id));
        Operation::Call(node.clone(), id.unwrap_or_default(), call)
    }

    /// The record that counts for a lease without a place: the first that was bound.
    pub(super) fn first_bound(&self) -> Option<&NodeName> {
        let bound = self
            .records
            .iter()
            .filter(|(_, record)| record.phase == LeasePhase::Bound);
        bound
            .min_by_key(|(name, record)| (record.bound_at, (*name).clone()))
            .map(|(name, _)| name)
    }

    pub(super) fn home(&self) -> Option<&NodeName> {
        match &self.place {
            Place::Home(node) => Some(node),
            _ => None,
        }
    }

    pub(super) fn secret_may_exist(&self) -> bool {
        match self.secret {
            SecretState::Written(_) => true,
            SecretState::Absent => false,
            SecretState::Unknown => match &self.presence {
                Presence::Live(object) => {
                    object.wants_secret
                        && (object.status.binding.is_some() || self.home().is_some())
                }
                // An agent that was away then may have made one necessary.
                Presence::Gone { secret, .. } => *secret || !self.records.is_empty(),
                _ => true,
            },
        }
    }

    pub(super) fn secret_uid(&self) -> Option<Uid> {
        match &self.secret {
            SecretState::Written(uid) => Some(uid.clone()),
            _ => None,
        }
    }

    /// Doubling from 100 ms to half a minute.
    pub(super) fn back_off(&mut self, now: Millis) {
        let pause = (100_u64 << self.failures.min(9)).min(30 * SECOND);
        self.failures += 1;
        self.retry_at = now + pause;
    }

    pub(super) fn succeeded(&mut self) {
        self.failures = 0;
        self.retry_at = 0;
    }
}

pub(super) fn condition<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.type_ == kind)
}
