//! Takes away an image that was never sealed.

use std::{fs, io, path::Path};

use branchpool_sys::btrfs;
use rustix::io::Errno;

use super::files;

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
