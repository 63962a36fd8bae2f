//! Custom resources of Branchpool: `BranchPool`, `BranchLease` and `BranchNode`, group
//! `branchpool.dev`, version `v1alpha1`.
//!
//! Shapes, defaults, bounds and CEL rules are written once, on the Rust types. [`crds`] gives the
//! definitions that a cluster takes; [`validate`] applies the same schema and the same CEL rules to
//! an object without a cluster. No module here does IO.

// `#[kube(printcolumn(type_ = …))]` repeats by design.
#![allow(clippy::duplicated_attributes)]
// Documentation of fields is what `kubectl explain` prints, and it prints no Markdown.
#![allow(clippy::doc_markdown)]

mod admission;
mod definition;
mod duration;
mod lease;
mod manifest;
mod metadata;
mod node;
mod pool;
mod quantity;
pub mod reference;
mod rules;
mod structure;
mod yaml;

pub use admission::{Resource, Violation, admit, admit_as, validate};
pub use definition::{GROUP, VERSION, crds, to_yaml};
pub use duration::{Duration, DurationError, MAX_DURATION};
pub use lease::{
    BranchLease, BranchLeaseSpec, BranchLeaseStatus, ConnectionSecret, LeaseFrom, LeasePhase,
    LocalReference, Priority,
};
pub use manifest::{ConfigMap, ManifestError, Manifests, load_manifests};
pub use node::{BranchNode, BranchNodeSpec, BranchNodeStatus, NodePool, NodeStorage};
pub use pool::{
    BranchPool, BranchPoolSpec, BranchPoolStatus, BranchResources, Cleanup, ConfigMapReference,
    LeasePolicy, Network, OpenConnections, Outbound, Placement, Postgres, Preconnect, Refresh,
    RemoteSource, Script, SecretReference, Source, SourcePhase, SourceStatus, SqlSource, StopMode,
    SubvolumeSource, Tombstones, Tuning, Unleased, Warming, WarmingMode,
};
pub use quantity::{Quantity, QuantityError};
