//! Threads that serve connections, each with an event loop of its own.
//!
//! A runtime of many threads wakes a second one for most of what happens on a socket. To move a few
//! bytes takes less time than that, and the processor it takes is one that the branch's server could
//! have.

use std::{
    io,
    sync::Arc,
    thread::{self, JoinHandle},
};

use tokio::{
    runtime::{self, Handle},
    sync::oneshot,
};

/// End when dropped, with all that they serve.
#[derive(Debug)]
pub(crate) struct Lanes(Vec<Lane>);

#[derive(Debug)]
struct Lane {
    handle: Handle,
    /// One more reference for each connection.
    load: Arc<()>,
    thread: JoinHandle<()>,
    /// Dropped, it ends the thread.
    open: oneshot::Sender<()>,
    /// Resolves when all that the thread has served is dropped.
    ended: oneshot::Receiver<()>,
}

/// A connection's place in the load of its thread.
#[derive(Debug)]
pub(crate) struct Share {
    _load: Arc<()>,
}

impl Lanes {
    /// As many as there are processors.
    pub(crate) fn start() -> io::Result<Self> {
        let count = thread::available_parallelism().map_or(1, usize::from);
        (0..count)
            .map(Lane::start)
            .collect::<io::Result<_>>()
            .map(Self)
    }

    /// The thread with the fewest connections; `None` when all have died.
    pub(crate) fn lightest(&self) -> Option<(&Handle, Share)> {
        let living = self.0.iter().filter(|lane| !lane.thread.is_finished());
        let lightest = living.min_by_key(|lane| Arc::strong_count(&lane.load));
        lightest.map(|lane| {
            let load = Arc::clone(&lane.load);
            (&lane.handle, Share { _load: load })
        })
    }

    /// Ends the threads, and waits until nothing of what they served is left.
    pub(crate) async fn close(self) {
        let ending: Vec<_> = self.0.into_iter().map(Lane::close).collect();
        for ended in ending {
            // An error: it has died before.
            let _ = ended.await;
        }
    }
}

impl Lane {
    fn start(number: usize) -> io::Result<Self> {
        let runtime = runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let handle = runtime.handle().clone();
        let (open, closed) = oneshot::channel();
        let (tell, ended) = oneshot::channel();
        let thread = thread::Builder::new()
            .name(format!("gateway-{number}"))
            .spawn(move || {
                // Nothing is ever sent.
                let _dropped = runtime.block_on(closed);
                drop(runtime);
                let _ = tell.send(());
            })?;
        Ok(Self {
            handle,
            load: Arc::new(()),
            thread,
            open,
            ended,
        })
    }

    fn close(self) -> oneshot::Receiver<()> {
        drop(self.open);
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(count: usize) -> Lanes {
        Lanes((0..count).map(|n| Lane::start(n).unwrap()).collect())
    }

    /// What a thread holds until it ends.
    fn held_by(handle: &Handle) -> oneshot::Receiver<()> {
        let (held, dropped) = oneshot::channel::<()>();
        handle.spawn(async move {
            let _held = held;
            std::future::pending::<()>().await;
        });
        dropped
    }

    #[test]
    fn connections_are_spread() {
        let lanes = lanes(3);
        let mut shares: Vec<Share> = (0..6).map(|_| lanes.lightest().unwrap().1).collect();
        let loads = |lanes: &Lanes| -> Vec<usize> {
            let loads = lanes.0.iter().map(|lane| Arc::strong_count(&lane.load) - 1);
            loads.collect()
        };
        assert_eq!(loads(&lanes), [2, 2, 2]);
        // Both of the second thread.
        shares.remove(4);
        shares.remove(1);
        assert_eq!(loads(&lanes), [2, 0, 2]);
        let _two = [lanes.lightest().unwrap().1, lanes.lightest().unwrap().1];
        assert_eq!(loads(&lanes), [2, 2, 2]);
    }

    #[test]
    fn what_is_served_ends_with_the_threads() {
        let lanes = lanes(1);
        let mut dropped = held_by(&lanes.0[0].handle);
        assert!(dropped.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        drop(lanes);
        assert!(dropped.blocking_recv().is_err());
    }

    #[tokio::test]
    async fn nothing_is_left_after_the_close() {
        let lanes = lanes(2);
        let mut dropped = [held_by(&lanes.0[0].handle), held_by(&lanes.0[1].handle)];
        lanes.close().await;
        for dropped in &mut dropped {
            assert_eq!(
                dropped.try_recv(),
                Err(oneshot::error::TryRecvError::Closed)
            );
        }
    }

    #[test]
    fn a_connection_that_panics_takes_no_other_with_it() {
        let lanes = lanes(1);
        let handle = lanes.0[0].handle.clone();
        let mut other = held_by(&handle);
        let panicked = handle.spawn(async { panic!("as a test") });
        let (done, after) = oneshot::channel();
        handle.spawn(async move {
            let _ = done.send(panicked.await.is_err_and(|error| error.is_panic()));
        });
        assert_eq!(after.blocking_recv(), Ok(true));
        assert!(other.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        assert!(lanes.lightest().is_some());
    }

    #[test]
    fn a_thread_that_died_gets_nothing() {
        let mut lanes = lanes(2);
        let (unused, _) = oneshot::channel();
        drop(std::mem::replace(&mut lanes.0[0].open, unused));
        while !lanes.0[0].thread.is_finished() {
            thread::yield_now();
        }
        let shares: Vec<Share> = (0..3).map(|_| lanes.lightest().unwrap().1).collect();
        assert_eq!(Arc::strong_count(&lanes.0[1].load), 1 + shares.len());
    }
}
