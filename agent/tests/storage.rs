//! Storage on a real Btrfs filesystem. Needs root and btrfs-progs.

#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Instant,
};

use branchpool_agent::{
    preflight::filesystem::{self, Warning},
    storage::{
        BranchId, Branches, Deletion, EndpointId, Layout, NodeKey, PoolUid, Scan,
        branches::Error,
        layout::{self, MAX_SOCKET_PATH},
        loopfile::{self, LoopFile},
        scan::{MAX_STRAYS, Why},
        space,
    },
};
use branchpool_sys::btrfs;

mod loop_btrfs;
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

#[test]
fn concurrent_snapshots_are_all_made_and_differ() {
    const THREADS: usize = 16;
    const EACH: usize = 13;
    let fixture = Fixture::new();
    let before = info(&fixture.layout().golden_generation(&fixture.pool, 1));
    let begin = Instant::now();
    let ids: Vec<BranchId> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| scope.spawn(|| (0..EACH).map(|_| fixture.branch()).collect::<Vec<_>>()))
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    let rate = (THREADS * EACH) as f64 / begin.elapsed().as_secs_f64();
    println!("{THREADS} threads: {rate:.0} snapshots/s");

    let distinct: BTreeSet<_> = ids.iter().copied().collect();
    assert_eq!(distinct.len(), THREADS * EACH);
    let scan = fixture.scan();
    assert_eq!(
        scan.branches
            .iter()
            .map(|entry| entry.id)
            .collect::<BTreeSet<_>>(),
        distinct
    );
    assert!(
        scan.branches
            .iter()
            .all(|entry| entry.info.parent_uuid == before.uuid)
    );
    assert!(scan.branches.iter().all(|entry| !entry.info.read_only));
    assert_eq!(scan.stray_count, 0);
    let shards: BTreeSet<_> = ids.iter().map(layout::shard).collect();
    assert!(
        shards.len() > 8,
        "ids should spread over the shards: {shards:?}"
    );
}

#[test]
fn golden_image_stays_the_same_under_snapshots_and_writes() {
    let fixture = Fixture::new();
    let image = fixture.layout().golden_generation(&fixture.pool, 1);
    btrfs::sync(btrfs::open_dir(&image).unwrap()).unwrap();
    let before = info(&image);
    assert!(before.read_only);
    let content = fs::read(image.join("base/1")).unwrap();
    for round in 0..8_u8 {
        let branch = fixture.layout().branch(&fixture.branch());
        fs::write(branch.join("base/1"), vec![round; 1 << 20]).unwrap();
        fs::remove_file(branch.join("PG_VERSION")).unwrap();
        fs::write(branch.join("new"), "new").unwrap();
        btrfs::sync(btrfs::open_dir(&branch).unwrap()).unwrap();
    }
    // Making a snapshot of it writes its root, which is no change of what it holds.
    let after = info(&image);
    assert_eq!(
        btrfs::Info {
            generation: before.generation,
            ..after
        },
        before
    );
    assert_eq!(fs::read(image.join("base/1")).unwrap(), content);
    assert!(fs::write(image.join("base/1"), "x").is_err());
    // The same comparison sees a change.
    set_read_only(&image, false);
    fs::write(image.join("base/1"), "x").unwrap();
    set_read_only(&image, true);
    btrfs::sync(btrfs::open_dir(&image).unwrap()).unwrap();
    assert_ne!(info(&image).changed, before.changed);
}

#[test]
fn stale_files_are_removed_from_the_clone_only() {
    let fixture = Fixture::new();
    let branch = fixture.layout().branch(&fixture.branch());
    assert!(branch.join("PG_VERSION").exists());
    assert!(!branch.join("postmaster.pid").exists());
    assert!(!branch.join("postmaster.opts").exists());
    assert!(
        fixture
            .layout()
            .golden_generation(&fixture.pool, 1)
            .join("postmaster.pid")
            .exists()
    );
}

#[test]
fn snapshot_fails_clearly() {
    let fixture = Fixture::new();
    let id = fixture.branch();
    let marker = fixture.layout().branch(&id).join("marker");
    fs::write(&marker, "").unwrap();
    let error = fixture
        .branches
        .snapshot(&fixture.pool, 1, &id)
        .unwrap_err();
    assert!(matches!(error, Error::Exists { .. }), "{error}");
    assert!(marker.exists());

    let id = fixture.branches.new_id();
    let error = fixture
        .branches
        .snapshot(&fixture.pool, 2, &id)
        .unwrap_err();
    assert!(matches!(error, Error::NoImage { .. }), "{error}");

    set_read_only(&fixture.layout().golden_generation(&fixture.pool, 1), false);
    let error = fixture
        .branches
        .snapshot(&fixture.pool, 1, &id)
        .unwrap_err();
    assert!(matches!(error, Error::NotSealed { .. }), "{error}");

    fs::create_dir(fixture.layout().golden_generation(&fixture.pool, 3)).unwrap();
    let error = fixture
        .branches
        .snapshot(&fixture.pool, 3, &id)
        .unwrap_err();
    assert!(matches!(error, Error::NotSealed { .. }), "{error}");
    assert!(!fixture.layout().branch(&id).exists());
}

#[test]
fn every_step_of_a_removal_can_be_repeated() {
    let fixture = Fixture::new();
    let id = fixture.branch();
    for _ in 0..2 {
        fixture.branches.trash_branch(&id).unwrap();
        assert!(!fixture.layout().branch(&id).exists());
        assert!(fixture.layout().tombstone(&id).exists());
    }
    let deleted = fixture.branches.delete_tombstone(&id).unwrap();
    assert_eq!(deleted, Deletion::Deleted { nested: 0 });
    assert_eq!(
        fixture.branches.delete_tombstone(&id).unwrap(),
        Deletion::Absent
    );
    fixture.branches.trash_branch(&id).unwrap();
    fixture.branches.kick_cleaner().unwrap();
    fixture.branches.kick_cleaner().unwrap();
    assert!(
        !subvolumes(fixture.btrfs.root())
            .iter()
            .any(|path| path.contains(id.as_str()))
    );
}

#[test]
fn read_only_branch_left_by_a_crash_is_removed() {
    let fixture = Fixture::new();
    let id = fixture.branch();
    set_read_only(&fixture.layout().branch(&id), true);
    fixture.branches.trash_branch(&id).unwrap();
    // As a crash before the rename would leave it, but already in the trash.
    set_read_only(&fixture.layout().tombstone(&id), true);
    let deleted = fixture.branches.delete_tombstone(&id).unwrap();
    assert_eq!(deleted, Deletion::Deleted { nested: 0 });
}

#[test]
fn images_become_tombstones() {
    let fixture = Fixture::new();
    let layout = fixture.layout();
    create_subvolume(&layout.building_generation(&fixture.pool, 2));
    let (golden, building) = (fixture.branches.new_id(), fixture.branches.new_id());
    for _ in 0..2 {
        fixture
            .branches
            .trash_golden(&fixture.pool, 1, &golden)
            .unwrap();
        fixture
            .branches
            .trash_building(&fixture.pool, 2, &building)
            .unwrap();
    }
    assert!(!layout.golden_pool(&fixture.pool).exists());
    let scan = fixture.scan();
    assert!(scan.golden.is_empty() && scan.building.is_empty());
    let tombstones: BTreeSet<_> = scan.tombstones.iter().map(|entry| entry.id).collect();
    assert_eq!(tombstones, BTreeSet::from([golden, building]));
    fixture.branches.delete_tombstone(&golden).unwrap();
    fixture.branches.delete_tombstone(&building).unwrap();
    assert!(subvolumes(fixture.btrfs.root()).is_empty());
}

#[test]
fn pool_directory_stays_while_it_holds_another_generation() {
    let fixture = Fixture::new();
    let next = fixture.layout().golden_generation(&fixture.pool, 2);
    create_subvolume(&next);
    fixture
        .branches
        .trash_golden(&fixture.pool, 1, &fixture.branches.new_id())
        .unwrap();
    assert!(next.exists());
}

#[test]
fn nested_subvolumes_go_children_first() {
    let fixture = Fixture::new();
    let id = fixture.branch();
    let branch = fixture.layout().branch(&id);
    // Deep, in a chain, read-only in the middle, and below plain directories.
    let deep = branch.join("base/a/b");
    fs::create_dir_all(&deep).unwrap();
    for path in [
        branch.join("one"),
        deep.join("two"),
        deep.join("two/three"),
        deep.join("two/three/four"),
        branch.join("five"),
    ] {
        create_subvolume(&path);
    }
    set_read_only(&deep.join("two/three"), true);
    set_read_only(&deep.join("two"), true);
    set_read_only(&branch.join("five"), true);
    fixture.branches.trash_branch(&id).unwrap();
    let children = btrfs::children(btrfs::open_dir(&fixture.layout().tombstone(&id)).unwrap());
    assert_eq!(children.unwrap().len(), 3);

    let other = fixture.branch();
    let deleted = fixture.branches.delete_tombstone(&id).unwrap();
    assert_eq!(deleted, Deletion::Deleted { nested: 5 });
    let left = subvolumes(fixture.btrfs.root());
    let golden = format!("golden/{}/1", fixture.pool);
    let branch = format!("branches/{}/{other}", layout::shard(&other));
    assert_eq!(left, BTreeSet::from([golden, branch]));
}

#[test]
fn more_nested_subvolumes_than_one_call_lists() {
    let fixture = Fixture::new();
    let id = fixture.branch();
    let branch = btrfs::open_dir(&fixture.layout().branch(&id)).unwrap();
    for number in 0..300 {
        btrfs::create_subvolume(&branch, OsStr::new(&format!("n{number}"))).unwrap();
    }
    assert_eq!(btrfs::children(&branch).unwrap().len(), 300);
    drop(branch);
    fixture.branches.trash_branch(&id).unwrap();
    let deleted = fixture.branches.delete_tombstone(&id).unwrap();
    assert_eq!(deleted, Deletion::Deleted { nested: 300 });
}

#[test]
fn directory_kinds_are_told_apart() {
    let fixture = Fixture::new();
    let image = fixture.layout().building_generation(&fixture.pool, 9);
    create_subvolume(&image);
    create_subvolume(&image.join("nested"));
    fs::create_dir(image.join("plain")).unwrap();
    let copy = fixture.layout().sources().join("copy");
    let parent = btrfs::open_dir(&fixture.layout().sources()).unwrap();
    btrfs::snapshot(
        btrfs::open_dir(&image).unwrap(),
        &parent,
        OsStr::new("copy"),
        true,
    )
    .unwrap();
    let kind = |path: &Path| btrfs::kind(btrfs::open_dir(path).unwrap()).unwrap();
    assert_eq!(kind(&image), btrfs::Kind::Subvolume);
    assert_eq!(kind(&image.join("nested")), btrfs::Kind::Subvolume);
    assert_eq!(kind(&image.join("plain")), btrfs::Kind::Directory);
    assert_eq!(kind(&copy.join("nested")), btrfs::Kind::Stub);
    assert_eq!(kind(fixture.btrfs.outside()), btrfs::Kind::Other);
    assert!(info(&copy).read_only);
    assert_eq!(info(&copy).parent_uuid, info(&image).uuid);
    assert_eq!(info(&image.join("nested")).parent_id, info(&image).id);
}

#[test]
fn only_own_subvolumes_are_deleted() {
    let fixture = Fixture::new();
    let layout = fixture.layout();
    let refused = |id: &BranchId| {
        let error = fixture.branches.delete_tombstone(id).unwrap_err();
        assert!(matches!(error, Error::NotOurs { .. }), "{error}");
        let metadata = fs::symlink_metadata(layout.tombstone(id));
        assert!(metadata.is_ok(), "{id} should still be there");
    };

    let file = fixture.branches.new_id();
    fs::write(layout.tombstone(&file), "precious").unwrap();
    refused(&file);

    let directory = fixture.branches.new_id();
    fs::create_dir(layout.tombstone(&directory)).unwrap();
    refused(&directory);

    let target = fixture.branch();
    let link = fixture.branches.new_id();
    symlink(layout.branch(&target), layout.tombstone(&link)).unwrap();
    refused(&link);
    assert!(layout.branch(&target).join("PG_VERSION").exists());

    let foreign = BranchId::generate(&NodeKey::from_bytes([9; 32]), &mut rand::rng());
    create_subvolume(&layout.tombstone(&foreign));
    refused(&foreign);

    // The same holds on the way into the trash.
    let file = fixture.branches.new_id();
    fs::write(layout.branch(&file), "precious").unwrap();
    let error = fixture.branches.trash_branch(&file).unwrap_err();
    assert!(matches!(error, Error::NotOurs { .. }), "{error}");
    assert!(layout.branch(&file).exists());
    let error = fixture
        .branches
        .trash_golden(&fixture.pool, 1, &foreign)
        .unwrap_err();
    assert!(matches!(error, Error::NotOurs { .. }), "{error}");
}

#[test]
fn a_tombstone_is_never_replaced() {
    let fixture = Fixture::new();
    let id = fixture.tombstone();
    fixture.branches.snapshot(&fixture.pool, 1, &id).unwrap();
    let error = fixture.branches.trash_branch(&id).unwrap_err();
    assert!(matches!(error, Error::TombstoneTaken { .. }), "{error}");
    assert!(fixture.layout().branch(&id).exists());
}

#[test]
fn strays_are_named_and_left_alone() {
    let fixture = Fixture::new();
    let layout = fixture.layout().clone();
    let branch = fixture.branch();
    let tombstone = fixture.tombstone();
    create_subvolume(&layout.building_generation(&fixture.pool, 12));
    let file = fixture.branches.new_id();
    let moved = fixture.branches.new_id();
    let wrong_shard = layout::shard_names()
        .into_iter()
        .find(|name| *name != layout::shard(&moved));
    let foreign = BranchId::generate(&NodeKey::from_bytes([1; 32]), &mut rand::rng());

    let mut expected: Vec<(PathBuf, Why)> = Vec::new();
    let mut file_at = |path: PathBuf, why| {
        fs::write(&path, "x").unwrap();
        expected.push((path, why));
    };
    file_at(layout.branches().join("notes.txt"), Why::Name);
    file_at(layout.branches().join("00/notes.txt"), Why::Name);
    file_at(layout.branch(&file), Why::NotASubvolume);
    file_at(layout.trash().join("0g"), Why::Name);
    file_at(layout.golden().join("README"), Why::Name);
    file_at(layout.golden_pool(&fixture.pool).join("01"), Why::Name);
    file_at(
        layout.golden_pool(&fixture.pool).join("2"),
        Why::NotASubvolume,
    );
    file_at(layout.building().join("no-generation-x"), Why::Name);
    file_at(layout.building().join("5"), Why::Name);
    let mut subvolume_at = |path: PathBuf, why| {
        create_subvolume(&path);
        expected.push((path, why));
    };
    subvolume_at(layout.tombstone(&foreign), Why::NotAuthentic);
    subvolume_at(
        layout.branches().join(wrong_shard.unwrap()).join(&moved),
        Why::WrongShard,
    );
    subvolume_at(layout.branches().join("stray"), Why::Name);
    subvolume_at(layout.golden().join("subvolume"), Why::Name);

    let scan = fixture.scan();
    assert_eq!(
        scan.branches
            .iter()
            .map(|entry| entry.id)
            .collect::<Vec<_>>(),
        [branch]
    );
    assert_eq!(
        scan.tombstones
            .iter()
            .map(|entry| entry.id)
            .collect::<Vec<_>>(),
        [tombstone]
    );
    assert_eq!(scan.golden.len(), 1);
    assert!(scan.golden[0].info.read_only);
    assert_eq!(scan.building.len(), 1);
    assert_eq!(scan.building[0].generation, 12);
    let mut found: Vec<_> = scan
        .strays
        .into_iter()
        .map(|stray| (stray.path, stray.why))
        .collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    expected.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(found, expected);
    assert_eq!(scan.stray_count, expected.len());
    assert!(expected.iter().all(|(path, _)| path.exists()));
}

#[test]
fn many_strays_are_counted_but_not_all_named() {
    let fixture = Fixture::new();
    for number in 0..MAX_STRAYS + 5 {
        fs::write(fixture.layout().building().join(number.to_string()), "").unwrap();
    }
    let scan = fixture.scan();
    assert_eq!(scan.strays.len(), MAX_STRAYS);
    assert_eq!(scan.stray_count, MAX_STRAYS + 5);
}

#[test]
fn layout_directories_get_their_modes_back() {
    let fixture = Fixture::new();
    let layout = fixture.layout();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    fs::set_permissions(layout.branches(), fs::Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(layout.mounts(), fs::Permissions::from_mode(0o700)).unwrap();
    layout.create().unwrap();
    assert_eq!(mode(&layout.branches()), 0o700);
    assert_eq!(mode(&layout.trash().join("0f")), 0o700);
    assert_eq!(mode(&layout.mounts()), 0o711);
    assert_eq!(mode(&layout.run().join("e")), 0o711);
    assert_eq!(mode(&layout.node_key()), 0o600);

    fs::remove_dir(layout.logs()).unwrap();
    fs::write(layout.logs(), "").unwrap();
    let error = layout.create().unwrap_err();
    assert!(error.to_string().contains("logs"), "{error}");
}

#[test]
fn long_run_directories_are_refused() {
    let fits = |run: &str| Layout::new("/srv", run).is_ok();
    let branch: BranchId = "abcdefghijklm".parse().unwrap();
    let overhead = Layout::new("/srv", "/r")
        .unwrap()
        .branch_socket(&branch)
        .as_os_str()
        .len()
        - 2;
    let longest = MAX_SOCKET_PATH - overhead;
    assert!(fits(&format!("/{}", "r".repeat(longest - 1))));
    let error = Layout::new("/srv", format!("/{}", "r".repeat(longest))).unwrap_err();
    assert!(error.to_string().contains("108 bytes"), "{error}");
    assert!(error.to_string().contains("1 bytes shorter"), "{error}");
    assert!(!fits("run"));
    assert!(!fits("/run/../tmp"));
}

#[test]
fn an_endpoint_leads_to_its_branch() {
    let fixture = Fixture::new();
    let layout = fixture.layout();
    let (endpoint, id) = (EndpointId::generate(&mut rand::rng()), fixture.branch());
    fs::create_dir_all(layout.branch_socket_dir(&id)).unwrap();
    symlink(layout.endpoint_target(&id), layout.endpoint(&endpoint)).unwrap();
    fs::write(layout.branch_socket(&id), "socket").unwrap();
    assert_eq!(
        fs::read(layout.endpoint_socket(&endpoint)).unwrap(),
        b"socket"
    );
}

#[test]
fn node_key_is_made_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("node.key");
    let key = NodeKey::load_or_create(&path).unwrap();
    assert!(NodeKey::load_or_create(&path).unwrap() == key);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    assert_eq!(format!("{key:?}"), "NodeKey(…)");
    fs::write(&path, "short").unwrap();
    let error = NodeKey::load_or_create(&path).unwrap_err();
    assert!(error.to_string().contains("5 bytes"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"short");
}

#[test]
fn space_follows_what_is_written() {
    let fixture = Fixture::new();
    let root = fixture.btrfs.root();
    let before = space::read(root).unwrap();
    assert_eq!(before.total, SIZE);
    assert!(before.unallocated > 0 && before.unallocated < SIZE);
    assert!(before.metadata_free > 0);
    let data: Vec<u8> = (0..32 << 20)
        .map(|byte: u32| (byte.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    fs::write(root.join("data"), data).unwrap();
    btrfs::sync(btrfs::open_dir(root).unwrap()).unwrap();
    let after = space::read(root).unwrap();
    assert!(
        after.used >= before.used + (30 << 20),
        "{before:?} {after:?}"
    );
    assert!(after.free < before.free);
}

#[test]
fn reclaimed_space_returns_after_a_kick() {
    let fixture = Fixture::new();
    let root = fixture.btrfs.root();
    let id = fixture.branch();
    fs::write(fixture.layout().branch(&id).join("big"), vec![1; 64 << 20]).unwrap();
    let directory = btrfs::open_dir(root).unwrap();
    btrfs::sync(&directory).unwrap();
    let full = btrfs::space_info(&directory).unwrap().data.used;
    fixture.branches.trash_branch(&id).unwrap();
    fixture.branches.delete_tombstone(&id).unwrap();
    fixture.branches.kick_cleaner().unwrap();
    let deadline = Instant::now() + std::time::Duration::from_secs(60);
    while btrfs::space_info(&directory).unwrap().data.used + (60 << 20) > full {
        assert!(Instant::now() < deadline, "the space was not reclaimed");
        thread::sleep(std::time::Duration::from_millis(10));
        // What the cleaner freed counts with the commit after it.
        let transaction = btrfs::start_sync(&directory).unwrap();
        btrfs::wait_sync(&directory, transaction).unwrap();
    }
}

#[test]
fn loop_file_is_made_once_and_attached_once() {
    let btrfs = LoopBtrfs::new(SIZE);
    fs::write(btrfs.root().join("kept"), "kept").unwrap();
    let image = btrfs.outside().join("image");
    let loops = |image: &Path| {
        let output = Command::new("losetup")
            .arg("-j")
            .arg(image)
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap().lines().count()
    };
    assert_eq!(loops(&image), 1);

    // Again, elsewhere, and from many threads at once: the same filesystem each time.
    LoopFile::mount(&image, SIZE, btrfs.root()).unwrap();
    let elsewhere: Vec<PathBuf> = (0..4)
        .map(|number| btrfs.outside().join(format!("m{number}")))
        .collect();
    let mounts: Vec<LoopFile> = thread::scope(|scope| {
        let threads: Vec<_> = elsewhere
            .iter()
            .map(|path| scope.spawn(|| LoopFile::mount(&image, SIZE, path).unwrap()))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(loops(&image), 1);
    for mount in &mounts {
        assert_eq!(
            fs::read_to_string(mount.mount_point().join("kept")).unwrap(),
            "kept"
        );
        mount.unmount().unwrap();
        mount.unmount().unwrap();
    }
    assert_eq!(loops(&image), 1);
}

#[test]
fn loop_file_survives_a_remount_and_clears_itself() {
    let directory = tempfile::tempdir().unwrap();
    let (image, point) = (
        directory.path().join("deep/image"),
        directory.path().join("point"),
    );
    let loop_file = LoopFile::mount(&image, SIZE, &point).unwrap();
    fs::write(point.join("kept"), "kept").unwrap();
    let held = fs::File::open(point.join("kept")).unwrap();
    assert!(
        loop_file
            .unmount()
            .unwrap_err()
            .to_string()
            .contains("fuser")
    );
    drop(held);
    loop_file.unmount().unwrap();
    // Another size is not applied to an image that exists.
    let again = LoopFile::mount(&image, 2 * SIZE, &point).unwrap();
    let kept = fs::read_to_string(point.join("kept"));
    let size = fs::metadata(&image).unwrap().len();
    again.unmount().unwrap();
    assert_eq!(kept.unwrap(), "kept");
    assert_eq!(size, SIZE);
}

#[test]
fn partly_made_image_is_made_anew() {
    let directory = tempfile::tempdir().unwrap();
    let (image, point) = (
        directory.path().join("image"),
        directory.path().join("point"),
    );
    let partial = directory.path().join("image.partial");
    fs::write(&partial, vec![1; 1 << 20]).unwrap();
    let loop_file = LoopFile::mount(&image, SIZE, &point).unwrap();
    let left = partial.exists();
    loop_file.unmount().unwrap();
    assert!(!left);
}

#[test]
fn loop_file_refuses_what_it_did_not_make() {
    let directory = tempfile::tempdir().unwrap();
    let (image, point) = (
        directory.path().join("image"),
        directory.path().join("point"),
    );
    let error = LoopFile::mount(&image, 1 << 20, &point).unwrap_err();
    assert!(matches!(error, loopfile::Error::TooSmall { .. }), "{error}");
    assert!(!image.exists());
    fs::write(&image, vec![b'x'; 1 << 20]).unwrap();
    let error = LoopFile::mount(&image, SIZE, &point).unwrap_err();
    assert!(
        matches!(error, loopfile::Error::NotAnImage { .. }),
        "{error}"
    );
    assert_eq!(fs::read(&image).unwrap(), vec![b'x'; 1 << 20]);

    let btrfs = LoopBtrfs::new(SIZE);
    let other = directory.path().join("other");
    let error = LoopFile::mount(&other, SIZE, btrfs.root()).unwrap_err();
    assert!(
        matches!(error, loopfile::Error::MountPointTaken { .. }),
        "{error}"
    );
}

#[test]
fn preflight_accepts_a_btrfs_and_leaves_nothing() {
    let btrfs = LoopBtrfs::new(SIZE);
    // As an interrupted check leaves it.
    create_subvolume(&btrfs.root().join(".branchpool-preflight"));
    let report = filesystem::check(btrfs.root()).unwrap();
    assert_eq!(report.warnings, []);
    assert!(
        report
            .mount_options
            .iter()
            .any(|option| option == "noatime")
    );
    assert_eq!(fs::read_dir(btrfs.root()).unwrap().count(), 0);

    let remount = |options: &str| {
        let status = Command::new("mount")
            .args(["-o", options])
            .arg(btrfs.root())
            .status();
        assert!(status.unwrap().success());
    };
    remount("remount,strictatime,autodefrag");
    let report = filesystem::check(btrfs.root()).unwrap();
    assert_eq!(report.warnings, [Warning::AccessTimes, Warning::AutoDefrag]);

    remount("remount,ro");
    let error = filesystem::check(btrfs.root()).unwrap_err();
    assert!(
        matches!(error, filesystem::Error::ReadOnly { .. }),
        "{error}"
    );
    assert_eq!(error.exit_code(), 78);
}

#[test]
fn preflight_refuses_clearly() {
    let btrfs = LoopBtrfs::new(SIZE);
    let error = filesystem::check(&btrfs.outside().join("nowhere")).unwrap_err();
    assert!(
        matches!(error, filesystem::Error::Missing { .. }),
        "{error}"
    );
    let error = filesystem::check(Path::new("/proc")).unwrap_err();
    assert!(
        matches!(&error, filesystem::Error::NotBtrfs { filesystem, .. } if filesystem == "proc")
    );
    assert_eq!(error.exit_code(), 78);
    fs::set_permissions(btrfs.root(), fs::Permissions::from_mode(0o700)).unwrap();
    let error = filesystem::check(btrfs.root()).unwrap_err();
    assert!(
        matches!(error, filesystem::Error::NotSearchable { mode: 0o700, .. }),
        "{error}"
    );
}

/// Runs the check in a process of its own that `setpriv` takes privileges from.
fn unprivileged_check(root: &Path, privileges: &[&str]) -> String {
    let output = Command::new("setpriv")
        .args(privileges)
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "helper_unprivileged_check",
            "--ignored",
            "--nocapture",
        ])
        .env("BRANCHPOOL_TEST_ROOT", root)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn preflight_says_when_a_privilege_is_missing() {
    let btrfs = LoopBtrfs::new(SIZE);
    let another_user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let text = unprivileged_check(btrfs.root(), &another_user);
    assert!(
        text.contains("exit code 77: no permission for creating a subvolume"),
        "{text}"
    );

    let without_admin = ["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"];
    let text = unprivileged_check(btrfs.root(), &without_admin);
    assert!(
        text.contains("exit code 77: no permission for deleting a subvolume"),
        "{text}"
    );
    assert_eq!(fs::read_dir(btrfs.root()).unwrap().count(), 0);
}

/// Run by the test above.
#[test]
#[ignore = "part of another test"]
fn helper_unprivileged_check() {
    let root = std::env::var_os("BRANCHPOOL_TEST_ROOT").unwrap();
    let error = filesystem::check(Path::new(&root)).unwrap_err();
    println!("exit code {}: {error}", error.exit_code());
}

#[test]
fn branch_ids_prove_their_origin() {
    let (key, other) = (NodeKey::from_bytes([3; 32]), NodeKey::from_bytes([4; 32]));
    for _ in 0..100 {
        let id = BranchId::generate(&key, &mut rand::rng());
        assert!(id.is_authentic(&key));
        assert!(!id.is_authentic(&other));
        for position in 0..id.as_str().len() {
            let mut text = id.to_string();
            let changed = if text.as_bytes()[position] == b'a' {
                "b"
            } else {
                "a"
            };
            text.replace_range(position..=position, changed);
            assert!(
                !text.parse::<BranchId>().unwrap().is_authentic(&key),
                "{text}"
            );
        }
        let json = serde_json::to_string(&id).unwrap();
        assert_eq!(json, format!("\"{id}\""));
        assert_eq!(serde_json::from_str::<BranchId>(&json).unwrap(), id);
    }
}

#[test]
fn names_of_another_form_are_refused() {
    for text in [
        "",
        "abc",
        "abcdefghijklmn",
        "ABCDEFGHIJKLM",
        "abcdefghijkl1",
        "abcdefghijkl/",
        "../../../../e",
        "äbcdefghijkl",
    ] {
        assert!(text.parse::<BranchId>().is_err(), "{text}");
        assert!(text.parse::<EndpointId>().is_err(), "{text}");
        assert!(
            serde_json::from_value::<EndpointId>(text.into()).is_err(),
            "{text}"
        );
    }
    for text in [
        "",
        "-a",
        "a-",
        "A",
        "a/b",
        ".",
        "..",
        "a b",
        &"a".repeat(64),
    ] {
        assert!(text.parse::<PoolUid>().is_err(), "{text}");
    }
    assert!("a".repeat(63).parse::<PoolUid>().is_ok());
    let long = "x"
        .repeat(10_000)
        .parse::<BranchId>()
        .unwrap_err()
        .to_string();
    assert!(long.len() < 300, "{long}");
}

#[test]
fn ids_spread_evenly_over_the_shards() {
    let key = NodeKey::from_bytes([5; 32]);
    let mut counts = [0_usize; layout::SHARDS];
    for _ in 0..layout::SHARDS * 200 {
        let shard = layout::shard(&BranchId::generate(&key, &mut rand::rng()));
        counts[usize::from_str_radix(shard, 16).unwrap()] += 1;
    }
    // Ten standard deviations.
    assert!(
        counts.iter().all(|count| count.abs_diff(200) < 140),
        "{counts:?}"
    );
}

#[test]
fn subvolume_names_are_checked() {
    let btrfs = LoopBtrfs::new(SIZE);
    let root = btrfs::open_dir(btrfs.root()).unwrap();
    for name in ["", ".", "..", "a/b", "nul\0"] {
        let error = btrfs::create_subvolume(&root, OsStr::new(name)).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{name:?}");
    }
    let error = btrfs::create_subvolume(&root, OsStr::new(&"n".repeat(256))).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(36));
    btrfs::create_subvolume(&root, OsStr::new(&"n".repeat(255))).unwrap();
}
