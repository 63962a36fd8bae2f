//! The life of leases, as one state machine: what the API server and the agents say goes in, what is
//! to be done comes out. Each step of a lease is decided from what is known about it then, not from
//! what was done before, so a leader that starts anew goes on where the last one stopped.
//!
//! The order of the steps: the agent hands out the branch, the Secret is created, the status says
//! `Bound`. At the end: the agent takes the branch back, the Secret is deleted, the agent forgets. An
//! agent so keeps the record of a lease until its Secret is gone.

mod decide;
mod entry;
mod fleet;
mod machine;
mod names;
mod object;
mod outcome;
mod queues;
#[cfg(test)]
pub(crate) mod sample;
mod status;
#[cfg(test)]
mod tests;
mod waiting;

use std::collections::BTreeSet;

use branchpool_agent_api::{Lease, LeaseRequest, PoolName, PoolStatus};
use branchpool_crds::{BranchLeaseStatus, Placement};

use super::{Millis, NodeName, Uid};

pub use self::{
    entry::Failure,
    machine::{Counts, Machine},
    object::{LeaseObject, version},
};

/// What the machine is told.
#[derive(Clone, Debug)]
pub enum Event {
    /// A lease as the API server has it, new or changed.
    Seen(Box<LeaseObject>),
    /// It exists, in this `resourceVersion`, and cannot be decoded: it is left alone.
    Opaque(ObjectRef, u64),
    Deleted(Uid),
    /// A complete list was read: no other lease exists.
    Listed(BTreeSet<Uid>),
    Pool(Box<PoolTerms>),
    PoolDeleted(PoolName),
    /// Pools are known and agents had time to report: from now on branches are handed out.
    Settled,
    /// All nodes of the cluster, from a complete list.
    Nodes(BTreeSet<NodeName>),
    /// Nodes whose branches nobody is to get: cordoned, or not for anybody now.
    Closed(BTreeSet<NodeName>),
    Agent(NodeName, AgentEvent),
    /// What came of an action.
    Done(Uid, Outcome),
    /// Somebody waits for the lease's connection; the answer is an [`Action::Answer`].
    Ask(Uid),
    /// Time passed.
    Tick,
}

/// What an agent's watch says.
#[derive(Clone, Debug)]
pub enum AgentEvent {
    /// Everything, as it is now.
    Snapshot {
        pools: Vec<PoolStatus>,
        leases: Vec<Lease>,
    },
    Pool(Box<PoolStatus>),
    PoolGone(String),
    Lease(Box<Lease>),
    /// By the agent's id.
    LeaseGone(String),
    /// The watch goes on where it ended; nothing was missed.
    Resumed,
    /// The watch ended, and what was known may be old.
    Silent,
}

/// What of a pool matters to its leases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolTerms {
    pub name: PoolName,
    pub placement: Placement,
    pub default_ttl: Millis,
    pub max_ttl: Millis,
    pub admission_wait: Millis,
    pub retain_finished: Millis,
}

/// What is to be done. At most one operation of a lease is under way at a time.
#[derive(Clone, Debug)]
pub enum Action {
    Do(Uid, Operation),
    /// For who asked.
    Answer(Uid, Result<Box<Lease>, Failure>),
    /// For people: something is out of the ordinary.
    Warn {
        lease: ObjectRef,
        reason: String,
        note: String,
    },
    /// An agent has obeyed a newer leader.
    Deposed {
        epoch: Option<u64>,
    },
}

/// An object of the API server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ObjectRef {
    pub namespace: String,
    pub name: String,
    pub uid: Uid,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// To an agent, which knows the lease by this id.
    Call(NodeName, String, Call),
    // The rest goes to the API server.
    CreateSecret(ObjectRef, Box<Lease>),
    DeleteSecret {
        lease: ObjectRef,
        /// The Secret's own UID, where this process made it.
        secret: Option<Uid>,
    },
    Patch(ObjectRef, Box<BranchLeaseStatus>),
    DeleteLease(ObjectRef),
    /// Whether the lease is really gone.
    Confirm(ObjectRef),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    Lease(LeaseRequest),
    Fetch,
    Renew { ttl_seconds: u64 },
    Reset { token: String },
    Release,
    Forget,
}

/// The id under which an agent knows a lease. It carries the object's name, so that a leader who finds
/// a lease at an agent alone can look for the object, and delete its Secret.
pub fn agent_id(lease: &ObjectRef) -> String {
    format!("{}.{}", lease.uid, lease.name)
}

/// The UID, and the object's name unless somebody else made the lease.
fn parse_agent_id(id: &str) -> (Uid, Option<&str>) {
    match id.split_once('.') {
        Some((uid, name)) => (uid.into(), Some(name)),
        None => (id.into(), None),
    }
}

/// What came of an [`Operation`].
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Of all calls to agents but `Forget`.
    Called(NodeName, Result<Box<Lease>, CallError>),
    Forgotten(NodeName, Result<(), CallError>),
    SecretCreated(Result<Uid, WriteError>),
    SecretDeleted(Result<(), WriteError>),
    /// With the `resourceVersion` that the status is in.
    Patched(Box<BranchLeaseStatus>, Result<u64, WriteError>),
    LeaseDeleted(Result<(), WriteError>),
    Confirmed(Result<Existence, WriteError>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existence {
    Exists,
    Gone,
}

/// Why a call to an agent failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallError {
    /// The agent answered, and refused.
    Refused {
        reason: String,
        message: String,
        retry_after: Option<Millis>,
        /// Of a newer leader.
        epoch: Option<u64>,
    },
    /// Whether the agent did it is not known.
    Unreachable(String),
}

/// Why a call to the API server failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteError {
    /// The object is gone.
    NotFound,
    /// A Secret of this name is there that is not ours to replace.
    Foreign(String),
    /// Trying again is no use: quota, terminating namespace.
    Final {
        reason: &'static str,
        message: String,
    },
    /// Worth another try, later.
    Later(String),
}
