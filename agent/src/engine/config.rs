//! What the engine is started with.

use std::time::Duration;

use branchpool_supervisor::client::Supervisor;

use crate::{
    plan::{Limits, Reach},
    postgres::installation::{Installation, OsUser},
    storage::Layout,
};

/// Everything that preflight found and the command line said.
#[derive(Debug)]
pub struct Config {
    /// Of the node, as it is reported.
    pub name: String,
    /// Its directories have been made.
    pub layout: Layout,
    pub supervisor: Supervisor,
    pub installations: Vec<Installation>,
    /// Owner of all files of all branches on disk.
    pub disk_user: OsUser,
    /// The user of slot `n` is `uid_base + n`.
    pub uid_base: u32,
    /// Name of the cgroup below which every branch has its own.
    pub cgroup_name: String,
    pub limits: Limits,
    /// Longest build of a golden image.
    pub build_time_limit: Duration,
    /// Bounds of SQL over HTTP.
    pub sql: crate::sql::Limits,
    /// Bytes of a server log; a longer one is cut.
    pub log_cap: u64,
    /// The API is served on TCP to whoever asks.
    pub open_api: bool,
    /// What holders are told; it says whether there is a gateway to be fed.
    pub reach: Reach,
    /// Starts at a time in pools that do not say.
    pub default_concurrency: u32,
}

impl Config {
    /// Major versions of Postgres that are installed, ascending.
    pub(super) fn majors(&self) -> Vec<u32> {
        let mut majors: Vec<u32> = self.installations.iter().map(|found| found.major).collect();
        majors.sort_unstable();
        majors
    }
}
