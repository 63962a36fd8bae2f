//! Where a run takes place: a directory, a Btrfs filesystem in a file, mounted as the agent does it.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::{io::Errno, mount::UnmountFlags};
use snafu::{ResultExt, whatever};
use tempfile::TempDir;

use crate::error::Result;

/// Unmounted and removed when dropped.
#[derive(Debug)]
pub(crate) struct Machine {
    root: PathBuf,
    directory: TempDir,
}

impl Machine {
    pub(crate) fn prepare(size: u64) -> Result<Self> {
        // Short, for a socket's path has at most 107 bytes.
        let directory = tempfile::Builder::new()
            .prefix("bpb")
            .tempdir()
            .whatever_context("cannot make a directory")?;
        // The servers' users pass through.
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o711))
            .whatever_context("cannot open the directory to the servers")?;
        let (image, root) = (
            directory.path().join("btrfs.img"),
            directory.path().join("root"),
        );
        let made = fs::create_dir(&root).and_then(|()| fs::File::create(&image)?.set_len(size));
        made.whatever_context("cannot make the file for the filesystem")?;
        // As the agent makes and mounts its own.
        let single = ["--quiet", "--metadata", "single", "--data", "single"];
        run("mkfs.btrfs", &single, &[&image])?;
        run(
            "mount",
            &["-t", "btrfs", "-o", "noatime,loop"],
            &[&image, &root],
        )?;
        let machine = Self { root, directory };
        // As /run is: making and removing files costs much more on a disk's filesystem.
        let memory = machine.memory();
        fs::create_dir(&memory).whatever_context("cannot make a directory")?;
        let none = Path::new("none");
        run(
            "mount",
            &["-t", "tmpfs", "-o", "mode=711"],
            &[none, &memory],
        )?;
        Ok(machine)
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The branch filesystem.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// For sockets and configuration: a tmpfs.
    pub(crate) fn memory(&self) -> PathBuf {
        self.directory().join("m")
    }

    /// Waits until the space of all deleted subvolumes is back, so that one sample's cleaning does
    /// not run in the next one's time.
    pub(crate) async fn settle(&self) -> Result<()> {
        let root = self.root().to_owned();
        let work = move || {
            let directory = branchpool_sys::btrfs::open_dir(&root);
            directory
                .and_then(branchpool_sys::btrfs::sync)
                .whatever_context("cannot commit the filesystem")?;
            run("btrfs", &["subvolume", "sync"], &[&root])
        };
        tokio::task::spawn_blocking(work)
            .await
            .whatever_context("waiting for the filesystem's cleaner failed")?
    }
}

/// Runs a tool.
fn run(tool: &str, options: &[&str], paths: &[&Path]) -> Result<()> {
    let output = Command::new(tool)
        .args(options)
        .args(paths)
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .output()
        .with_whatever_context(|_| format!("cannot run {tool}"))?;
    if !output.status.success() {
        whatever!("{tool}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

impl Drop for Machine {
    fn drop(&mut self) {
        for point in [&self.memory(), &self.root] {
            match rustix::mount::unmount(point, UnmountFlags::NOFOLLOW) {
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
                Err(error) => eprintln!("bench: {} stays mounted: {error}", point.display()),
            }
        }
    }
}
