//! Loop devices that stand for a node's disks.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use rustix::{
    fs::{SeekFrom, seek},
    mount::UnmountFlags,
};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

pub(crate) const SIZE: u64 = 512 << 20;

pub(crate) struct Disks {
    directory: TempDir,
    /// `None` for one that was pulled out.
    devices: Vec<Option<PathBuf>>,
}

impl Disks {
    pub(crate) fn new(count: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        fs::create_dir(directory.path().join("by-id")).unwrap();
        let mut disks = Self {
            directory,
            devices: Vec::new(),
        };
        for number in 0..count {
            File::create(disks.file(number))
                .unwrap()
                .set_len(SIZE)
                .unwrap();
            disks.devices.push(None);
            disks.plug_in(number);
        }
        disks
    }

    pub(crate) fn file(&self, number: usize) -> PathBuf {
        self.directory.path().join(format!("disk-{number}"))
    }

    pub(crate) fn device(&self, number: usize) -> &Path {
        self.devices[number].as_deref().unwrap()
    }

    fn link(&self, number: usize) -> PathBuf {
        self.directory.path().join(format!("by-id/ssd-{number}"))
    }

    pub(crate) fn plug_in(&mut self, number: usize) {
        let output = run("losetup", &["--find", "--show"], &[&self.file(number)]);
        let device = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
        symlink(&device, self.link(number)).unwrap();
        self.devices[number] = Some(device);
    }

    pub(crate) fn pull_out(&mut self, number: usize) {
        let device = self.devices[number].take().unwrap();
        fs::remove_file(self.link(number)).unwrap();
        forget(&device);
        run("losetup", &["--detach"], &[&device]);
    }

    pub(crate) fn mount_point(&self) -> PathBuf {
        self.directory.path().join("mnt/branches")
    }

    /// Other tests mount theirs at the same time.
    pub(crate) fn mounts(&self) -> Vec<String> {
        let place = self.directory.path().display().to_string();
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let here = table.lines().filter(|line| line.contains(&place));
        here.map(str::to_owned).collect()
    }

    pub(crate) fn unmount(&self) {
        rustix::mount::unmount(self.mount_point(), UnmountFlags::NOFOLLOW).unwrap();
    }

    pub(crate) fn command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_branchpool-agent"));
        command
            .arg("prepare-node")
            .arg("--devices")
            .arg(self.directory.path().join("by-id/ssd-*"))
            .arg("--mount-point")
            .arg(self.mount_point())
            .args(more);
        command
    }

    /// What it says it did.
    pub(crate) fn prepared(&self, more: &[&str]) -> String {
        let output = self.command(more).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Why it did nothing: no disk has changed, and nothing is mounted here that was not.
    pub(crate) fn refused(&self, more: &[&str]) -> String {
        let before = (self.digests(), self.mounts());
        let output = self.command(more).output().unwrap();
        assert_eq!(output.status.code(), Some(78), "{output:?}");
        assert_eq!((self.digests(), self.mounts()), before);
        String::from_utf8(output.stderr).unwrap()
    }

    fn digests(&self) -> Vec<Vec<u8>> {
        (0..self.devices.len())
            .map(|number| digest(&self.file(number)))
            .collect()
    }

    pub(crate) fn write(&self, number: usize, at: u64, bytes: &[u8]) {
        let file = File::options()
            .write(true)
            .open(self.device(number))
            .unwrap();
        file.write_all_at(bytes, at).unwrap();
        file.sync_all().unwrap();
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        let _not_mounted = rustix::mount::unmount(self.mount_point(), UnmountFlags::DETACH);
        for device in self.devices.iter().flatten() {
            forget(device);
            let _reported = Command::new("losetup").arg("--detach").arg(device).status();
        }
    }
}

/// Of every block that is not zeros, and where it is. What was never written is skipped; where exactly that begins
/// depends on what is cached.
fn digest(path: &Path) -> Vec<u8> {
    const BLOCK: u64 = 4096;
    let file = File::open(path).unwrap();
    let mut digest = Sha256::new();
    let mut end = 0;
    while let Ok(start) = seek(&file, SeekFrom::Data(end)) {
        end = seek(&file, SeekFrom::Hole(start)).unwrap();
        let start = start / BLOCK * BLOCK;
        let mut bytes = vec![0; usize::try_from(end - start).unwrap()];
        file.read_exact_at(&mut bytes, start).unwrap();
        for (at, block) in (start..).step_by(4096).zip(bytes.chunks(4096)) {
            if block.iter().any(|byte| *byte != 0) {
                digest.update(at.to_le_bytes());
                digest.update(block);
            }
        }
    }
    digest.finalize().to_vec()
}

/// The kernel remembers devices of Btrfs filesystems, also those that are gone.
fn forget(device: &Path) {
    let _unknown = Command::new("btrfs")
        .args(["device", "scan", "--forget"])
        .arg(device)
        .output();
}

pub(crate) fn run(tool: &str, options: &[&str], paths: &[&Path]) -> Output {
    let output = Command::new(tool)
        .args(options)
        .args(paths)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .output()
        .unwrap();
    assert!(output.status.success(), "{tool}: {output:?}");
    output
}
