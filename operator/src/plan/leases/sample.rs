//! Values for tests.

use branchpool_agent_api::{
    GoldenPhase, GoldenStatus, Isolation, Lease, LeasePhase, NodeStatus, PoolName, PoolStatus,
    QueueProbe, Space,
};
use branchpool_crds::{BranchLeaseStatus, Placement, Priority};

use super::{LeaseObject, ObjectRef, PoolTerms};
use crate::plan::Millis;

pub(crate) fn pool_name() -> PoolName {
    PoolName::new("shop", "app")
}

pub(crate) fn terms() -> PoolTerms {
    PoolTerms {
        name: pool_name(),
        placement: Placement::Spread,
        default_ttl: 3_600_000,
        max_ttl: 7_200_000,
        admission_wait: 300_000,
        retain_finished: 3_600_000,
    }
}

pub(crate) fn object(uid: &str, name: &str, created: Millis) -> LeaseObject {
    LeaseObject {
        id: ObjectRef {
            namespace: "shop".into(),
            name: name.into(),
            uid: uid.into(),
        },
        generation: 1,
        version: 1,
        created,
        deleting: false,
        pool: pool_name(),
        ttl: None,
        priority: Priority::Medium,
        holder: None,
        renew_time: None,
        reset_token: None,
        from_lease: false,
        wants_secret: true,
        status: BranchLeaseStatus::default(),
    }
}

pub(crate) fn bound(id: &str, at: Millis) -> Lease {
    Lease {
        uid: id.to_owned(),
        pool: pool_name(),
        pool_uid: "pool".into(),
        phase: LeasePhase::Bound,
        reason: None,
        message: None,
        branch: "k3v7q2m5xa4ne".into(),
        endpoint: "t6w2zc7hqy5pd".into(),
        generation: 1,
        host: "10.0.0.7".into(),
        port: 7432,
        database: "app".into(),
        user: "app.t6w2zc7hqy5pd".into(),
        password: None,
        ca: None,
        uri: "postgresql://app.t6w2zc7hqy5pd@10.0.0.7:7432/app".into(),
        socket: "/run/branchpool/e/t6w2zc7hqy5pd".into(),
        holder: None,
        bound_at: at,
        expires_at: at + 3_600_000,
        observed_reset_token: None,
        restarts: 0,
        connections: None,
        last_used_at: None,
    }
}

pub(crate) fn pool(ready: u32, leased: u32) -> PoolStatus {
    PoolStatus {
        uid: "pool".into(),
        name: pool_name(),
        observed_generation: 1,
        desired: ready,
        max_branches: 100,
        ready,
        warming: 0,
        snapshotting: 0,
        starting: 0,
        preconnecting: 0,
        leased,
        cleaning: 0,
        quarantined: 0,
        tombstones: 0,
        stale: 0,
        golden: GoldenStatus {
            phase: GoldenPhase::Sealed,
            generation: 1,
            message: None,
            bytes: 8 << 20,
        },
        conditions: Vec::new(),
        retry_at: None,
    }
}

pub(crate) fn node(name: &str) -> NodeStatus {
    NodeStatus {
        name: name.into(),
        version: "0.1.0".into(),
        revision: 1,
        instance: "i".into(),
        provider: "btrfs".into(),
        ready: true,
        can_snapshot: true,
        conditions: Vec::new(),
        gates: Vec::new(),
        isolation: Isolation {
            level: "Full".into(),
            cgroup: "v2".into(),
            user_per_branch: true,
            ipc_namespace: true,
            network_namespace: true,
            landlock_abi: 7,
            missing: Vec::new(),
        },
        postgres_majors: vec![15],
        space: Space::default(),
        max_branches: 1_000,
        branches: 0,
        leases: 0,
        pools: Vec::new(),
        quarantined: Vec::new(),
        trash_directory: "trash".into(),
        resident_state: true,
        journal_pending: 0,
        journal_delay_ms: 0,
        async_release: true,
        read_queries: QueueProbe::default(),
        write_queries: QueueProbe::default(),
        session_driver: "native".into(),
        session_close_timeout_ms: 200,
        trust: None,
        lease_activity: Vec::new(),
    }
}
