//! Whether a directory can hold branches.

use std::{
    ffi::OsStr,
    fmt, fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::PermissionsExt,
    },
    path::{Path, PathBuf},
};

use branchpool_sys::btrfs;
use rustix::{
    fs::{AtFlags, FlockOperation, StatxFlags},
    io::Errno,
};
use snafu::{OptionExt, ResultExt, Snafu, ensure};

use super::mountinfo::{self, Mount};

/// Oldest kernel on which this is tried: what branches rely on came with 5.8 to 6.0.
pub const MIN_KERNEL: (u32, u32) = (6, 1);

const PROBE: &str = ".branchpool-preflight";
const PROBE_SNAPSHOT: &str = ".branchpool-preflight-snapshot";

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display(
        "the kernel is {release}, and branches need {}.{} or newer; upgrade it",
        MIN_KERNEL.0, MIN_KERNEL.1
    ))]
    KernelTooOld { release: String },
    #[snafu(display("the storage directory {path:?} does not exist; make or mount it first"))]
    Missing { path: PathBuf },
    #[snafu(display(
        "{path:?} is on {filesystem}, and branches need Btrfs; mount a Btrfs filesystem there, \
         or leave the directory out in standalone mode to get one in a file"
    ))]
    NotBtrfs { path: PathBuf, filesystem: String },
    #[snafu(display("{path:?} is mounted read-only; remount it with: mount -o remount,rw {}", path.display()))]
    ReadOnly { path: PathBuf },
    #[snafu(display(
        "{path:?} cannot be entered by other users (mode {mode:04o}), and branches run as users \
         of their own; allow it with: chmod o+x {}", path.display()
    ))]
    NotSearchable { path: PathBuf, mode: u32 },
    #[snafu(display(
        "no permission for {action} in {path:?}; run the agent as root with CAP_SYS_ADMIN"
    ))]
    NoPermission { action: &'static str, path: PathBuf },
    #[snafu(display(
        "{path:?} has no space left for {action}; delete data or enlarge the filesystem"
    ))]
    NoSpace { action: &'static str, path: PathBuf },
    #[snafu(display(
        "{action} in {path:?} failed: {source}; see the kernel's log for Btrfs errors"
    ))]
    Failed {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl Error {
    /// Exit code of the program, from `sysexits.h`: 69 unavailable, 77 no permission, 78
    /// configuration.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::KernelTooOld { .. } | Self::NoSpace { .. } | Self::Failed { .. } => 69,
            Self::NoPermission { .. } => 77,
            Self::Missing { .. }
            | Self::NotBtrfs { .. }
            | Self::ReadOnly { .. }
            | Self::NotSearchable { .. } => 78,
        }
    }
}

/// Something that works, but not as well as it could.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Warning {
    AccessTimes,
    AutoDefrag,
    NoDataCow,
}

impl fmt::Display for Warning {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::AccessTimes => {
                "the filesystem is mounted without noatime: reading a branch writes to it; \
                 remount it with noatime"
            }
            Self::AutoDefrag => {
                "the filesystem is mounted with autodefrag, which rewrites what branches share; \
                 remount it with noautodefrag"
            }
            Self::NoDataCow => {
                "the filesystem is mounted with nodatacow: no checksums, and nothing gained, for \
                 the first write after a snapshot is copied anyway; remount it with datacow"
            }
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Release of the kernel as `uname` says.
    pub kernel: String,
    /// Options of the mount and of the filesystem.
    pub mount_options: Vec<String>,
    pub warnings: Vec<Warning>,
}

/// Checks that branches can be made below `root`, by making one and deleting it. Blocks.
pub fn check(root: &Path) -> Result<Report, Error> {
    let kernel = rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned();
    check_kernel(&kernel)?;
    let directory = open(root)?;
    let mount = mount_of(&directory, root)?;
    let is_btrfs = btrfs::is_btrfs(&directory).context(FailedSnafu {
        action: "reading",
        path: root,
    })?;
    ensure!(
        is_btrfs,
        NotBtrfsSnafu {
            path: root,
            filesystem: mount.filesystem
        }
    );
    ensure!(
        !mount.options.iter().any(|option| option == "ro"),
        ReadOnlySnafu { path: root }
    );
    check_searchable(root)?;
    try_snapshot(&directory, root)?;
    let warnings = warnings(&mount.options);
    Ok(Report {
        kernel,
        mount_options: mount.options,
        warnings,
    })
}

/// Checks that all users may pass through a directory and those above it.
pub fn check_searchable(path: &Path) -> Result<(), Error> {
    let action = "reading the mode of a directory";
    let path = path.canonicalize().context(FailedSnafu { action, path })?;
    for path in path.ancestors() {
        let metadata = fs::metadata(path).context(FailedSnafu { action, path })?;
        let mode = metadata.permissions().mode() & 0o7777;
        ensure!(mode & 0o001 != 0, NotSearchableSnafu { path, mode });
    }
    Ok(())
}

fn check_kernel(release: &str) -> Result<(), Error> {
    let version = parse_kernel(release).context(KernelTooOldSnafu { release })?;
    ensure!(version >= MIN_KERNEL, KernelTooOldSnafu { release });
    Ok(())
}

fn parse_kernel(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|character: char| !character.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn open(root: &Path) -> Result<OwnedFd, Error> {
    // A link is followed here: administrators may well point to another disk.
    let flags =
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    match rustix::fs::open(root, flags, rustix::fs::Mode::empty()) {
        Ok(directory) => Ok(directory),
        Err(Errno::NOENT | Errno::NOTDIR) => MissingSnafu { path: root }.fail(),
        Err(error) => Err(failed("opening the directory", root, error.into())),
    }
}

fn mount_of(directory: &OwnedFd, root: &Path) -> Result<Mount, Error> {
    const ACTION: &str = "finding the mount";
    let stat = rustix::fs::statx(directory, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)
        .map_err(|error| failed(ACTION, root, error.into()))?;
    let table = fs::read_to_string("/proc/self/mountinfo").context(FailedSnafu {
        action: ACTION,
        path: root,
    })?;
    let mut mounts = mountinfo::parse(&table).into_iter();
    mounts
        .find(|mount| mount.id == stat.stx_mnt_id)
        .ok_or_else(|| {
            failed(
                ACTION,
                root,
                io::Error::other("it is not in /proc/self/mountinfo"),
            )
        })
}

fn warnings(options: &[String]) -> Vec<Warning> {
    let has = |wanted: &str| options.iter().any(|option| option == wanted);
    let found = [
        (!has("noatime"), Warning::AccessTimes),
        (has("autodefrag"), Warning::AutoDefrag),
        (has("nodatacow"), Warning::NoDataCow),
    ];
    found
        .into_iter()
        .filter_map(|(found, warning)| found.then_some(warning))
        .collect()
}

fn try_snapshot(root: &OwnedFd, path: &Path) -> Result<(), Error> {
    // Another agent may be trying the same here; released with this descriptor.
    let lock = open(path)?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)
        .map_err(|error| failed("locking the directory", path, error.into()))?;
    // What an interrupted try left.
    remove_probes(root, path)?;
    let (probe, copy) = (OsStr::new(PROBE), OsStr::new(PROBE_SNAPSHOT));
    btrfs::create_subvolume(root, probe)
        .map_err(|error| failed("creating a subvolume", path, error))?;
    let result = btrfs::open_dir(&path.join(PROBE))
        .and_then(|source| btrfs::snapshot(&source, root, copy, false))
        .map_err(|error| failed("making a snapshot", path, error));
    let removed = remove_probes(root, path);
    result.and(removed)
}

fn remove_probes(root: impl AsFd, path: &Path) -> Result<(), Error> {
    let mut result = Ok(());
    for name in [PROBE_SNAPSHOT, PROBE] {
        match btrfs::delete(&root, OsStr::new(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                // Without the privilege an empty subvolume can still go like a directory; to
                // leave nothing behind is worth a try, the check has failed either way.
                let _removed = rustix::fs::unlinkat(&root, name, AtFlags::REMOVEDIR);
                result = Err(failed("deleting a subvolume", path, error));
            }
            _ => {}
        }
    }
    result
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> Error {
    let path = path.into();
    match source.kind() {
        io::ErrorKind::PermissionDenied => Error::NoPermission { action, path },
        io::ErrorKind::StorageFull => Error::NoSpace { action, path },
        io::ErrorKind::ReadOnlyFilesystem => Error::ReadOnly { path },
        _ => Error::Failed {
            action,
            path,
            source,
        },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_compared_by_number() {
        for release in ["6.1.0-18-amd64", "6.18.44", "10.0", "6.1+"] {
            assert!(check_kernel(release).is_ok(), "{release}");
        }
        for release in ["5.15.0-generic", "6.0.19", "", "unknown", "6"] {
            let error = check_kernel(release).unwrap_err();
            assert_eq!(error.exit_code(), 69);
            assert!(error.to_string().contains("6.1 or newer"), "{error}");
        }
    }

    #[test]
    fn mount_options_are_judged() {
        let options = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(warnings(&options("rw,noatime,space_cache=v2")), []);
        assert_eq!(
            warnings(&options("rw,relatime,autodefrag,nodatacow")),
            [
                Warning::AccessTimes,
                Warning::AutoDefrag,
                Warning::NoDataCow
            ]
        );
    }
}
