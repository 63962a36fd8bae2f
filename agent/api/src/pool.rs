//! Pools on this node.

use serde::{Deserialize, Serialize};

use crate::{Condition, PoolName};

/// Body of `PUT /v1/pools/{uid}`: what the pool shall be from now on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DesiredPool {
    pub namespace: String,
    pub name: String,
    /// `metadata.generation` of the `BranchPool`; an older one than the agent has is refused.
    pub generation: u64,
    /// The leader's epoch; a lower one than the agent has seen is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
    /// `spec` of the `BranchPool`, as in its manifest.
    pub spec: serde_json::Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GoldenPhase {
    /// Nothing asked for yet.
    Pending,
    Building,
    Sealed,
    /// The last build failed; an older generation, if any, goes on serving.
    Failed,
}

/// The golden image of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GoldenStatus {
    pub phase: GoldenPhase,
    /// Newest sealed generation, 0 when there is none.
    pub generation: u64,
    /// What the build is doing, or why it failed, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Size of the sealed image in bytes.
    pub bytes: u64,
}

/// A pool as this node sees it. `ready + warming + leased + cleaning + quarantined` branches exist,
/// and `tombstones` wait for deletion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolStatus {
    pub uid: String,
    pub name: PoolName,
    /// `metadata.generation` of the desired state in force.
    pub observed_generation: u64,
    pub desired: u32,
    pub max_branches: u32,
    pub ready: u32,
    pub warming: u32,
    /// Warming, by phase.
    pub snapshotting: u32,
    pub starting: u32,
    pub preconnecting: u32,
    pub leased: u32,
    pub cleaning: u32,
    pub quarantined: u32,
    pub tombstones: u32,
    /// Ready branches of an older generation or of older settings, still served.
    pub stale: u32,
    pub golden: GoldenStatus,
    /// `Ready`, `SourceReady`, `Available`, `Progressing`, `Degraded`.
    pub conditions: Vec<Condition>,
    /// Earliest time at which a held-back refill goes on (back-off), if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_at: Option<u64>,
}

/// Answer of `GET /v1/pools`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolList {
    pub pools: Vec<PoolStatus>,
}
