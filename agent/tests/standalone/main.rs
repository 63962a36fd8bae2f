//! A whole node, from its command line to its end.

#![allow(clippy::unwrap_used)]

mod burst;
#[path = "../loop_btrfs/mod.rs"]
mod loop_btrfs;

mod bad_input;
mod bad_pools;
mod full_disk;
mod inmate;
mod isolation;
mod node;
mod starvation;
mod takeover;
