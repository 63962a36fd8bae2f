//! Files that someone else writes, read again when they change.

use std::{
    collections::BTreeSet,
    fmt::{self, Display},
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use notify::{
    Event, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode, EventKind, ModifyKind},
};
use snafu::{ResultExt, Snafu};
use tokio::sync::Notify;
use tracing::warn;

/// What cannot be used may be half written: it is judged when the files have rested this long,
const QUIET: Duration = Duration::from_millis(200);
/// or, if they never rest, after this.
const MAX_UNREST: Duration = Duration::from_secs(2);

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("the path {} cannot be resolved: {source}", path.display()))]
    Path { path: PathBuf, source: io::Error },
    #[snafu(display(
        "cannot watch files for changes: {source}; raise fs.inotify.max_user_instances"
    ))]
    Watch { source: notify::Error },
}

/// Some files, and `L`, which reads them. They may be missing, and may be links, such as those that
/// Kubernetes swaps. Needs a Tokio runtime.
pub struct Files<L> {
    paths: Vec<PathBuf>,
    load: L,
    watcher: RecommendedWatcher,
    /// The directories of the files, of the last load.
    watched: Arc<Mutex<BTreeSet<PathBuf>>>,
    changed: Arc<Notify>,
}

impl<L> fmt::Debug for Files<L> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Files").field(&self.paths).finish()
    }
}

impl<L, T, E> Files<L>
where
    L: Fn() -> Result<T, E> + Send + 'static,
    T: Send + 'static,
    E: Display + Send + 'static,
{
    pub fn new(paths: &[&Path], load: L) -> Result<Self, Error> {
        let paths = paths
            .iter()
            .map(|path| std::path::absolute(path).context(PathSnafu { path }))
            .collect::<Result<_, _>>()?;
        let watched = Arc::new(Mutex::new(BTreeSet::new()));
        let changed = Arc::new(Notify::new());
        let (filter, tell) = (Arc::clone(&watched), Arc::clone(&changed));
        let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            let directories = filter.lock().unwrap_or_else(PoisonError::into_inner);
            if event.is_ok_and(|event| !is_change(&event, &directories)) {
                return;
            }
            // One permit, however many events: a load sees all that came before it.
            tell.notify_one();
        })
        .context(WatchSnafu)?;
        Ok(Self {
            paths,
            load,
            watcher,
            watched,
            changed,
        })
    }

    /// What the files hold now, read on a thread where that may block.
    pub async fn load(self) -> (Self, Result<T, E>) {
        let reading = tokio::task::spawn_blocking(move || {
            let mut files = self;
            // Watched before they are read, so that no change is missed.
            files.watch_directories();
            let loaded = (files.load)();
            (files, loaded)
        });
        reading.await.expect("reading files should not panic")
    }

    /// After each change, `take` gets what the files hold; what cannot be used goes to `complain`, once for
    /// each problem. Never returns.
    pub async fn follow(self, mut take: impl FnMut(T), mut complain: impl FnMut(&str)) {
        let mut files = self;
        let mut told = String::new();
        loop {
            files.changed.notified().await;
            let mut loaded;
            (files, loaded) = files.load().await;
            if loaded.is_err() {
                wait_until_quiet(&files.changed).await;
                (files, loaded) = files.load().await;
            }
            match loaded {
                Ok(value) => {
                    told.clear();
                    take(value);
                }
                Err(error) => {
                    let problem = error.to_string();
                    // Such as of a link that points nowhere for a moment: not with each event.
                    if problem != told {
                        complain(&problem);
                        told = problem;
                    }
                }
            }
        }
    }

    /// Watches the directories that the names are in and those that links lead to, again each time: one
    /// that was made anew is another one under the same name. Of one that is missing, what is above it.
    fn watch_directories(&mut self) {
        let mut directories = BTreeSet::new();
        for path in &self.paths {
            let target = fs::canonicalize(path).ok();
            for path in target.iter().chain([path]) {
                let existing = path.ancestors().skip(1).find(|above| above.is_dir());
                directories.extend(existing.map(Path::to_owned));
            }
        }
        let before = {
            let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *watched, directories.clone())
        };
        for directory in &directories {
            if let Err(error) = self.watcher.watch(directory, RecursiveMode::NonRecursive) {
                warn!(directory = %directory.display(), %error, "changes of files here are not noticed");
            }
        }
        for directory in before.difference(&directories) {
            // It may be gone, and its watch with it.
            let _ = self.watcher.unwatch(directory);
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
