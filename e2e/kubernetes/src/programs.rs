//! The programs that scripts/build-kubernetes makes.

use std::path::{Path, PathBuf};

use crate::script;

/// The directory of the programs, all of which are there.
#[derive(Clone, Debug)]
pub struct Programs {
    directory: PathBuf,
}

impl Programs {
    /// Of an API without nodes.
    pub(crate) const API: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];

    /// Builds what is missing, which takes minutes on a fresh machine; an empty list is all of them.
    pub async fn ready(names: &[&str]) -> Result<Self, script::Error> {
        let directory = script::build("build-kubernetes", names).await?;
        Ok(Self { directory })
    }

    /// For `PATH`.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}
