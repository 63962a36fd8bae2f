//! What the operator writes about a pool.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Counts over all nodes, the state of the source, and conditions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BranchPoolStatus {
    /// Generation of the spec that these numbers answer.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Branches held against spec.replicas: ready or in the making. The scale subresource reports it.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub replicas: u32,
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
    /// Released branches whose server is being stopped.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub cleaning: u32,
    /// Stopped branches that wait for deletion.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub tombstones: u32,
    /// Ready branches of an older generation or older settings, still served.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub stale: u32,
    /// Ready branches that the nodes were asked to hold.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub desired: u32,
    /// Nodes that hold branches of the pool.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub nodes: u32,
    /// Newest sealed generation of the golden image, 0 for none.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub generation: i64,
    /// The import of the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<SourceStatus>,
    /// Label selector of the scale subresource, unique to the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub selector: Option<String>,
    /// Ready, SourceReady, Available, Progressing and Degraded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["type"],
    ))]
    pub conditions: Vec<Condition>,
}

/// The import of the source.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SourceStatus {
    /// Pending, Importing, Preparing, Sealed or Failed.
    #[serde(default)]
    pub phase: SourcePhase,
    /// Share of the import that is done, where it can be told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub progress_percent: Option<u32>,
    /// Bytes imported so far, or the size of the sealed image.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub bytes: i64,
    /// When the image in use was sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_refresh_time: Option<Time>,
    /// What the import does, or why it failed and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub message: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SourcePhase {
    #[default]
    Pending,
    Importing,
    Preparing,
    Sealed,
    Failed,
}
