//! Looks at devices, and changes nothing.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::FlockOperation,
    io::{Errno, FdFlags},
};
use snafu::{ResultExt, ensure};

use super::{
    Error, FailedSnafu, NoDeviceSnafu, PatternSnafu,
    plan::{Content, Device, Place},
    superblock::{self, Superblock},
};
use crate::{preflight::mountinfo, storage::tool::Tool};

const WIPEFS: Tool = Tool {
    name: "wipefs",
    package: "util-linux",
};

/// Looked at on both ends: programs that write no signature begin at one of them.
const END: u64 = 1 << 20;

/// Block devices that the patterns match, without links, each once. An empty list is no error here.
pub(super) fn find(patterns: &[String]) -> Result<Vec<PathBuf>, Error> {
    let mut found = BTreeSet::new();
    for pattern in patterns {
        let matches = glob::glob(pattern).map_err(|error| {
            let message = error.to_string();
            PatternSnafu { pattern, message }.build()
        })?;
        for path in matches {
            let path = path.map_err(|error| Error::Failed {
                action: "reading",
                path: error.path().to_owned(),
                source: error.into(),
            })?;
            let path = path.canonicalize().context(FailedSnafu {
                action: "finding",
                path,
            })?;
            let file_type = fs::metadata(&path)
                .context(FailedSnafu {
                    action: "reading",
                    path: &path,
                })?
                .file_type();
            ensure!(file_type.is_block_device(), NoDeviceSnafu { path });
            found.insert(path);
        }
    }
    Ok(found.into_iter().collect())
}

/// A device that is locked until this is dropped and every program started meanwhile has ended: a
/// `mkfs.btrfs` that outlives us keeps others off. udev heeds the lock too.
#[derive(Debug)]
pub(super) struct Locked(File);

pub(super) fn lock(path: &Path) -> Result<Locked, Error> {
    let file = File::open(path).context(FailedSnafu {
        action: "opening",
        path,
    })?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)
        .map_err(io::Error::from)
        .context(FailedSnafu {
            action: "locking",
            path,
        })?;
    rustix::io::fcntl_setfd(&file, FdFlags::empty())
        .map_err(io::Error::from)
        .context(FailedSnafu {
            action: "locking",
            path,
        })?;
    Ok(Locked(file))
}

pub(super) fn look(path: &Path, locked: &Locked) -> Result<Device, Error> {
    let content = content(path, &locked.0)?;
    Ok(Device {
        path: path.to_owned(),
        content,
    })
}

fn content(path: &Path, file: &File) -> Result<Content, Error> {
    let reading = FailedSnafu {
        action: "reading",
        path,
    };
    let mut end = file;
    let size = end.seek(SeekFrom::End(0)).context(reading)?;
    if size < 2 * END {
        return Ok(Content::Other(format!("{size} bytes only")));
    }
    let mut block = [0; superblock::SIZE];
    file.read_exact_at(&mut block, superblock::OFFSET)
        .context(reading)?;
    match superblock::parse(&block) {
        Some(Superblock::Complete(member)) => return Ok(Content::Btrfs(member)),
        Some(Superblock::Unfinished(label)) => return Ok(Content::Unfinished { label }),
        None => {}
    }
    if let Some(signatures) = signatures(path)? {
        return Ok(Content::Other(signatures));
    }
    if is_in_use(path).context(reading)? {
        return Ok(Content::Other(
            "a user: it is mounted, swap, or part of a set".to_owned(),
        ));
    }
    for (start, place) in [(0, "first"), (size - END, "last")] {
        if !is_zero(file, start).context(reading)? {
            return Ok(Content::Other(format!(
                "data of no known kind in its {place} MiB"
            )));
        }
    }
    Ok(Content::Blank)
}

/// Of filesystems, partition tables, RAID, swap, LVM and all else that libblkid knows.
fn signatures(path: &Path) -> Result<Option<String>, Error> {
    let output = WIPEFS.run(&["--no-act", "--noheadings", "--output", "TYPE"], &[path])?;
    let types: BTreeSet<_> = output
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    if types.is_empty() {
        return Ok(None);
    }
    let types: Vec<_> = types.into_iter().collect();
    Ok(Some(format!("signatures of {}", types.join(", "))))
}

/// The kernel lets one user at a time have a device for itself: a mount, swap, a RAID or mapped device.
fn is_in_use(path: &Path) -> io::Result<bool> {
    let exclusive = OpenOptions::new()
        .read(true)
        .custom_flags(i32::try_from(rustix::fs::OFlags::EXCL.bits()).unwrap_or_default())
        .open(path);
    match exclusive {
        Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => Ok(true),
        other => other.map(|_| false),
    }
}

fn is_zero(file: &File, start: u64) -> io::Result<bool> {
    let mut buffer = vec![0; 64 << 10];
    let mut reader = file;
    reader.seek(SeekFrom::Start(start))?;
    let mut left = END;
    while left > 0 {
        reader.read_exact(&mut buffer)?;
        if buffer.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        left -= buffer.len() as u64;
    }
    Ok(true)
}

/// What is at the mount point. One that is not there is empty.
pub(super) fn place(mount_point: &Path, devices: &[Device]) -> Result<Place, Error> {
    let reading = FailedSnafu {
        action: "reading",
        path: mount_point,
    };
    let entries = match fs::read_dir(mount_point) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Place::Empty),
        other => other.context(reading)?,
    };
    let table = fs::read_to_string("/proc/self/mountinfo").context(reading)?;
    let point = mount_point.canonicalize().context(reading)?;
    let mounts = mountinfo::parse(&table);
    // The last one covers those before.
    let mounted = mounts.into_iter().rfind(|mount| mount.point == point);
    // A directory of such a filesystem, mounted by itself, is not the filesystem.
    if let Some(mount) =
        mounted.filter(|mount| mount.filesystem == "btrfs" && mount.root == Path::new("/"))
    {
        let source = fs::canonicalize(&mount.source).unwrap_or_else(|_| mount.source.into());
        let device = devices.iter().find(|device| device.path == source);
        if let Some(Content::Btrfs(member)) = device.map(|device| &device.content) {
            return Ok(Place::Mounted(member.filesystem));
        }
    }
    Ok(match entries.count() {
        0 => Place::Empty,
        _ => Place::Taken,
    })
}
