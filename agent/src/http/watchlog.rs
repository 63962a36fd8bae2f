//! The log behind the watch: the last changes in a ring, and the state that they add up to.
//!
//! A watcher that falls out of the ring is not cut off but gets a fresh snapshot, so its memory
//! here is one number, however slow it is.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use branchpool_agent_api::{
    Change, Lease, NodeStatus, PoolStatus, Problem, TrustStatus, WatchEvent, problem::reason,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{Instant, timeout_at},
};

const RING_EVENTS: usize = 4096;
const MAX_WATCHERS: usize = 64;
const BOOKMARK_AFTER: Duration = Duration::from_secs(5);
/// When a refused watcher may try again; a watcher leaves when it likes.
const RETRY_AFTER_MS: u64 = 5_000;

/// Cheap to clone; clones share one log.
#[derive(Clone, Debug)]
pub struct WatchLog {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    instance: String,
    state: Mutex<State>,
    /// Wakes the watchers; what they read is in `state`.
    wake: watch::Sender<()>,
    watchers: Arc<Semaphore>,
}

#[derive(Debug)]
struct State {
    revision: u64,
    /// Events of contiguous revisions, the last one's being `revision`.
    ring: VecDeque<Arc<WatchEvent>>,
    node: NodeStatus,
    pools: BTreeMap<String, PoolStatus>,
    leases: BTreeMap<String, Arc<Lease>>,
    closed: bool,
}

impl WatchLog {
    /// The first snapshot holds `node`, whose `instance` names this log, and nothing else.
    pub fn new(mut node: NodeStatus) -> Self {
        node.revision = 1;
        Self {
            inner: Arc::new(Inner {
                instance: node.instance.clone(),
                state: Mutex::new(State {
                    revision: 1,
                    ring: VecDeque::with_capacity(RING_EVENTS),
                    node,
                    pools: BTreeMap::new(),
                    leases: BTreeMap::new(),
                    closed: false,
                }),
                wake: watch::Sender::new(()),
                watchers: Arc::new(Semaphore::new(MAX_WATCHERS)),
            }),
        }
    }

    pub fn revision(&self) -> u64 {
        self.state().revision
    }

    /// Reports the node; its `revision` is set here. Equal to the last report: no event. Like the
    /// other reports it answers the revision that holds it.
    pub fn node(&self, mut node: NodeStatus) -> u64 {
        let mut state = self.state();
        node.revision = state.node.revision;
        node.trust.clone_from(&state.node.trust);
        if node == state.node {
            return state.revision;
        }
        node.revision = state.revision + 1;
        state.node = node.clone();
        self.append(&mut state, Change::Node(Box::new(node)))
    }

    /// What is trusted and shown, which the rest of the node does not know of.
    pub fn trust(&self, trust: Option<TrustStatus>) -> u64 {
        let mut state = self.state();
        if trust == state.node.trust {
            return state.revision;
        }
        state.node.trust = trust;
        state.node.revision = state.revision + 1;
        let node = Box::new(state.node.clone());
        self.append(&mut state, Change::Node(node))
    }

    pub fn pool(&self, pool: PoolStatus) -> u64 {
        let mut state = self.state();
        if state.pools.get(&pool.uid) == Some(&pool) {
            return state.revision;
        }
        state.pools.insert(pool.uid.clone(), pool.clone());
        self.append(&mut state, Change::Pool(Box::new(pool)))
    }

    pub fn pool_gone(&self, uid: &str) -> u64 {
        let mut state = self.state();
        if state.pools.remove(uid).is_none() {
            return state.revision;
        }
        let uid = uid.to_owned();
        self.append(&mut state, Change::PoolGone { uid })
    }

    pub fn lease(&self, lease: Lease) -> u64 {
        let mut state = self.state();
        if state
            .leases
            .get(&lease.uid)
            .is_some_and(|known| **known == lease)
        {
            return state.revision;
        }
        let lease = Arc::new(lease);
        state.leases.insert(lease.uid.clone(), Arc::clone(&lease));
        self.append(&mut state, Change::Lease(lease))
    }

    pub fn lease_gone(&self, uid: &str) -> u64 {
        let mut state = self.state();
        if state.leases.remove(uid).is_none() {
            return state.revision;
        }
        let uid = uid.to_owned();
        self.append(&mut state, Change::LeaseGone { uid })
    }

    pub fn known_node(&self) -> NodeStatus {
        let state = self.state();
        NodeStatus {
            revision: state.revision,
            ..state.node.clone()
        }
    }

    pub fn known_pools(&self) -> Vec<PoolStatus> {
        self.state().pools.values().cloned().collect()
    }

    pub fn known_pool(&self, uid: &str) -> Option<PoolStatus> {
        self.state().pools.get(uid).cloned()
    }

    pub fn known_leases(&self) -> Vec<Lease> {
        let state = self.state();
        state
            .leases
            .values()
            .map(|lease| (**lease).clone())
            .collect()
    }

    pub fn known_lease(&self, uid: &str) -> Option<Lease> {
        self.state().leases.get(uid).map(|lease| (**lease).clone())
    }

    /// The first lease, by uid, that is wanted.
    pub fn find_lease(&self, is_wanted: impl Fn(&Lease) -> bool) -> Option<Lease> {
        let state = self.state();
        state
            .leases
            .values()
            .find(|lease| is_wanted(lease))
            .map(|lease| (**lease).clone())
    }

    /// Ends every subscription once it has delivered what is in the log.
    pub fn close(&self) {
        self.state().closed = true;
        self.inner.wake.send_replace(());
    }

    /// A watcher's place in the log: after `since` (instance and revision) if that is still known,
    /// else at the start of a snapshot. 503 when 64 watchers are there already.
    pub fn subscribe(&self, since: Option<(String, u64)>) -> Result<Subscription, Problem> {
        let Ok(permit) = Arc::clone(&self.inner.watchers).try_acquire_owned() else {
            return Err(Problem::new(
                503,
                reason::TOO_MANY_WATCHERS,
                format!(
                    "{MAX_WATCHERS} watchers are connected, which is the most this agent serves; close one"
                ),
            )
            .with_retry_after_ms(RETRY_AFTER_MS));
        };
        let position = since
            .filter(|(instance, _)| *instance == self.inner.instance)
            .map(|(_, revision)| revision);
        Ok(Subscription {
            log: self.clone(),
            position,
            wake: self.inner.wake.subscribe(),
            // Who goes on from where it was hears at once that it can.
            bookmark_at: if position.is_some() {
                Instant::now()
            } else {
                Instant::now() + BOOKMARK_AFTER
            },
            _permit: permit,
        })
    }

    fn append(&self, state: &mut State, change: Change) -> u64 {
        state.revision += 1;
        if state.ring.len() == RING_EVENTS {
            state.ring.pop_front();
        }
        let revision = state.revision;
        state
            .ring
            .push_back(Arc::new(WatchEvent { revision, change }));
        self.inner.wake.send_replace(());
        revision
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// What a watcher that has seen `position` gets next.
    fn after(&self, position: Option<u64>) -> Next {
        if position == Some(self.revision) {
            return if self.closed { Next::End } else { Next::Wait };
        }
        position
            .and_then(|position| self.event(position.checked_add(1)?))
            .map_or_else(|| Next::Event(Arc::new(self.snapshot())), Next::Event)
    }

    fn event(&self, revision: u64) -> Option<Arc<WatchEvent>> {
        let first = self.ring.front()?.revision;
        let index = usize::try_from(revision.checked_sub(first)?).ok()?;
        self.ring.get(index).cloned()
    }

    fn snapshot(&self) -> WatchEvent {
        let node = NodeStatus {
            revision: self.revision,
            ..self.node.clone()
        };
        WatchEvent {
            revision: self.revision,
            change: Change::Snapshot {
                node: Box::new(node),
                pools: self.pools.values().cloned().collect(),
                leases: self
                    .leases
                    .values()
                    .map(|lease| (**lease).clone())
                    .collect(),
            },
        }
    }
}

enum Next {
    Event(Arc<WatchEvent>),
    Wait,
    End,
}

/// One watcher. Dropping it frees its place.
#[derive(Debug)]
pub struct Subscription {
    log: WatchLog,
    position: Option<u64>,
    wake: watch::Receiver<()>,
    bookmark_at: Instant,
    _permit: OwnedSemaphorePermit,
}

impl Subscription {
    /// The next event, a bookmark after 5 s without one (at once to who continues and missed nothing), or `None` when the log is closed. Safe to
    /// drop and call again.
    pub async fn next(&mut self) -> Option<Arc<WatchEvent>> {
        loop {
            // Marked as seen before the state is read, so that a change in between wakes us.
            self.wake.mark_unchanged();
            let next = self.log.state().after(self.position);
            match next {
                Next::Event(event) => return Some(self.deliver(event)),
                Next::End => return None,
                Next::Wait => {}
            }
            match timeout_at(self.bookmark_at, self.wake.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return None,
                Err(_) => {
                    let bookmark = WatchEvent {
                        revision: self.position.unwrap_or_default(),
                        change: Change::Bookmark,
                    };
                    return Some(self.deliver(Arc::new(bookmark)));
                }
            }
        }
    }

    fn deliver(&mut self, event: Arc<WatchEvent>) -> Arc<WatchEvent> {
        self.position = Some(event.revision);
        self.bookmark_at = Instant::now() + BOOKMARK_AFTER;
        event
    }
}
