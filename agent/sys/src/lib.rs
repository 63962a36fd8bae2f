//! System calls that no well-kept library offers safely, and thin safe wrappers over those that do.
//!
//! Linux only. All unsafe code of this part is in the private module `raw`.

pub mod btrfs;
pub mod cgroup;
pub mod mount;
pub mod namespace;
pub mod probe;
pub mod process;
mod raw;
pub mod sandbox;
pub mod spawn;
