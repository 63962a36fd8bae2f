//! A Btrfs filesystem of its own for a test, gone with it.

#![allow(dead_code, reason = "each test program uses its part")]

use std::{fs, path::Path, process::Command};

use branchpool_agent::storage::loopfile::LoopFile;
use tempfile::TempDir;

pub(crate) struct LoopBtrfs {
    filesystem: LoopFile,
    directory: TempDir,
}

impl LoopBtrfs {
    pub(crate) fn new(size: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // Tests of the whole walk through it as other users.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(directory.path(), mode).unwrap();
        let image = directory.path().join("image");
        let mount_point = directory.path().join("root");
        let filesystem = LoopFile::mount(&image, size, &mount_point).unwrap();
        Self {
            filesystem,
            directory,
        }
    }

    pub(crate) fn root(&self) -> &Path {
        self.filesystem.mount_point()
    }

    /// On another filesystem than `root`.
    pub(crate) fn outside(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for LoopBtrfs {
    fn drop(&mut self) {
        if self.filesystem.unmount().is_err() {
            // A test that failed may have left files open.
            let lazily = Command::new("umount").arg("-l").arg(self.root()).status();
            assert!(std::thread::panicking() || lazily.is_ok_and(|status| status.success()));
        }
    }
}
