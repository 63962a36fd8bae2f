//! A whole node, from its command line to its end.

#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]
#![allow(clippy::too_many_lines, reason = "a test tells one story")]

mod adoption;
mod api;
mod bad_input;
mod bad_pools;
mod burst;
mod chaos;
mod container;
mod full_disk;
mod gateway;
mod held;
mod image;
mod inmate;
mod inspect;
mod isolation;
#[path = "../loop_btrfs/mod.rs"]
mod loop_btrfs;
#[allow(dead_code, reason = "the tests of the HTTP server use the rest")]
#[path = "../http/message.rs"]
mod message;
#[path = "../neon/mod.rs"]
mod neon_driver;
mod node;
mod operator;
mod reboot;
mod reload;
mod sql;
mod starvation;
mod stop;
mod takeover;
#[path = "../../../trust/tests/support/mod.rs"]
mod trust;

pub(crate) fn agent_binary() -> std::path::PathBuf {
    env!("CARGO_BIN_EXE_branchpool-agent").into()
}
