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

    /// Why it did nothing: no disk has changed, and nothing is mounted that was not.
    pub(crate) fn refused(&self, more: &[&str]) -> String {
        let before = (self.digests(), mounts());
        let output = self.command(more).output().unwrap();
        assert_eq!(output.status.code(), Some(78), "{output:?}");
        assert_eq!((self.digests(), mounts()), before);
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

/// Of what was ever written, and where. The rest of the file was not.
fn digest(path: &Path) -> Vec<u8> {
    let file = File::open(path).unwrap();
    let mut digest = Sha256::new();
    let mut end = 0;
    while let Ok(start) = seek(&file, SeekFrom::Data(end)) {
        end = seek(&file, SeekFrom::Hole(start)).unwrap();
        let mut bytes = vec![0; usize::try_from(end - start).unwrap()];
        file.read_exact_at(&mut bytes, start).unwrap();
        digest.update(start.to_le_bytes());
        digest.update(bytes);
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

pub(crate) fn mounts() -> String {
    fs::read_to_string("/proc/self/mountinfo").unwrap()
}
