//! Checks made before anything else, so that what a node lacks is said in one sentence.

pub mod filesystem;
pub(crate) mod mountinfo;
pub mod postgres;

use std::{
    fmt,
    path::{Path, PathBuf},
};

use snafu::Snafu;

use crate::postgres::installation::{Installation, OsUser};

/// sysexits.h: no permission.
const NO_PERMISSION: u8 = 77;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("{source}"), context(false))]
    Filesystem { source: filesystem::Error },
    #[snafu(display(
        "the agent runs as an ordinary user; run it as root: it makes snapshots, mounts and cgroups"
    ))]
    NotRoot,
    #[snafu(display("{source}"), context(false))]
    Postgres { source: postgres::Error },
}

impl Error {
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Filesystem { source } => source.exit_code(),
            Self::NotRoot => NO_PERMISSION,
            Self::Postgres { source } => source.exit_code(),
        }
    }
}

/// What a node has.
#[derive(Clone, Debug)]
pub struct Found {
    pub filesystem: filesystem::Report,
    /// Newest major first; at least one.
    pub installations: Vec<Installation>,
    pub disk_user: OsUser,
    /// What works, but not well.
    pub warnings: Vec<String>,
}

impl fmt::Display for Found {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "kernel      {}", self.filesystem.kernel)?;
        writeln!(
            formatter,
            "filesystem  btrfs, {}",
            self.filesystem.mount_options.join(",")
        )?;
        for found in &self.installations {
            writeln!(
                formatter,
                "postgres    {} in {}",
                found.version,
                found.bindir.display()
            )?;
        }
        write!(
            formatter,
            "disk user   {} ({})",
            self.disk_user.name, self.disk_user.uid
        )?;
        for warning in &self.warnings {
            write!(formatter, "\nwarning     {warning}")?;
        }
        Ok(())
    }
}

/// Checks privileges, the filesystem of `root`, Postgres and the OS user. Blocks.
pub fn check(
    root: &Path,
    postgres_bindirs: &[PathBuf],
    postgres_user: &str,
) -> Result<Found, Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::NotRoot);
    }
    let filesystem = filesystem::check(root)?;
    let found = postgres::check(postgres_bindirs, postgres_user)?;
    let warnings = filesystem
        .warnings
        .iter()
        .map(ToString::to_string)
        .collect();
    Ok(Found {
        filesystem,
        installations: found.installations,
        disk_user: found.disk_user,
        warnings,
    })
}
