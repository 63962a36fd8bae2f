//! A control group for each branch, on cgroup v2, v1, or v1 with an empty v2 beside it.
//!
//! Starting, freezing, killing and "has anything left" use the v2 hierarchy wherever there is one,
//! with or without controllers; limits and weight use the hierarchy that has the controller.

mod events;
mod group;
mod hierarchy;

use std::{io, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};
use snafu::Snafu;

pub use group::Group;
pub use hierarchy::{Base, Layout};

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(self)))]
pub enum Error {
    #[snafu(display("cannot read {}", path.display()))]
    Read { path: PathBuf, source: io::Error },
    #[snafu(display("cannot write \"{value}\" to {}: {hint}", path.display()))]
    Write {
        path: PathBuf,
        value: String,
        hint: &'static str,
        source: io::Error,
    },
    #[snafu(display(
        "cannot make cgroup {}: run as root with a writable cgroup mount",
        path.display()
    ))]
    Create { path: PathBuf, source: io::Error },
    #[snafu(display("cannot remove cgroup {}: is it empty?", path.display()))]
    Remove { path: PathBuf, source: io::Error },
    #[snafu(display("no cgroup hierarchy with what is needed is mounted: mount cgroup2"))]
    NotMounted,
    #[snafu(display("\"{name}\" cannot name a cgroup: use letters, digits, dash and underscore"))]
    Name { name: String },
    #[snafu(display("{} did not become {wanted} within {timeout:?}", path.display()))]
    TimedOut {
        path: PathBuf,
        wanted: &'static str,
        timeout: Duration,
    },
    #[snafu(display("cannot wait for a change of {}", path.display()))]
    Wait { path: PathBuf, source: io::Error },
    #[snafu(display("cannot end process {pid} of a cgroup"))]
    Kill {
        pid: u32,
        source: crate::process::Error,
    },
}

/// The directories that a process has to join to be in a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    pub unified: Option<PathBuf>,
    pub v1: Vec<PathBuf>,
}

/// A controller that limits something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Controller {
    Cpu,
    Memory,
    Pids,
}

impl Controller {
    pub const ALL: [Self; 3] = [Self::Cpu, Self::Memory, Self::Pids];

    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Pids => "pids",
        }
    }
}

/// What a group may use; absent: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes.
    pub memory: Option<u64>,
    /// Thousandths of a CPU.
    pub cpu_millicores: Option<u32>,
    /// Processes and threads.
    pub pids: Option<u32>,
}
