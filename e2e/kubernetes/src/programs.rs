//! The programs that scripts/build-kubernetes makes.

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

/// The directory of the programs, all of which are there.
#[derive(Clone, Debug)]
pub struct Programs {
    directory: PathBuf,
}

impl Programs {
    /// Of an API without nodes.
    pub(crate) const API: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];

    /// Builds what is missing, which takes minutes on a fresh machine; an empty list is all of them.
    pub async fn ready(names: &[&str]) -> Result<Self, Error> {
        let script = target::checkout().join("scripts/build-kubernetes");
        let output = Command::new(&script)
            .args(names)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .await
            .context(RunSnafu { script: &script })?;
        ensure!(output.status.success(), FailedSnafu { script });
        let printed = String::from_utf8_lossy(&output.stdout);
        Ok(Self {
            directory: PathBuf::from(printed.trim()),
        })
    }

    /// For `PATH`.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}
