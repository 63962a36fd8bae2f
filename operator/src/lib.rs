//! The operator: custom resources in, orders to the node agents out.

pub mod plan;
