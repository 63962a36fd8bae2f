//! A program that runs in a space, and can be killed and started again.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::Arc,
    time::Duration,
};

use branchpool_sys::process;
use snafu::{OptionExt, ResultExt, Snafu};
use tokio::{process::Child, time::Instant};

use crate::space::{PATH, Space};

/// How much of a log is shown when a program has ended.
const SHOWN: usize = 4_000;
/// How often to look whether a program is ready; nothing tells it.
const LOOK: Duration = Duration::from_millis(25);
const READY_LIMIT: Duration = Duration::from_secs(120);
const STOP_LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot start {name}"))]
    Start { name: String, source: io::Error },
    #[snafu(display("cannot open the log {}", path.display()))]
    Log { path: PathBuf, source: io::Error },
    #[snafu(display("cannot signal {name}"))]
    Signal {
        name: String,
        source: process::Error,
    },
    #[snafu(display("{name} has ended: {status}; the end of its log {}:\n{tail}", log.display()))]
    Ended {
        name: String,
        status: ExitStatus,
        log: PathBuf,
        tail: String,
    },
    #[snafu(display("cannot learn how {name} does"))]
    Status { name: String, source: io::Error },
    #[snafu(display("{name} is not ready within {} s; the end of its log {}:\n{tail}", READY_LIMIT.as_secs(), log.display()))]
    NotReady {
        name: String,
        log: PathBuf,
        tail: String,
    },
    #[snafu(display("{name} does not end within {} s", STOP_LIMIT.as_secs()))]
    DoesNotEnd { name: String },
    #[snafu(display("{name} does not run"))]
    NotRunning { name: String },
}

/// A program with its arguments; whether it runs is another matter.
#[derive(Debug)]
pub struct Program {
    name: String,
    space: Arc<Space>,
    path: PathBuf,
    arguments: Vec<OsString>,
    log: PathBuf,
    running: Option<Child>,
}

impl Program {
    /// `path` as the space sees it; `log` as this process does.
    pub(crate) fn new<A: Into<OsString>>(
        name: &str,
        space: &Arc<Space>,
        path: PathBuf,
        arguments: impl IntoIterator<Item = A>,
        logs: &Path,
    ) -> Self {
        Self {
            name: name.to_owned(),
            space: Arc::clone(space),
            path,
            arguments: arguments.into_iter().map(Into::into).collect(),
            log: logs.join(format!("{name}.log")),
            running: None,
        }
    }

    /// Does nothing while it runs.
    pub fn start(&mut self) -> Result<(), Error> {
        if self.status()?.is_some() {
            return Ok(());
        }
        let log = File::options().create(true).append(true).open(&self.log);
        let log = log.context(LogSnafu { path: &self.log })?;
        let errors = log.try_clone().context(LogSnafu { path: &self.log })?;
        let child = self
            .space
            .command(&self.path)
            .args(&self.arguments)
            .env("PATH", PATH)
            // Ctrl-C in a terminal is for the harness.
            .process_group(0)
            .stdout(log)
            .stderr(errors)
            .spawn()
            .context(StartSnafu { name: &self.name })?;
        self.running = Some(child);
        Ok(())
    }

    /// The process, as seen from here, if it runs.
    pub async fn pid(&mut self) -> Result<Option<u32>, Error> {
        // `nsenter` may not have made it yet.
        while let Some(wrapper) = self.status()? {
            if let Some(pid) = child_of(wrapper) {
                return Ok(Some(pid));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(None)
    }

    /// SIGKILL, then waits for the end; nothing is done when it does not run.
    pub async fn kill(&mut self) -> Result<(), Error> {
        self.signal_and_wait(9).await
    }

    /// SIGTERM, then waits for the end.
    pub async fn stop(&mut self) -> Result<(), Error> {
        self.signal_and_wait(15).await
    }

    async fn signal_and_wait(&mut self, signal: i32) -> Result<(), Error> {
        if !self.signal(signal).await? {
            return Ok(());
        }
        let Some(running) = &mut self.running else {
            return Ok(());
        };
        tokio::time::timeout(STOP_LIMIT, running.wait())
            .await
            .ok()
            .context(DoesNotEndSnafu { name: &self.name })?
            .context(StatusSnafu { name: &self.name })?;
        self.running = None;
        Ok(())
    }

    /// Sends a signal, as SIGSTOP (19) or SIGCONT (18). `false`: it does not run.
    pub async fn signal(&mut self, signal: i32) -> Result<bool, Error> {
        let Some(pid) = self.pid().await? else {
            return Ok(false);
        };
        let name = &self.name;
        let pidfd = process::open(pid).context(SignalSnafu { name })?;
        process::signal(pidfd, signal).context(SignalSnafu { name })
    }

    /// The wrapper's id while it runs.
    fn status(&mut self) -> Result<Option<u32>, Error> {
        let Some(running) = &mut self.running else {
            return Ok(None);
        };
        match running
            .try_wait()
            .context(StatusSnafu { name: &self.name })?
        {
            None => Ok(running.id()),
            Some(_) => Ok(None),
        }
    }

    /// Waits until `look` says yes. A program that ends meanwhile is an error with the end of its log.
    pub(crate) async fn ready(&mut self, mut look: impl AsyncFnMut() -> bool) -> Result<(), Error> {
        let deadline = Instant::now() + READY_LIMIT;
        loop {
            if look().await {
                return Ok(());
            }
            let running = self
                .running
                .as_mut()
                .context(NotRunningSnafu { name: &self.name })?;
            if let Some(status) = running
                .try_wait()
                .context(StatusSnafu { name: &self.name })?
            {
                let (log, tail) = (self.log.clone(), tail(&self.log));
                let name = self.name.clone();
                return EndedSnafu {
                    name,
                    status,
                    log,
                    tail,
                }
                .fail();
            }
            if Instant::now() > deadline {
                let (log, tail) = (self.log.clone(), tail(&self.log));
                let name = self.name.clone();
                return NotReadySnafu { name, log, tail }.fail();
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// The process that `nsenter` has made. Not every kernel lists the children of a process.
fn child_of(parent: u32) -> Option<u32> {
    let entries = fs::read_dir("/proc").ok()?;
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .find(|pid: &u32| parent_of(*pid) == Some(parent))
}

fn parent_of(pid: u32) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything.
    let (_, rest) = text.rsplit_once(") ")?;
    rest.split(' ').nth(1)?.parse().ok()
}

fn tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let from = text.len().saturating_sub(SHOWN);
    String::from_utf8_lossy(&text[from..]).into_owned()
}
