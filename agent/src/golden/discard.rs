//! What builds leave when the agent dies in the middle of one.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use branchpool_sys::btrfs;
use rustix::io::Errno;

use super::files;
use crate::storage::Layout;

/// Directories of running builds.
pub(super) fn run_dir(layout: &Layout) -> PathBuf {
    layout.run().join("g")
}

/// Removes images that were never sealed: all subvolumes in `building`, and those in `golden`
/// that were moved there but not made read-only. Other things are left alone. No build may run,
/// and no process of an earlier one. Blocks; returns what was removed.
pub fn discard_unfinished(layout: &Layout) -> io::Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    files::remove_tree(&run_dir(layout))?;
    for path in files::entries(&layout.building())? {
        if discard(&path)? {
            removed.push(path);
        }
    }
    for pool in files::entries(&layout.golden())? {
        if !fs::symlink_metadata(&pool)?.is_dir() {
            continue;
        }
        for path in files::entries(&pool)? {
            if is_unsealed(&path)? && discard(&path)? {
                removed.push(path);
            }
        }
    }
    Ok(removed)
}

fn is_unsealed(path: &Path) -> io::Result<bool> {
    if !fs::symlink_metadata(path)?.is_dir() {
        return Ok(false);
    }
    let directory = btrfs::open_dir(path)?;
    Ok(btrfs::is_subvolume(&directory)? && !btrfs::is_read_only(&directory)?)
}

/// Deletes the subvolume `path` with all that is nested in it. `false` when there is none.
pub(super) fn discard(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    }
    let subvolume = btrfs::open_dir(path)?;
    if !btrfs::is_subvolume(&subvolume)? {
        return Ok(false);
    }
    drop(subvolume);
    let (parent, name) = files::split(path);
    let parent = btrfs::open_dir(parent)?;
    match btrfs::delete(&parent, name) {
        Err(error) if error.raw_os_error() == Some(Errno::NOTEMPTY.raw_os_error()) => {
            btrfs::delete_nested(btrfs::open_dir(path)?)?;
            btrfs::delete(&parent, name)?;
        }
        other => other?,
    }
    Ok(true)
}
