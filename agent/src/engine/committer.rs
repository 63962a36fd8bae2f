//! Journal, addresses and answers, in the order in which the core asked for them.
//!
//! Entries go into the journal's queue at once, so everything that is asked for while a
//! transaction runs becomes one transaction. What follows a commit is done here, one after the
//! other.

use std::{
    collections::BTreeMap, fs, io, os::unix::fs::symlink, path::Path, sync::Arc, time::Duration,
};

use tokio::sync::{mpsc, oneshot, watch};

use super::{files, steps::blocking};
use crate::{
    journal::{self, Journal, Kind, Record},
    plan::{Answer, Entry, LinkChange, Refusal},
    storage::Layout,
};

/// Wait before entries that the journal refused are offered again.
const RETRY: Duration = Duration::from_secs(1);

pub(super) type Reply = oneshot::Sender<Result<Box<Answer>, Refusal>>;

type Commit = std::pin::Pin<Box<dyn Future<Output = Result<(), journal::Error>> + Send>>;

struct Work {
    number: u64,
    /// The publication that shows what this is about.
    publication: u64,
    commit: Option<Commit>,
    records: Vec<Record>,
    links: Vec<LinkChange>,
    reply: Option<(Reply, Box<Answer>)>,
}

impl std::fmt::Debug for Work {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Work")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// Handle of the committer.
#[derive(Clone, Debug)]
pub(super) struct Committer {
    queue: mpsc::UnboundedSender<Work>,
    journal: Journal,
    submitted: Arc<std::sync::atomic::AtomicU64>,
    done: watch::Receiver<u64>,
    /// Counts publications of the core's state.
    published: Arc<watch::Sender<u64>>,
    /// What the journal refuses with, while it does.
    failing: watch::Receiver<Option<String>>,
}

impl Committer {
    pub(super) fn start(journal: Journal, layout: Layout) -> Self {
        // Bounded by what the core has in flight: each lease command and each step adds one.
        let (queue, work) = mpsc::unbounded_channel();
        let (done_sender, done) = watch::channel(0);
        let (failing_sender, failing) = watch::channel(None);
        let (published, publications) = watch::channel(0);
        tokio::spawn(run(
            work,
            journal.clone(),
            layout,
            done_sender,
            failing_sender,
            publications,
        ));
        Self {
            queue,
            journal,
            submitted: Arc::default(),
            done,
            published: Arc::new(published),
            failing,
        }
    }

    /// Queues a commit. Called by the core only, in the order of its decisions.
    pub(super) fn submit(
        &self,
        entries: Vec<Entry>,
        links: Vec<LinkChange>,
        reply: Option<(Reply, Box<Answer>)>,
    ) -> u64 {
        let number = 1 + self
            .submitted
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let records: Vec<Record> = entries.into_iter().filter_map(record).collect();
        let commit: Option<Commit> = if records.is_empty() {
            None
        } else {
            Some(Box::pin(self.journal.write(records.clone())))
        };
        let _closed = self.queue.send(Work {
            number,
            publication: *self.published.borrow() + 1,
            commit,
            records,
            links,
            reply,
        });
        number
    }

    /// Everything submitted so far can be seen by whoever asks: callers get their answers only then,
    /// so that they find what they were told.
    pub(super) fn note_published(&self) {
        self.published.send_modify(|count| *count += 1);
    }

    /// Waits until everything submitted up to `number` is in the journal.
    pub(super) async fn committed(&self, number: u64) {
        let mut done = self.done.clone();
        // An error means that the committer ended, which it does only with the agent.
        let _ended = done.wait_for(|done| *done >= number).await;
    }

    pub(super) fn submitted(&self) -> u64 {
        self.submitted.load(std::sync::atomic::Ordering::Relaxed)
    }

    pub(super) fn pending(&self) -> usize {
        self.journal.pending()
    }

    pub(super) fn failing(&self) -> watch::Receiver<Option<String>> {
        self.failing.clone()
    }
}

async fn run(
    mut queue: mpsc::UnboundedReceiver<Work>,
    journal: Journal,
    layout: Layout,
    done: watch::Sender<u64>,
    failing: watch::Sender<Option<String>>,
    mut publications: watch::Receiver<u64>,
) {
    let mut refused: BTreeMap<(Kind, String), Record> = BTreeMap::new();
    while let Some(work) = queue.recv().await {
        let written = match work.commit {
            Some(commit) => commit.await,
            None => Ok(()),
        };
        let result = match written {
            Ok(()) if refused.is_empty() => Ok(()),
            Ok(()) => {
                // Older values must not come back over newer ones.
                for record in &work.records {
                    refused.remove(&key(record));
                }
                Ok(())
            }
            Err(error) => {
                let detail = error.to_string();
                refused.extend(
                    work.records
                        .into_iter()
                        .map(|record| (key(&record), record)),
                );
                failing.send_replace(Some(detail.clone()));
                Err(Refusal::JournalFailed { detail })
            }
        };
        apply_links(&layout, &work.links);
        if let Some((reply, answer)) = work.reply {
            // An error means that the core ended.
            let _ended = publications
                .wait_for(|count| *count >= work.publication)
                .await;
            let _caller_is_gone = reply.send(result.map(|()| answer));
        }
        while !refused.is_empty() && queue.is_empty() {
            let full = layout.clone();
            if let Ok(Err(error)) = blocking(move || files::give_reserve(&full)).await {
                tracing::warn!(%error, "the journal's reserve could not be given up");
            }
            let records: Vec<Record> = refused.values().cloned().collect();
            if journal.write(records).await.is_ok() {
                refused.clear();
                failing.send_replace(None);
            } else {
                // Nobody waits for this: every caller has had its answer.
                tokio::time::sleep(RETRY).await;
            }
        }
        if refused.is_empty() {
            done.send_replace(work.number);
        }
    }
}

fn apply_links(layout: &Layout, links: &[LinkChange]) {
    for link in links {
        let (result, endpoint) = match link {
            LinkChange::Point { endpoint, branch } => (
                point(&layout.endpoint(endpoint), &layout.endpoint_target(branch)),
                endpoint,
            ),
            LinkChange::Remove { endpoint } => (remove(&layout.endpoint(endpoint)), endpoint),
        };
        if let Err(error) = result {
            tracing::error!(%endpoint, %error, "the address could not be changed; is the run directory writable?");
        }
    }
}

/// By rename, so that the address leads somewhere at any time.
fn point(link: &Path, target: &Path) -> io::Result<()> {
    let new = link.with_extension("new");
    remove(&new)?;
    symlink(target, &new)?;
    fs::rename(&new, link)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn key(record: &Record) -> (Kind, String) {
    match record {
        Record::Put { kind, key, .. } | Record::Delete { kind, key } => (*kind, key.clone()),
    }
}

/// Name of the record that holds the highest epoch seen.
pub(super) const EPOCH: &str = "epoch";
/// Name of the record that holds the boot id.
pub(super) const BOOT: &str = "boot";

/// One entry as the journal stores it.
fn record(entry: Entry) -> Option<Record> {
    let result = match entry {
        Entry::Pool(uid, pool) => Record::put(Kind::Pool, uid.as_str(), &pool),
        Entry::PoolGone(uid) => Ok(Record::delete(Kind::Pool, uid.as_str())),
        Entry::Generation(uid, number, record) => Record::put(
            Kind::Generation,
            generation_key(uid.as_str(), number),
            &record,
        ),
        Entry::GenerationGone(uid, number) => Ok(Record::delete(
            Kind::Generation,
            generation_key(uid.as_str(), number),
        )),
        Entry::Branch(id, record) => Record::put(Kind::Branch, id.as_str(), &record),
        Entry::BranchGone(id) => Ok(Record::delete(Kind::Branch, id.as_str())),
        Entry::Lease(uid, record) => Record::put(Kind::Lease, uid.0, &record),
        Entry::LeaseGone(uid) => Ok(Record::delete(Kind::Lease, uid.0)),
        Entry::Epoch(epoch) => Record::put(Kind::Meta, EPOCH, &epoch),
    };
    result
        .inspect_err(|error| tracing::error!(%error, "an entry has no form in the journal"))
        .ok()
}

fn generation_key(pool: &str, number: u64) -> String {
    format!("{pool}/{number}")
}
