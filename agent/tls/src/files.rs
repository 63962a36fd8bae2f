//! An identity in files that someone else writes.

use std::{path::Path, sync::Arc};

use time::OffsetDateTime;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::{
    Identities,
    pem::{self, Error, Pair},
    watching::Files,
};

/// The pair in these files, and each good pair that takes its place, until the receivers are dropped.
/// A pair that cannot be served is logged, and the one before stays in force. The first pair must be good.
/// Needs a Tokio runtime.
pub async fn follow(certificate: &Path, key: &Path) -> Result<Identities, Error> {
    let files = Files::new(&[certificate, key], {
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        move || pem::load(&certificate, &key, OffsetDateTime::now_utc())
    })?;
    let (files, loaded) = files.load().await;
    let Pair {
        identity,
        fingerprint: mut in_force,
    } = loaded?;
    let (sender, receiver) = watch::channel(identity);
    let path = certificate.to_owned();
    tokio::spawn(async move {
        let take = |pair: Pair| {
            if pair.fingerprint != in_force {
                in_force = pair.fingerprint;
                info!(certificate = %path.display(), "new connections get the new certificate");
                sender.send_replace(Arc::clone(&pair.identity));
            }
        };
        let complain = |problem: &str| warn!("the certificate before stays in force: {problem}");
        tokio::select! {
            () = files.follow(take, complain) => {}
            () = sender.closed() => {}
        }
    });
    Ok(receiver)
}
