//! Bind mounts in which the files of one user appear as those of another.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::CWD,
    io::Errno,
    mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree},
};
use snafu::{ResultExt, Snafu};

pub use crate::namespace::Ids;
use crate::{namespace, raw};

/// How many mounts may lie over each other on one target before `unmount` gives up.
const STACKED_MAX: usize = 64;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot map ids for a mount"))]
    UserNamespace { source: namespace::Error },
    #[snafu(display("cannot copy the mount of {}: does it exist?", path.display()))]
    Copy { path: PathBuf, source: io::Error },
    #[snafu(display(
        "cannot map the ids of {}: its filesystem has to allow idmapped mounts (Btrfs: Linux 5.15)",
        path.display()
    ))]
    MapIds { path: PathBuf, source: io::Error },
    #[snafu(display("cannot mount at {}: it has to be a directory", path.display()))]
    Attach { path: PathBuf, source: io::Error },
    #[snafu(display("cannot unmount {}", path.display()))]
    Unmount { path: PathBuf, source: io::Error },
}

/// Makes idmapped mounts and keeps the user namespaces that they need, a bounded number of them.
#[derive(Debug)]
pub struct IdMounts {
    namespaces: VecDeque<((Ids, Ids), OwnedFd)>,
    capacity: usize,
}

impl IdMounts {
    /// `capacity`: how many descriptors of user namespaces to keep, at least one.
    pub fn new(capacity: usize) -> Self {
        Self {
            namespaces: VecDeque::new(),
            capacity: capacity.max(1),
        }
    }

    /// Replaces what is mounted at `target` by `source`, with files of `on_disk` seen as `inside`'s
    /// and the other way round. Files of others cannot be changed through it by anyone.
    pub fn mount(
        &mut self,
        source: &Path,
        target: &Path,
        on_disk: Ids,
        inside: Ids,
    ) -> Result<(), Error> {
        let tree = detached(source)?;
        let namespace = self.namespace(on_disk, inside)?;
        raw::map_ids(tree.as_fd(), namespace.as_fd()).context(MapIdsSnafu { path: source })?;
        unmount(target)?;
        move_mount(
            &tree,
            "",
            CWD,
            target,
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
        )
        .map_err(io::Error::from)
        .context(AttachSnafu { path: target })
    }

    fn namespace(&mut self, on_disk: Ids, inside: Ids) -> Result<&OwnedFd, Error> {
        let key = (on_disk, inside);
        if let Some(at) = self.namespaces.iter().position(|(known, _)| *known == key) {
            return Ok(&self.namespaces[at].1);
        }
        if self.namespaces.len() >= self.capacity {
            self.namespaces.pop_front();
        }
        let made = namespace::user(on_disk, inside).context(UserNamespaceSnafu)?;
        Ok(&self.namespaces.push_back_mut((key, made)).1)
    }
}

fn detached(source: &Path) -> Result<OwnedFd, Error> {
    open_tree(
        CWD,
        source,
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
    )
    .map_err(io::Error::from)
    .context(CopySnafu { path: source })
}

/// Whether a directory's filesystem allows idmapped mounts, tried on a mount that nobody sees.
pub(crate) fn try_map(directory: &Path) -> Result<(), Error> {
    let ids = |id| Ids { uid: id, gid: id };
    let tree = detached(directory)?;
    let namespace = namespace::user(ids(1), ids(2)).context(UserNamespaceSnafu)?;
    raw::map_ids(tree.as_fd(), namespace.as_fd()).context(MapIdsSnafu { path: directory })
}

/// Detaches all that is mounted at `target`. Not mounted, or not there, is no error. Processes that
/// have files open below keep them.
pub fn unmount(target: &Path) -> Result<(), Error> {
    for _ in 0..STACKED_MAX {
        match rustix::mount::unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(error) => return Err(error.into()).context(UnmountSnafu { path: target }),
        }
    }
    Err(Errno::LOOP.into()).context(UnmountSnafu { path: target })
}
