//! What changed, as the API tells it.

use std::{collections::BTreeSet, sync::Arc};

use branchpool_agent_api::{Condition, Isolation, NodeStatus, PoolProbe, Quarantined, QueueProbe};

use super::{build, world::World};
use crate::{
    http::WatchLog,
    plan::{Effects, LeaseUid, Node, Pool, PoolUid, Preconnect, State, StopMode, WarmingMode},
};

const STATES: [&str; 9] = [
    "ready",
    "snapshotting",
    "starting",
    "preconnecting",
    "leased",
    "cleaning",
    "quarantined",
    "tombstones",
    "stale",
];

/// What about the node does not change while the agent runs.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) name: String,
    pub(super) instance: String,
    pub(super) isolation: Isolation,
    pub(super) postgres_majors: Vec<u32>,
}

/// Collects what events touched, and reports it once for a batch of them.
#[derive(Debug)]
pub(super) struct Publisher {
    log: WatchLog,
    facts: Arc<Facts>,
    pools: BTreeSet<PoolUid>,
    leases: BTreeSet<LeaseUid>,
    node: bool,
}

impl Publisher {
    pub(super) fn new(log: WatchLog, facts: Arc<Facts>) -> Self {
        Self {
            log,
            facts,
            pools: BTreeSet::new(),
            leases: BTreeSet::new(),
            node: true,
        }
    }

    /// Reports everything with the next publication.
    pub(super) fn note_all(&mut self, node: &Node) {
        self.pools.extend(node.pools.keys().cloned());
        self.leases.extend(node.leases.keys().cloned());
    }

    pub(super) fn note(&mut self, effects: &Effects) {
        self.pools.extend(effects.pools.iter().cloned());
        self.leases.extend(effects.leases.iter().cloned());
        self.node |= effects.node;
    }

    pub(super) fn publish(&mut self, node: &Node, world: &World) {
        if self.pools.is_empty() && self.leases.is_empty() && !self.node {
            return;
        }
        let now = world.clock.now();
        for uid in std::mem::take(&mut self.leases) {
            if let Some(lease) = node.leases.get(&uid) {
                let socket = world.layout.endpoint(&lease.endpoint);
                let socket = socket.display().to_string();
                let reach = world.addresses.reach();
                self.log.lease(lease.view(&uid.0, &socket, reach));
            } else {
                self.log.lease_gone(&uid.0);
            }
        }
        for uid in std::mem::take(&mut self.pools) {
            let Some(status) = node.pool_status(&uid, now) else {
                world.drop_settings(&uid);
                world.addresses.forget_pool(&uid);
                build::remove_auth(&world.layout, &uid);
                if let Some(gone) = self.log.known_pool(uid.as_str()) {
                    world
                        .metrics
                        .drop_pool(&gone.name.namespace, &gone.name.name, &STATES);
                }
                self.log.pool_gone(uid.as_str());
                continue;
            };
            let name = &status.name;
            let counts = [
                status.ready,
                status.snapshotting,
                status.starting,
                status.preconnecting,
                status.leased,
                status.cleaning,
                status.quarantined,
                status.tombstones,
                status.stale,
            ];
            let states: Vec<_> = STATES.into_iter().zip(counts).collect();
            world
                .metrics
                .set_branches(&name.namespace, &name.name, &states);
            self.log.pool(status);
        }
        self.node = false;
        let bound = node
            .leases
            .values()
            .filter(|lease| lease.is_bound())
            .count();
        world
            .metrics
            .leases
            .set(i64::try_from(bound).unwrap_or(i64::MAX));
        world
            .metrics
            .set_gates(node.gates.iter().map(|gate| gate.reason.clone()));
        let status = node_status(node, world, &self.facts);
        world
            .metrics
            .quarantined
            .set(i64::try_from(status.quarantined.len()).unwrap_or(i64::MAX));
        self.log.node(status);
    }
}

/// The node as it is now. What changes all the time (space, queues) is filled in when asked for.
pub(super) fn node_status(node: &Node, world: &World, facts: &Facts) -> NodeStatus {
    let bound = node
        .leases
        .values()
        .filter(|lease| lease.is_bound())
        .count();
    let open = node.gates.is_empty() && !node.is_draining();
    let mut quarantined = node.strays.clone();
    for branch in node.branches.values() {
        if let State::Quarantined(failure) = &branch.state {
            let path = world.layout.branch(&branch.id);
            let path = path.strip_prefix(world.layout.root()).unwrap_or(&path);
            quarantined.push(Quarantined {
                path: path.display().to_string(),
                reason: failure.reason.clone(),
                message: failure.message.clone(),
            });
        }
    }
    NodeStatus {
        name: facts.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        revision: 0,
        instance: facts.instance.clone(),
        provider: "btrfs".to_owned(),
        ready: !node.is_draining(),
        can_snapshot: open,
        conditions: conditions(node),
        gates: node.gates.clone(),
        isolation: facts.isolation.clone(),
        postgres_majors: facts.postgres_majors.clone(),
        space: world.sample().space,
        max_branches: node.limits.slots,
        branches: u32::try_from(node.branches.len()).unwrap_or(u32::MAX),
        leases: u32::try_from(bound).unwrap_or(u32::MAX),
        pools: node
            .pools
            .values()
            .map(|pool| pool_probe(node, pool))
            .collect(),
        lease_activity: Vec::new(),
        quarantined,
        trash_directory: "trash".to_owned(),
        resident_state: true,
        journal_pending: 0,
        journal_delay_ms: 0,
        async_release: true,
        read_queries: QueueProbe::default(),
        write_queries: QueueProbe::default(),
        session_driver: "native".to_owned(),
        session_close_timeout_ms: 200,
        trust: None,
    }
}

fn conditions(node: &Node) -> Vec<Condition> {
    let ready = if node.is_draining() {
        Condition::new(
            "Ready",
            false,
            "Draining",
            "the agent is stopping; leases survive its restart",
        )
    } else {
        Condition::new("Ready", true, "Serving", "leases are handed out")
    };
    let pressure = |kind: &str, reasons: &[&str]| match node
        .gates
        .iter()
        .find(|gate| reasons.contains(&gate.reason.as_str()))
    {
        Some(gate) => Condition::new(kind, true, &gate.reason, &gate.message),
        None => Condition::new(kind, false, "Enough", "there is enough of it"),
    };
    vec![
        ready,
        pressure("DiskPressure", &["DiskPressure", "MetadataPressure"]),
        pressure("MemoryPressure", &["MemoryPressure"]),
    ]
}

fn pool_probe(node: &Node, pool: &Pool) -> PoolProbe {
    let counts = pool.counts();
    let (spec, warming, cleanup) = (&pool.spec, &pool.spec.warming, &pool.spec.cleanup);
    let queue = |concurrency: u32, active: u32, queued: u32| QueueProbe {
        concurrency,
        active,
        queued,
    };
    let (deleting, waiting) = node.tombstones(&spec.uid);
    PoolProbe {
        uid: spec.uid.to_string(),
        name: spec.name.clone(),
        ready: counts.ready,
        warming: counts.warming(),
        desired: if pool.removed { 0 } else { spec.target },
        stale: node.stale_ready(pool),
        leased: counts.leased,
        refill: !pool.removed && node.gates.is_empty() && !node.is_draining(),
        warming_mode: match warming.mode {
            WarmingMode::Phased => "Phased",
            WarmingMode::Pipelined => "Pipelined",
        }
        .to_owned(),
        refill_window: crate::plan::WINDOW,
        refill_delay_ms: 0,
        refill_lease_delay_ms: 0,
        refill_continue_delay_ms: 0,
        snapshot: queue(
            warming.snapshot_concurrency,
            counts.snapshotting,
            node.deficit(pool),
        ),
        start: queue(
            warming.start_concurrency,
            counts.starting,
            counts.snapshotted,
        ),
        preconnect: queue(
            warming.preconnect_concurrency,
            counts.preconnecting,
            counts.started,
        ),
        preconnect_mode: match warming.preconnect {
            Preconnect::WhileWarming => "WhileWarming",
            Preconnect::OnLease => "OnLease",
            Preconnect::Never => "Never",
        }
        .to_owned(),
        sessions_open: match warming.preconnect {
            Preconnect::WhileWarming => counts.ready,
            Preconnect::OnLease | Preconnect::Never => 0,
        },
        sessions_max_per_branch: u32::from(warming.preconnect != Preconnect::Never),
        stale_after_ms: warming.stale_after,
        admission_wait_ms: spec.lease.admission_wait,
        cleanup: queue(
            cleanup.concurrency,
            counts.stopping_now,
            counts.stopping - counts.stopping_now,
        ),
        cleanup_start_delay_ms: cleanup.start_delay,
        stop_mode: match cleanup.stop_mode {
            StopMode::Immediate => "Immediate",
            StopMode::Fast => "Fast",
        }
        .to_owned(),
        tuning: if spec.durable { "Durable" } else { "Ephemeral" }.to_owned(),
        tombstones: queue(cleanup.tombstones.concurrency, deleting, waiting),
        tombstone_delay_ms: cleanup.tombstones.delay,
        tombstones_scheduled: pool.tombstones_scheduled,
        tombstones_max_count: cleanup.tombstones.max_count,
        tombstones_max_bytes: cleanup.tombstones.max_bytes,
    }
}
