//! What does not belong into the agent's directories.

use std::{fs, path::PathBuf};

use branchpool_agent::storage::{
    BranchId, NodeKey, layout,
    scan::{MAX_STRAYS, Why},
};

use crate::{Fixture, create_subvolume};

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
        layout.branches().join(wrong_shard.unwrap()).join(moved),
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
