//! Starting programs inside an account.

use std::{
    convert::Infallible,
    ffi::OsString,
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
};

use snafu::ResultExt;
use tokio::process::Command;

use crate::{account::Account, error::Result};

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
