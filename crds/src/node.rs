//! `BranchNode`: what one node agent reports.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;

/// Nothing: a BranchNode is a report.
#[derive(
    CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "branchpool.dev",
    version = "v1alpha1",
    kind = "BranchNode",
    plural = "branchnodes",
    shortname = "bn",
    no_spec,
    status = "BranchNodeStatus",
    derive = "PartialEq",
    doc = "A node with an agent, as the agent last reported it. Written by the operator; named as the node.",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(name = "Branches", type_ = "integer", json_path = ".status.branches"),
    printcolumn(name = "Leases", type_ = "integer", json_path = ".status.leases"),
    printcolumn(
        name = "Allocatable",
        type_ = "integer",
        json_path = ".status.allocatableBranches",
        description = "Branches that the node may hold"
    ),
    printcolumn(
        name = "Free",
        type_ = "string",
        json_path = ".status.storage.free",
        description = "Free space of the branch filesystem"
    ),
    printcolumn(
        name = "Isolation",
        type_ = "string",
        json_path = ".status.isolation",
        priority = 1
    ),
    printcolumn(
        name = "Agent",
        type_ = "string",
        json_path = ".status.agentVersion",
        priority = 1
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
pub struct BranchNodeSpec {}

/// Capacity, free space, Postgres versions, and the pools on the node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BranchNodeStatus {
    /// Version of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub agent_version: Option<String>,
    /// What separates a branch from its neighbours: Full, NoLandlock or SharedUser.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub isolation: Option<String>,
    /// Major versions of Postgres on the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        inner(range(min = 1, max = 999)),
        extend("x-kubernetes-list-type" = "set")
    )]
    pub postgres_versions: Vec<u32>,
    /// Branches that the node may hold.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub allocatable_branches: u32,
    /// Branches that exist.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub branches: u32,
    /// Leases held.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub leases: u32,
    /// The branch filesystem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<NodeStorage>,
    /// Pools that have branches on the node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1000), extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["uid"],
    ))]
    pub pools: Vec<NodePool>,
    /// Ready, DiskPressure and MemoryPressure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["type"],
    ))]
    pub conditions: Vec<Condition>,
}

/// Space of the branch filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeStorage {
    /// Size.
    pub capacity: Quantity,
    /// Free, as statfs says.
    pub free: Quantity,
    /// Not yet given to data or metadata.
    pub unallocated: Quantity,
    /// Free for metadata.
    pub metadata_free: Quantity,
}

/// One pool's branches on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodePool {
    /// UID of the BranchPool.
    #[schemars(length(min = 1, max = 63))]
    pub uid: String,
    /// Namespace of the BranchPool.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// Name of the BranchPool.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// Branches that can be leased now.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub ready: u32,
    /// Branches in the making.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub warming: u32,
    /// Branches in the hands of leases.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub leased: u32,
    /// Ready branches that the node was asked to hold.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub desired: u32,
    /// Newest sealed generation of the golden image on the node, 0 for none.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub generation: i64,
}
