//! The operator: custom resources in, orders to the node agents out.
//!
//! What is decided is in `plan`, which knows neither kube nor tokio. Around it are the watches of API
//! server and agents, and the calls to both.

mod agents;
pub mod app;
pub mod cli;
mod clock;
mod cluster;
mod election;
mod events;
mod follow;
mod hook;
mod index;
mod lease_api;
mod leases;
mod metrics;
pub mod plan;
mod pools;
mod served;
mod trust;
