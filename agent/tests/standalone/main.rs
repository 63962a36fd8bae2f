//! A whole node, from its command line to its end.

#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]
#![allow(clippy::too_many_lines, reason = "a test tells one story")]

mod adoption;
mod api;
mod burst;
mod image;
mod inmate;
mod inspect;
mod isolation;
#[allow(dead_code, reason = "the tests of the HTTP server use the rest")]
#[path = "../http/message.rs"]
mod message;
mod node;
mod reload;
mod starvation;
mod takeover;

pub(crate) fn agent_binary() -> &'static str {
    env!("CARGO_BIN_EXE_branchpool-agent")
}
