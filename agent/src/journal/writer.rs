//! The thread that writes: whatever is queued becomes one transaction.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use tokio::sync::{mpsc, oneshot};

use super::{Error, Record, database::Database, lock::Lock};

/// Calls in one transaction, so that the first of many does not wait for all.
const BATCH: usize = 1024;

#[derive(Debug)]
pub(super) enum Message {
    Write(Write),
    Close(oneshot::Sender<()>),
}

#[derive(Debug)]
pub(super) struct Write {
    pub(super) records: Arc<[Record]>,
    pub(super) done: oneshot::Sender<Result<(), Error>>,
    pub(super) pending: Pending,
}

/// Counts a write from the call until its answer.
#[derive(Debug)]
pub(super) struct Pending(Arc<AtomicUsize>);

impl Pending {
    pub(super) fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(super) fn spawn(
    database: Database,
    lock: Lock,
    queue: mpsc::Receiver<Message>,
) -> io::Result<()> {
    thread::Builder::new()
        .name("journal".into())
        .spawn(move || run(database, lock, queue))
        .map(drop)
}

fn run(mut database: Database, lock: Lock, mut queue: mpsc::Receiver<Message>) {
    let mut closers = Vec::new();
    let mut messages = Vec::with_capacity(BATCH);
    // Ends when it is closed, here or by the last sender's end, and empty.
    while queue.blocking_recv_many(&mut messages, BATCH) > 0 {
        let mut writes = Vec::with_capacity(messages.len());
        for message in messages.drain(..) {
            match message {
                Message::Write(write) => writes.push(write),
                Message::Close(done) => {
                    queue.close();
                    closers.push(done);
                }
            }
        }
        if !writes.is_empty() {
            commit(&mut database, writes);
        }
    }
    // The lock must outlast it.
    drop(database);
    drop(lock);
    for done in closers {
        // The closer may have gone away.
        let _gone = done.send(());
    }
}

fn commit(database: &mut Database, writes: Vec<Write>) {
    let result = database.apply(writes.iter().flat_map(|write| &*write.records));
    if let Err(error) = &result {
        tracing::error!(%error, writes = writes.len(), "the journal could not be written");
    }
    for Write { done, pending, .. } in writes {
        drop(pending);
        // A caller that went away does not want to know; its records are written all the same.
        let _gone = done.send(
            result
                .as_ref()
                .map(drop)
                .map_err(|e| database.write_error(e)),
        );
    }
}
