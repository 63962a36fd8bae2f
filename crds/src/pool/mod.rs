//! `BranchPool`: what a pool is made from, how many branches it holds, how they are handed out.

mod policy;
mod postgres;
mod source;
mod status;

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quantity::Quantity;
use crate::rules::{quantity_at_least, rule, rule_at};

pub use policy::{
    Cleanup, LeasePolicy, Network, OpenConnections, Outbound, Placement, Preconnect, Refresh,
    StopMode, Tombstones, Unleased, Warming, WarmingMode,
};
pub use postgres::{Postgres, Tuning};
pub use source::{
    ConfigMapReference, RemoteSource, Script, SecretReference, Source, SqlSource, SubvolumeSource,
};
pub use status::{BranchPoolStatus, SourcePhase, SourceStatus};

/// What a pool is made from, how many branches it holds ready, and how they are leased.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "branchpool.dev",
    version = "v1alpha1",
    kind = "BranchPool",
    plural = "branchpools",
    shortname = "bp",
    namespaced,
    status = "BranchPoolStatus",
    derive = "PartialEq",
    doc = "A pool of prestarted Postgres branches, writable copies of one prepared image.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(
        name = "Ready",
        type_ = "integer",
        json_path = ".status.ready",
        description = "Branches that can be leased now"
    ),
    printcolumn(
        name = "Warming",
        type_ = "integer",
        json_path = ".status.warming",
        description = "Branches in the making"
    ),
    printcolumn(
        name = "Leased",
        type_ = "integer",
        json_path = ".status.leased",
        description = "Branches in the hands of leases"
    ),
    printcolumn(
        name = "Desired",
        type_ = "integer",
        json_path = ".spec.replicas",
        description = "Ready branches to hold"
    ),
    printcolumn(
        name = "Available",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Available')].status",
        description = "Whether a lease now would be immediate"
    ),
    printcolumn(
        name = "Source",
        type_ = "string",
        json_path = ".status.source.phase",
        description = "State of the golden image"
    ),
    printcolumn(
        name = "Generation",
        type_ = "integer",
        json_path = ".status.generation",
        description = "Generation of the golden image",
        priority = 1
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].reason",
        description = "Reason of the Ready condition",
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
        ".replicas",
        "self.replicas <= self.maxBranches",
        "replicas must not exceed maxBranches: lower replicas or raise maxBranches",
    ),
]))]
pub struct BranchPoolSpec {
    /// Where the data comes from: exactly one of sql, physical, logical and subvolume.
    #[schemars(extend("x-kubernetes-validations" = [rule(
        "[has(self.sql), has(self.physical), has(self.logical), has(self.subvolume)].filter(given, given).size() == 1",
        "name exactly one source: sql, physical, logical or subvolume",
    )]))]
    pub source: Source,
    /// SQL run as superuser on the imported data, in this order, before the golden image is sealed: masking, extra indexes, ANALYZE.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["name"],
    ))]
    pub prepare: Vec<Script>,
    /// When the source is imported again, and what then happens to branches nobody has leased.
    #[serde(default)]
    pub refresh: Refresh,
    /// The Postgres servers of the branches.
    pub postgres: Postgres,
    /// Ready branches to hold over all nodes.
    #[serde(default = "default_replicas")]
    #[schemars(range(min = 0, max = 100_000))]
    pub replicas: u32,
    /// Most branches that may exist at a time, leased ones included.
    #[serde(default = "default_max_branches")]
    #[schemars(range(min = 1, max = 100_000))]
    pub max_branches: u32,
    /// What one branch may use.
    #[serde(default)]
    pub resources: BranchResources,
    /// Labels that a node must carry to hold branches of this pool.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "node_selector_schema")]
    pub node_selector: BTreeMap<String, String>,
    /// Spread: as even over the nodes as can be. Pack: fill one node after the other.
    #[serde(default)]
    pub placement: Placement,
    /// How branches are made.
    #[serde(default)]
    pub warming: Warming,
    /// What servers in branches may reach.
    #[serde(default)]
    pub network: Network,
    /// How long branches are handed out for.
    #[serde(default)]
    pub lease: LeasePolicy,
    /// What happens to branches that were given back.
    #[serde(default)]
    pub cleanup: Cleanup,
}

fn default_replicas() -> u32 {
    4
}

fn default_max_branches() -> u32 {
    100
}

/// What one branch may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = [
    quantity_at_least(
        "memory",
        "64Mi",
        "a Postgres server does not work with less than 64Mi of memory: raise memory",
    ),
    quantity_at_least(
        "cpu",
        "10m",
        "cpu must be at least 10m: raise it, or leave it out for no limit",
    ),
]))]
pub struct BranchResources {
    /// Most memory of a branch's server and all its processes, page cache included.
    #[serde(default = "default_memory")]
    pub memory: Quantity,
    /// Most CPU of a branch. Absent: branches share the node's CPU evenly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Quantity>,
}

impl Default for BranchResources {
    fn default() -> Self {
        Self {
            memory: default_memory(),
            cpu: None,
        }
    }
}

fn default_memory() -> Quantity {
    Quantity::literal("512Mi", 512 << 20)
}

fn node_selector_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "maxProperties": 16,
        "additionalProperties": {"type": "string", "maxLength": 63},
        "x-kubernetes-map-type": "atomic",
        "x-kubernetes-validations": [rule(
            "self.all(key, key.size() >= 1 && key.size() <= 317)",
            "a label's key has 1 to 317 characters: correct the keys of nodeSelector",
        )],
    })
}
