//! The small parent of every Postgres server, and the agent's side of the connection to it.
//!
//! [`server`] has one thread and never enters an async runtime, so that a fork of it is cheap and
//! sound. [`client`] is for the agent's tokio runtime.

pub mod client;
pub mod protocol;
pub mod server;
mod wire;

/// Names the agent's end of the connection: the number of an inherited descriptor.
pub const FD_VARIABLE: &str = "BRANCHPOOL_SUPERVISOR_FD";
