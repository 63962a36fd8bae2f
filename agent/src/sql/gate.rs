//! How many queries run and wait at a time: reads and writes apart, and each lease bounded, so that none
//! takes all places.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use branchpool_agent_api::{Problem, QueueProbe};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::{Kind, Limits};

/// Why a request has to come again.
pub(super) const BUSY: &str = "TooManyQueries";
const RETRY_AFTER_MS: u64 = 1_000;

#[derive(Debug)]
struct Lane {
    name: &'static str,
    concurrency: u32,
    queue: u32,
    places: Arc<Semaphore>,
    queued: Arc<AtomicU32>,
}

/// Counts one in a counter for as long as it lives.
#[derive(Debug)]
struct Counted(Arc<AtomicU32>);

impl Counted {
    /// `None` when `most` are counted already.
    fn below(counter: &Arc<AtomicU32>, most: u32) -> Option<Self> {
        counter
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
                (count < most).then_some(count + 1)
            })
            .ok()
            .map(|_| Self(Arc::clone(counter)))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Lane {
    fn new(name: &'static str, concurrency: u32, queue: u32) -> Self {
        Self {
            name,
            concurrency,
            queue,
            places: Arc::new(Semaphore::new(concurrency as usize)),
            queued: Arc::default(),
        }
    }

    async fn enter(&self, longest: Duration) -> Result<OwnedSemaphorePermit, Problem> {
        if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
            return Ok(place);
        }
        let Some(_waiting) = Counted::below(&self.queued, self.queue) else {
            return Err(self.full(format!("and {} more wait", self.queue)));
        };
        match timeout(longest, Arc::clone(&self.places).acquire_owned()).await {
            Ok(Ok(place)) => Ok(place),
            _ => Err(self.full(format!("and none ended within {} s", longest.as_secs()))),
        }
    }

    fn full(&self, and: impl std::fmt::Display) -> Problem {
        busy(format!(
            "{} {} queries run on this node, {and}; try again",
            self.concurrency, self.name
        ))
    }

    fn probe(&self) -> QueueProbe {
        let free = u32::try_from(self.places.available_permits()).unwrap_or(u32::MAX);
        QueueProbe {
            concurrency: self.concurrency,
            active: self.concurrency.saturating_sub(free),
            queued: self.queued.load(Ordering::Relaxed),
        }
    }
}

fn busy(detail: String) -> Problem {
    Problem::new(503, BUSY, detail).with_retry_after_ms(RETRY_AFTER_MS)
}

#[derive(Debug)]
pub(super) struct Gate {
    reads: Lane,
    writes: Lane,
    queue_wait: Duration,
    per_lease: u32,
    requests: Arc<Semaphore>,
    leases: Arc<Mutex<BTreeMap<String, u32>>>,
}

/// The right to hold a request's body and its answer in memory.
#[derive(Debug)]
pub struct Admission {
    _permit: OwnedSemaphorePermit,
}

/// The right to one backend.
#[derive(Debug)]
pub(super) struct Place {
    _lane: OwnedSemaphorePermit,
    _of_lease: OfLease,
}

impl Gate {
    pub(super) fn new(limits: &Limits) -> Self {
        let most = limits.reads + limits.writes + 2 * limits.queue;
        Self {
            reads: Lane::new("read", limits.reads, limits.queue),
            writes: Lane::new("write", limits.writes, limits.queue),
            queue_wait: limits.queue_wait,
            per_lease: limits.per_lease,
            requests: Arc::new(Semaphore::new(most as usize)),
            leases: Arc::default(),
        }
    }

    /// Before a request's body is read. 503 when as many are there as can run and wait.
    pub(super) fn admit(&self) -> Result<Admission, Problem> {
        let permit = Arc::clone(&self.requests).try_acquire_owned();
        let permit = permit.map_err(|_| {
            busy("the node holds as many SQL requests as it can; try again".to_owned())
        })?;
        Ok(Admission { _permit: permit })
    }

    /// Waits in the queue of its kind. 503 when that is full or does not move.
    pub(super) async fn enter(&self, lease: &str, kind: Kind) -> Result<Place, Problem> {
        let of_lease = OfLease::enter(&self.leases, lease, self.per_lease).ok_or_else(|| {
            busy(format!(
                "{} queries of the lease {lease} run or wait; let one end first",
                self.per_lease
            ))
        })?;
        let lane = match kind {
            Kind::Read => &self.reads,
            Kind::Write => &self.writes,
        };
        Ok(Place {
            _lane: lane.enter(self.queue_wait).await?,
            _of_lease: of_lease,
        })
    }

    /// Reads, then writes.
    pub(super) fn probes(&self) -> (QueueProbe, QueueProbe) {
        (self.reads.probe(), self.writes.probe())
    }
}

/// Counts one query of a lease for as long as it lives.
#[derive(Debug)]
struct OfLease {
    leases: Arc<Mutex<BTreeMap<String, u32>>>,
    lease: String,
}

impl OfLease {
    fn enter(leases: &Arc<Mutex<BTreeMap<String, u32>>>, lease: &str, most: u32) -> Option<Self> {
        let mut counts = leases.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(lease.to_owned()).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(Self {
            leases: Arc::clone(leases),
            lease: lease.to_owned(),
        })
    }
}

impl Drop for OfLease {
    fn drop(&mut self) {
        let mut counts = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.lease) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.lease);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate() -> Gate {
        Gate::new(&Limits {
            reads: 2,
            writes: 1,
            queue: 1,
            per_lease: 2,
            ..Limits::default()
        })
    }

    #[tokio::test(start_paused = true)]
    async fn reads_and_writes_do_not_wait_for_each_other() {
        let gate = gate();
        let write = gate.enter("a", Kind::Write).await.unwrap();
        let _read = gate.enter("b", Kind::Read).await.unwrap();
        let waiting = gate.enter("c", Kind::Write);
        tokio::pin!(waiting);
        assert!(timeout(Duration::ZERO, &mut waiting).await.is_err());
        let (reads, writes) = gate.probes();
        assert_eq!((reads.active, reads.queued), (1, 0));
        assert_eq!((writes.active, writes.queued), (1, 1));
        let full = gate.enter("d", Kind::Write).await.unwrap_err();
        assert_eq!((full.status, &*full.reason), (503, "TooManyQueries"));
        assert!(full.retry_after_ms.is_some());
        drop(write);
        let place = waiting.await.unwrap();
        assert_eq!(gate.probes().1.queued, 0);
        drop(place);
        assert_eq!(gate.probes().1.active, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_queue_that_does_not_move_is_left() {
        let gate = gate();
        let _write = gate.enter("a", Kind::Write).await.unwrap();
        let refused = gate.enter("b", Kind::Write).await.unwrap_err();
        assert!(refused.detail.contains("none ended"), "{refused}");
        assert_eq!(gate.probes().1.queued, 0);
    }

    #[tokio::test]
    async fn one_lease_does_not_take_all_places() {
        let gate = gate();
        let _one = gate.enter("a", Kind::Write).await.unwrap();
        let two = gate.enter("a", Kind::Read).await.unwrap();
        let refused = gate.enter("a", Kind::Read).await.unwrap_err();
        assert!(refused.detail.contains("lease a"), "{refused}");
        let _other = gate.enter("b", Kind::Read).await.unwrap();
        drop(two);
        let _again = gate.enter("a", Kind::Read).await.unwrap();
    }

    #[tokio::test]
    async fn requests_in_memory_are_bounded() {
        let gate = gate();
        let admitted: Vec<_> = std::iter::from_fn(|| gate.admit().ok()).take(100).collect();
        assert_eq!(admitted.len(), 5);
        drop(admitted);
        gate.admit().unwrap();
    }
}
