//! An identity in files that someone else writes, read again when they change.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use notify::{
    Event, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode, EventKind, ModifyKind},
};
use snafu::ResultExt;
use time::OffsetDateTime;
use tokio::sync::{Notify, watch};
use tracing::{info, warn};

use crate::{
    Identities, TlsIdentity,
    pem::{self, Error, Pair, ReadSnafu, WatchSnafu},
};

/// A pair that does not fit may be half written: it is judged when its files have rested this long,
const QUIET: Duration = Duration::from_millis(200);
/// or, if they never rest, after this.
const MAX_UNREST: Duration = Duration::from_secs(2);

/// The pair in these files, and each good pair that takes its place, until the receivers are dropped.
/// A pair that cannot be served is logged, and the one before stays in force. Both may be links, such as
/// those that Kubernetes swaps. The first pair must be good. Needs a Tokio runtime.
pub async fn follow(certificate: &Path, key: &Path) -> Result<Identities, Error> {
    let changed = Arc::new(Notify::new());
    let reader = Reader::new(certificate, key, Arc::clone(&changed))?;
    let (reader, loaded) = reader.load().await;
    let Pair {
        identity,
        fingerprint,
    } = loaded?;
    let (sender, receiver) = watch::channel(identity);
    tokio::spawn(keep_up(reader, changed, sender, fingerprint));
    Ok(receiver)
}

async fn keep_up(
    mut reader: Reader,
    changed: Arc<Notify>,
    sender: watch::Sender<Arc<TlsIdentity>>,
    mut in_force: [u8; 32],
) {
    // Such as of a link that points nowhere for a moment: told once, not with each event.
    let mut told = String::new();
    loop {
        tokio::select! {
            () = changed.notified() => {}
            () = sender.closed() => return,
        }
        let mut loaded;
        (reader, loaded) = reader.load().await;
        if loaded.is_err() {
            wait_until_quiet(&changed).await;
            (reader, loaded) = reader.load().await;
        }
        match loaded {
            Ok(pair) => {
                told.clear();
                if pair.fingerprint != in_force {
                    in_force = pair.fingerprint;
                    info!(certificate = %reader.certificate.display(), "new connections get the new certificate");
                    sender.send_replace(pair.identity);
                }
            }
            Err(error) => {
                let problem = error.to_string();
                if problem != told {
                    warn!("the certificate before stays in force: {problem}");
                    told = problem;
                }
            }
        }
    }
}

async fn wait_until_quiet(changed: &Notify) {
    let quiet = async {
        while tokio::time::timeout(QUIET, changed.notified())
            .await
            .is_ok()
        {}
    };
    // Whatever comes after the limit is a change like any other.
    let _ = tokio::time::timeout(MAX_UNREST, quiet).await;
}

struct Reader {
    certificate: PathBuf,
    key: PathBuf,
    watcher: RecommendedWatcher,
    /// The directories of the files, of the last load.
    watched: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl Reader {
    fn new(certificate: &Path, key: &Path, changed: Arc<Notify>) -> Result<Self, Error> {
        let absolute = |path: &Path| std::path::absolute(path).context(ReadSnafu { path });
        let watched = Arc::new(Mutex::new(BTreeSet::new()));
        let filter = Arc::clone(&watched);
        let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            let directories = filter.lock().unwrap_or_else(PoisonError::into_inner);
            if event.is_ok_and(|event| !is_change(&event, &directories)) {
                return;
            }
            // One permit, however many events: a load sees all that came before it.
            changed.notify_one();
        })
        .context(WatchSnafu)?;
        Ok(Self {
            certificate: absolute(certificate)?,
            key: absolute(key)?,
            watcher,
            watched,
        })
    }

    /// Reads files on a thread where that may block.
    async fn load(self) -> (Self, Result<Pair, Error>) {
        let reading = tokio::task::spawn_blocking(move || {
            let mut reader = self;
            // Watched before they are read, so that no change is missed.
            reader.watch_directories();
            let loaded = pem::load(&reader.certificate, &reader.key, OffsetDateTime::now_utc());
            (reader, loaded)
        });
        reading.await.expect("reading files should not panic")
    }

    /// Watches the directories that the names are in and those that links lead to, again each time: one
    /// that was made anew is another one under the same name.
    fn watch_directories(&mut self) {
        let mut directories = BTreeSet::new();
        for path in [&self.certificate, &self.key] {
            let target = fs::canonicalize(path).ok();
            for path in target.iter().chain([path]) {
                directories.extend(path.parent().map(Path::to_owned));
            }
        }
        let before = {
            let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *watched, directories.clone())
        };
        for directory in &directories {
            if let Err(error) = self.watcher.watch(directory, RecursiveMode::NonRecursive) {
                warn!(directory = %directory.display(), %error, "changes of certificates here are not noticed");
            }
        }
        for directory in before.difference(&directories) {
            // It may be gone, and its watch with it.
            let _ = self.watcher.unwatch(directory);
        }
    }
}

/// A file that is being written is read when it is closed, not before.
fn is_change(event: &Event, directories: &BTreeSet<PathBuf>) -> bool {
    if event.need_rescan() {
        return true;
    }
    let matters = match event.kind {
        EventKind::Access(kind) => kind == AccessKind::Close(AccessMode::Write),
        EventKind::Modify(kind) => !matches!(kind, ModifyKind::Data(_)),
        _ => true,
    };
    let concerns = |path: &PathBuf| {
        directories.contains(path)
            || path
                .parent()
                .is_some_and(|parent| directories.contains(parent))
    };
    matters && event.paths.iter().any(concerns)
}
