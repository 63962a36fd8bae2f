//! Makes a node's disks ready for branches: finds them, makes a Btrfs filesystem when they are blank and
//! that is allowed, mounts it.
//!
//! What to do is decided in [`plan`] from what was seen; nothing is written before that. Killed at any
//! time, it does the rest the next time.

mod observe;
pub mod plan;
pub mod superblock;

use std::{
    ffi::CString,
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use rustix::mount::MountFlags;
use snafu::{ResultExt, Snafu, ensure};

use self::plan::{Plan, Profiles, Refusal, Wanted};
use crate::storage::tool::{self, Tool};

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("{source}"), context(false))]
    Refused { source: Refusal },
    #[snafu(display("{source}"), context(false))]
    Tool { source: tool::Error },
    #[snafu(display("only root may read and mount devices; run this as root"))]
    NotRoot,
    #[snafu(display("{pattern:?} is no pattern of files: {message}"))]
    Pattern { pattern: String, message: String },
    #[snafu(display("{path:?} is no block device; correct --devices"))]
    NoDevice { path: PathBuf },
    #[snafu(display("{action} {path:?} failed: {source}; see the kernel's log"))]
    Failed {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl Error {
    /// From `sysexits.h`: 69 unavailable, 77 no permission, 78 configuration.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Refused { .. } | Self::Pattern { .. } | Self::NoDevice { .. } => 78,
            Self::Tool { .. } | Self::Failed { .. } => 69,
            Self::NotRoot => 77,
        }
    }
}

/// Does what is needed and returns what it did, or with `dry_run` what it would do, in one sentence. Blocks.
pub fn prepare(patterns: &[String], wanted: &Wanted, dry_run: bool) -> Result<String, Error> {
    ensure!(rustix::process::geteuid().is_root(), NotRootSnafu);
    let paths = observe::find(patterns)?;
    // In the order of their names, so two of these cannot wait for each other.
    let locks = paths
        .iter()
        .map(|path| observe::lock(path))
        .collect::<Result<Vec<_>, _>>()?;
    let devices = paths
        .iter()
        .zip(&locks)
        .map(|(path, lock)| observe::look(path, lock))
        .collect::<Result<Vec<_>, _>>()?;
    let place = observe::place(&wanted.mount_point, &devices)?;
    let plan = plan::plan(&devices, &place, wanted)?;
    if !dry_run {
        carry_out(&plan, wanted)?;
    }
    Ok(plan.describe(&wanted.mount_point, &wanted.label))
}

fn carry_out(plan: &Plan, wanted: &Wanted) -> Result<(), Error> {
    match plan {
        Plan::Ready => Ok(()),
        Plan::Mount(devices) => mount(devices, &wanted.mount_point),
        Plan::Format(devices, profiles) => {
            format(devices, *profiles, &wanted.label)?;
            mount(devices, &wanted.mount_point)
        }
    }
}

/// Without `--force`: `mkfs.btrfs` then refuses, by its own look, what has data or a user.
fn format(devices: &[PathBuf], profiles: Profiles, label: &str) -> Result<(), Error> {
    let options = [
        "--quiet",
        "--label",
        label,
        "--data",
        profiles.data,
        "--metadata",
        profiles.metadata,
    ];
    let paths: Vec<&Path> = devices.iter().map(PathBuf::as_path).collect();
    Tool::MKFS.run(&options, &paths)?;
    Ok(())
}

fn mount(devices: &[PathBuf], mount_point: &Path) -> Result<(), Error> {
    fs::create_dir_all(mount_point).context(FailedSnafu {
        action: "making",
        path: mount_point,
    })?;
    let Some(first) = devices.first() else {
        return Ok(());
    };
    // Names each device, so that nothing has to have scanned for them before.
    let mut options = Vec::new();
    for device in devices {
        if !options.is_empty() {
            options.push(b',');
        }
        options.extend_from_slice(b"device=");
        options.extend_from_slice(device.as_os_str().as_bytes());
    }
    let mounting = FailedSnafu {
        action: "mounting",
        path: first,
    };
    let options = CString::new(options)
        .map_err(io::Error::from)
        .context(mounting)?;
    rustix::mount::mount(
        first,
        mount_point,
        "btrfs",
        MountFlags::NOATIME,
        options.as_c_str(),
    )
    .map_err(io::Error::from)
    .context(mounting)
}
