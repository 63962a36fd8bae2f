//! The three definitions as a cluster takes them.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

use crate::{BranchLease, BranchNode, BranchPool};

pub const GROUP: &str = "branchpool.dev";
pub const VERSION: &str = "v1alpha1";

/// All definitions, in the order of their use.
pub fn crds() -> Vec<CustomResourceDefinition> {
    vec![BranchPool::crd(), BranchLease::crd(), BranchNode::crd()]
}
