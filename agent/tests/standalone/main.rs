//! A whole node, from its command line to its end.

#![allow(clippy::unwrap_used)]

mod api;
mod burst;
#[path = "../http/message.rs"]
mod message;
mod node;
mod reload;

pub(crate) fn agent_binary() -> &'static str {
    env!("CARGO_BIN_EXE_branchpool-agent")
}
