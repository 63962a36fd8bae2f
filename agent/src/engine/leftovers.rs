//! What a crash between two steps leaves outside the branches: run directories, addresses and logs
//! that nothing refers to any more.

use std::{collections::BTreeSet, ffi::OsString, fs, io, path::Path};

use super::files;
use crate::{
    plan::{Node, State},
    storage::{
        Layout,
        ids::{BranchId, EndpointId, NodeKey},
        tree::remove_tree,
    },
};

/// Decides by what the node knows right after the start, before it does anything.
#[derive(Debug)]
pub(super) struct Leftovers {
    layout: Layout,
    key: NodeKey,
    /// Known to the node, or on disk without being known.
    branches: BTreeSet<BranchId>,
    /// Addresses of leases.
    endpoints: BTreeSet<EndpointId>,
}

impl Leftovers {
    pub(super) fn new(
        layout: &Layout,
        key: NodeKey,
        node: &Node,
        on_disk: BTreeSet<BranchId>,
    ) -> Self {
        let leased = node
            .branches
            .values()
            .filter(|branch| matches!(branch.state, State::Leased { .. } | State::Parked { .. }));
        let endpoints = leased.map(|branch| branch.endpoint).collect();
        let mut branches = on_disk;
        branches.extend(node.branches.keys());
        Self {
            layout: layout.clone(),
            key,
            branches,
            endpoints,
        }
    }

    /// What cannot be removed is told and left. No build may run. Blocks.
    pub(super) fn remove(&self) {
        let builds = self.layout.build_runs();
        if let Err(error) = remove_tree(&builds) {
            tracing::warn!(path = ?builds, %error, "an earlier run left this, and it could not be removed");
        }
        sweep(
            &self.layout.branch_runs(),
            |name| self.is_unknown(name),
            remove_tree,
        );
        sweep(
            &self.layout.run().join("e"),
            |name| self.is_unused(name),
            |path| fs::remove_file(path),
        );
        sweep(
            &self.layout.logs(),
            |name| self.is_old_log(name),
            |path| fs::remove_file(path),
        );
    }

    fn is_unknown(&self, name: &str) -> bool {
        name.parse::<BranchId>()
            .is_ok_and(|id| id.is_authentic(&self.key) && !self.branches.contains(&id))
    }

    fn is_unused(&self, name: &str) -> bool {
        // Its name has a suffix while it is being made.
        let (stem, complete) = match name.split_once('.') {
            Some((stem, _)) => (stem, false),
            None => (name, true),
        };
        stem.parse::<EndpointId>()
            .is_ok_and(|endpoint| !complete || !self.endpoints.contains(&endpoint))
    }

    fn is_old_log(&self, name: &str) -> bool {
        name.strip_suffix(".log")
            .is_some_and(|stem| stem.starts_with("build-") || self.is_unknown(stem))
    }
}

fn sweep(
    directory: &Path,
    is_left: impl Fn(&str) -> bool,
    remove: impl Fn(&Path) -> io::Result<()>,
) {
    let names = || -> io::Result<Vec<OsString>> {
        fs::read_dir(directory)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect()
    };
    let names = names().unwrap_or_else(|error| {
        tracing::warn!(?directory, %error, "what an earlier run left there stays");
        Vec::new()
    });
    for name in names {
        if !name.to_str().is_some_and(&is_left) {
            continue;
        }
        let path = directory.join(&name);
        if let Err(error) = files::absent(remove(&path)) {
            tracing::warn!(?path, %error, "an earlier run left this, and it could not be removed");
        }
    }
}
