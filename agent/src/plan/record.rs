//! What outlives the agent: the journal's entries as typed values.

use std::collections::BTreeMap;

use branchpool_agent_api::{LeasePhase, PoolName};
use serde::{Deserialize, Serialize};

use super::{Image, LeaseUid, PoolSpec, PoolUid, Slot};
use crate::storage::ids::{BranchId, EndpointId};

/// One change to the journal. Entries of one write become durable together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    Pool(PoolUid, Box<PoolRecord>),
    PoolGone(PoolUid),
    Generation(PoolUid, u64, GenerationRecord),
    GenerationGone(PoolUid, u64),
    Branch(BranchId, BranchRecord),
    BranchGone(BranchId),
    Lease(LeaseUid, Box<LeaseRecord>),
    LeaseGone(LeaseUid),
    /// Highest leader's epoch seen.
    Epoch(u64),
    /// Names the time since the machine was started.
    Boot(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolRecord {
    pub spec: PoolSpec,
    /// The desired state as it was received; the core does not look into it.
    pub body: serde_json::Value,
    pub removed: bool,
}

/// A golden image: under construction while `image` is absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GenerationRecord {
    pub image_key: String,
    pub image: Option<Image>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Made for the pool, not handed out. Written before the snapshot is taken.
    Warming,
    Leased {
        lease: LeaseUid,
        /// The server was stopped cleanly, and its data synced.
        parked: bool,
        /// It stays so until somebody wants it.
        #[serde(default)]
        suspended: bool,
    },
    Quarantined {
        reason: String,
        message: String,
    },
    /// To be stopped and thrown away.
    Stopping,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchRecord {
    pub pool: PoolUid,
    pub generation: u64,
    pub settings_key: String,
    pub slot: Slot,
    pub endpoint: EndpointId,
    pub serial: u64,
    pub stage: Stage,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    pub pool: PoolUid,
    pub pool_name: PoolName,
    pub branch: BranchId,
    pub endpoint: EndpointId,
    pub generation: u64,
    pub database: String,
    pub role: String,
    pub holder: Option<String>,
    pub bound_at: u64,
    pub expires_at: u64,
    /// Wall-clock time that no renewal goes beyond.
    pub end_of_life_at: u64,
    pub phase: LeasePhase,
    pub reason: Option<String>,
    pub message: Option<String>,
    pub reset_token: Option<String>,
    pub restarts: u32,
    #[serde(default)]
    pub led: bool,
    /// Wall-clock time at which a finished lease is forgotten.
    pub forget_at: Option<u64>,
}

/// Everything that the journal held at the start.
#[derive(Clone, Debug, Default)]
pub struct Records {
    pub pools: BTreeMap<PoolUid, PoolRecord>,
    pub generations: BTreeMap<(PoolUid, u64), GenerationRecord>,
    pub branches: BTreeMap<BranchId, BranchRecord>,
    pub leases: BTreeMap<LeaseUid, LeaseRecord>,
    pub epoch: u64,
}
