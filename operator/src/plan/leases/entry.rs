//! Everything known about one lease.

use std::collections::BTreeMap;

use branchpool_agent_api::{Lease, LeasePhase};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::{Call, LeaseObject, ObjectRef, Operation, names::Key};
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
    Opaque(ObjectRef),
    Live(Box<LeaseObject>),
    /// Not in a complete list any more; to be confirmed.
    Missing(ObjectRef),
    /// Gone for sure.
    Gone(ObjectRef),
}

/// Where its branch is, or is to come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Nowhere,
    /// A branch there is counted on, and the agent has not answered.
    Assigned(NodeName),
    Home(NodeName),
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
    /// Once it is known.
    pub(super) name: Option<Key>,
    /// What agents say of it, without the password.
    pub(super) records: BTreeMap<NodeName, Lease>,
    pub(super) place: Place,
    /// An agent's answer with the password, until the connection is written.
    pub(super) credentials: Option<Box<Lease>>,
    /// It, or a former leader for it, may have made a Secret that was not seen to go.
    pub(super) may_have_secret: bool,
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
            name: None,
            records: BTreeMap::new(),
            place: Place::Nowhere,
            credentials: None,
            may_have_secret: true,
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
            Presence::Opaque(id) | Presence::Missing(id) | Presence::Gone(id) => Some(id.clone()),
            Presence::Unknown => self.named_by_record(),
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

    /// The connection is where its holder reads it.
    pub(super) fn written(&mut self) {
        let bound =
            |object: &LeaseObject| object.status.phase == branchpool_crds::LeasePhase::Bound;
        if self.live().is_some_and(bound) && !self.asked {
            self.credentials = None;
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
