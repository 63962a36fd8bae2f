//! Life of a branch on disk: snapshot, tombstone, gone. Every function blocks.

use std::{
    ffi::OsStr,
    fs, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use branchpool_sys::btrfs;
use rustix::{
    fs::{AtFlags, CWD, RenameFlags},
    io::Errno,
};
use snafu::{ResultExt, Snafu, ensure};

use super::{
    ids::{BranchId, NodeKey, PoolUid},
    layout::Layout,
};

/// Left behind by the server that the image was made with; they would stop a clone's start or
/// make it a wrong one.
const STALE_FILES: [&str; 2] = ["postmaster.pid", "postmaster.opts"];

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display(
        "there is no golden image {path:?}; it has to be built before branches are made of it"
    ))]
    NoImage { path: PathBuf },
    #[snafu(display(
        "the golden image {path:?} is not a read-only subvolume, so its content may have \
         changed; build a new generation"
    ))]
    NotSealed { path: PathBuf },
    #[snafu(display("the branch {id} exists already; make another id"))]
    Exists { id: BranchId },
    #[snafu(display(
        "the filesystem has no space left for {action} {path:?}; delete data or enlarge it"
    ))]
    NoSpace { action: &'static str, path: PathBuf },
    #[snafu(display(
        "{path:?} is not a subvolume that this agent made; it is left alone, move it elsewhere"
    ))]
    NotOurs { path: PathBuf },
    #[snafu(display(
        "{path:?} is to become the tombstone {id}, but there is one of that name already"
    ))]
    TombstoneTaken { path: PathBuf, id: BranchId },
    #[snafu(display("{action} {path:?} failed: {source}"))]
    Failed {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

/// What [`Branches::delete_tombstone`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deletion {
    /// Deleted now, with this many subvolumes nested in it.
    Deleted { nested: usize },
    /// It was gone before.
    Absent,
}

/// Makes and removes branches below one [`Layout`].
#[derive(Clone, Debug)]
pub struct Branches {
    layout: Layout,
    key: NodeKey,
}

impl Branches {
    pub fn new(layout: Layout, key: NodeKey) -> Self {
        Self { layout, key }
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn key(&self) -> &NodeKey {
        &self.key
    }

    pub fn new_id(&self) -> BranchId {
        BranchId::generate(&self.key, &mut rand::rng())
    }

    /// Makes a branch out of a sealed image, and returns its directory.
    ///
    /// Fails with [`Error::Exists`] when there is a branch of that name, and then nothing changed.
    pub fn snapshot(
        &self,
        pool: &PoolUid,
        generation: u64,
        id: &BranchId,
    ) -> Result<PathBuf, Error> {
        const ACTION: &str = "making a snapshot of";
        let path = self.layout.golden_generation(pool, generation);
        let image = match btrfs::open_dir(&path) {
            Err(error) if is_absent(&error) => return NoImageSnafu { path }.fail(),
            other => other.context(FailedSnafu {
                action: "opening",
                path: &path,
            })?,
        };
        let sealed = btrfs::is_subvolume(&image)
            .and_then(|yes| Ok(yes && btrfs::is_read_only(&image)?))
            .context(FailedSnafu {
                action: "examining",
                path: &path,
            })?;
        ensure!(sealed, NotSealedSnafu { path });

        let shard = open(&self.layout.branch_shard(id))?;
        match btrfs::snapshot(&image, &shard, OsStr::new(id.as_str()), false) {
            Ok(()) => {}
            Err(error) if is(&error, Errno::EXIST) => return ExistsSnafu { id: *id }.fail(),
            Err(error) => return Err(failed(ACTION, &path, error)),
        }
        let branch = self.layout.branch(id);
        remove_stale_files(&branch)?;
        Ok(branch)
    }

    /// Turns a branch into a tombstone. Done already or no such branch: no error.
    pub fn trash_branch(&self, id: &BranchId) -> Result<(), Error> {
        self.trash(&self.layout.branch(id), id)
    }

    /// Turns a sealed image into a tombstone of the given, new name. No such image: no error.
    pub fn trash_golden(
        &self,
        pool: &PoolUid,
        generation: u64,
        tombstone: &BranchId,
    ) -> Result<(), Error> {
        self.trash(&self.layout.golden_generation(pool, generation), tombstone)?;
        // The last generation takes the pool's directory along.
        let parent = self.layout.golden_pool(pool);
        match fs::remove_dir(&parent) {
            Err(error) if !is_absent(&error) && !is(&error, Errno::NOTEMPTY) => {
                Err(failed("removing", &parent, error))
            }
            _ => Ok(()),
        }
    }

    /// Turns an unfinished image into a tombstone of the given, new name. None there: no error.
    pub fn trash_building(
        &self,
        pool: &PoolUid,
        generation: u64,
        tombstone: &BranchId,
    ) -> Result<(), Error> {
        self.trash(
            &self.layout.building_generation(pool, generation),
            tombstone,
        )
    }

    fn trash(&self, path: &Path, id: &BranchId) -> Result<(), Error> {
        let target = self.layout.tombstone(id);
        ensure!(id.is_authentic(&self.key), NotOursSnafu { path: target });
        let subvolume = match btrfs::open_dir(path) {
            Err(error) if is_absent(&error) => return Ok(()),
            Err(error) if is(&error, Errno::NOTDIR) => return NotOursSnafu { path }.fail(),
            other => other.context(FailedSnafu {
                action: "opening",
                path,
            })?,
        };
        self.ensure_subvolume(&subvolume, path)?;
        // A read-only subvolume cannot change its parent directory.
        btrfs::set_read_only(&subvolume, false)
            .map_err(|error| failed("clearing the read-only flag of", path, error))?;
        drop(subvolume);
        match rustix::fs::renameat_with(CWD, path, CWD, &target, RenameFlags::NOREPLACE) {
            // Absent: another call was faster.
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::EXIST) => TombstoneTakenSnafu { path, id: *id }.fail(),
            Err(error) => Err(failed("moving to the trash", path, error.into())),
        }
    }

    /// Deletes a tombstone and all subvolumes nested in it. The space comes back when nothing
    /// below it is open and the filesystem's cleaner has run: see [`Branches::kick_cleaner`].
    ///
    /// Fails with [`Error::NotOurs`], and touches nothing, when the name was not made by this
    /// agent or is not a subvolume.
    pub fn delete_tombstone(&self, id: &BranchId) -> Result<Deletion, Error> {
        const ACTION: &str = "deleting";
        let path = self.layout.tombstone(id);
        ensure!(id.is_authentic(&self.key), NotOursSnafu { path });
        let subvolume = match btrfs::open_dir(&path) {
            Err(error) if is_absent(&error) => return Ok(Deletion::Absent),
            Err(error) if is(&error, Errno::NOTDIR) || is(&error, Errno::LOOP) => {
                return NotOursSnafu { path }.fail();
            }
            other => other.context(FailedSnafu {
                action: "opening",
                path: &path,
            })?,
        };
        self.ensure_subvolume(&subvolume, &path)?;
        // An open descriptor would keep the space of what is deleted.
        drop(subvolume);

        let shard = open(&self.layout.trash_shard(id))?;
        let name = OsStr::new(id.as_str());
        let mut nested = 0;
        let result = match btrfs::delete(&shard, name) {
            Err(error) if is(&error, Errno::NOTEMPTY) => {
                let subvolume = open(&path)?;
                nested = btrfs::delete_nested(&subvolume)
                    .map_err(|error| failed("deleting what is nested in", &path, error))?;
                drop(subvolume);
                btrfs::delete(&shard, name)
            }
            other => other,
        };
        match result {
            Ok(()) => Ok(Deletion::Deleted { nested }),
            Err(error) if is_absent(&error) => Ok(Deletion::Absent),
            Err(error) => Err(failed(ACTION, &path, error)),
        }
    }

    /// Writes everything and commits, which makes deletions durable, and wakes the cleaner.
    pub fn reclaim(&self) -> Result<(), Error> {
        let root = open(self.layout.root())?;
        btrfs::sync(&root).map_err(|error| failed("committing", self.layout.root(), error))
    }

    /// Starts a commit, after which the cleaner runs. Returns when the commit has begun: mostly at
    /// once, but when another commit comes in between not before the filesystem's own next one.
    pub fn kick_cleaner(&self) -> Result<(), Error> {
        let root = open(self.layout.root())?;
        btrfs::start_sync(&root)
            .map(drop)
            .map_err(|error| failed("starting a commit of", self.layout.root(), error))
    }

    fn ensure_subvolume(&self, directory: &OwnedFd, path: &Path) -> Result<(), Error> {
        let is_subvolume = btrfs::is_subvolume(directory).context(FailedSnafu {
            action: "examining",
            path,
        })?;
        // The whole filesystem is a subvolume as well, and a link could lead elsewhere.
        let is_below = path.starts_with(self.layout.root());
        ensure!(is_subvolume && is_below, NotOursSnafu { path });
        Ok(())
    }
}

/// Only for a clone whose server never ran: elsewhere such a file may speak of a live server.
fn remove_stale_files(branch: &Path) -> Result<(), Error> {
    let directory = open(branch)?;
    for name in STALE_FILES {
        match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(failed("removing", &branch.join(name), error.into())),
        }
    }
    Ok(())
}

fn open(path: &Path) -> Result<OwnedFd, Error> {
    btrfs::open_dir(path).map_err(|error| failed("opening", path, error))
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> Error {
    if is(&source, Errno::NOSPC) || is(&source, Errno::DQUOT) {
        Error::NoSpace {
            action,
            path: path.into(),
        }
    } else {
        Error::Failed {
            action,
            path: path.into(),
            source,
        }
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

fn is_absent(error: &io::Error) -> bool {
    is(error, Errno::NOENT)
}
