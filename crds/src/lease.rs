//! `BranchLease`: one branch in the hands of one holder for a bounded time.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::duration::Duration;
use crate::rules::{duration_of_at_least, rule, rule_at};

/// Which pool to lease from, for how long, and for whom.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "branchpool.dev",
    version = "v1alpha1",
    kind = "BranchLease",
    plural = "branchleases",
    shortname = "bl",
    namespaced,
    status = "BranchLeaseStatus",
    derive = "PartialEq",
    doc = "One branch of a BranchPool, held for a bounded time. Deleting the lease deletes the branch.",
    selectable = ".spec.poolRef.name",
    selectable = ".status.phase",
    selectable = ".status.node",
    printcolumn(name = "Pool", type_ = "string", json_path = ".spec.poolRef.name"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Secret",
        type_ = "string",
        json_path = ".status.binding.name",
        description = "Secret with the connection"
    ),
    printcolumn(
        name = "Expires",
        type_ = "string",
        json_path = ".status.expirationTime"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].reason",
        description = "Reason of the Ready condition"
    ),
    printcolumn(
        name = "Holder",
        type_ = "string",
        json_path = ".spec.holder",
        priority = 1
    ),
    printcolumn(
        name = "Node",
        type_ = "string",
        json_path = ".status.node",
        priority = 1
    ),
    printcolumn(
        name = "Queue",
        type_ = "integer",
        json_path = ".status.queuePosition",
        description = "Leases before this one",
        priority = 1
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = [
    rule_at(
        ".from",
        "has(self.from) == has(oldSelf.from) && (!has(self.from) || self.from == oldSelf.from)",
        "from cannot change: create another BranchLease",
    ),
]))]
pub struct BranchLeaseSpec {
    /// Pool in the same namespace. It cannot change.
    #[schemars(extend("x-kubernetes-validations" = [rule(
        "self == oldSelf",
        "poolRef cannot change: create another BranchLease",
    )]))]
    pub pool_ref: LocalReference,
    /// Term of the lease, counted from the hand-over or the last renewal. Absent: the pool's lease.defaultTTL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = duration_of_at_least("1s")))]
    pub ttl: Option<Duration>,
    /// Place in the queue when no branch is ready: High before Medium before Low.
    #[serde(default)]
    pub priority: Priority,
    /// Who holds the lease, in free text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub holder: Option<String>,
    /// Set it to now to start the term anew. A time in the future counts as now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renew_time: Option<Time>,
    /// A new value replaces the branch by a fresh one behind the same address; status.observedResetToken answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub reset_token: Option<String>,
    /// Branch from another lease's branch instead of the pool's golden image. It cannot change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<LeaseFrom>,
    /// Create: a Secret with the lease's name holds the connection. None: the caller of the lease API got it. It cannot change.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-validations" = [rule(
        "self == oldSelf",
        "connectionSecret cannot change: create another BranchLease",
    )]))]
    pub connection_secret: ConnectionSecret,
}

/// An object in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LocalReference {
    /// Name of the object.
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    )]
    pub name: String,
}

/// Where the branch comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LeaseFrom {
    /// A bound BranchLease of the same pool.
    pub lease_ref: LocalReference,
}

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum Priority {
    High,
    #[default]
    Medium,
    Low,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConnectionSecret {
    #[default]
    Create,
    None,
}

/// Where the branch is, and until when.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BranchLeaseStatus {
    /// Generation of the spec that this status answers.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Pending, Bound, Expired, Failed or Lost; for people. Programs read the condition Ready.
    #[serde(default)]
    pub phase: LeasePhase,
    /// Address to connect to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub host: Option<String>,
    /// Port to connect to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_535))]
    pub port: Option<u32>,
    /// Database to connect to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub database: Option<String>,
    /// User to connect as; it selects the branch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub user: Option<String>,
    /// Secret with the connection, as the Service Binding specification has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub binding: Option<LocalReference>,
    /// Node that holds the branch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node: Option<String>,
    /// Id of the branch; a reset changes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub branch: Option<String>,
    /// When the branch was handed out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound_time: Option<Time>,
    /// When the lease ends unless it is renewed: the later of boundTime and renewTime, plus the term.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiration_time: Option<Time>,
    /// Leases that get a branch before this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub queue_position: Option<u32>,
    /// Last reset token that was answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub observed_reset_token: Option<String>,
    /// Ready, with a reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["type"],
    ))]
    pub conditions: Vec<Condition>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum LeasePhase {
    #[default]
    Pending,
    Bound,
    Expired,
    Failed,
    Lost,
}

impl LeasePhase {
    /// Nothing more happens to a finished lease.
    pub fn is_finished(self) -> bool {
        matches!(self, Self::Expired | Self::Failed | Self::Lost)
    }
}
