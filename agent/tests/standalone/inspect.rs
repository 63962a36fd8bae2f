//! What a node has on disk, in its run directory and among the machine's processes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use branchpool_agent::storage::loopfile::LoopFile;
use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};

use crate::node::Node;

/// Everything that belongs to branches, by place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inventory {
    pub(crate) branches: BTreeSet<String>,
    pub(crate) trash: BTreeSet<String>,
    pub(crate) run_dirs: BTreeSet<String>,
    pub(crate) addresses: BTreeSet<String>,
    pub(crate) logs: BTreeSet<String>,
    pub(crate) building: BTreeSet<String>,
    pub(crate) golden: BTreeSet<String>,
    pub(crate) servers: usize,
    /// Mounts of data directories.
    pub(crate) mounts: usize,
}

impl Inventory {
    pub(crate) fn of(node: &Node) -> Self {
        let root = node.root();
        let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", node.supervisor_pid()));
        let place = node.image().parent().unwrap().join("root/mnt/");
        let place = place.to_string_lossy().into_owned();
        Self {
            branches: shards(&root.join("branches")),
            trash: shards(&root.join("trash")),
            run_dirs: names(&node.run_dir().join("b")),
            addresses: names(&node.run_dir().join("e")),
            logs: names(&root.join("logs")),
            building: names(&root.join("building")),
            golden: names(&root.join("golden"))
                .iter()
                .filter(|pool| root.join("golden").join(pool).is_dir())
                .flat_map(|pool| {
                    let images = names(&root.join("golden").join(pool));
                    images
                        .into_iter()
                        .map(move |image| format!("{pool}/{image}"))
                })
                .collect(),
            servers: node.postmasters().len(),
            mounts: mounts
                .unwrap()
                .lines()
                .filter(|line| line.contains(&place))
                .count(),
        }
    }

    /// When there are so many addresses and tombstones: addresses come and go a moment after the
    /// status says so and before any answer that names them, and a tombstone that was found at the
    /// start is no pool's.
    pub(crate) fn settled(node: &Node, addresses: usize, tombstones: usize) -> Self {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let inventory = Self::of(node);
            let settled = (addresses, tombstones);
            if (inventory.addresses.len(), inventory.trash.len()) == settled
                || Instant::now() > deadline
            {
                return inventory;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Leaves out what is at these paths below the root.
    pub(crate) fn forget<'a>(&mut self, paths: impl Iterator<Item = &'a str>) {
        for path in paths {
            let (parent, name) = path.split_once('/').unwrap();
            let in_shard = || name.split_once('/').unwrap().1;
            let found = match parent {
                "branches" => self.branches.remove(in_shard()),
                "trash" => self.trash.remove(in_shard()),
                "building" => self.building.remove(name),
                "golden" if name.contains('/') => self.golden.remove(name),
                _ => true,
            };
            assert!(found, "{path} is gone");
        }
    }

    /// One of everything for each branch, and nothing else.
    pub(crate) fn assert_tidy(&self, branches: usize) {
        assert_eq!(self.branches.len(), branches, "branches: {self:#?}");
        assert_eq!(self.servers, branches, "servers: {self:#?}");
        assert_eq!(self.run_dirs, self.branches, "run directories");
        let logs: BTreeSet<String> = self.branches.iter().map(|id| format!("{id}.log")).collect();
        assert_eq!(self.logs, logs, "logs");
        assert_eq!(self.addresses.len(), branches, "addresses: {self:#?}");
        // None for servers that an earlier supervisor started, or without a user for each branch.
        assert!(self.mounts <= branches, "mounts: {self:#?}");
        assert!(self.trash.is_empty(), "tombstones: {:?}", self.trash);
        assert!(self.building.is_empty(), "builds: {:?}", self.building);
        assert_eq!(self.golden.len(), 1, "images: {:?}", self.golden);
    }
}

/// The journal's records by kind and key, of a node that is stopped.
pub(crate) fn journal(node: &Node) -> BTreeMap<(String, String), serde_json::Value> {
    let mounted = Mounted::new(node);
    let journal = rusqlite::Connection::open(mounted.journal()).unwrap();
    let mut statement = journal
        .prepare("SELECT kind, key, value FROM record")
        .unwrap();
    let rows = statement.query_map([], |row| {
        let value: String = row.get(2)?;
        Ok((
            (row.get(0)?, row.get(1)?),
            serde_json::from_str(&value).unwrap(),
        ))
    });
    rows.unwrap().map(Result::unwrap).collect()
}

/// The filesystem of a node that is stopped.
pub(crate) struct Mounted(LoopFile);

impl Mounted {
    pub(crate) fn new(node: &Node) -> Self {
        let place = node.image().with_file_name("edit");
        Self(LoopFile::mount(&node.image(), 1 << 30, &place).unwrap())
    }

    pub(crate) fn journal(&self) -> PathBuf {
        self.0.mount_point().join("state/journal.db")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = self.0.unmount();
        assert!(
            unmounted.is_ok() || std::thread::panicking(),
            "{unmounted:?}"
        );
    }
}

fn shards(parent: &Path) -> BTreeSet<String> {
    let shards = names(parent);
    shards
        .iter()
        .flat_map(|shard| names(&parent.join(shard)))
        .collect()
}

pub(crate) fn names(directory: &Path) -> BTreeSet<String> {
    fs::read_dir(directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()))
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}

impl Node {
    /// Waits until the agent has logged this so often.
    pub(crate) fn wait_logged(&self, text: &str, times: usize) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.log().matches(text).count() < times {
            assert!(
                Instant::now() < deadline,
                "never logged: {text}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The only golden image of a node with one pool.
pub(crate) fn golden_image(node: &Node) -> PathBuf {
    let golden = node.root().join("golden");
    let images: Vec<PathBuf> = names(&golden)
        .iter()
        .flat_map(|pool| {
            let pool = golden.join(pool);
            let images = names(&pool);
            images.into_iter().map(move |image| pool.join(image))
        })
        .collect();
    assert_eq!(images.len(), 1, "{images:?}");
    images[0].clone()
}

/// Names, kinds, owners, modes, sizes, times of change and contents of everything below a directory.
pub(crate) fn digest(directory: &Path) -> String {
    let mut hash = Sha256::new();
    add(&mut hash, directory, Path::new(""));
    HEXLOWER.encode(&hash.finalize())
}

fn add(hash: &mut Sha256, base: &Path, relative: &Path) {
    let path = base.join(relative);
    let metadata = fs::symlink_metadata(&path).unwrap();
    let (uid, gid) = (metadata.uid(), metadata.gid());
    let mode = metadata.permissions().mode();
    let (mtime, nanoseconds) = (metadata.mtime(), metadata.mtime_nsec());
    hash.update(relative.as_os_str().as_encoded_bytes());
    hash.update(format!(" {mode:o} {uid} {gid} {mtime}.{nanoseconds}\n").as_bytes());
    let kind = metadata.file_type();
    if kind.is_dir() {
        for name in names(&path) {
            add(hash, base, &relative.join(name));
        }
    } else if kind.is_symlink() {
        hash.update(fs::read_link(&path).unwrap().as_os_str().as_encoded_bytes());
    } else if kind.is_file() {
        let content = fs::read(&path).unwrap();
        hash.update(content.len().to_le_bytes());
        hash.update(content);
    } else {
        assert!(
            kind.is_socket() || kind.is_fifo(),
            "{} is a device",
            path.display()
        );
    }
}

/// When a process was started, in clock ticks since the machine's start.
pub(crate) fn start_time(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_name = stat.rsplit_once(')').unwrap().1;
    // The 22nd field; the state after the name is the 3rd.
    after_name
        .split_whitespace()
        .nth(19)
        .unwrap()
        .parse()
        .unwrap()
}
