//! Making branches and removing them.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    os::unix::fs::symlink,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use branchpool_agent::storage::{BranchId, Deletion, NodeKey, branches::Error, layout, space};
use branchpool_sys::btrfs;

use crate::{Fixture, SIZE, create_subvolume, info, set_read_only, subvolumes};

#[test]
fn concurrent_snapshots_are_all_made_and_differ() {
    const THREADS: usize = 16;
    const EACH: usize = 13;
    let fixture = Fixture::new();
    let before = info(&fixture.layout().golden_generation(&fixture.pool, 1));
    let ids: Vec<BranchId> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| scope.spawn(|| (0..EACH).map(|_| fixture.branch()).collect::<Vec<_>>()))
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });

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
    let deadline = Instant::now() + Duration::from_mins(1);
    while btrfs::space_info(&directory).unwrap().data.used + (60 << 20) > full {
        assert!(Instant::now() < deadline, "the space was not reclaimed");
        thread::sleep(Duration::from_millis(10));
        // What the cleaner freed counts with the commit after it.
        let transaction = btrfs::start_sync(&directory).unwrap();
        btrfs::wait_sync(&directory, transaction).unwrap();
    }
}

/// Prints numbers; asserts none. Run with `--ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measure_snapshots_and_removals() {
    const EACH: u32 = 160;
    let fixture = Fixture::new();
    for threads in [1, 4, 16] {
        let begin = Instant::now();
        let mut made: Vec<(BranchId, Duration)> = thread::scope(|scope| {
            let work = || {
                (0..EACH / threads)
                    .map(|_| {
                        let begin = Instant::now();
                        (fixture.branch(), begin.elapsed())
                    })
                    .collect::<Vec<_>>()
            };
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap())
                .collect()
        });
        let rate = f64::from(EACH) / begin.elapsed().as_secs_f64();
        made.sort_by_key(|(_, time)| *time);
        let (p50, p95) = (made[made.len() / 2].1, made[made.len() * 95 / 100].1);
        println!("{threads} threads: {rate:.0} snapshots/s, p50 {p50:?}, p95 {p95:?}");

        let begin = Instant::now();
        for (id, _) in &made {
            fixture.branches.trash_branch(id).unwrap();
        }
        let trashed = begin.elapsed() / EACH;
        let begin = Instant::now();
        for (id, _) in &made {
            fixture.branches.delete_tombstone(id).unwrap();
        }
        println!(
            "one by one: to the trash {trashed:?}, deleted {:?}",
            begin.elapsed() / EACH
        );
        btrfs::sync(btrfs::open_dir(fixture.btrfs.root()).unwrap()).unwrap();
    }
}
