//! The decisions of the agent: plain values in, plain values out.
//!
//! [`Node`] holds what the agent knows of its node. [`Node::handle`] takes one [`Event`] and the
//! time, changes that knowledge and returns the [`Action`]s to be done; each action comes back as
//! an event. Nothing in here does IO, reads a clock, or knows kube or tokio, so a test can play any
//! interleaving, crash and clock.

mod adopt;
mod apply;
mod backoff;
mod branch;
mod cleanup;
mod command;
mod completion;
mod golden;
mod idle;
mod lease;
mod leasing;
mod node;
mod pool;
mod pressure;
mod record;
mod spec;
mod status;
mod warming;

pub use crate::storage::ids::PoolUid;
pub use adopt::{Observed, ObservedBranch};
pub use branch::{After, Branch, Failure, Server, State};
pub use cleanup::Kick;
pub use command::{Answer, Command, Refusal};
pub use completion::{Completion, Stopped};
pub use golden::{Generation, GenerationState, Image};
pub use idle::{Suspension, Use};
pub use lease::{LeaseState, Reach};
pub use node::{Action, Effects, Event, Limits, LinkChange, Node, Now, Token};
pub use pool::{Counts, Pool};
pub use pressure::{Pressure, Sample, pressure};
pub use record::{BranchRecord, Entry, GenerationRecord, LeaseRecord, PoolRecord, Records, Stage};
pub use spec::{
    Cleanup, LeaseTerms, PoolSpec, Preconnect, StopMode, Tombstones, Warming, WarmingMode,
};
pub use warming::WINDOW;

/// Milliseconds: of the monotonic clock when a point in time, else a span.
pub type Millis = u64;

/// A lease's identity, chosen by whoever asks for it.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct LeaseUid(pub String);

impl std::fmt::Display for LeaseUid {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(&self.0)
    }
}

/// Number of a place for one running branch on this node: its user, its cgroup, its mount point.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct Slot(pub u32);
