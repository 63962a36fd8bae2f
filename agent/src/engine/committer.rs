//! Journal, addresses and answers, in the order in which the core asked for them.
//!
//! What the core asks for is collected until it has no more events at hand, and becomes one
//! transaction. What follows a commit is done here, one after the other.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::{mpsc, oneshot, watch};

use super::{addresses::Addresses, files};
use crate::{
    blocking::blocking,
    journal::{self, Journal, Kind, Record},
    plan::{Answer, Entry, LinkChange, Refusal},
    storage::Layout,
};

/// Wait before entries that the journal refused are offered again.
const RETRY: Duration = Duration::from_secs(1);

pub(super) type Reply = oneshot::Sender<Result<Box<Answer>, Refusal>>;

type Commit = std::pin::Pin<Box<dyn Future<Output = Result<(), journal::Error>> + Send>>;

/// What follows one decision of the core, once it is in the journal.
#[derive(Debug)]
struct Sequel {
    links: Vec<LinkChange>,
    reply: Option<(Reply, Box<Answer>)>,
}

/// Decisions that were submitted and not yet flushed.
#[derive(Debug, Default)]
struct Batch {
    /// Of the last decision.
    number: u64,
    records: Vec<Record>,
    sequels: Vec<Sequel>,
}

struct Work {
    /// Of the last decision in it.
    number: u64,
    /// The publication that shows what this is about.
    publication: u64,
    commit: Option<Commit>,
    records: Arc<[Record]>,
    sequels: Vec<Sequel>,
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
    /// Held while one is flushed, from its way into the journal's queue to its way into ours: both
    /// have the same order.
    batch: Arc<Mutex<Batch>>,
    done: watch::Receiver<u64>,
    /// Counts publications of the core's state.
    published: Arc<watch::Sender<u64>>,
    /// What the journal refuses with, while it does.
    failing: watch::Receiver<Option<String>>,
}

impl Committer {
    pub(super) fn start(journal: Journal, layout: Layout, addresses: Arc<Addresses>) -> Self {
        let (queue, work) = queue();
        let (done_sender, done) = watch::channel(0);
        let (failing_sender, failing) = watch::channel(None);
        let (published, publications) = watch::channel(0);
        let batch = Arc::default();
        let retries = Retries {
            journal: journal.clone(),
            batch: Arc::clone(&batch),
            refused: BTreeMap::new(),
            failing: failing_sender,
        };
        tokio::spawn(run(
            work,
            retries,
            layout,
            addresses,
            done_sender,
            publications,
        ));
        Self {
            queue,
            journal,
            batch,
            done,
            published: Arc::new(published),
            failing,
        }
    }

    /// Called by the core only, in the order of its decisions. Nothing happens before the flush.
    pub(super) fn submit(
        &self,
        entries: Vec<Entry>,
        links: Vec<LinkChange>,
        reply: Option<(Reply, Box<Answer>)>,
    ) -> u64 {
        let mut batch = lock(&self.batch);
        batch.number += 1;
        batch.records.extend(entries.into_iter().filter_map(record));
        if reply.is_some() || !links.is_empty() {
            batch.sequels.push(Sequel { links, reply });
        }
        batch.number
    }

    /// Begins the commit of what was submitted since the last flush.
    pub(super) fn flush(&self) {
        let mut batch = lock(&self.batch);
        if batch.records.is_empty() && batch.sequels.is_empty() {
            return;
        }
        let records: Arc<[Record]> = std::mem::take(&mut batch.records).into();
        let commit: Option<Commit> = if records.is_empty() {
            None
        } else {
            Some(Box::pin(self.journal.write(Arc::clone(&records))))
        };
        let _closed = self.queue.send(Work {
            number: batch.number,
            publication: *self.published.borrow() + 1,
            commit,
            records,
            sequels: std::mem::take(&mut batch.sequels),
        });
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
        lock(&self.batch).number
    }

    pub(super) fn pending(&self) -> usize {
        self.journal.pending()
    }

    pub(super) fn failing(&self) -> watch::Receiver<Option<String>> {
        self.failing.clone()
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the core must not wait for it; bounded by what the core has in flight: each command and each step adds one"
)]
fn queue() -> (mpsc::UnboundedSender<Work>, mpsc::UnboundedReceiver<Work>) {
    mpsc::unbounded_channel()
}

async fn run(
    mut queue: mpsc::UnboundedReceiver<Work>,
    mut retries: Retries,
    layout: Layout,
    addresses: Arc<Addresses>,
    done: watch::Sender<u64>,
    mut publications: watch::Receiver<u64>,
) {
    let mut last = 0;
    loop {
        let work = if retries.refused.is_empty() {
            queue.recv().await
        } else {
            let Ok(work) = tokio::time::timeout(RETRY, queue.recv()).await else {
                give_reserve(&layout).await;
                retries.offer(&queue).await;
                retries.report(&done, last);
                continue;
            };
            work
        };
        let Some(work) = work else { return };
        let written = match work.commit {
            Some(commit) => commit.await,
            None => Ok(()),
        };
        let wrote = written.is_ok() && !work.records.is_empty();
        let mut result = retries.note(written, &work.records);
        if result.is_err() {
            give_reserve(&layout).await;
            retries.offer(&queue).await;
            if retries.refused.is_empty() {
                result = Ok(());
            }
        }
        // An error means that the core ended.
        drop(
            publications
                .wait_for(|count| *count >= work.publication)
                .await,
        );
        for Sequel { links, reply } in work.sequels {
            for link in &links {
                addresses.apply(link);
            }
            if let Some((reply, answer)) = reply {
                let _caller_is_gone = reply.send(result.clone().map(|()| answer));
            }
        }
        if wrote {
            // The journal works again.
            retries.offer(&queue).await;
        }
        last = work.number;
        retries.report(&done, last);
    }
}

/// On a full disk only what the journal cannot write would free space.
async fn give_reserve(layout: &Layout) {
    let full = layout.clone();
    if let Ok(Err(error)) = blocking(move || files::give_reserve(&full)).await {
        tracing::warn!(%error, "the journal's reserve could not be given up");
    }
}

/// What the journal refused, until it takes it.
struct Retries {
    journal: Journal,
    batch: Arc<Mutex<Batch>>,
    refused: BTreeMap<(Kind, String), Record>,
    failing: watch::Sender<Option<String>>,
}

impl Retries {
    fn note(
        &mut self,
        written: Result<(), journal::Error>,
        records: &[Record],
    ) -> Result<(), Refusal> {
        match written {
            Ok(()) => {
                if self.refused.is_empty() {
                    return Ok(());
                }
                // Older values must not come back over newer ones.
                for record in records {
                    self.refused.remove(&key(record));
                }
                Ok(())
            }
            Err(error) => {
                let detail = error.to_string();
                let records = records.iter().map(|record| (key(record), record.clone()));
                self.refused.extend(records);
                self.failing.send_replace(Some(detail.clone()));
                Err(Refusal::JournalFailed { detail })
            }
        }
    }

    /// Offers the journal once more what it refused, unless newer entries are on their way to it.
    async fn offer(&mut self, queue: &mpsc::UnboundedReceiver<Work>) {
        if self.refused.is_empty() {
            return;
        }
        let commit = {
            let batch = lock(&self.batch);
            if !batch.records.is_empty() || !queue.is_empty() {
                return;
            }
            let records: Vec<_> = self.refused.values().cloned().collect();
            self.journal.write(records.into())
        };
        if commit.await.is_ok() {
            self.refused.clear();
        }
    }

    /// All up to `number` is in the journal once nothing is refused any more.
    fn report(&self, done: &watch::Sender<u64>, number: u64) {
        if self.refused.is_empty() {
            self.failing
                .send_if_modified(|failing| failing.take().is_some());
            done.send_replace(number);
        }
    }
}

fn lock(batch: &Mutex<Batch>) -> MutexGuard<'_, Batch> {
    batch.lock().unwrap_or_else(PoisonError::into_inner)
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
        Entry::Boot(id) => Record::put(Kind::Meta, BOOT, &id),
    };
    result
        .inspect_err(|error| tracing::error!(%error, "an entry has no form in the journal"))
        .ok()
}

fn generation_key(pool: &str, number: u64) -> String {
    format!("{pool}/{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(key: &str, value: &str) -> Record {
        Record::put(Kind::Lease, key, &value).unwrap()
    }

    fn refusal() -> Result<(), journal::Error> {
        Err(journal::Error::Closed)
    }

    #[tokio::test]
    async fn what_the_journal_refused_is_offered_again_until_something_newer_replaces_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal.db");
        let (journal, _) = Journal::open(&path).unwrap();
        let (failing, seen) = watch::channel(None);
        let mut retries = Retries {
            journal: journal.clone(),
            batch: Arc::default(),
            refused: BTreeMap::new(),
            failing,
        };
        let (done, committed) = watch::channel(0);
        let (_queue, empty) = queue();

        let refused = retries.note(refusal(), &[put("a", "old"), put("b", "old")]);
        assert!(matches!(refused, Err(Refusal::JournalFailed { .. })));
        retries.report(&done, 1);
        assert!(seen.borrow().is_some());
        assert_eq!(*committed.borrow(), 0);

        journal.write([put("a", "new")].into()).await.unwrap();
        retries.note(Ok(()), &[put("a", "new")]).unwrap();
        retries.offer(&empty).await;
        retries.report(&done, 2);
        assert_eq!(*seen.borrow(), None);
        assert_eq!(*committed.borrow(), 2);

        // Nothing is left to be offered once everything was replaced.
        let refused = retries.note(refusal(), &[put("b", "lost")]);
        assert!(refused.is_err());
        journal.write([put("b", "newer")].into()).await.unwrap();
        retries.note(Ok(()), &[put("b", "newer")]).unwrap();
        retries.report(&done, 4);
        assert_eq!(*seen.borrow(), None);
        assert_eq!(*committed.borrow(), 4);

        journal.close().await;
        let (_journal, contents) = Journal::open(&path).unwrap();
        assert_eq!(contents.get(Kind::Lease, "a"), Some("\"new\""));
        assert_eq!(contents.get(Kind::Lease, "b"), Some("\"newer\""));
    }

    #[tokio::test]
    async fn newer_entries_on_their_way_go_first() {
        let directory = tempfile::tempdir().unwrap();
        let (journal, _) = Journal::open(&directory.path().join("journal.db")).unwrap();
        let mut retries = Retries {
            journal,
            batch: Arc::default(),
            refused: BTreeMap::new(),
            failing: watch::Sender::new(None),
        };
        let refused = retries.note(refusal(), &[put("a", "old")]);
        assert!(refused.is_err());
        let (queue, waiting) = queue();
        let work = Work {
            number: 2,
            commit: None,
            records: [put("a", "new")].into(),
            sequels: Vec::new(),
            publication: 0,
        };
        queue.send(work).unwrap();
        retries.offer(&waiting).await;
        assert_eq!(retries.refused.len(), 1, "the old value was written");
    }
}
