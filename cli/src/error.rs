//! Why a command ended without success.

use std::{ffi::OsString, io, path::PathBuf, time::Duration};

use branchpool_agent_api::{ClientError, LeasePhase, PoolName};
use snafu::Snafu;

use crate::{cluster::ClusterError, duration};

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)))]
pub(crate) enum CliError {
    #[snafu(transparent)]
    Agent { source: ClientError },

    #[snafu(transparent)]
    Cluster { source: ClusterError },

    #[snafu(display("{message}"))]
    Usage { message: String },

    #[snafu(display(
        "no branch of pool {pool} became ready within {}: {why}; wait longer with --wait, or see `kubectl-branch pools {pool}`",
        duration::show(*waited)
    ))]
    NotReady {
        pool: PoolName,
        waited: Duration,
        why: String,
    },

    #[snafu(display("pool {pool} was removed while a branch of it was waited for"))]
    PoolGone { pool: PoolName },

    #[snafu(display(
        "lease {id} is {phase:?} already; a lease ends once, choose another --id for a new one"
    ))]
    Finished { id: String, phase: LeasePhase },

    #[snafu(display(
        "{what} is neither a lease nor the name of a pool ({why}); `kubectl-branch ls` and `kubectl-branch pools` list them"
    ))]
    NeitherLeaseNorPool { what: String, why: String },

    #[snafu(display("cannot run {}: {source}", program.display()))]
    Spawn {
        program: OsString,
        source: io::Error,
    },

    #[snafu(display("cannot wait for the command: {source}"))]
    Wait { source: io::Error },

    #[snafu(display("cannot watch for signals: {source}"))]
    Signals { source: io::Error },

    #[snafu(display("cannot read the token file {}: {source}", path.display()))]
    TokenFile { path: PathBuf, source: io::Error },

    #[snafu(display("cannot write to standard output: {source}"))]
    Output { source: io::Error },

    #[snafu(display("cannot write JSON: {source}"))]
    Json { source: serde_json::Error },

    #[snafu(display("cannot write YAML: {source}"))]
    Yaml { source: serde_saphyr::ser::Error },

    #[snafu(display("{failed} of {all} leases were not released"))]
    NotReleased { failed: usize, all: usize },

    /// Already told by the process that ended, or by the signal's sender.
    #[snafu(display("ended with exit code {code}"))]
    Code { code: u8 },
}

impl CliError {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Usage { .. } => 2,
            Self::NotReady { .. }
            | Self::Cluster {
                source: ClusterError::NotReady { .. },
            } => 3,
            Self::Spawn { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            Self::Spawn { .. } => 126,
            Self::Code { code } => *code,
            _ => 1,
        }
    }

    pub(crate) fn is_silent(&self) -> bool {
        matches!(self, Self::Code { .. })
    }
}
