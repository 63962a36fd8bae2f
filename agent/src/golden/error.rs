use std::{io, path::PathBuf, time::Duration};

use snafu::Snafu;

use super::checks;
use crate::postgres::{chain, control, server, session};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an image could not be built.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(super)))]
pub enum Error {
    #[snafu(display("Postgres {wanted} is not installed on this node; it has {found}. Install the package postgresql-{wanted}, or ask for another version"))]
    MajorMissing { wanted: u32, found: String },

    #[snafu(display("{field} {value:?} cannot be used: {reason}"))]
    Spec {
        field: &'static str,
        value: String,
        reason: &'static str,
    },

    #[snafu(display("{} exists already; ask for the next generation", path.display()))]
    GenerationExists { path: PathBuf },

    #[snafu(display("{action} {} failed: {source}", path.display()))]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },

    #[snafu(display("the source cannot be used: {source}"))]
    Check { source: checks::Error },

    #[snafu(display("{program} could not be started: {}", chain(source.as_ref())))]
    StartTool {
        program: String,
        #[snafu(source(from(branchpool_supervisor::client::Error, Box::new)))]
        source: Box<branchpool_supervisor::client::Error>,
    },

    #[snafu(display("{program} failed: {message}"))]
    Tool { program: String, message: String },

    #[snafu(display("{kind} {name} failed: {message}"))]
    Script {
        kind: &'static str,
        name: String,
        message: String,
    },

    #[snafu(display("{source}"))]
    Server {
        #[snafu(source(from(server::Error, Box::new)))]
        source: Box<server::Error>,
    },

    #[snafu(display("{action} failed: {source}"))]
    Session {
        action: String,
        source: session::Error,
    },

    #[snafu(display("the source has no superuser named postgres, which the agent works as; run CREATE ROLE postgres SUPERUSER LOGIN in the source"))]
    NoSuperuser,

    #[snafu(display("the source has no database {database:?}; it has {found}. Name one of these as the pool's database"))]
    NoDatabase { database: String, found: String },

    #[snafu(display("{source}"))]
    Control { source: control::Error },

    #[snafu(display("the image's server left the state {state:?} instead of \"shut down\"; look for errors in its log: {log}"))]
    NotShutDown { state: String, log: String },

    #[snafu(display("processes of the build could not be killed: {}", chain(source)))]
    Kill { source: branchpool_sys::cgroup::Error },

    #[snafu(display("the build was not done after {} s, in the step \"{step}\"; make the scripts faster or allow more time", limit.as_secs()))]
    TimedOut { step: String, limit: Duration },
}
