//! What an agent that was killed left beside its branches: run directories, logs, builds.

use std::{collections::BTreeSet, fs, io, path::Path};

use super::files;
use crate::storage::{
    Layout,
    ids::{BranchId, NodeKey},
    tree::remove_tree,
};

/// Removes what belongs to branches of this node that are not on disk any more, and to builds, of
/// which none runs now. What has another name is left alone. Blocks.
pub(super) fn sweep(layout: &Layout, key: &NodeKey, there: &BTreeSet<BranchId>) -> io::Result<()> {
    let is_left_over = |name: &str| {
        name.parse::<BranchId>()
            .is_ok_and(|id| id.is_authentic(key) && !there.contains(&id))
    };
    for name in names(&layout.branch_runs())? {
        if is_left_over(&name) {
            remove_tree(&layout.branch_runs().join(name))?;
        }
    }
    for name in names(&layout.logs())? {
        let stem = name.strip_suffix(".log").unwrap_or_default();
        if stem.starts_with("build-") || is_left_over(stem) {
            files::absent(fs::remove_file(layout.logs().join(name)))?;
        }
    }
    remove_tree(&layout.build_runs())
}

fn names(directory: &Path) -> io::Result<Vec<String>> {
    fs::read_dir(directory)?
        .filter_map(|entry| {
            entry
                .map(|entry| entry.file_name().into_string().ok())
                .transpose()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_belongs_to_no_branch_goes() {
        let directory = tempfile::tempdir().unwrap();
        let (root, run) = (directory.path().join("root"), directory.path().join("run"));
        fs::create_dir(&root).unwrap();
        let layout = Layout::new(&root, &run).unwrap();
        layout.create().unwrap();
        let (key, other) = (NodeKey::from_bytes([1; 32]), NodeKey::from_bytes([2; 32]));
        let there = BranchId::generate(&key, &mut rand::rng());
        let gone = BranchId::generate(&key, &mut rand::rng());
        let foreign = BranchId::generate(&other, &mut rand::rng());
        for id in [&there, &gone, &foreign] {
            fs::create_dir_all(layout.branch_socket_dir(id)).unwrap();
            fs::write(layout.log(id.as_str()), "x").unwrap();
        }
        fs::write(layout.log("build-pool-1"), "x").unwrap();
        fs::write(layout.logs().join("notes.txt"), "x").unwrap();
        fs::create_dir_all(layout.build_runs().join("x/s")).unwrap();

        sweep(&layout, &key, &BTreeSet::from([there])).unwrap();

        for id in [&there, &foreign] {
            assert!(layout.branch_socket_dir(id).exists());
            assert!(layout.log(id.as_str()).exists());
        }
        assert!(!layout.branch_run(&gone).exists());
        assert!(!layout.log(gone.as_str()).exists());
        assert!(!layout.log("build-pool-1").exists());
        assert!(layout.logs().join("notes.txt").exists());
        assert!(!layout.build_runs().exists());
    }
}
