//! The gateway's own cancel keys, and where they lead.
//!
//! A client gets the process id of its backend, as drivers compare it with that in notifications,
//! and a secret of the gateway's: 4 bytes in protocol 3.0, 32 in 3.2.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::{Bytes, BytesMut};
use postgres_protocol::message::frontend;
use rand::Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{branch::Branch, session::CancelKey, startup::Cancel};

/// Length of a secret, in bytes, by the minor version of the protocol.
fn secret_length(minor: u16) -> usize {
    if minor >= 2 { 32 } else { 4 }
}

#[derive(Clone, Default)]
pub(crate) struct Cancels {
    table: Arc<Mutex<HashMap<Cancel, Target>>>,
}

#[derive(Clone)]
struct Target {
    branch: Arc<Branch>,
    key: CancelKey,
}

/// A key that is good until it is dropped.
pub(crate) struct Registered {
    cancels: Cancels,
    pub(crate) key: Cancel,
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered").finish_non_exhaustive()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.cancels.lock().remove(&self.key);
    }
}

impl Cancels {
    /// Makes a key for a backend.
    pub(crate) fn register(&self, branch: &Arc<Branch>, key: CancelKey, minor: u16) -> Registered {
        let mut table = self.lock();
        loop {
            let mut secret = vec![0; secret_length(minor)];
            rand::rng().fill_bytes(&mut secret);
            let own = Cancel {
                process_id: key.process_id,
                secret: Bytes::from(secret),
            };
            if let Entry::Vacant(entry) = table.entry(own.clone()) {
                let branch = Arc::clone(branch);
                entry.insert(Target { branch, key });
                return Registered {
                    cancels: self.clone(),
                    key: own,
                };
            }
        }
    }

    /// Passes the request on to whom the key leads, if to anybody, and waits until the server has
    /// acted on it. Like Postgres, tells nothing.
    pub(crate) async fn cancel(&self, request: &Cancel) {
        let target = self.lock().get(request).cloned();
        let Some(Target { branch, key }) = target else {
            return;
        };
        let (mut stream, _link, _permit) = match branch.connect().await {
            Ok(connected) => connected,
            Err(error) => return tracing::debug!(%error, "a cancel request is lost"),
        };
        let mut message = BytesMut::new();
        frontend::cancel_request(key.process_id, key.secret, &mut message);
        let sent = async {
            stream.write_all(&message).await?;
            // The server closes when it has sent the signal.
            stream.read_u8().await
        };
        tokio::select! {
            _ = sent => {}
            () = branch.ended() => {}
        }
        drop(stream);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Cancel, Target>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
