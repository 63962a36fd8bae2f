//! One group: its limits, its processes, how to stop them.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use snafu::ResultExt;

use super::{
    Base, Controller, CreateSnafu, Error, KillSnafu, Limits, Membership, ReadSnafu, RemoveSnafu,
    TimedOutSnafu, WriteSnafu,
    events::{EMPTY, FROZEN, THAWED, has, wait_for},
    hierarchy::{is_gone, pids},
};
use crate::process;

/// v1 and v2: the period that a CPU quota is for, in microseconds.
const CPU_PERIOD: u64 = 100_000;
/// The shortest quota that the kernel takes, in microseconds.
const CPU_QUOTA_MIN: u64 = 1_000;
/// The v1 freezer gives no notice, so its state has to be looked at.
const V1_FREEZER_INTERVAL: Duration = Duration::from_millis(2);
/// v2: what belongs to a group's use and not to its processes.
const SETTINGS: [&str; 4] = ["cpu.max", "cpu.weight", "memory.max", "pids.max"];
const KILL_HINT: &str = "run as root";
const HINT: &str = "run as root with a writable cgroup mount";

/// The group of one slot. A handle: dropping it changes nothing.
#[derive(Clone, Debug)]
pub struct Group {
    unified: Option<PathBuf>,
    /// Which of the controllers the unified directory has.
    unified_controllers: Vec<Controller>,
    v1: Vec<(Controller, PathBuf)>,
    freezer: Option<PathBuf>,
}

impl Group {
    pub(super) fn new(base: &Base, name: &str) -> Self {
        let unified = base.unified.as_ref();
        Self {
            unified: unified.map(|unified| unified.directory.join(name)),
            unified_controllers: unified
                .map_or_else(Vec::new, |unified| unified.controllers.clone()),
            v1: base
                .v1
                .iter()
                .map(|(controller, path)| (*controller, path.join(name)))
                .collect(),
            freezer: base.freezer.as_ref().map(|freezer| freezer.join(name)),
        }
    }

    pub(super) fn directories(&self) -> Vec<&Path> {
        let v1 = self.v1.iter().map(|(_, path)| path);
        let mut all: Vec<_> = self
            .unified
            .iter()
            .chain(v1)
            .chain(&self.freezer)
            .map(PathBuf::as_path)
            .collect();
        // Controllers that are mounted together share a directory.
        all.sort_unstable();
        all.dedup();
        all
    }

    /// What a process has to join; see [`crate::spawn`].
    pub fn membership(&self) -> Membership {
        let mut v1: Vec<_> = self.directories().into_iter().map(Path::to_owned).collect();
        v1.retain(|directory| self.unified.as_ref() != Some(directory));
        Membership {
            unified: self.unified.clone(),
            v1,
        }
    }

    /// Sets all limits, also those of an earlier use back to none. Those whose controller is missing
    /// are left out: see [`Base::missing`].
    pub fn set_limits(&self, limits: Limits) -> Result<(), Error> {
        let quota = limits
            .cpu_millicores
            .map(|millicores| (u64::from(millicores) * CPU_PERIOD / 1000).max(CPU_QUOTA_MIN));
        let or = |value: Option<u64>, none: &str| {
            value.map_or(none.to_owned(), |value| value.to_string())
        };
        let pids = or(limits.pids.map(Into::into), "max");
        if self.on_v2(Controller::Cpu).is_some() {
            self.write_v2(
                Controller::Cpu,
                "cpu.max",
                &format!("{} {CPU_PERIOD}", or(quota, "max")),
            )?;
        }
        self.write_v2(Controller::Memory, "memory.max", &or(limits.memory, "max"))?;
        self.write_v2(Controller::Pids, "pids.max", &pids)?;
        self.write_v1(
            Controller::Cpu,
            "cpu.cfs_period_us",
            &CPU_PERIOD.to_string(),
        )?;
        self.write_v1(Controller::Cpu, "cpu.cfs_quota_us", &or(quota, "-1"))?;
        self.write_v1(
            Controller::Memory,
            "memory.limit_in_bytes",
            &or(limits.memory, "-1"),
        )?;
        self.write_v1(Controller::Pids, "pids.max", &pids)
    }

    /// The share of CPU time under contention, 1 to 10,000; 100 is the default of every group.
    pub fn set_cpu_weight(&self, weight: u32) -> Result<(), Error> {
        let weight = weight.clamp(1, 10_000);
        self.write_v2(Controller::Cpu, "cpu.weight", &weight.to_string())?;
        let shares = (weight * 1024 / 100).max(2);
        self.write_v1(Controller::Cpu, "cpu.shares", &shares.to_string())
    }

    /// The ids of the processes in it.
    pub fn processes(&self) -> Result<Vec<u32>, Error> {
        let mut all = Vec::new();
        for directory in self.tracking() {
            all.extend(pids(directory)?);
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// Whether no process is left; zombies do not count.
    pub fn is_empty(&self) -> Result<bool, Error> {
        let Some(events) = self.events_file() else {
            return Ok(self.processes()?.is_empty());
        };
        match fs::read_to_string(&events) {
            Ok(text) => Ok(has(&text, EMPTY.0, EMPTY.1)),
            Err(error) if is_gone(&error) => Ok(true),
            Err(error) => Err(error).context(ReadSnafu { path: events }),
        }
    }

    /// The file that an inotify MODIFY event comes for when the last process has left, or the first
    /// has come. None without a v2 hierarchy.
    pub fn events_file(&self) -> Option<PathBuf> {
        self.unified
            .as_ref()
            .map(|unified| unified.join("cgroup.events"))
    }

    /// SIGKILL to every process, frozen ones and ones just being forked included, then waits until
    /// none is left. Gives [`Self::events_file`] a new inode if there was anything to kill.
    pub fn kill(&self, timeout: Duration) -> Result<(), Error> {
        if self.is_empty()? {
            return Ok(());
        }
        let Some(unified) = &self.unified else {
            return self.kill_each(timeout);
        };
        match write(&unified.join("cgroup.kill"), "1") {
            // Linux before 5.14.
            Err(Error::Write { source, .. }) if is_gone(&source) => self.kill_each(timeout)?,
            other => other?,
        }
        self.wait_empty(timeout)?;
        self.renew()
    }

    /// Makes the empty v2 group anew, with the same limits. Linux 6.18 was seen to kill, at birth,
    /// every process that is cloned into a group that cgroup.kill was ever used on.
    fn renew(&self) -> Result<(), Error> {
        let Some(unified) = &self.unified else {
            return Ok(());
        };
        let settings: Vec<_> = SETTINGS
            .iter()
            .map(|file| unified.join(file))
            .filter_map(|path| fs::read_to_string(&path).ok().map(|value| (path, value)))
            .collect();
        make_anew(unified)?;
        settings
            .iter()
            .try_for_each(|(path, value)| write(path, value.trim()))
    }

    /// Waits until no process is left, by notice of the kernel.
    pub fn wait_empty(&self, timeout: Duration) -> Result<(), Error> {
        match self.events_file() {
            Some(events) => wait_for(&events, EMPTY, "empty", timeout),
            None => self.wait_each(timeout),
        }
    }

    /// Kills what is there until nothing is: a process may fork while others are being killed.
    fn kill_each(&self, timeout: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + timeout;
        loop {
            let processes = self.processes()?;
            if processes.is_empty() {
                return Ok(());
            }
            let mut killed = Vec::new();
            for pid in processes {
                // Gone meanwhile is fine.
                let Ok(pidfd) = process::open(pid) else {
                    continue;
                };
                process::signal(&pidfd, libc::SIGKILL).context(KillSnafu { pid })?;
                killed.push((pid, pidfd));
            }
            if let Some(freezer) = &self.freezer {
                write(&freezer.join("freezer.state"), "THAWED")?;
            }
            for (pid, pidfd) in killed {
                let left = deadline.saturating_duration_since(Instant::now());
                if !process::wait(&pidfd, Some(left)).context(KillSnafu { pid })? {
                    return self.timed_out("empty", timeout);
                }
            }
        }
    }

    fn wait_each(&self, timeout: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + timeout;
        loop {
            let Some(pid) = self.processes()?.first().copied() else {
                return Ok(());
            };
            let Ok(pidfd) = process::open(pid) else {
                continue;
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if !process::wait(&pidfd, Some(left)).context(KillSnafu { pid })? {
                return self.timed_out("empty", timeout);
            }
        }
    }

    /// Stops every process where it is and waits until the last one has stopped. A group that does
    /// not stop in time is thawed again.
    pub fn freeze(&self, timeout: Duration) -> Result<(), Error> {
        let frozen = self.set_frozen(true, timeout);
        if frozen.is_err() {
            let _ = self.set_frozen(false, timeout);
        }
        frozen
    }

    /// Lets frozen processes go on.
    pub fn thaw(&self, timeout: Duration) -> Result<(), Error> {
        self.set_frozen(false, timeout)
    }

    fn set_frozen(&self, frozen: bool, timeout: Duration) -> Result<(), Error> {
        if let (Some(unified), Some(events)) = (&self.unified, self.events_file()) {
            let (value, wanted, name) = if frozen {
                ("1", FROZEN, "frozen")
            } else {
                ("0", THAWED, "thawed")
            };
            write(&unified.join("cgroup.freeze"), value)?;
            return wait_for(&events, wanted, name, timeout);
        }
        let Some(freezer) = &self.freezer else {
            return Ok(());
        };
        let (value, name) = if frozen {
            ("FROZEN", "frozen")
        } else {
            ("THAWED", "thawed")
        };
        let state = freezer.join("freezer.state");
        let deadline = Instant::now() + timeout;
        write(&state, value)?;
        while fs::read_to_string(&state)
            .context(ReadSnafu { path: &state })?
            .trim()
            != value
        {
            if Instant::now() >= deadline {
                return self.timed_out(name, timeout);
            }
            thread::sleep(V1_FREEZER_INTERVAL);
        }
        Ok(())
    }

    /// How many processes the kernel has killed for want of memory. None without the controller.
    pub fn oom_kills(&self) -> Result<Option<u64>, Error> {
        let v2 = self
            .on_v2(Controller::Memory)
            .map(|group| group.join("memory.events"));
        let v1 = self
            .on_v1(Controller::Memory)
            .map(|group| group.join("memory.oom_control"));
        let Some(path) = v2.or(v1) else {
            return Ok(None);
        };
        let text = fs::read_to_string(&path).context(ReadSnafu { path })?;
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        Ok(count.and_then(|count| count.trim().parse().ok()))
    }

    /// Removes the empty group. Not there is no error.
    pub fn remove(&self) -> Result<(), Error> {
        self.directories().into_iter().try_for_each(remove)
    }

    /// The directories that together see every process of the group.
    fn tracking(&self) -> Vec<&Path> {
        match &self.unified {
            Some(unified) => vec![unified],
            None => self.directories(),
        }
    }

    fn on_v2(&self, controller: Controller) -> Option<&Path> {
        let there = self.unified_controllers.contains(&controller);
        self.unified.as_deref().filter(|_| there)
    }

    fn on_v1(&self, controller: Controller) -> Option<&Path> {
        let found = self.v1.iter().find(|(known, _)| *known == controller);
        found.map(|(_, path)| path.as_path())
    }

    fn write_v2(&self, controller: Controller, file: &str, value: &str) -> Result<(), Error> {
        self.on_v2(controller)
            .map_or(Ok(()), |group| write(&group.join(file), value))
    }

    fn write_v1(&self, controller: Controller, file: &str, value: &str) -> Result<(), Error> {
        self.on_v1(controller)
            .map_or(Ok(()), |group| write(&group.join(file), value))
    }

    fn timed_out(&self, wanted: &'static str, timeout: Duration) -> Result<(), Error> {
        let path = self
            .directories()
            .first()
            .map(|&path| path.to_owned())
            .unwrap_or_default();
        TimedOutSnafu {
            path,
            wanted,
            timeout,
        }
        .fail()
    }
}

pub(super) fn write(path: &Path, value: &str) -> Result<(), Error> {
    let hint = if path.ends_with("cgroup.kill") {
        KILL_HINT
    } else {
        HINT
    };
    fs::write(path, value).context(WriteSnafu { path, value, hint })
}

/// Makes a group without a past; one with processes stays as it is.
pub(super) fn make_anew(directory: &Path) -> Result<(), Error> {
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => return Ok(()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).context(RemoveSnafu { path: directory });
        }
        _ => {}
    }
    fs::create_dir(directory).context(CreateSnafu { path: directory })
}

pub(super) fn remove(directory: &Path) -> Result<(), Error> {
    match fs::remove_dir(directory) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).context(RemoveSnafu { path: directory }),
    }
}
