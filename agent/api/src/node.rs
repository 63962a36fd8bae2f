//! The node as a whole: `GET /v1/node`, the probe.

use serde::{Deserialize, Serialize};

use crate::PoolName;

/// As in Kubernetes: `status` is `True`, `False` or `Unknown`; `reason` a CamelCase word; `message`
/// says what to do when the status is bad.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    pub status: String,
    pub reason: String,
    pub message: String,
}

impl Condition {
    pub fn new(kind: &str, status: bool, reason: &str, message: &str) -> Self {
        Self {
            kind: kind.to_owned(),
            status: if status { "True" } else { "False" }.to_owned(),
            reason: reason.to_owned(),
            message: message.to_owned(),
        }
    }
}

/// Something that holds back refill.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Gate {
    /// `DiskPressure`, `MetadataPressure`, `MemoryPressure`, `ProcessPressure`, `DescriptorPressure`, `Draining`.
    pub reason: String,
    pub message: String,
}

/// What separates a branch from its neighbours on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Isolation {
    /// `Full`, `NoLandlock`, `SharedUser` (no uid of its own per branch), best first.
    pub level: String,
    /// `v2`, `v1` or `v1+unified`.
    pub cgroup: String,
    pub user_per_branch: bool,
    pub ipc_namespace: bool,
    pub network_namespace: bool,
    /// ABI of Landlock in force, 0 for none.
    pub landlock_abi: u32,
    /// Why the level is not `Full`, one sentence each.
    pub missing: Vec<String>,
}

/// Bytes of the branch filesystem.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Space {
    pub total: u64,
    pub used: u64,
    /// Free as `statfs` says.
    pub free: u64,
    /// Not yet given to any chunk.
    pub unallocated: u64,
    /// Free inside the metadata chunks.
    pub metadata_free: u64,
}

/// A queue with its own workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueueProbe {
    pub concurrency: u32,
    pub active: u32,
    pub queued: u32,
}

/// Something in the agent's directories that it will not touch by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Quarantined {
    /// Path relative to the root of the branch filesystem.
    pub path: String,
    /// CamelCase word: `Unknown`, `StartFailed`, `ServerDied`, …
    pub reason: String,
    pub message: String,
}

/// The knobs and counts of one pool, as the probe shows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolProbe {
    pub uid: String,
    pub name: PoolName,
    pub ready: u32,
    pub warming: u32,
    pub desired: u32,
    pub stale: u32,
    pub leased: u32,
    pub refill: bool,
    pub warming_mode: String,
    /// Most branches whose snapshots may run ahead of their starts.
    pub refill_window: u32,
    /// Waits on purpose before a refill, after a lease, and between batches: always 0, for refill
    /// follows events.
    pub refill_delay_ms: u64,
    pub refill_lease_delay_ms: u64,
    pub refill_continue_delay_ms: u64,
    pub snapshot: QueueProbe,
    pub start: QueueProbe,
    pub preconnect: QueueProbe,
    pub preconnect_mode: String,
    pub sessions_open: u32,
    pub sessions_max_per_branch: u32,
    pub stale_after_ms: u64,
    pub admission_wait_ms: u64,
    pub cleanup: QueueProbe,
    pub cleanup_start_delay_ms: u64,
    pub stop_mode: String,
    pub tuning: String,
    pub tombstones: QueueProbe,
    pub tombstone_delay_ms: u64,
    /// Deletions scheduled since the agent started.
    pub tombstones_scheduled: u64,
    pub tombstones_max_count: u32,
    pub tombstones_max_bytes: u64,
}

/// The use of one bound lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeaseProbe {
    pub uid: String,
    pub pool: PoolName,
    /// Clients that are connected, those of SQL over HTTP included.
    pub connections: u32,
    /// When a client last logged in or sent anything; absent as in [`Lease`](crate::Lease).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used_at: Option<u64>,
}

/// What an agent that an operator has certified trusts and shows. CAs are named by the SHA-256 of their
/// certificates, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TrustStatus {
    /// The CAs that it accepts the operator's certificate of; first the one that signs.
    pub trusts: Vec<String>,
    /// The CA of the certificate that it shows.
    pub issuer: String,
    /// End of that certificate, in milliseconds since 1970.
    pub expires_at: u64,
}

/// Answer of `GET /v1/node`. `docs/probe.md` maps its fields to those of the reference's probe.
// Each bool is a fact of its own on the wire, not a state that an enum could name.
#[allow(clippy::struct_excessive_bools)]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    pub name: String,
    pub version: String,
    /// Changes with every change of anything that the watch reports.
    pub revision: u64,
    /// Changes when the agent starts.
    pub instance: String,
    /// A name for what makes branches here: `btrfs`.
    pub provider: String,
    pub ready: bool,
    /// Snapshots can be made: the filesystem is there, writable, and no gate is shut.
    pub can_snapshot: bool,
    pub conditions: Vec<Condition>,
    pub gates: Vec<Gate>,
    pub isolation: Isolation,
    /// Majors of Postgres found, oldest first.
    pub postgres_majors: Vec<u32>,
    pub space: Space,
    pub max_branches: u32,
    pub branches: u32,
    pub leases: u32,
    pub pools: Vec<PoolProbe>,
    /// Bound leases by uid, on a node with a gateway; empty in the watch.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lease_activity: Vec<LeaseProbe>,
    pub quarantined: Vec<Quarantined>,
    /// Directory, relative to the root, that holds what waits for deletion.
    pub trash_directory: String,
    /// The state is held in memory and journalled behind it.
    pub resident_state: bool,
    /// Entries that waited for the journal when asked.
    pub journal_pending: u32,
    /// Delay added on purpose before a journal write, always 0: writes are grouped, not delayed.
    pub journal_delay_ms: u64,
    /// A release is answered before its branch is gone.
    pub async_release: bool,
    pub read_queries: QueueProbe,
    pub write_queries: QueueProbe,
    /// What opens sessions: `native`, the agent's own client of the Postgres protocol.
    pub session_driver: String,
    /// Wait for a preconnected session to close before it is cut.
    pub session_close_timeout_ms: u64,
    /// Absent on a node without an operator, and before the first certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust: Option<TrustStatus>,
}
