//! The cgroups below which the kubelets keep those of their Pods.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use snafu::{ResultExt, Snafu};

/// What the kubelet wants of cgroups v2.
const CONTROLLERS: [&str; 6] = ["cpuset", "cpu", "io", "memory", "hugetlb", "pids"];
/// v1: without these no process can join a group.
const CPUSET: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];
/// How long processes that were killed may take to leave.
const LEAVE_LIMIT: Duration = Duration::from_secs(30);
const LEAVE_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot read /proc/self/mountinfo"))]
    Mounts { source: io::Error },
    #[snafu(display("cannot make the cgroup {}: run as root with a writable cgroup mount", path.display()))]
    Make { path: PathBuf, source: io::Error },
    #[snafu(display("cannot remove the cgroup {}", path.display()))]
    Remove { path: PathBuf, source: io::Error },
}

/// Makes `/name/child` in every hierarchy.
pub(crate) fn make(name: &str, child: &str) -> Result<(), Error> {
    for root in hierarchies()? {
        let parent = root.join(name);
        let group = parent.join(child);
        hand_down(&root);
        make_one(&parent)?;
        hand_down(&parent);
        make_one(&group)?;
    }
    Ok(())
}

/// v2: a group has the controllers that the one above it hands down. Those that the machine lacks are
/// the kubelet's to complain about.
fn hand_down(group: &Path) {
    let file = group.join("cgroup.subtree_control");
    if file.exists() {
        for controller in CONTROLLERS {
            let _ = fs::write(&file, format!("+{controller}"));
        }
    }
}

fn make_one(group: &Path) -> Result<(), Error> {
    fs::create_dir_all(group).context(MakeSnafu { path: group })?;
    let Some(parent) = group.parent() else {
        return Ok(());
    };
    for file in CPUSET {
        // Only the v1 controller has it in every group, and lets it be copied.
        if let Ok(value) = fs::read(parent.join(file)) {
            let path = group.join(file);
            fs::write(&path, value).context(MakeSnafu { path })?;
        }
    }
    Ok(())
}

/// Removes `/name` and all below it, from every hierarchy.
pub(crate) fn remove(name: &str) -> Result<(), Error> {
    let groups: Vec<_> = hierarchies()?
        .into_iter()
        .map(|root| root.join(name))
        .filter(|group| group.exists())
        .collect();
    // A process that is frozen does not die.
    for group in &groups {
        thaw(group);
    }
    let deadline = Instant::now() + LEAVE_LIMIT;
    for group in groups {
        loop {
            match remove_tree(&group) {
                Ok(()) => break,
                Err(_) if Instant::now() < deadline => std::thread::sleep(LEAVE_INTERVAL),
                Err(source) => return Err(source).context(RemoveSnafu { path: group }),
            }
        }
    }
    Ok(())
}

/// Lets all processes below `/name` run.
pub(crate) fn thaw_all(name: &str) -> Result<(), Error> {
    for root in hierarchies()? {
        thaw(&root.join(name));
    }
    Ok(())
}

fn thaw(group: &Path) {
    for (file, value) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
        let file = group.join(file);
        if file.exists() {
            let _ = fs::write(file, value);
        }
    }
    for child in children(group).unwrap_or_default() {
        thaw(&child);
    }
}

fn remove_tree(group: &Path) -> io::Result<()> {
    match children(group) {
        Ok(children) => {
            for child in children {
                remove_tree(&child)?;
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    match fs::remove_dir(group) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn children(group: &Path) -> io::Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            all.push(entry.path());
        }
    }
    Ok(all)
}

/// Where the hierarchies are mounted.
fn hierarchies() -> Result<Vec<PathBuf>, Error> {
    let text = fs::read_to_string("/proc/self/mountinfo").context(MountsSnafu)?;
    Ok(hierarchies_in(&text))
}

fn hierarchies_in(mountinfo: &str) -> Vec<PathBuf> {
    let mut all: Vec<_> = mountinfo
        .lines()
        .filter_map(|line| {
            let (place, kind) = line.split_once(" - ")?;
            let mount_point = place.split(' ').nth(4)?;
            let kind = kind.split(' ').next()?;
            let is_hierarchy = kind == "cgroup" || kind == "cgroup2";
            is_hierarchy.then(|| PathBuf::from(mount_point))
        })
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_hierarchies_of_both_versions() {
        let mountinfo = "\
            22 1 254:0 / / rw,relatime - ext4 /dev/root rw\n\
            30 22 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
            31 30 0:27 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu\n\
            32 30 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        assert_eq!(
            hierarchies_in(mountinfo),
            ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/unified"].map(PathBuf::from)
        );
    }
}
