//! What agent and supervisor say to each other: one JSON message per `SOCK_SEQPACKET` datagram.

use std::path::PathBuf;

use branchpool_sys::mount::Ids;
use serde::{Deserialize, Serialize};

/// From the agent. `Spawn` carries up to three descriptors: stdin, stdout and stderr of the child.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub id: u64,
    pub command: Command,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    Spawn {
        spawn: Box<Spawn>,
        /// Which of stdin, stdout and stderr come along; the others are `/dev/null`.
        stdio: [bool; 3],
    },
    /// Detaches a mount that an earlier `Spawn` made. Not mounted is no error.
    Unmount { target: PathBuf },
}

/// A program to be run for one branch, with all that fences it in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spawn {
    pub program: PathBuf,
    /// Without the program's own name.
    pub args: Vec<String>,
    /// The whole environment.
    pub env: Vec<(String, String)>,
    pub cwd: PathBuf,
    /// User and group to run as; absent: the supervisor's own.
    pub user: Option<User>,
    /// cgroup directories to join (see `branchpool_sys::cgroup`); the default joins none.
    pub cgroup: branchpool_sys::cgroup::Membership,
    /// Done before the spawn, replacing what an earlier spawn left at the target.
    pub mount: Option<IdMount>,
    /// An IPC namespace of its own.
    pub ipc_namespace: bool,
    /// The network namespace without interfaces that all branches share.
    pub network_namespace: bool,
    pub landlock: Option<Landlock>,
    pub oom_score_adj: i32,
}

/// A user and a group to run as.
pub type User = Ids;

/// A bind mount in which files of `on_disk` appear as files of `inside`, and the other way round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMount {
    pub source: PathBuf,
    pub target: PathBuf,
    pub on_disk: User,
    pub inside: User,
}

/// Paths that stay reachable; all others are not. Signals and abstract sockets stay inside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Landlock {
    /// What is missing of these is skipped.
    pub read_execute: Vec<PathBuf>,
    /// What is missing of these is skipped.
    pub read: Vec<PathBuf>,
    /// All of these have to exist, after the mount.
    pub read_write: Vec<PathBuf>,
    /// TCP connect and bind allowed.
    pub network: bool,
}

/// To the agent. The answer to a `Spawn` carries the pidfd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    Done {
        id: u64,
        result: Result<Answer, String>,
    },
    /// A child ended and was reaped.
    Exited { pid: u32, outcome: Outcome },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Spawned { pid: u32 },
    Unmounted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    Code(i32),
    Signal(i32),
}
