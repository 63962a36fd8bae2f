//! The one cluster that stays when its maker has ended, for people.

use std::path::PathBuf;

use crate::{
    cluster::{Error, Options, Own},
    state::{self, State},
};

/// Starts it, unless it runs, and gives its kubeconfig.
pub async fn start(options: Options) -> Result<PathBuf, Error> {
    if let Some(directory) = state::running()? {
        return Ok(directory.join("pki/admin.kubeconfig"));
    }
    let own = Own::start(State::of_detached, options).await?;
    let kubeconfig = own.api.kubeconfig().to_owned();
    own.detach().await?;
    Ok(kubeconfig)
}

/// Ends it and removes all that it was. `false`: there was none.
pub fn remove() -> Result<bool, state::Error> {
    state::remove_detached()
}
