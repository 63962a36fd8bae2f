//! The images that scripts/build-images makes.

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

/// The directory of the images.
#[derive(Clone, Debug)]
pub struct Images {
    directory: PathBuf,
}

impl Images {
    /// Builds what is missing or has changed.
    pub async fn ready(names: &[&str]) -> Result<Self, Error> {
        let script = target::checkout().join("scripts/build-images");
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
            directory: Path::new(printed.trim()).to_owned(),
        })
    }

    /// An OCI archive.
    pub fn archive(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.tar"))
    }
}
