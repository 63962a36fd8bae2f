//! A real Kubernetes on this machine, for tests and for people.
//!
//! Two tiers: [`Api`] is etcd and kube-apiserver, enough for controllers; [`Cluster`] has whole nodes. All
//! of it runs in namespaces, cgroups and a directory of its own, below `kubernetes` in Cargo's target
//! directory, and is gone when the value is dropped. What a killed process has left is removed at the
//! next start.
//!
//! Linux only, and as root.

pub mod api;
mod cgroup;
pub mod cluster;
pub mod detached;
pub mod images;
mod network;
pub mod node;
mod pki;
mod plan;
mod ports;
pub mod process;
pub mod programs;
pub mod script;
pub mod space;
pub mod state;
mod target;

pub use api::Api;
pub use cluster::{Cluster, Options, Own};
pub use programs::Programs;
