//! Servers and sessions. Needs root.

mod loop_btrfs;
mod supervised;

fn main() {}
