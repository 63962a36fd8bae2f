//! Ids, the node's key, and where things lie.

use std::{
    ffi::OsStr,
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use branchpool_agent::storage::{BranchId, EndpointId, Layout, NodeKey, PoolUid, layout};
use branchpool_gateway::MAX_SOCKET_PATH;
use branchpool_sys::btrfs;

use crate::{Fixture, LoopBtrfs, SIZE};

#[test]
fn layout_directories_get_their_modes_back() {
    let fixture = Fixture::new();
    let layout = fixture.layout();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    fs::set_permissions(layout.branches(), fs::Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(layout.mounts(), fs::Permissions::from_mode(0o700)).unwrap();
    layout.create().unwrap();
    assert_eq!(mode(&layout.branches()), 0o711);
    layout.close_branches().unwrap();
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
