//! A service that keeps leases in a map: enough behaviour to see that each request arrives whole.
//! The command line's tests use it too.

// Not everything here is used by both.
#![allow(dead_code)]
// The trait says so; see there.
#![allow(clippy::result_large_err)]

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use branchpool_agent::{
    http::{Service, Subscription, WatchLog},
    sql::{Entered, Limits, Sql, SqlTarget},
};
use branchpool_agent_api::{
    DesiredPool, GoldenPhase, GoldenStatus, Isolation, Lease, LeasePhase, LeaseRequest, NodeStatus,
    PoolName, PoolStatus, Problem, QueueProbe, RenewRequest, ResetRequest, Space, problem::reason,
};

pub(crate) const INSTANCE: &str = "instance-1";
/// Of every lease; the user is `app.` and the lease's uid.
pub(crate) const PASSWORD: &str = "right:p@ssword";

#[derive(Clone)]
pub(crate) struct InMemory {
    state: Arc<Mutex<State>>,
    pub(crate) sql: Sql,
    pub(crate) log: WatchLog,
}

#[derive(Default)]
struct State {
    leases: BTreeMap<String, Lease>,
    pools: BTreeMap<String, PoolStatus>,
    not_ready: Option<String>,
    last_epoch: Option<u64>,
    sql_targets: BTreeMap<String, SqlTarget>,
    attempts: usize,
}

impl InMemory {
    pub(crate) fn new() -> Self {
        Self::with(Limits::default())
    }

    pub(crate) fn with(limits: Limits) -> Self {
        Self {
            state: Arc::default(),
            sql: Sql::new(limits),
            log: WatchLog::new(node()),
        }
    }

    pub(crate) fn not_ready(&self, why: &str) {
        self.state.lock().unwrap().not_ready = Some(why.to_owned());
    }

    pub(crate) fn sql_target(&self, uid: &str, target: SqlTarget) {
        self.state
            .lock()
            .unwrap()
            .sql_targets
            .insert(uid.to_owned(), target);
    }

    /// Of reads and of writes.
    pub(crate) fn sql_probes(&self) -> (QueueProbe, QueueProbe) {
        self.sql.probes()
    }

    /// The epoch of the last request that can carry one in its query.
    pub(crate) fn last_epoch(&self) -> Option<u64> {
        self.state.lock().unwrap().last_epoch
    }

    /// Requests for a lease so far, whatever became of them.
    pub(crate) fn attempts(&self) -> usize {
        self.state.lock().unwrap().attempts
    }

    fn change(&self, uid: &str, change: impl FnOnce(&mut Lease)) -> Result<Lease, Problem> {
        let mut state = self.state.lock().unwrap();
        let lease = state.leases.get_mut(uid).ok_or_else(|| {
            Problem::new(
                404,
                reason::LEASE_NOT_FOUND,
                format!("there is no lease {uid}"),
            )
        })?;
        change(lease);
        self.log.lease(lease.clone());
        Ok(lease.clone())
    }
}

impl Service for InMemory {
    async fn lease(&self, uid: String, request: LeaseRequest) -> Result<(Lease, bool), Problem> {
        let mut state = self.state.lock().unwrap();
        state.attempts += 1;
        if let Some(lease) = state.leases.get(&uid) {
            return Ok((lease.clone(), false));
        }
        let known = state.pools.values().find(|pool| pool.name == request.pool);
        let Some(pool) = known else {
            let names = state.pools.values().map(|pool| &pool.name);
            return Err(Problem::pool_not_found(&request.pool, names));
        };
        if pool.ready == 0 {
            let problem = Problem::new(503, reason::NO_BRANCH_READY, "no branch is ready");
            return Err(problem.with_retry_after_ms(1500));
        }
        let lease = lease(&uid, &request);
        state.leases.insert(uid, lease.clone());
        self.log.lease(lease.clone());
        Ok((lease, true))
    }

    async fn renew(&self, uid: String, request: RenewRequest) -> Result<Lease, Problem> {
        self.change(&uid, |lease| {
            lease.expires_at += request.ttl_seconds.unwrap_or(60) * 1000;
        })
    }

    async fn reset(&self, uid: String, request: ResetRequest) -> Result<Lease, Problem> {
        self.change(&uid, |lease| {
            lease.observed_reset_token = Some(request.token);
        })
    }

    async fn release(&self, uid: String, epoch: Option<u64>) -> Result<Lease, Problem> {
        self.state.lock().unwrap().last_epoch = epoch;
        self.change(&uid, |lease| lease.phase = LeasePhase::Released)
    }

    async fn forget(&self, uid: String, epoch: Option<u64>) -> Result<(), Problem> {
        let mut state = self.state.lock().unwrap();
        state.last_epoch = epoch;
        state.leases.remove(&uid);
        self.log.lease_gone(&uid);
        Ok(())
    }

    fn get_lease(&self, uid: &str) -> Option<Lease> {
        self.state.lock().unwrap().leases.get(uid).cloned()
    }

    fn leases(&self) -> Vec<Lease> {
        self.state
            .lock()
            .unwrap()
            .leases
            .values()
            .cloned()
            .collect()
    }

    fn pools(&self) -> Vec<PoolStatus> {
        self.state.lock().unwrap().pools.values().cloned().collect()
    }

    fn node(&self) -> NodeStatus {
        node()
    }

    fn sql(&self) -> &Sql {
        &self.sql
    }

    fn sql_target(&self, uid: &str) -> Result<SqlTarget, Problem> {
        let target = self.state.lock().unwrap().sql_targets.get(uid).cloned();
        target.ok_or_else(|| Problem::new(404, reason::LEASE_NOT_FOUND, "there is no such lease"))
    }

    async fn sql_enter(&self, uid: &str) -> Result<Entered, Problem> {
        let target = Service::sql_target(self, uid)?;
        Ok(Entered {
            target,
            guest: None,
        })
    }

    fn sql_login(&self, user: &str, password: &str) -> Option<String> {
        (password == PASSWORD)
            .then(|| user.strip_prefix("app."))
            .flatten()
            .map(str::to_owned)
    }

    async fn apply_pool(&self, uid: String, desired: DesiredPool) -> Result<PoolStatus, Problem> {
        let ready = desired.spec["replicas"].as_u64().unwrap_or(0);
        let name = PoolName::new(desired.namespace, desired.name);
        let status = pool(&uid, name, u32::try_from(ready).unwrap());
        self.state.lock().unwrap().pools.insert(uid, status.clone());
        self.log.pool(status.clone());
        Ok(status)
    }

    async fn remove_pool(&self, uid: String, epoch: Option<u64>) -> Result<(), Problem> {
        let mut state = self.state.lock().unwrap();
        state.last_epoch = epoch;
        state.pools.remove(&uid);
        self.log.pool_gone(&uid);
        Ok(())
    }

    fn subscribe(&self, since: Option<(String, u64)>) -> Result<Subscription, Problem> {
        self.log.subscribe(since)
    }

    fn metrics(&self) -> String {
        "# EOF\n".to_owned()
    }

    fn readiness(&self) -> Result<(), String> {
        self.state
            .lock()
            .unwrap()
            .not_ready
            .clone()
            .map_or(Ok(()), Err)
    }
}

pub(crate) fn lease(uid: &str, request: &LeaseRequest) -> Lease {
    Lease {
        uid: uid.to_owned(),
        pool: request.pool.clone(),
        pool_uid: "pool-1".to_owned(),
        phase: LeasePhase::Bound,
        reason: None,
        message: None,
        branch: "branch-1".to_owned(),
        endpoint: "endpoint-1".to_owned(),
        generation: 1,
        host: "/run/e".to_owned(),
        port: 5432,
        database: "app".to_owned(),
        user: "app".to_owned(),
        password: None,
        ca: None,
        uri: "postgresql:///app?host=/run/e".to_owned(),
        socket: "/run/e".to_owned(),
        holder: request.holder.clone(),
        bound_at: 1_000,
        expires_at: 1_000 + request.ttl_seconds.unwrap_or(60) * 1000,
        observed_reset_token: None,
        restarts: 0,
        connections: None,
        last_used_at: None,
    }
}

pub(crate) fn pool(uid: &str, name: PoolName, ready: u32) -> PoolStatus {
    PoolStatus {
        uid: uid.to_owned(),
        name,
        observed_generation: 1,
        desired: ready,
        max_branches: 100,
        ready,
        warming: 0,
        snapshotting: 0,
        starting: 0,
        preconnecting: 0,
        leased: 0,
        cleaning: 0,
        quarantined: 0,
        tombstones: 0,
        stale: 0,
        golden: GoldenStatus {
            phase: GoldenPhase::Sealed,
            generation: 1,
            message: None,
            bytes: 1,
        },
        conditions: Vec::new(),
        retry_at: None,
    }
}

pub(crate) fn node() -> NodeStatus {
    NodeStatus {
        name: "node-1".to_owned(),
        version: "0.1.0".to_owned(),
        revision: 0,
        instance: INSTANCE.to_owned(),
        provider: "btrfs".to_owned(),
        ready: true,
        can_snapshot: true,
        conditions: Vec::new(),
        gates: Vec::new(),
        isolation: Isolation {
            level: "Full".to_owned(),
            cgroup: "v2".to_owned(),
            user_per_branch: true,
            ipc_namespace: true,
            network_namespace: true,
            landlock_abi: 7,
            missing: Vec::new(),
        },
        postgres_majors: vec![15],
        space: Space::default(),
        max_branches: 100,
        branches: 0,
        leases: 0,
        pools: Vec::new(),
        lease_activity: Vec::new(),
        quarantined: Vec::new(),
        trash_directory: "trash".to_owned(),
        resident_state: true,
        journal_pending: 0,
        journal_delay_ms: 0,
        async_release: true,
        read_queries: QueueProbe::default(),
        write_queries: QueueProbe::default(),
        session_driver: "native".to_owned(),
        session_close_timeout_ms: 0,
        trust: None,
    }
}
