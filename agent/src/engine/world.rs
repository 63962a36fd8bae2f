//! What the steps of a branch's life share: directories, servers, settings, and the way back to the
//! core.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use branchpool_supervisor::client::Supervisor;
use branchpool_sys::cgroup::{Base, Group};
use tokio::{
    sync::{Mutex as AsyncMutex, mpsc, oneshot},
    task::JoinHandle,
};

use super::{
    addresses::Addresses, committer::Committer, desired::Settings, hand_over::HandOver,
    metrics::Metrics, precedence::Precedence, unused::Unused,
};
use crate::{
    golden::Facts,
    plan::{Event, Now, PoolUid, Sample, Slot},
    postgres::{
        installation::{Installation, OsUser},
        readiness::Watcher,
        sandbox::Isolation,
        server::Server,
    },
    storage::{Branches, Layout, ids::BranchId},
};

/// Longest that refill stands back for leases that are being handed out.
const STAND_BACK: Duration = Duration::from_millis(50);

/// Both clocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    start: Instant,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    pub(super) fn now(&self) -> Now {
        let wall = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Now {
            mono: millis(self.start.elapsed()),
            wall: millis(wall),
        }
    }

    /// What is left until a monotonic time.
    pub(super) fn until(&self, mono: u64) -> Duration {
        Duration::from_millis(mono).saturating_sub(self.start.elapsed())
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The processes and connections of one branch.
#[derive(Debug, Default)]
pub(super) struct Runtime {
    pub(super) server: Option<Server>,
    pub(super) exit_watch: Option<JoinHandle<()>>,
}

/// One lock per branch: its steps never overlap, whatever their order of arrival.
pub(super) type SharedRuntime = Arc<AsyncMutex<Runtime>>;

#[derive(Debug)]
pub(super) struct World {
    pub(super) clock: Clock,
    pub(super) layout: Layout,
    pub(super) branches: Branches,
    pub(super) supervisor: Supervisor,
    pub(super) watcher: Watcher,
    pub(super) committer: Committer,
    pub(super) addresses: Arc<Addresses>,
    pub(super) installations: Arc<[Installation]>,
    pub(super) disk_user: OsUser,
    pub(super) uid_base: u32,
    pub(super) isolation: Isolation,
    /// Each slot has a user of its own.
    pub(super) user_per_branch: bool,
    pub(super) build_time_limit: Duration,
    pub(super) log_cap: u64,
    pub(super) build_turn: tokio::sync::Semaphore,
    /// Callers that ask for a lease.
    pub(super) hand_outs: Precedence,
    pub(super) reclaim_turn: Arc<tokio::sync::Semaphore>,
    pub(super) metrics: Metrics,
    /// What clients of the gateway are to trust, in PEM.
    pub(super) authority: OnceLock<String>,
    events: mpsc::Sender<Event>,
    hand_overs: mpsc::UnboundedSender<HandOver>,
    pub(super) unused: Unused,
    cgroups: Base,
    slots: u32,
    groups: Mutex<HashMap<String, Group>>,
    runtimes: Mutex<HashMap<BranchId, SharedRuntime>>,
    settings: Mutex<BTreeMap<PoolUid, Arc<Settings>>>,
    images: Mutex<BTreeMap<(PoolUid, u64), Arc<Facts>>>,
    builds: Mutex<BTreeMap<PoolUid, oneshot::Sender<()>>>,
    sample: Mutex<Sample>,
}

/// What a [`World`] is made of at the start.
pub(super) struct Parts {
    pub(super) clock: Clock,
    pub(super) branches: Branches,
    pub(super) supervisor: Supervisor,
    pub(super) watcher: Watcher,
    pub(super) committer: Committer,
    pub(super) addresses: Arc<Addresses>,
    pub(super) installations: Vec<Installation>,
    pub(super) disk_user: OsUser,
    pub(super) uid_base: u32,
    pub(super) isolation: Isolation,
    pub(super) user_per_branch: bool,
    pub(super) build_time_limit: Duration,
    pub(super) log_cap: u64,
    pub(super) metrics: Metrics,
    pub(super) events: mpsc::Sender<Event>,
    pub(super) hand_overs: mpsc::UnboundedSender<HandOver>,
    pub(super) unused: Unused,
    pub(super) cgroups: Base,
    pub(super) slots: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    pub(super) fn new(parts: Parts) -> Self {
        Self {
            clock: parts.clock,
            layout: parts.branches.layout().clone(),
            branches: parts.branches,
            supervisor: parts.supervisor,
            watcher: parts.watcher,
            committer: parts.committer,
            addresses: parts.addresses,
            installations: parts.installations.into(),
            disk_user: parts.disk_user,
            uid_base: parts.uid_base,
            isolation: parts.isolation,
            user_per_branch: parts.user_per_branch,
            build_time_limit: parts.build_time_limit,
            log_cap: parts.log_cap,
            build_turn: tokio::sync::Semaphore::new(1),
            hand_outs: Precedence::new(),
            reclaim_turn: Arc::new(tokio::sync::Semaphore::new(1)),
            metrics: parts.metrics,
            authority: OnceLock::new(),
            events: parts.events,
            hand_overs: parts.hand_overs,
            unused: parts.unused,
            cgroups: parts.cgroups,
            slots: parts.slots,
            groups: Mutex::default(),
            runtimes: Mutex::default(),
            settings: Mutex::default(),
            images: Mutex::default(),
            builds: Mutex::default(),
            sample: Mutex::default(),
        }
    }

    /// Tells the core. When the core is gone there is nobody left to tell.
    pub(super) async fn tell(&self, event: Event) {
        let _gone = self.events.send(event).await;
    }

    pub(super) fn hand_over(&self, hand_over: HandOver) {
        let _at_the_end = self.hand_overs.send(hand_over);
    }

    /// Lets the leases of a burst be handed out before what they lead to takes the processors.
    pub(super) async fn after_hand_outs(&self) {
        self.hand_outs.yield_to_waiting(STAND_BACK).await;
    }

    /// The cgroup of a slot, made when it is first used.
    pub(super) fn slot_group(&self, slot: Slot) -> Result<Group, branchpool_sys::cgroup::Error> {
        self.group(&slot_group_name(slot))
    }

    pub(super) fn slots(&self) -> u32 {
        self.slots
    }

    pub(super) fn build_group(&self) -> Result<Group, branchpool_sys::cgroup::Error> {
        self.group("build")
    }

    fn group(&self, name: &str) -> Result<Group, branchpool_sys::cgroup::Error> {
        if let Some(group) = lock(&self.groups).get(name) {
            return Ok(group.clone());
        }
        let group = self.cgroups.group(name)?;
        lock(&self.groups).insert(name.to_owned(), group.clone());
        Ok(group)
    }

    pub(super) fn runtime(&self, id: BranchId) -> SharedRuntime {
        lock(&self.runtimes).entry(id).or_default().clone()
    }

    pub(super) fn forget_runtime(&self, id: BranchId) {
        lock(&self.runtimes).remove(&id);
    }

    pub(super) fn settings(&self, pool: &PoolUid) -> Option<Arc<Settings>> {
        lock(&self.settings).get(pool).cloned()
    }

    /// The spec that was applied last.
    pub(super) fn applied(&self, pool: &PoolUid) -> Option<serde_json::Value> {
        Some(self.settings(pool)?.spec.clone())
    }

    pub(super) fn set_settings(&self, pool: PoolUid, settings: Arc<Settings>) {
        lock(&self.settings).insert(pool, settings);
    }

    pub(super) fn drop_settings(&self, pool: &PoolUid) {
        lock(&self.settings).remove(pool);
        lock(&self.images).retain(|(uid, _), _| uid != pool);
    }

    pub(super) fn image(&self, pool: &PoolUid, generation: u64) -> Option<Arc<Facts>> {
        lock(&self.images).get(&(pool.clone(), generation)).cloned()
    }

    pub(super) fn set_image(&self, pool: PoolUid, generation: u64, facts: Facts) {
        lock(&self.images).insert((pool, generation), Arc::new(facts));
    }

    /// Takes a build into the books; the receiver resolves when it is to be given up.
    pub(super) fn begin_build(&self, pool: PoolUid) -> oneshot::Receiver<()> {
        let (cancel, cancelled) = oneshot::channel();
        lock(&self.builds).insert(pool, cancel);
        cancelled
    }

    pub(super) fn cancel_build(&self, pool: &PoolUid) {
        lock(&self.builds).remove(pool);
    }

    pub(super) fn sample(&self) -> Sample {
        *lock(&self.sample)
    }

    pub(super) fn set_sample(&self, sample: Sample) {
        *lock(&self.sample) = sample;
    }
}

pub(super) fn slot_group_name(slot: Slot) -> String {
    format!("slot-{}", slot.0)
}
