//! Manifests in files: read as a set, and read again whenever they change.
//!
//! Nobody waits for a reload, and a set that lacks a pool ends that pool. So a set that is good and
//! lacks nothing is delivered at once; one that is broken, or lacks a pool that was there, may be an
//! edit half done and is read again when the files have been quiet for a moment.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use branchpool_crds::{ManifestError, Manifests, load_manifests};
use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind};
use notify::{Event, RecommendedWatcher, RecursiveMode, Watcher};
use snafu::{ResultExt, Snafu, ensure};
use tokio::sync::{Notify, watch};
use tracing::warn;

/// Most files of one set.
pub const MAX_FILES: usize = 64;
/// Most bytes of one file.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

const QUIET: Duration = Duration::from_millis(200);
/// Files that never rest are taken as they are after this.
const MAX_UNREST: Duration = Duration::from_secs(2);

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot read {}: {source}; check the path given with -f", path.display()))]
    Read { path: PathBuf, source: io::Error },
    #[snafu(display("{} is neither a file nor a directory; give -f one of them", path.display()))]
    Special { path: PathBuf },
    #[snafu(display(
        "{} is larger than {MAX_FILE_BYTES} bytes; split it, or use a subvolume source for big data",
        path.display()
    ))]
    TooLarge { path: PathBuf },
    #[snafu(display("{} is not UTF-8 text; save it as UTF-8", path.display()))]
    NotText { path: PathBuf },
    #[snafu(display("more than {MAX_FILES} manifest files; put several objects into one file"))]
    TooManyFiles,
    #[snafu(display("{}", lines(errors)))]
    Refused { errors: Vec<ManifestError> },
    #[snafu(display(
        "cannot watch files for changes: {source}; raise fs.inotify.max_user_instances"
    ))]
    Watch { source: notify::Error },
}

fn lines(errors: &[ManifestError]) -> String {
    let lines: Vec<_> = errors.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

/// A complete set, or why the files as they are now make none: then the set before stays in force.
pub type Loaded = Result<Arc<Manifests>, Arc<Error>>;

/// Reads what `paths` name: files of any name, and of directories the files `*.yaml`, `*.yml` and
/// `*.json` directly in them, hidden ones left out.
pub fn read(paths: &[PathBuf]) -> Result<Manifests, Error> {
    read_files(&list(paths)?)
}

/// [`read`] now and after every change, until the receiver is dropped. The first value is there when
/// this returns. Needs a Tokio runtime.
pub async fn watch(paths: &[PathBuf]) -> Result<watch::Receiver<Loaded>, Error> {
    let changed = Arc::new(Notify::new());
    let reader = Reader::new(paths, Arc::clone(&changed))?;
    let (reader, loaded) = reader.load().await;
    let last_good = loaded.as_ref().ok().cloned().unwrap_or_default();
    let (sender, receiver) = watch::channel(loaded);
    tokio::spawn(follow(reader, changed, sender, last_good));
    Ok(receiver)
}

async fn follow(
    mut reader: Reader,
    changed: Arc<Notify>,
    sender: watch::Sender<Loaded>,
    mut last_good: Arc<Manifests>,
) {
    loop {
        tokio::select! {
            () = changed.notified() => {}
            () = sender.closed() => return,
        }
        let mut loaded;
        (reader, loaded) = reader.load().await;
        if is_doubtful(&loaded, &last_good) {
            wait_until_quiet(&changed).await;
            (reader, loaded) = reader.load().await;
        }
        if let Ok(manifests) = &loaded {
            last_good = Arc::clone(manifests);
        }
        sender.send_if_modified(|current| {
            let differs = !is_same(current, &loaded);
            if differs {
                *current = loaded;
            }
            differs
        });
    }
}

fn is_doubtful(loaded: &Loaded, last_good: &Manifests) -> bool {
    let Ok(manifests) = loaded else { return true };
    let names: BTreeSet<_> = names(manifests).collect();
    names_missing(last_good, &names)
}

fn names_missing(of: &Manifests, names: &BTreeSet<PoolName<'_>>) -> bool {
    self::names(of).any(|name| !names.contains(&name))
}

type PoolName<'a> = (Option<&'a str>, Option<&'a str>);

fn names(manifests: &Manifests) -> impl Iterator<Item = PoolName<'_>> {
    manifests.pools.iter().map(|pool| {
        let metadata = &pool.metadata;
        (metadata.namespace.as_deref(), metadata.name.as_deref())
    })
}

fn is_same(a: &Loaded, b: &Loaded) -> bool {
    match (a, b) {
        (Ok(a), Ok(b)) => a == b,
        (Err(a), Err(b)) => a.to_string() == b.to_string(),
        _ => false,
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

/// What a change may concern, shared with the thread that receives events.
#[derive(Default)]
struct Interest {
    /// Directories given, in case they are made anew.
    paths: BTreeSet<PathBuf>,
    /// Everything directly in these.
    directories: BTreeSet<PathBuf>,
}

impl Interest {
    fn concerns(&self, path: &Path) -> bool {
        self.paths.contains(path)
            || self.directories.contains(path)
            || path
                .parent()
                .is_some_and(|parent| self.directories.contains(parent))
    }
}

struct Reader {
    paths: Vec<PathBuf>,
    watcher: RecommendedWatcher,
    /// By the last load.
    watched: BTreeSet<PathBuf>,
    interest: Arc<Mutex<Interest>>,
}

impl Reader {
    fn new(paths: &[PathBuf], changed: Arc<Notify>) -> Result<Self, Error> {
        let paths = paths
            .iter()
            .map(|path| std::path::absolute(path).context(ReadSnafu { path }))
            .collect::<Result<Vec<_>, _>>()?;
        let interest = Arc::new(Mutex::new(Interest::default()));
        let filter = Arc::clone(&interest);
        let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
            let interest = filter.lock().unwrap_or_else(PoisonError::into_inner);
            if event.is_ok_and(|event| !is_change(&event, &interest)) {
                return;
            }
            // One permit, however many events: a reload sees all that came before it.
            changed.notify_one();
        })
        .context(WatchSnafu)?;
        Ok(Self {
            paths,
            watcher,
            watched: BTreeSet::new(),
            interest,
        })
    }

    /// Reads files on a thread where that may block.
    async fn load(self) -> (Self, Loaded) {
        let reading = tokio::task::spawn_blocking(move || {
            let mut reader = self;
            let loaded = reader.load_watched();
            (reader, loaded)
        });
        reading.await.expect("reading files should not panic")
    }

    fn load_watched(&mut self) -> Loaded {
        // Watched before it is read, so that no change is missed.
        let before = mem::take(&mut self.watched);
        self.watch_given();
        let files = list(&self.paths);
        if let Ok(files) = &files {
            self.watch_targets(files);
        }
        for directory in before.difference(&self.watched) {
            // It may be gone, and its watch with it.
            let _ = self.watcher.unwatch(directory);
        }
        let manifests = files.and_then(|files| read_files(&files));
        manifests.map(Arc::new).map_err(Arc::new)
    }

    /// Watches directories, and the directories of files, again each time: one that was made anew is
    /// another one under the same name.
    fn watch_given(&mut self) {
        let mut interest = Interest::default();
        let mut directories = BTreeSet::new();
        for path in &self.paths {
            interest.paths.insert(path.clone());
            if path.is_dir() {
                interest.directories.insert(path.clone());
                directories.insert(path.clone());
            } else if let Some(parent) = path.parent() {
                interest.directories.insert(parent.to_owned());
            }
            directories.extend(path.parent().map(Path::to_owned));
        }
        *self.interest.lock().unwrap_or_else(PoisonError::into_inner) = interest;
        for directory in directories {
            self.watch(&directory);
        }
    }

    /// What a link leads to changes elsewhere.
    fn watch_targets(&mut self, files: &[PathBuf]) {
        let targets = files.iter().filter_map(|file| fs::canonicalize(file).ok());
        let parents: BTreeSet<_> = targets
            .filter_map(|target| target.parent().map(Path::to_owned))
            .collect();
        for parent in parents {
            let mut interest = self.interest.lock().unwrap_or_else(PoisonError::into_inner);
            let is_new = interest.directories.insert(parent.clone());
            drop(interest);
            if is_new {
                self.watch(&parent);
            }
        }
    }

    fn watch(&mut self, directory: &Path) {
        self.watched.insert(directory.to_owned());
        if let Err(error) = self.watcher.watch(directory, RecursiveMode::NonRecursive) {
            warn!(directory = %directory.display(), %error, "changes of manifests here are not noticed");
        }
    }
}

/// A file that is being written is read when it is closed, not before.
fn is_change(event: &Event, interest: &Interest) -> bool {
    if event.need_rescan() {
        return true;
    }
    let matters = match event.kind {
        EventKind::Access(kind) => kind == AccessKind::Close(AccessMode::Write),
        EventKind::Modify(kind) => !matches!(kind, ModifyKind::Data(_)),
        _ => true,
    };
    matters && event.paths.iter().any(|path| interest.concerns(path))
}

fn list(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for path in paths {
        let kind = fs::metadata(path).context(ReadSnafu { path })?;
        if kind.is_dir() {
            files.extend(list_directory(path)?);
        } else {
            files.push(path.clone());
        }
        ensure!(files.len() <= MAX_FILES, TooManyFilesSnafu);
    }
    let mut seen = BTreeSet::new();
    files.retain(|file| seen.insert(file.clone()));
    Ok(files)
}

/// The manifests directly in a directory, by name.
fn list_directory(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = BTreeSet::new();
    for entry in fs::read_dir(directory).context(ReadSnafu { path: directory })? {
        let path = entry.context(ReadSnafu { path: directory })?.path();
        if is_manifest(&path) && path.is_file() {
            files.insert(path);
            ensure!(files.len() <= MAX_FILES, TooManyFilesSnafu);
        }
    }
    Ok(files.into_iter().collect())
}

fn is_manifest(path: &Path) -> bool {
    let hidden = path
        .file_name()
        .is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    let extension = path.extension().and_then(|extension| extension.to_str());
    !hidden && matches!(extension, Some("yaml" | "yml" | "json"))
}

fn read_files(files: &[PathBuf]) -> Result<Manifests, Error> {
    let texts = files
        .iter()
        .map(|path| Ok((path.display().to_string(), read_file(path)?)))
        .collect::<Result<Vec<_>, Error>>()?;
    let texts: Vec<_> = texts
        .iter()
        .map(|(name, text)| (name.as_str(), text.as_str()))
        .collect();
    load_manifests(&texts).map_err(|errors| Error::Refused { errors })
}

fn read_file(path: &Path) -> Result<String, Error> {
    // Opening a pipe would wait for its writer.
    let kind = fs::metadata(path).context(ReadSnafu { path })?;
    ensure!(kind.is_file(), SpecialSnafu { path });
    let file = File::open(path).context(ReadSnafu { path })?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .context(ReadSnafu { path })?;
    ensure!(bytes.len() as u64 <= MAX_FILE_BYTES, TooLargeSnafu { path });
    String::from_utf8(bytes).map_err(|_| Error::NotText {
        path: path.to_owned(),
    })
}

#[cfg(test)]
#[path = "manifests_tests.rs"]
mod tests;
