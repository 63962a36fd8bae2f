//! The directory of a cluster, and what is left of one whose maker was killed.
//!
//! A lock file beside the directory is held by its maker and by the first process of each space, so it is
//! free only when all are gone. A directory whose lock is free is a leftover, and is removed before
//! anything is started.

use std::{
    fs::{self, File, TryLockError},
    io,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use branchpool_sys::process;
use snafu::{ResultExt, Snafu};

use crate::{
    cgroup,
    space::{self, END_LIMIT},
    target,
};

const LOCK: &str = "lock";
const CGROUP: &str = "cgroup";
const PROCESSES: &str = "processes";
const MAKER: &str = "maker";
/// How long processes that were killed may take to let go of files.
const REMOVE_LIMIT: Duration = Duration::from_secs(30);
const REMOVE_INTERVAL: Duration = Duration::from_millis(50);
/// Logs of this many failed runs are kept.
const KEPT_LOGS: usize = 10;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot {step} {}", path.display()))]
    File {
        step: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[snafu(display("a cluster runs already in {}; `make cluster-down` removes it", path.display()))]
    Running { path: PathBuf },
    #[snafu(display("cannot end the processes of a cluster"))]
    Kill { source: process::Error },
    #[snafu(transparent)]
    Cgroup { source: cgroup::Error },
}

#[derive(Debug)]
pub(crate) struct State {
    directory: PathBuf,
    lock: File,
    /// Another lock, which is this process's alone.
    _maker: File,
    detached: bool,
    keep_logs: bool,
}

impl State {
    /// For as long as this process lives.
    pub(crate) fn bound() -> Result<Self, Error> {
        Self::create(&format!("test-{:08x}", rand::random::<u32>()))
    }

    /// For one that may stay, and is found by its name.
    pub(crate) fn create(name: &str) -> Result<Self, Error> {
        let all = directories()?;
        let _one_at_a_time = sweep(&all)?;
        let directory = all.join(name);
        let lock_path = lock_of(&directory);
        let lock = open_lock(&lock_path)?;
        if try_lock(&lock, &lock_path)? {
            make(&directory)?;
            make(&directory.join("logs"))?;
            let path = directory.join(MAKER);
            let maker = open_lock(&path)?;
            maker.lock().context(FileSnafu { step: "lock", path })?;
            Ok(Self {
                directory,
                lock,
                _maker: maker,
                detached: false,
                keep_logs: false,
            })
        } else {
            RunningSnafu { path: directory }.fail()
        }
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.directory.join(file)
    }

    pub(crate) fn logs(&self) -> PathBuf {
        self.path("logs")
    }

    /// Another handle of the lock, for those who are to hold it too.
    pub(crate) fn lock(&self) -> Result<File, Error> {
        self.lock.try_clone().context(FileSnafu {
            step: "hand on the lock of",
            path: &self.directory,
        })
    }

    /// The name of its cgroups, which it is found by when all else is gone.
    pub(crate) fn cgroup(&self) -> Result<String, Error> {
        let name = format!("branchpool-e2e-{:08x}", rand::random::<u32>());
        let path = self.path(CGROUP);
        fs::write(&path, &name).context(FileSnafu {
            step: "write",
            path,
        })?;
        Ok(name)
    }

    /// Notes the processes with which a detached cluster ends, and leaves the directory to it.
    pub(crate) fn detach(&mut self, first_processes: &[u32]) -> Result<(), Error> {
        let list: Vec<_> = first_processes.iter().map(u32::to_string).collect();
        let path = self.path(PROCESSES);
        fs::write(&path, list.join("\n")).context(FileSnafu {
            step: "write",
            path,
        })?;
        self.detached = true;
        Ok(())
    }

    /// From now on the logs outlive the directory.
    pub(crate) fn keep_logs(&mut self) {
        self.keep_logs = true;
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if self.detached {
            return;
        }
        if self.keep_logs || std::thread::panicking() {
            match save_logs(&self.directory) {
                Ok(saved) => eprintln!("the logs of the cluster are in {}", saved.display()),
                Err(error) => eprintln!("{}", branchpool_sys::chain(&error)),
            }
        }
        if let Err(error) = remove(&self.directory) {
            eprintln!("{}", branchpool_sys::chain(&error));
        }
    }
}

/// The directory of the detached cluster while it runs.
pub(crate) fn running(name: &str) -> Result<Option<PathBuf>, Error> {
    let directory = directories()?.join(name);
    let path = lock_of(&directory);
    if !path.exists() {
        return Ok(None);
    }
    let lock = open_lock(&path)?;
    Ok((!try_lock(&lock, &path)?).then_some(directory))
}

/// Ends the detached cluster and removes what it was. `false`: there was none.
pub(crate) fn remove_detached(name: &str) -> Result<bool, Error> {
    let Some(directory) = running(name)? else {
        sweep(&directories()?)?;
        return Ok(false);
    };
    if let Ok(name) = fs::read_to_string(directory.join(CGROUP)) {
        cgroup::thaw_all(&name)?;
    }
    let path = directory.join(PROCESSES);
    let list = fs::read_to_string(&path).unwrap_or_default();
    for pid in list.lines().filter_map(|line| line.parse().ok()) {
        // One that has ended is what is wanted; its number may be another's by now.
        if let Ok(pidfd) = process::open(pid)
            && space::is_first_process(pid)
        {
            process::signal(&pidfd, 9).context(KillSnafu)?;
            process::wait(&pidfd, Some(END_LIMIT)).context(KillSnafu)?;
        }
    }
    // Without it this counts as one whose maker was killed, and is waited for.
    let _ = fs::remove_file(&path);
    sweep(&directories()?)?;
    Ok(true)
}

fn directories() -> Result<PathBuf, Error> {
    let path = target::directory().join("clusters");
    make(&path)?;
    Ok(path)
}

/// Removes all whose makers are gone. Nobody else makes or removes one while the result is held.
fn sweep(all: &Path) -> Result<File, Error> {
    let path = all.join(LOCK);
    let guard = open_lock(&path)?;
    guard.lock().context(FileSnafu { step: "lock", path })?;
    let entries = fs::read_dir(all).context(FileSnafu {
        step: "list",
        path: all,
    })?;
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if path.extension().is_none_or(|extension| extension != LOCK) {
            continue;
        }
        let directory = path.with_extension("");
        let lock = open_lock(&path)?;
        if try_lock(&lock, &path)? || is_dying(&directory)? && lock_within(&lock, &path)? {
            remove(&directory)?;
        }
    }
    Ok(guard)
}

/// Whether its maker has been killed, and its processes are on their way.
fn is_dying(directory: &Path) -> Result<bool, Error> {
    let path = directory.join(MAKER);
    if !path.exists() || directory.join(PROCESSES).exists() {
        return Ok(false);
    }
    try_lock(&open_lock(&path)?, &path)
}

fn lock_within(lock: &File, path: &Path) -> Result<bool, Error> {
    let deadline = Instant::now() + REMOVE_LIMIT;
    while Instant::now() < deadline {
        if try_lock(lock, path)? {
            return Ok(true);
        }
        std::thread::sleep(REMOVE_INTERVAL);
    }
    Ok(false)
}

/// The lock file goes last: what is not finished is found again.
fn remove(directory: &Path) -> Result<(), Error> {
    if let Ok(name) = fs::read_to_string(directory.join(CGROUP)) {
        cgroup::remove(&name)?;
    }
    detach_loop_devices(directory);
    let deadline = Instant::now() + REMOVE_LIMIT;
    loop {
        match fs::remove_dir_all(directory) {
            Ok(()) => break,
            Err(error) if error.kind() == io::ErrorKind::NotFound => break,
            // A process that dies may still write.
            Err(_) if Instant::now() < deadline => std::thread::sleep(REMOVE_INTERVAL),
            Err(error) => {
                return Err(error).context(FileSnafu {
                    step: "remove",
                    path: directory,
                });
            }
        }
    }
    let lock = lock_of(directory);
    fs::remove_file(&lock).context(FileSnafu {
        step: "remove",
        path: lock,
    })
}

/// They go with their mounts, which go with their namespaces; except where one was never mounted.
fn detach_loop_devices(directory: &Path) {
    let list = Command::new("losetup")
        .args(["--list", "--noheadings", "--output", "NAME,BACK-FILE"])
        .output();
    let Ok(list) = list else { return };
    for line in String::from_utf8_lossy(&list.stdout).lines() {
        let Some((device, file)) = line.trim().split_once(char::is_whitespace) else {
            continue;
        };
        if Path::new(file.trim()).starts_with(directory) {
            // It may be on its way already.
            let _ = Command::new("losetup").args(["--detach", device]).output();
        }
    }
}

fn save_logs(directory: &Path) -> Result<PathBuf, Error> {
    let all = target::directory().join("logs");
    make(&all)?;
    let mut older: Vec<_> = fs::read_dir(&all)
        .context(FileSnafu {
            step: "list",
            path: &all,
        })?
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((entry.metadata().ok()?.modified().ok()?, entry.path()))
        })
        .collect();
    older.sort();
    for (_, path) in older.iter().rev().skip(KEPT_LOGS - 1) {
        let _ = fs::remove_dir_all(path);
    }
    let name = directory.file_name().unwrap_or_default();
    let saved = all.join(name);
    let _ = fs::remove_dir_all(&saved);
    fs::rename(directory.join("logs"), &saved).context(FileSnafu {
        step: "move logs to",
        path: &saved,
    })?;
    Ok(saved)
}

fn lock_of(directory: &Path) -> PathBuf {
    directory.with_extension(LOCK)
}

fn open_lock(path: &Path) -> Result<File, Error> {
    let mut options = File::options();
    options.create(true).truncate(false).write(true);
    options.open(path).context(FileSnafu { step: "open", path })
}

fn try_lock(file: &File, path: &Path) -> Result<bool, Error> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(source)) => Err(source).context(FileSnafu { step: "lock", path }),
    }
}

fn make(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).context(FileSnafu { step: "make", path })
}
