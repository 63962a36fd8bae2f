//! Storage on a real Btrfs filesystem. Needs root and btrfs-progs.

#![allow(clippy::unwrap_used)]

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use branchpool_agent::storage::{BranchId, Branches, Layout, NodeKey, PoolUid, Scan};
use branchpool_sys::btrfs;

mod branches;
#[path = "../loop_btrfs/mod.rs"]
mod loop_btrfs;
mod loopfile;
mod names;
mod own_bytes;
mod preflight;
mod scan;

use loop_btrfs::LoopBtrfs;

const SIZE: u64 = 1 << 30;

struct Fixture {
    branches: Branches,
    pool: PoolUid,
    // Last: everything else is gone when it is unmounted.
    btrfs: LoopBtrfs,
}

impl Fixture {
    /// With a sealed image of generation 1 that looks like a data directory.
    fn new() -> Self {
        let btrfs = LoopBtrfs::new(SIZE);
        let layout = Layout::new(btrfs.root(), btrfs.outside().join("run")).unwrap();
        layout.create().unwrap();
        let key = NodeKey::load_or_create(&layout.node_key()).unwrap();
        let pool: PoolUid = "8e0cf1c0-1111-4222-8333-444455556666".parse().unwrap();
        fs::create_dir(layout.golden_pool(&pool)).unwrap();
        let image = layout.golden_generation(&pool, 1);
        create_subvolume(&image);
        fs::write(image.join("PG_VERSION"), "15\n").unwrap();
        fs::write(image.join("postmaster.pid"), "1\n").unwrap();
        fs::write(image.join("postmaster.opts"), "postgres\n").unwrap();
        fs::create_dir(image.join("base")).unwrap();
        fs::write(image.join("base/1"), vec![7; 1 << 20]).unwrap();
        set_read_only(&image, true);
        Self {
            branches: Branches::new(layout, key),
            pool,
            btrfs,
        }
    }

    fn layout(&self) -> &Layout {
        self.branches.layout()
    }

    fn branch(&self) -> BranchId {
        let id = self.branches.new_id();
        self.branches.snapshot(&self.pool, 1, &id).unwrap();
        id
    }

    fn tombstone(&self) -> BranchId {
        let id = self.branch();
        self.branches.trash_branch(&id).unwrap();
        id
    }

    fn scan(&self) -> Scan {
        Scan::read(self.layout(), self.branches.key()).unwrap()
    }
}

fn create_subvolume(path: &Path) {
    let parent = btrfs::open_dir(path.parent().unwrap()).unwrap();
    btrfs::create_subvolume(&parent, path.file_name().unwrap()).unwrap();
}

fn set_read_only(path: &Path, read_only: bool) {
    btrfs::set_read_only(btrfs::open_dir(path).unwrap(), read_only).unwrap();
}

fn info(path: &Path) -> btrfs::Info {
    btrfs::info(btrfs::open_dir(path).unwrap()).unwrap()
}

/// As btrfs-progs sees the filesystem, by path below its root.
fn subvolumes(root: &Path) -> BTreeSet<String> {
    let output = Command::new("btrfs")
        .args(["subvolume", "list"])
        .arg(root)
        .output()
        .unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .map(|line| line.split_once(" path ").unwrap().1.to_owned())
        .collect()
}
