//! File changes as events: one inotify instance for the whole agent, because closing one costs
//! milliseconds and a user may have only 128.

use std::{
    collections::HashMap,
    io,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags},
    io::Errno,
};
use snafu::{ResultExt, Snafu};
use tokio::{io::unix::AsyncFd, sync::watch, task::AbortHandle};

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display(
        "an inotify instance could not be made: {source}; raise fs.inotify.max_user_instances"
    ))]
    Instance { source: io::Error },

    #[snafu(display("{} could not be watched: {source}; if it exists, raise fs.inotify.max_user_watches", path.display()))]
    Watch { path: PathBuf, source: io::Error },
}

/// What makes a watch wake up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// A file of the directory was closed after writing, or renamed into it.
    Written,
    /// The file was modified, as the kernel does with `cgroup.events`.
    Modified,
}

impl Interest {
    fn flags(self) -> WatchFlags {
        match self {
            Self::Written => WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO | WatchFlags::ONLYDIR,
            Self::Modified => WatchFlags::MODIFY,
        }
    }
}

/// The agent's inotify instance. Clones share it; its task ends with the last of them.
#[derive(Clone, Debug)]
pub struct Watcher {
    shared: Arc<Shared>,
    _task: Arc<AbortOnDrop>,
}

#[derive(Debug)]
struct Shared {
    inotify: AsyncFd<OwnedFd>,
    /// By watch descriptor. The kernel answers with the same descriptor for the same inode,
    /// whichever path or mount leads to it, so that entries are counted.
    entries: Mutex<HashMap<i32, Entry>>,
}

#[derive(Debug)]
struct Entry {
    changes: watch::Sender<()>,
    users: usize,
}

#[derive(Debug)]
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Watcher {
    /// Must be called inside a tokio runtime.
    pub fn new() -> Result<Self, Error> {
        #[expect(
            deprecated,
            reason = "the replacement is unsafe for types whose descriptor may change; an OwnedFd's does not"
        )]
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)
            .map_err(io::Error::from)
            .and_then(AsyncFd::new)
            .context(InstanceSnafu)?;
        let shared = Arc::new(Shared {
            inotify,
            entries: Mutex::default(),
        });
        let task = tokio::spawn(dispatch(Arc::clone(&shared)));
        Ok(Self {
            shared,
            _task: Arc::new(AbortOnDrop(task.abort_handle())),
        })
    }

    /// Watches `path` until the answer is dropped. Changes from now on are seen.
    pub fn watch(&self, path: &Path, interest: Interest) -> Result<Watch, Error> {
        let mut entries = self.shared.entries();
        let descriptor = inotify::add_watch(
            self.shared.inotify.get_ref(),
            path,
            interest.flags() | WatchFlags::MASK_ADD,
        )
        .map_err(io::Error::from)
        .context(WatchSnafu { path })?;
        let entry = entries.entry(descriptor).or_insert_with(|| Entry {
            changes: watch::Sender::new(()),
            users: 0,
        });
        entry.users += 1;
        let changes = entry.changes.subscribe();
        drop(entries);
        Ok(Watch {
            shared: Arc::clone(&self.shared),
            descriptor,
            changes,
        })
    }
}

impl Shared {
    fn entries(&self) -> MutexGuard<'_, HashMap<i32, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn release(&self, descriptor: i32) {
        let mut entries = self.entries();
        let Some(entry) = entries.get_mut(&descriptor) else {
            return;
        };
        entry.users -= 1;
        if entry.users == 0 {
            entries.remove(&descriptor);
            // Fails when the inode is gone, and then the watch is too.
            let _ = inotify::remove_watch(self.inotify.get_ref(), descriptor);
        }
    }

    fn wake(&self, descriptor: i32) {
        if let Some(entry) = self.entries().get(&descriptor) {
            entry.changes.send_replace(());
        }
    }

    /// After an overflow of the kernel's queue nobody knows what was lost: all look again.
    fn wake_all(&self) {
        for entry in self.entries().values() {
            entry.changes.send_replace(());
        }
    }
}

async fn dispatch(shared: Arc<Shared>) {
    loop {
        let Ok(mut ready) = shared.inotify.readable().await else {
            return;
        };
        match drain(&shared) {
            Ok(()) => ready.clear_ready(),
            Err(errno) => {
                tracing::error!(error = %errno, "reading file events failed");
                shared.wake_all();
                ready.clear_ready();
            }
        }
    }
}

fn drain(shared: &Shared) -> Result<(), Errno> {
    let mut buffer = [MaybeUninit::uninit(); 16 * 1024];
    let mut events = inotify::Reader::new(shared.inotify.get_ref(), &mut buffer);
    loop {
        match events.next() {
            Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => shared.wake_all(),
            Ok(event) => shared.wake(event.wd()),
            Err(Errno::AGAIN) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Interest in one path; ends when dropped.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<Shared>,
    descriptor: i32,
    changes: watch::Receiver<()>,
}

impl Watch {
    /// Resolves when something changed since the watch was made or since the last call
    /// resolved. Several changes may be one event; an event may be a false alarm.
    pub async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            // The entry, and with it the sender, lives as long as this watch.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.release(self.descriptor);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use super::*;

    async fn wakes(watch: &mut Watch) -> bool {
        tokio::time::timeout(Duration::from_secs(5), watch.changed())
            .await
            .is_ok()
    }

    async fn stays_asleep(watch: &mut Watch) -> bool {
        tokio::time::timeout(Duration::from_millis(100), watch.changed())
            .await
            .is_err()
    }

    #[tokio::test]
    async fn written_files_wake_their_directory_only() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let watcher = Watcher::new().unwrap();
        let mut first = watcher.watch(one.path(), Interest::Written).unwrap();
        let mut second = watcher.watch(other.path(), Interest::Written).unwrap();
        fs::write(one.path().join("postmaster.pid"), "1").unwrap();
        assert!(wakes(&mut first).await);
        assert!(stays_asleep(&mut second).await);
    }

    #[tokio::test]
    async fn two_watches_of_one_inode_live_apart() {
        let dir = tempfile::tempdir().unwrap();
        let watcher = Watcher::new().unwrap();
        let first = watcher.watch(dir.path(), Interest::Written).unwrap();
        let mut second = watcher
            .watch(&dir.path().join("."), Interest::Written)
            .unwrap();
        drop(first);
        fs::write(dir.path().join("f"), "1").unwrap();
        assert!(wakes(&mut second).await);
        drop(second);
        assert!(watcher.shared.entries().is_empty());
    }

    #[tokio::test]
    async fn a_watch_outlives_its_directory_without_harm() {
        let watcher = Watcher::new().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let watch = watcher.watch(dir.path(), Interest::Written).unwrap();
        dir.close().unwrap();
        drop(watch);
        assert!(watcher.shared.entries().is_empty());
        let missing = watcher.watch(Path::new("/nonexistent"), Interest::Written);
        assert!(matches!(missing, Err(Error::Watch { .. })));
    }

    #[tokio::test]
    async fn an_overflow_wakes_everybody() {
        let dir = tempfile::tempdir().unwrap();
        let watcher = Watcher::new().unwrap();
        let mut watch = watcher.watch(dir.path(), Interest::Written).unwrap();
        watcher.shared.wake_all();
        assert!(wakes(&mut watch).await);
    }
}
