//! A cluster that stays when its maker has ended, for people. It is found by its name.

use std::path::PathBuf;

use branchpool_sys::process;
use snafu::ResultExt;

use crate::{
    cluster::{DescriptorsSnafu, Error, Options, Own},
    state::{self, State},
};

/// Starts it, unless it runs, and gives its kubeconfig.
pub async fn start(name: &str, options: Options) -> Result<PathBuf, Error> {
    if let Some(directory) = state::running(name)? {
        return Ok(directory.join("pki/admin.kubeconfig"));
    }
    // What the caller holds, such as a lock, must not be held as long as the cluster lives.
    process::close_rest_on_exec().context(DescriptorsSnafu)?;
    let own = Own::start(|| State::create(name), options).await?;
    let kubeconfig = own.api.kubeconfig().to_owned();
    own.detach().await?;
    Ok(kubeconfig)
}

/// Ends it and removes all that it was. `false`: there was none.
pub fn remove(name: &str) -> Result<bool, state::Error> {
    state::remove_detached(name)
}
