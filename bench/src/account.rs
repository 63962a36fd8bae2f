//! CPU time of a process and all that it starts, by a cgroup: exact, where `/proc` counts ticks.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    process::{Pid, Signal, kill_process},
    time::{ClockId, clock_gettime},
};
use snafu::{OptionExt, ResultExt, whatever};

use crate::error::Result;

/// How long processes may take to die after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// A group that a process joins before it becomes its program. Dropped, it takes what is left in it
/// along.
#[derive(Debug)]
pub(crate) struct Account {
    directory: PathBuf,
}

impl Account {
    pub(crate) fn create(name: &str) -> Result<Self> {
        let top = [
            "/sys/fs/cgroup/cpuacct",
            "/sys/fs/cgroup/cpu,cpuacct",
            "/sys/fs/cgroup",
        ]
        .into_iter()
        .map(Path::new)
        .find(|top| top.join("cgroup.procs").exists())
        .whatever_context("no cgroup hierarchy that counts CPU time is mounted")?;
        let directory = top.join(format!("branchpool-bench-{}-{name}", std::process::id()));
        fs::create_dir(&directory)
            .with_whatever_context(|_| format!("cannot make {} (root?)", directory.display()))?;
        Ok(Self { directory })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Takes in a process that was started elsewhere; its time before counts nowhere.
    pub(crate) fn adopt(&self, pid: u32) -> Result<()> {
        fs::write(self.directory.join("cgroup.procs"), pid.to_string())
            .with_whatever_context(|_| format!("cannot count process {pid}"))
    }

    /// Since the group was made, of processes that ended as well.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        if let Ok(text) = fs::read_to_string(self.directory.join("cpuacct.usage")) {
            let nanoseconds = text.trim().parse();
            return Ok(Duration::from_nanos(
                nanoseconds.whatever_context("cpuacct.usage is no number")?,
            ));
        }
        let path = self.directory.join("cpu.stat");
        let text = fs::read_to_string(&path)
            .with_whatever_context(|_| format!("cannot read {}", path.display()))?;
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix("usage_usec "))
            .and_then(|value| value.parse().ok());
        let Some(microseconds) = value else {
            whatever!("{} has no usage_usec", path.display())
        };
        Ok(Duration::from_micros(microseconds))
    }

    pub(crate) fn processes(&self) -> Vec<u32> {
        let mut processes = Vec::new();
        for directory in below(&self.directory) {
            let text = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
            processes.extend(text.lines().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        processes
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let deadline = Instant::now() + KILL_TIMEOUT;
        loop {
            let left = self.processes();
            if left.is_empty() || Instant::now() > deadline {
                break;
            }
            for pid in left {
                let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
                if let Some(pid) = pid {
                    let _gone = kill_process(pid, Signal::KILL);
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        for directory in below(&self.directory).into_iter().rev() {
            if let Err(error) = fs::remove_dir(&directory) {
                eprintln!("bench: {} stays: {error}", directory.display());
            }
        }
    }
}

/// Of this process so far.
pub(crate) fn own_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.try_into().unwrap_or(0),
        time.tv_nsec.try_into().unwrap_or(0),
    )
}

/// A directory and all below it, parents first.
fn below(directory: &Path) -> Vec<PathBuf> {
    let mut found = vec![directory.to_owned()];
    let mut next = 0;
    while next < found.len() {
        let entries = fs::read_dir(&found[next]).into_iter().flatten().flatten();
        let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let paths: Vec<_> = directories.map(|entry| entry.path()).collect();
        found.extend(paths);
        next += 1;
    }
    found
}
