//! Free space of the branch filesystem.

use std::{
    io,
    path::{Path, PathBuf},
};

pub use branchpool_agent_api::Space;
use branchpool_sys::btrfs;
use snafu::{ResultExt, Snafu};

#[derive(Debug, Snafu)]
#[snafu(display("cannot read the free space of {path:?}: {source}; is it still mounted?"))]
pub struct Error {
    path: PathBuf,
    source: io::Error,
}

/// Reads the space of the Btrfs filesystem that `root` lies on. Blocks shortly.
///
/// What `statfs` calls free may be unusable when metadata has no room left: new branches need
/// `unallocated` or `metadata_free` as well.
pub fn read(root: &Path) -> Result<Space, Error> {
    let read = || -> io::Result<Space> {
        let directory = btrfs::open_dir(root)?;
        let statistics = rustix::fs::fstatvfs(&directory)?;
        let info = btrfs::space_info(&directory)?;
        let total = statistics.f_blocks * statistics.f_frsize;
        Ok(Space {
            total,
            used: total.saturating_sub(statistics.f_bfree * statistics.f_frsize),
            free: statistics.f_bavail * statistics.f_frsize,
            unallocated: info.unallocated,
            // The reserve is counted as free, but only deletions and the like may use it.
            metadata_free: info
                .metadata
                .free()
                .saturating_sub(info.global_reserve.total),
        })
    };
    read().context(Snafu { path: root })
}
