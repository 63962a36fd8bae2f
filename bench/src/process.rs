//! Starting programs inside an account.

use std::{
    convert::Infallible,
    ffi::OsString,
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use snafu::{ResultExt, whatever};
use tokio::{
    process::{Child, Command},
    time::timeout,
};

use crate::{account::Account, error::Result};

/// For a program that is told to stop.
const PATIENCE: Duration = Duration::from_mins(2);
/// For one whose run was broken off.
const GOODBYE: Duration = Duration::from_secs(10);

/// A command that joins the account before it becomes `program`; killed when dropped.
pub(crate) fn in_account(account: &Account, program: &Path) -> Result<Command> {
    let own = std::env::current_exe().whatever_context("cannot find this program")?;
    let mut command = Command::new(own);
    command.arg("enter").arg(account.directory()).arg(program);
    command.kill_on_drop(true);
    Ok(command)
}

/// Joins the group and becomes the program.
pub(crate) fn enter(group: &Path, program: &PathBuf, args: &[OsString]) -> Result<Infallible> {
    fs::write(group.join("cgroup.procs"), "0")
        .with_whatever_context(|_| format!("cannot join {}", group.display()))?;
    let error = std::process::Command::new(program).args(args).exec();
    Err(error).with_whatever_context(|_| format!("cannot become {}", program.display()))
}

/// A program in an account of its own that stops in order, whatever happens.
#[derive(Debug)]
pub(crate) struct Daemon {
    name: &'static str,
    child: Child,
    pub(crate) account: Account,
    log: PathBuf,
}

impl Daemon {
    /// `command` is of [`in_account`] with the same account.
    pub(crate) fn start(
        name: &'static str,
        mut command: Command,
        account: Account,
        log: PathBuf,
    ) -> Result<Self> {
        let output = fs::File::create(&log)
            .with_whatever_context(|_| format!("cannot make the log of the {name}"))?;
        let errors = output
            .try_clone()
            .with_whatever_context(|_| format!("cannot make the log of the {name}"))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn()
            .with_whatever_context(|_| format!("cannot start the {name}"))?;
        Ok(Self {
            name,
            child,
            account,
            log,
        })
    }

    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let ended = self.child.try_wait();
        ended.with_whatever_context(|_| format!("cannot wait for the {}", self.name))
    }

    /// The end of what it wrote.
    pub(crate) fn log(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Stops it in order, and makes sure that no process of it is left.
    pub(crate) async fn stop(mut self) -> Result<()> {
        let name = self.name;
        self.tell_to_stop();
        let status = timeout(PATIENCE, self.child.wait())
            .await
            .with_whatever_context(|_| format!("the {name} does not stop"))?
            .with_whatever_context(|_| format!("cannot wait for the {name}"))?;
        if !status.success() {
            whatever!("the {name} ended with {status}: {}", self.log());
        }
        let left = self.account.processes();
        if !left.is_empty() {
            whatever!("the {name} left processes behind: {left:?}");
        }
        Ok(())
    }

    fn tell_to_stop(&self) {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            let _gone = kill_process(pid, Signal::TERM);
        }
    }
}

impl Drop for Daemon {
    /// SIGKILL, which comes with the account's end, would leave an agent's cgroups behind.
    fn drop(&mut self) {
        // A second signal tells it not to wait for its servers.
        for _ in 0..2 {
            self.tell_to_stop();
            let deadline = Instant::now() + GOODBYE;
            while Instant::now() < deadline {
                if !matches!(self.child.try_wait(), Ok(None)) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
