//! What is on disk, compared with nothing: one pass over the agent's directories.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

use branchpool_sys::btrfs::{self, Info};
use snafu::{ResultExt, Snafu};

use super::{
    ids::{BranchId, NodeKey, PoolUid},
    layout::{Layout, shard, shard_names},
};

/// Strays that are named; more are only counted.
pub const MAX_STRAYS: usize = 1000;

#[derive(Debug, Snafu)]
#[snafu(display("cannot read the directory {path:?}: {source}; check its permissions"))]
pub struct Error {
    path: PathBuf,
    source: io::Error,
}

/// A branch or a tombstone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub id: BranchId,
    pub info: Info,
}

/// An image. A sealed one is read-only; one in `golden` that is not was interrupted in between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    pub pool: PoolUid,
    pub generation: u64,
    pub info: Info,
}

/// Something that the agent did not put there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stray {
    pub path: PathBuf,
    pub why: Why,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The name is not of the form that belongs there.
    Name,
    /// The name has the form of an id, but not the tag of this node's key.
    NotAuthentic,
    /// The name belongs into another shard.
    WrongShard,
    /// A plain file or directory, a link, or something that cannot be read.
    NotASubvolume,
}

impl std::fmt::Display for Why {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Name => "its name is none that the agent gives",
            Self::NotAuthentic => "its name was not made with this node's key",
            Self::WrongShard => "it lies in the wrong shard",
            Self::NotASubvolume => "it is not a subvolume",
        })
    }
}

/// Everything below `branches`, `trash`, `golden` and `building`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    pub branches: Vec<Entry>,
    pub tombstones: Vec<Entry>,
    pub golden: Vec<Image>,
    pub building: Vec<Image>,
    /// At most [`MAX_STRAYS`].
    pub strays: Vec<Stray>,
    pub stray_count: usize,
}

impl Scan {
    /// Reads the directories of a layout. What vanishes meanwhile is left out. Blocks.
    ///
    /// Fails when one of the directories cannot be read; never because of what is in it.
    pub fn read(layout: &Layout, key: &NodeKey) -> Result<Self, Error> {
        let mut scan = Self::default();
        scan.branches = scan.read_shards(&layout.branches(), key)?;
        scan.tombstones = scan.read_shards(&layout.trash(), key)?;
        scan.read_golden(&layout.golden())?;
        scan.read_building(&layout.building())?;
        Ok(scan)
    }

    fn read_shards(&mut self, parent: &Path, key: &NodeKey) -> Result<Vec<Entry>, Error> {
        let mut entries = Vec::new();
        for (name, path) in names(parent)? {
            let known = shard_names().into_iter().find(|shard| name == *shard);
            match known {
                Some(shard) if is_plain_directory(&path) => {
                    self.read_shard(shard, &path, key, &mut entries)?;
                }
                Some(_) | None => self.stray(path, Why::Name),
            }
        }
        entries.sort_by_key(|entry| entry.id);
        Ok(entries)
    }

    fn read_shard(
        &mut self,
        shard_name: &str,
        directory: &Path,
        key: &NodeKey,
        entries: &mut Vec<Entry>,
    ) -> Result<(), Error> {
        for (name, path) in names(directory)? {
            let id = name.to_str().and_then(|name| name.parse::<BranchId>().ok());
            match id {
                None => self.stray(path, Why::Name),
                Some(id) if !id.is_authentic(key) => self.stray(path, Why::NotAuthentic),
                Some(id) if shard(&id) != shard_name => self.stray(path, Why::WrongShard),
                Some(id) => {
                    if let Some(info) = self.subvolume(path) {
                        entries.push(Entry { id, info });
                    }
                }
            }
        }
        Ok(())
    }

    fn read_golden(&mut self, parent: &Path) -> Result<(), Error> {
        for (name, path) in names(parent)? {
            let pool = name.to_str().and_then(|name| name.parse::<PoolUid>().ok());
            match pool {
                Some(pool) if is_plain_directory(&path) => {
                    for (name, path) in names(&path)? {
                        match name.to_str().and_then(parse_generation) {
                            Some(generation) => {
                                let pool = pool.clone();
                                let image = self.subvolume(path).map(|info| Image {
                                    pool,
                                    generation,
                                    info,
                                });
                                self.golden.extend(image);
                            }
                            None => self.stray(path, Why::Name),
                        }
                    }
                }
                Some(_) | None => self.stray(path, Why::Name),
            }
        }
        self.golden
            .sort_by(|a, b| (&a.pool, a.generation).cmp(&(&b.pool, b.generation)));
        Ok(())
    }

    fn read_building(&mut self, parent: &Path) -> Result<(), Error> {
        for (name, path) in names(parent)? {
            let parsed = name.to_str().and_then(|name| {
                let (pool, generation) = name.rsplit_once('-')?;
                Some((pool.parse::<PoolUid>().ok()?, parse_generation(generation)?))
            });
            match parsed {
                Some((pool, generation)) => {
                    let image = self.subvolume(path).map(|info| Image {
                        pool,
                        generation,
                        info,
                    });
                    self.building.extend(image);
                }
                None => self.stray(path, Why::Name),
            }
        }
        self.building
            .sort_by(|a, b| (&a.pool, a.generation).cmp(&(&b.pool, b.generation)));
        Ok(())
    }

    /// The subvolume's information; what is none becomes a stray.
    fn subvolume(&mut self, path: PathBuf) -> Option<Info> {
        let examine = || -> io::Result<Option<Info>> {
            let directory = btrfs::open_dir(&path)?;
            if btrfs::is_subvolume(&directory)? {
                btrfs::info(&directory).map(Some)
            } else {
                Ok(None)
            }
        };
        match examine() {
            Ok(Some(info)) => Some(info),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Ok(None) | Err(_) => {
                self.stray(path, Why::NotASubvolume);
                None
            }
        }
    }

    fn stray(&mut self, path: PathBuf, why: Why) {
        self.stray_count += 1;
        if self.strays.len() < MAX_STRAYS {
            self.strays.push(Stray { path, why });
        }
    }
}

/// Generations are written without leading zeros, so that each has one name.
fn parse_generation(text: &str) -> Option<u64> {
    let generation = text.parse::<u64>().ok()?;
    (generation.to_string() == text).then_some(generation)
}

fn is_plain_directory(path: &Path) -> bool {
    let kind = btrfs::open_dir(path).and_then(|directory| btrfs::kind(&directory));
    matches!(kind, Ok(btrfs::Kind::Directory))
}

fn names(directory: &Path) -> Result<Vec<(OsString, PathBuf)>, Error> {
    let read = || -> io::Result<Vec<(OsString, PathBuf)>> {
        fs::read_dir(directory)?
            .map(|entry| entry.map(|entry| (entry.file_name(), entry.path())))
            .collect()
    };
    read().context(Snafu { path: directory })
}
