//! What is asked of the agent for one pool, validated and in plain units.

use branchpool_agent_api::PoolName;
use serde::{Deserialize, Serialize};

use super::{Millis, PoolUid};

/// Desired state of a pool on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolSpec {
    pub uid: PoolUid,
    pub name: PoolName,
    /// `metadata.generation` of the object.
    pub observed_generation: u64,
    /// Digest of everything that goes into the golden image. A change asks for a new generation.
    pub image_key: String,
    /// Digest of the server settings of branches. A change makes ready branches stale.
    pub settings_key: String,
    /// Ready branches to hold on this node.
    pub target: u32,
    /// Most branches that may exist on this node, tombstones not counted.
    pub max_branches: u32,
    pub database: String,
    pub role: String,
    /// Whether a branch survives a reboot of the node.
    pub durable: bool,
    /// Whether stale ready branches are replaced, or served until they are used up.
    pub replace_stale: bool,
    pub warming: Warming,
    pub lease: LeaseTerms,
    pub cleanup: Cleanup,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WarmingMode {
    /// The snapshots of a batch are all asked for before its first start.
    Phased,
    /// Each branch goes through by itself.
    Pipelined,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preconnect {
    WhileWarming,
    OnLease,
    Never,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warming {
    pub mode: WarmingMode,
    /// Each at least 1.
    pub snapshot_concurrency: u32,
    pub start_concurrency: u32,
    pub preconnect_concurrency: u32,
    pub preconnect: Preconnect,
    /// A branch that has been warming for longer has failed.
    pub stale_after: Millis,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseTerms {
    pub default_ttl: Millis,
    /// Longest single term.
    pub max_ttl: Millis,
    /// Longest life over all renewals.
    pub max_lifetime: Millis,
    /// How long a finished lease can still be asked about.
    pub retain_finished: Millis,
    /// How long a caller should go on asking when nothing is ready.
    pub admission_wait: Millis,
    /// A server that nobody used for this long is suspended.
    #[serde(default)]
    pub idle_timeout: Option<Millis>,
    /// Whether an open connection that sends nothing is use.
    #[serde(default)]
    pub open_connections_count: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopMode {
    Immediate,
    Fast,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cleanup {
    pub concurrency: u32,
    pub start_delay: Millis,
    pub stop_mode: StopMode,
    pub tombstones: Tombstones,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstones {
    pub delay: Millis,
    pub concurrency: u32,
    /// Above either bound the oldest go at once.
    pub max_count: u32,
    pub max_bytes: u64,
}

impl Default for Tombstones {
    /// For what is left of pools that are gone.
    fn default() -> Self {
        Self {
            delay: 0,
            concurrency: 1,
            max_count: 0,
            max_bytes: 0,
        }
    }
}
