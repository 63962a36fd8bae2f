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

/// An error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
