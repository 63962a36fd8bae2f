//! The scripts that build what a cluster is made of: each prints the directory in which it is.

use std::{
    io,
    path::{Path, PathBuf},
    process::Stdio,
};

use snafu::{ResultExt, Snafu, ensure};
use tokio::process::Command;

use crate::target;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot run {}", script.display()))]
    Run { script: PathBuf, source: io::Error },
    #[snafu(display("{} failed: see what it printed above", script.display()))]
    Failed { script: PathBuf },
}

/// Runs `scripts/NAME`, whose messages are shown.
pub(crate) async fn build(name: &str, arguments: &[&str]) -> Result<PathBuf, Error> {
    let script = target::checkout().join("scripts").join(name);
    let output = Command::new(&script)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .await
        .context(RunSnafu { script: &script })?;
    ensure!(output.status.success(), FailedSnafu { script });
    let printed = String::from_utf8_lossy(&output.stdout);
    Ok(Path::new(printed.trim()).to_owned())
}
