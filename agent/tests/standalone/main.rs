//! A whole node, from its command line to its end.

#![allow(clippy::unwrap_used)]

mod adoption;
mod api;
mod burst;
mod image;
mod inmate;
mod inspect;
mod isolation;
#[path = "../http/message.rs"]
mod message;
mod node;
mod reload;
mod starvation;
mod takeover;

pub(crate) fn agent_binary() -> &'static str {
    env!("CARGO_BIN_EXE_branchpool-agent")
}
