//! Processes and cgroups as the kernel shows them.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};

use super::Node;

pub(crate) fn send(pid: u32, signal: rustix::process::Signal) {
    if let Some(pid) = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw)
    {
        let _gone = rustix::process::kill_process(pid, signal);
    }
}

pub(crate) fn wait_gone(pid: u32) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Path::new(&format!("/proc/{pid}/exe")).read_link().is_ok() {
        assert!(Instant::now() < deadline, "process {pid} does not go");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn processes() -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap();
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect()
}

pub(crate) fn descendants(pid: u32) -> Vec<u32> {
    let children =
        fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

pub(crate) fn command_of(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

/// `None` when it is gone.
pub(crate) fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Name and state come before it.
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(1)?.parse().ok()
}

/// The directories of the node's cgroups, in all hierarchies.
pub(crate) fn cgroups(node: &Node) -> Vec<PathBuf> {
    let root = node.image().parent().unwrap().join("root");
    let digest = HEXLOWER.encode(&Sha256::digest(root.as_os_str().as_encoded_bytes()));
    let name = format!("branchpool-{}", &digest[..12]);
    let mut found = Vec::new();
    search(Path::new("/sys/fs/cgroup"), &name, &mut found);
    found
}

pub(crate) fn search(directory: &Path, name: &str, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        if entry.file_name() == name {
            found.push(entry.path());
        } else {
            search(&entry.path(), name, found);
        }
    }
}
