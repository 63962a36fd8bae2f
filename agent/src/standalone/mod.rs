//! An agent without a cluster: manifests from files instead of an operator.

pub mod manifests;
