//! What a `BranchNode` says of its node, and when that is written.

use branchpool_agent_api::{NodeStatus, PoolStatus};
use branchpool_crds::{BranchNodeStatus, NodePool, NodeStorage, Quantity};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::{Millis, SECOND};

/// The least time between two writes of a node's status.
pub const WRITE_EVERY: Millis = 5 * SECOND;
/// Space that came or went is worth a write from this part of the whole on.
const SPACE_STEP: u64 = 100;

/// What an agent last said, and whether it still does.
#[derive(Clone, Debug)]
pub struct Report<'a> {
    /// Absent: it was never heard.
    pub node: Option<&'a NodeStatus>,
    pub pools: Vec<&'a PoolStatus>,
    pub connected: bool,
    /// Why it is not connected.
    pub trouble: Option<&'a str>,
    pub cordoned: bool,
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Condition {
    Condition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        observed_generation: None,
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
    }
}

/// Conditions whose status is as before keep their time; the others get the time of now.
pub fn with_times(new: &mut [Condition], before: &[Condition], now: Millis) {
    let seconds = i64::try_from(now / SECOND).unwrap_or(i64::MAX);
    let now = Time(Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX));
    for condition in new {
        let old = before.iter().find(|old| old.type_ == condition.type_);
        condition.last_transition_time = match old {
            Some(old) if old.status == condition.status => old.last_transition_time.clone(),
            _ => now.clone(),
        };
    }
}

/// The status to write, if it differs enough from the one there is.
pub fn status(
    report: &Report<'_>,
    before: Option<&BranchNodeStatus>,
    now: Millis,
) -> Option<BranchNodeStatus> {
    let mut status = match report.node {
        Some(node) => described(report, node),
        None => before.cloned().unwrap_or_default(),
    };
    status.conditions = conditions(report);
    let told = before.map_or(&[][..], |before| &before.conditions);
    with_times(&mut status.conditions, told, now);
    if let (Some(new), Some(old)) = (
        &mut status.storage,
        before.and_then(|before| before.storage.as_ref()),
    ) && is_close(new, old)
    {
        *new = old.clone();
    }
    (before != Some(&status)).then_some(status)
}

fn is_close(new: &NodeStorage, old: &NodeStorage) -> bool {
    let step = new.capacity.units() / SPACE_STEP;
    let close = |a: &Quantity, b: &Quantity| a.units().abs_diff(b.units()) <= step;
    new.capacity.units() == old.capacity.units()
        && close(&new.free, &old.free)
        && close(&new.unallocated, &old.unallocated)
        && close(&new.metadata_free, &old.metadata_free)
}

fn described(report: &Report<'_>, node: &NodeStatus) -> BranchNodeStatus {
    let pools = report.pools.iter().map(|pool| NodePool {
        uid: pool.uid.clone(),
        namespace: pool.name.namespace.clone(),
        name: pool.name.name.clone(),
        ready: pool.ready,
        warming: pool.warming,
        leased: pool.leased,
        desired: pool.desired,
        generation: i64::try_from(pool.golden.generation).unwrap_or(i64::MAX),
    });
    BranchNodeStatus {
        agent_version: Some(node.version.clone()),
        isolation: Some(node.isolation.level.clone()),
        postgres_versions: node.postgres_majors.clone(),
        allocatable_branches: node.max_branches,
        branches: node.branches,
        leases: node.leases,
        storage: Some(NodeStorage {
            capacity: Quantity::from_bytes(node.space.total),
            free: Quantity::from_bytes(node.space.free),
            unallocated: Quantity::from_bytes(node.space.unallocated),
            metadata_free: Quantity::from_bytes(node.space.metadata_free),
        }),
        pools: pools.collect(),
        conditions: Vec::new(),
    }
}

fn conditions(report: &Report<'_>) -> Vec<Condition> {
    let Some(node) = report.node.filter(|_| report.connected) else {
        let why = report.trouble.unwrap_or("it was never heard");
        let message = format!(
            "the agent does not answer ({why}): see its Pod with kubectl describe, and its log"
        );
        return vec![
            condition("Ready", "Unknown", "AgentUnreachable", &message),
            condition("DiskPressure", "Unknown", "AgentUnreachable", &message),
            condition("MemoryPressure", "Unknown", "AgentUnreachable", &message),
        ];
    };
    let told = |kind: &str| node.conditions.iter().find(|told| told.kind == kind);
    let ready = match told("Ready") {
        _ if report.cordoned => condition(
            "Ready",
            "False",
            "Cordoned",
            "the node is cordoned: leases stay, and no new branches are made. kubectl uncordon it to go on",
        ),
        Some(told) => condition("Ready", &told.status, &told.reason, &told.message),
        None => condition("Ready", "True", "Serving", "leases are handed out"),
    };
    let pressure = |kind: &str| match told(kind) {
        Some(told) => condition(kind, &told.status, &told.reason, &told.message),
        None => condition(kind, "False", "Enough", "refill is not held back"),
    };
    vec![ready, pressure("DiskPressure"), pressure("MemoryPressure")]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::leases::sample;

    fn report(node: &NodeStatus) -> Report<'_> {
        Report {
            node: Some(node),
            pools: Vec::new(),
            connected: true,
            trouble: None,
            cordoned: false,
        }
    }

    #[test]
    fn small_changes_of_space_are_not_written() {
        let mut node = sample::node("a");
        node.space.total = 1_000_000;
        node.space.free = 500_000;
        let first = status(&report(&node), None, 5_000).unwrap();
        assert_eq!(status(&report(&node), Some(&first), 9_000), None);
        let mut later = node.clone();
        later.space.free = 491_000;
        assert_eq!(status(&report(&later), Some(&first), 9_000), None);
        later.space.free = 480_000;
        assert!(status(&report(&later), Some(&first), 9_000).is_some());
    }

    #[test]
    fn an_agent_that_is_silent_is_unknown_and_keeps_its_numbers() {
        let node = sample::node("a");
        let mut report = report(&node);
        let first = status(&report, None, 5_000).unwrap();
        report.connected = false;
        report.trouble = Some("connection refused");
        let silent = status(&report, Some(&first), 9_000).unwrap();
        assert_eq!(silent.allocatable_branches, first.allocatable_branches);
        assert_eq!(silent.conditions[0].status, "Unknown");
        assert!(silent.conditions[0].message.contains("connection refused"));
        assert_eq!(silent.conditions[0].last_transition_time.0.as_second(), 9);
        assert_eq!(status(&report, Some(&silent), 99_000), None);
    }
}
