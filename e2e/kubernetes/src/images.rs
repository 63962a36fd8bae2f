//! The images that scripts/build-images makes.

use std::path::PathBuf;

use crate::script;

/// The directory of the images.
#[derive(Clone, Debug)]
pub struct Images {
    directory: PathBuf,
}

impl Images {
    /// Builds what is missing or has changed.
    pub async fn ready(names: &[&str]) -> Result<Self, script::Error> {
        let directory = script::build("build-images", names).await?;
        Ok(Self { directory })
    }

    /// An OCI archive.
    pub fn archive(&self, name: &str) -> PathBuf {
        self.directory.join(format!("{name}.tar"))
    }
}
