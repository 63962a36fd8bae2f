//! System calls that no well-kept library offers safely, and thin safe wrappers over those that do.

pub mod btrfs;
