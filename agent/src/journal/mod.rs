//! What the agent must know again after a crash: leases, branches, generations.
//!
//! `SQLite` in WAL mode without an fsync for each commit: an acknowledged write survives the end
//! of the agent, a power cut may lose the newest writes and leaves the file consistent.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use serde::{Serialize, de::DeserializeOwned};
use snafu::{ResultExt, Snafu};
use tokio::sync::{mpsc, oneshot};

mod database;
mod lock;
mod writer;

use writer::Message;

/// Writes that may wait; further callers wait until there is room.
pub const QUEUE: usize = 16 * 1024;

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(self)))]
pub enum Error {
    #[snafu(display(
        "another agent{} holds the lock {path:?} of this storage directory; stop it first, or \
         give this agent a directory of its own",
        pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
    ))]
    Locked { path: PathBuf, pid: Option<u32> },
    #[snafu(display(
        "cannot {action} the journal {path:?}: {source}; check its directory's permissions and \
         free space"
    ))]
    File {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[snafu(display(
        "cannot open the journal {path:?}: {source}; check its directory's permissions and free \
         space, on Btrfs for metadata too (btrfs filesystem usage)"
    ))]
    Open {
        path: PathBuf,
        source: rusqlite::Error,
    },
    #[snafu(display(
        "{path:?} is not a journal of this agent, or is damaged ({message}); nothing was changed. \
         Restore it from a backup; or move it and the files beside it that start with its name \
         elsewhere, which makes every lease on this node be lost"
    ))]
    Damaged { path: PathBuf, message: String },
    #[snafu(display(
        "the journal {path:?} has format {found}, this agent knows formats up to {known}; start \
         the newer agent that wrote it"
    ))]
    Newer {
        path: PathBuf,
        found: i64,
        known: i64,
    },
    #[snafu(display(
        "no space left to write the journal {path:?}; delete data or enlarge the filesystem, \
         later writes then work again"
    ))]
    DiskFull { path: PathBuf },
    #[snafu(display("cannot write the journal {path:?}: {message}"))]
    Write { path: PathBuf, message: String },
    #[snafu(display("the journal is closed, so the change was not recorded"))]
    Closed,
    #[snafu(display("cannot make the journal's {kind} record {key:?}: {source}"))]
    Encode {
        kind: Kind,
        key: String,
        source: serde_json::Error,
    },
    #[snafu(display(
        "the journal's {kind} record {key:?} cannot be read: {source}; was it written by another \
         version of the agent?"
    ))]
    Decode {
        kind: Kind,
        key: String,
        source: serde_json::Error,
    },
    #[snafu(display("cannot read the boot id {path:?}: {source}; is /proc mounted?"))]
    BootId { path: PathBuf, source: io::Error },
}

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Pool,
    Generation,
    Branch,
    Lease,
    /// Facts about the node and the agent itself, such as the boot id.
    Meta,
}

impl Kind {
    pub const ALL: [Self; 5] = [
        Self::Pool,
        Self::Generation,
        Self::Branch,
        Self::Lease,
        Self::Meta,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pool => "pool",
            Self::Generation => "generation",
            Self::Branch => "branch",
            Self::Lease => "lease",
            Self::Meta => "meta",
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(self.as_str())
    }
}

/// A change of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// Sets the value, a JSON text.
    Put {
        kind: Kind,
        key: String,
        value: String,
    },
    /// Removes the value; none there: no error.
    Delete { kind: Kind, key: String },
}

impl Record {
    /// Fails when the value has no form in JSON.
    pub fn put(kind: Kind, key: impl Into<String>, value: &impl Serialize) -> Result<Self, Error> {
        let key = key.into();
        let value = serde_json::to_string(value).context(EncodeSnafu {
            kind,
            key: key.as_str(),
        })?;
        Ok(Self::Put { kind, key, value })
    }

    pub fn delete(kind: Kind, key: impl Into<String>) -> Self {
        Self::Delete {
            kind,
            key: key.into(),
        }
    }
}

/// All records of a journal at the time it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    records: BTreeMap<(Kind, String), String>,
}

impl Contents {
    pub fn len(&self) -> usize {
        self.records.len()
    }

    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The JSON text of one record.
    pub fn get(&self, kind: Kind, key: &str) -> Option<&str> {
        self.records
            .get(&(kind, key.to_owned()))
            .map(String::as_str)
    }

    /// Keys and JSON texts of a kind, by key.
    pub fn of(&self, kind: Kind) -> impl Iterator<Item = (&str, &str)> {
        self.records
            .range((kind, String::new())..)
            .take_while(move |((found, _), _)| *found == kind)
            .map(|((_, key), value)| (key.as_str(), value.as_str()))
    }

    /// Like [`Contents::of`], decoded; each record fails by itself.
    pub fn decode<T: DeserializeOwned>(
        &self,
        kind: Kind,
    ) -> impl Iterator<Item = (&str, Result<T, Error>)> {
        self.of(kind).map(move |(key, value)| {
            (
                key,
                serde_json::from_str(value).context(DecodeSnafu { kind, key }),
            )
        })
    }
}

/// Handle of the journal's writer; copies share it. The file is closed, and its lock released,
/// with the last of them, or by [`Journal::close`].
#[derive(Clone, Debug)]
pub struct Journal {
    queue: mpsc::Sender<Message>,
    pending: Arc<AtomicUsize>,
    path: Arc<Path>,
}

impl Journal {
    /// Opens the journal, or makes an empty one, and reads all of it. Blocks.
    ///
    /// Fails when another agent has it open, when it is of a newer format, or damaged; nothing is
    /// changed then.
    pub fn open(path: &Path) -> Result<(Self, Contents), Error> {
        let lock = lock::Lock::acquire(path)?;
        let database = database::Database::open(path)?;
        let contents = Contents {
            records: database.read()?,
        };
        let (queue, receiver) = mpsc::channel(QUEUE);
        writer::spawn(database, lock, receiver).context(FileSnafu {
            action: "start the writer of",
            path,
        })?;
        let journal = Self {
            queue,
            pending: Arc::default(),
            path: path.into(),
        };
        Ok((journal, contents))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the records, all or none; the result comes when they are committed. What waits
    /// while a transaction is under way becomes the next one.
    ///
    /// Queued by the call itself, not by the first poll, so calls made one after the other are
    /// written in that order and a dropped future does not take its records back; only with the
    /// queue full is the order that of the polls, and a dropped future forgets its records.
    ///
    /// Fails when the disk is full, cannot be written, or the journal is closed: then nothing of
    /// it was written, and later writes may work again.
    pub fn write(
        &self,
        records: Arc<[Record]>,
    ) -> impl Future<Output = Result<(), Error>> + Send + use<> {
        let (done, answer) = oneshot::channel();
        let message = Message::Write(writer::Write {
            records,
            done,
            pending: writer::Pending::new(&self.pending),
        });
        let unsent = match self.queue.try_send(message) {
            Err(mpsc::error::TrySendError::Full(message)) => Some((self.queue.clone(), message)),
            // Closed: the message is dropped, which the answer tells.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => None,
        };
        async move {
            if let Some((queue, message)) = unsent {
                queue.send(message).await.map_err(|_| Error::Closed)?;
            }
            answer.await.unwrap_or(Err(Error::Closed))
        }
    }

    /// Writes that are queued or under way.
    pub fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }

    /// Writes what is queued, closes the file and releases its lock. Later writes, of other copies
    /// too, fail with [`Error::Closed`]; closing again is no error.
    pub async fn close(self) {
        let (done, answer) = oneshot::channel();
        if self.queue.send(Message::Close(done)).await.is_ok() {
            // An error means that the writer has ended already.
            let _ended = answer.await;
        }
    }
}

/// Identifies the time since the machine started; another one after a reboot.
pub fn boot_id() -> Result<String, Error> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = fs::read_to_string(path).context(BootIdSnafu { path })?;
    Ok(text.trim().to_owned())
}
