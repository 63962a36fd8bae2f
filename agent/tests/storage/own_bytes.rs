//! What a branch has written itself.

use std::{
    fs::{self, File},
    io::Read,
    os::unix::fs::FileExt,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use branchpool_sys::btrfs;

use crate::{LoopBtrfs, SIZE, create_subvolume};

const MIB: u64 = 1 << 20;

/// That no compression makes smaller.
fn noise(bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    let mut random = File::open("/dev/urandom").unwrap();
    random.read_exact(&mut data).unwrap();
    data
}

fn own_bytes(subvolume: &Path) -> u64 {
    btrfs::own_bytes(btrfs::open_dir(subvolume).unwrap()).unwrap()
}

fn synced_own_bytes(subvolume: &Path) -> u64 {
    btrfs::sync(btrfs::open_dir(subvolume).unwrap()).unwrap();
    own_bytes(subvolume)
}

fn snapshot(source: &Path, target: &Path) {
    let parent = btrfs::open_dir(target.parent().unwrap()).unwrap();
    let source = btrfs::open_dir(source).unwrap();
    btrfs::snapshot(source, parent, target.file_name().unwrap(), false).unwrap();
}

/// A filesystem with the subvolume `source`: one file of 100 MiB and many small ones.
fn source() -> LoopBtrfs {
    let btrfs = LoopBtrfs::new(SIZE);
    let source = btrfs.root().join("source");
    create_subvolume(&source);
    for number in 0..200 {
        fs::write(source.join(format!("small-{number}")), noise(1000)).unwrap();
    }
    fs::write(source.join("large"), noise(100 << 20)).unwrap();
    btrfs
}

#[test]
fn counts_what_was_written_since_the_snapshot() {
    let btrfs = source();
    let [source, branch] = ["source", "branch"].map(|name| btrfs.root().join(name));
    // The source's data is in memory still, and written by the snapshot's own transaction.
    snapshot(&source, &branch);
    assert_eq!(own_bytes(&branch), 0);
    assert_eq!(synced_own_bytes(&branch), 0);
    // No snapshot: all is its own.
    let all = own_bytes(&source);
    assert!((100 * MIB..102 * MIB).contains(&all), "{all}");

    let page = noise(8192);
    let large = File::options().write(true).open(branch.join("large"));
    large.unwrap().write_all_at(&page, 40 * MIB).unwrap();
    assert_eq!(synced_own_bytes(&branch), 8192);

    fs::write(branch.join("small-7"), noise(500)).unwrap();
    assert_eq!(synced_own_bytes(&branch), 8192 + 500);

    fs::write(branch.join("more"), noise(10 << 20)).unwrap();
    assert_eq!(synced_own_bytes(&branch), 8192 + 500 + 10 * MIB);

    // Neither is its sibling's or its source's.
    let sibling = btrfs.root().join("sibling");
    snapshot(&source, &sibling);
    fs::write(source.join("later"), noise(1 << 20)).unwrap();
    assert_eq!(synced_own_bytes(&sibling), 0);
    assert_eq!(own_bytes(&branch), 8192 + 500 + 10 * MIB);

    fs::remove_file(branch.join("more")).unwrap();
    fs::remove_file(branch.join("large")).unwrap();
    assert_eq!(synced_own_bytes(&branch), 500);
}

#[test]
fn pages_rewritten_in_an_own_extent_do_not_count_it_again() {
    const PAGES: u64 = 400;
    let btrfs = source();
    let [source, branch] = ["source", "branch"].map(|name| btrfs.root().join(name));
    snapshot(&source, &branch);
    fs::write(branch.join("own"), noise(64 << 20)).unwrap();
    assert_eq!(synced_own_bytes(&branch), 64 * MIB);

    let own = File::options()
        .write(true)
        .open(branch.join("own"))
        .unwrap();
    for number in 0..PAGES {
        own.write_all_at(&noise(8192), number * 16 * 8192).unwrap();
    }
    // More items than one search returns; what is overwritten stays with the rest of its extent.
    assert_eq!(synced_own_bytes(&branch), 64 * MIB + PAGES * 8192);
}

#[test]
fn beside_a_writer_no_place_counts_twice() {
    const PAGE: u64 = 8192;
    const PAGES: u64 = 200;
    let btrfs = source();
    let [source, branch] = ["source", "branch"].map(|name| btrfs.root().join(name));
    snapshot(&source, &branch);
    let done = AtomicBool::new(false);
    let found: Vec<u64> = thread::scope(|scope| {
        scope.spawn(|| {
            let file = File::create(branch.join("busy")).unwrap();
            for number in 0..3 * PAGES {
                // With holes between them, so that each page stays an extent of its own.
                let at = number % PAGES * 3 * PAGE;
                file.write_all_at(&noise(8192), at).unwrap();
                file.sync_data().unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        std::iter::from_fn(|| (!done.load(Ordering::Relaxed)).then(|| own_bytes(&branch))).collect()
    });
    assert!(found.iter().all(|bytes| *bytes <= PAGES * PAGE));
    assert!(found.iter().any(|bytes| (1..PAGES * PAGE).contains(bytes)));
    assert_eq!(synced_own_bytes(&branch), PAGES * PAGE);
}
