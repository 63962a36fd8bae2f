//! Tables of a cluster's objects, with the look of those of an agent's.

use std::fmt::Write as _;

use branchpool_agent_api::Condition;
use branchpool_crds::{BranchLease, BranchNode, BranchPool, SourcePhase};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition as ApiCondition;
use kube::ResourceExt;

use super::lease::{Progress, millis, progress};
use crate::output::{conditions, golden, leases as lease_table, pool_table, span, status, table};

pub(super) fn pools(pools: &[BranchPool]) -> String {
    pool_table(pools.iter().map(row))
}

fn row(pool: &BranchPool) -> [String; 8] {
    let status_of = pool.status.clone().unwrap_or_default();
    let phase = status_of.source.as_ref().map(|source| source.phase);
    let sealed = matches!(phase, Some(SourcePhase::Sealed));
    let phase = phase.map_or_else(|| "Pending".to_owned(), |phase| format!("{phase:?}"));
    [
        pool.namespace().unwrap_or_default(),
        pool.name_any(),
        format!("{}/{}", status_of.ready, pool.spec.replicas),
        status_of.warming.to_string(),
        status_of.leased.to_string(),
        pool.spec.max_branches.to_string(),
        golden(
            sealed,
            u64::try_from(status_of.generation).unwrap_or(0),
            &phase,
        ),
        status(&plain(&status_of.conditions)),
    ]
}

/// One pool, with what its conditions say.
pub(super) fn pool(pool: &BranchPool) -> String {
    let mut text = pools(std::slice::from_ref(pool));
    let Some(status) = &pool.status else {
        return text;
    };
    if let Some(message) = status
        .source
        .as_ref()
        .and_then(|source| source.message.as_ref())
    {
        let _ = writeln!(text, "\nGolden image: {message}");
    }
    if !status.conditions.is_empty() {
        let _ = write!(text, "\n{}", conditions(&plain(&status.conditions)));
    }
    text
}

fn plain(found: &[ApiCondition]) -> Vec<Condition> {
    let plain = found.iter().map(|condition| Condition {
        kind: condition.type_.clone(),
        status: condition.status.clone(),
        reason: condition.reason.clone(),
        message: condition.message.clone(),
    });
    plain.collect()
}

pub(super) fn leases(leases: &[BranchLease], now: u64) -> String {
    let header = [
        "ID",
        "POOL",
        "PHASE",
        "BRANCH",
        "AGE",
        "EXPIRES-IN",
        "HOLDER",
    ];
    let rows = leases.iter().map(|lease| {
        let status = lease.status.clone().unwrap_or_default();
        let phase = match progress(lease) {
            Progress::Bound => format!("{:?}", status.phase),
            Progress::Unanswered => "Pending".to_owned(),
            Progress::Waiting(_) => match status.queue_position {
                Some(count) => format!("{:?} ({count} before it)", status.phase),
                None => with_reason(lease),
            },
            Progress::Finished(..) => with_reason(lease),
        };
        let created = lease.creation_timestamp();
        let end = millis(status.expiration_time.as_ref());
        [
            lease.name_any(),
            format!(
                "{}/{}",
                lease.namespace().unwrap_or_default(),
                lease.spec.pool_ref.name
            ),
            phase,
            status.branch.unwrap_or_else(none),
            span(millis(created.as_ref()), now),
            if end == 0 { none() } else { span(now, end) },
            lease.spec.holder.clone().unwrap_or_else(none),
        ]
    });
    lease_table(header, rows)
}

fn with_reason(lease: &BranchLease) -> String {
    let status = lease.status.clone().unwrap_or_default();
    match super::lease::ready(&status) {
        Some(condition) => format!("{:?} ({})", status.phase, condition.reason),
        None => format!("{:?}", status.phase),
    }
}

fn none() -> String {
    "<none>".to_owned()
}

pub(super) fn is_ready(node: &BranchNode) -> bool {
    let conditions = node.status.iter().flat_map(|status| &status.conditions);
    conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Nodes, and below them every condition that is not as it should be.
pub(super) fn nodes(nodes: &[BranchNode]) -> String {
    if nodes.is_empty() {
        return "No nodes with an agent found.\n".to_owned();
    }
    let header = [
        "NAME",
        "READY",
        "BRANCHES",
        "LEASES",
        "ALLOCATABLE",
        "FREE",
        "ISOLATION",
        "AGENT",
    ];
    let rows = nodes.iter().map(|node| {
        let status = node.status.clone().unwrap_or_default();
        [
            node.name_any(),
            if is_ready(node) { "yes" } else { "no" }.to_owned(),
            status.branches.to_string(),
            status.leases.to_string(),
            status.allocatable_branches.to_string(),
            status
                .storage
                .map_or_else(none, |storage| storage.free.to_string()),
            status.isolation.unwrap_or_else(none),
            status.agent_version.unwrap_or_else(none),
        ]
    });
    let mut text = table(header, rows);
    let wrong: Vec<_> = nodes
        .iter()
        .flat_map(|node| {
            let conditions = node.status.iter().flat_map(|status| &status.conditions);
            // Ready is good when it is true, the pressures when they are not.
            let wrong = conditions
                .filter(|condition| (condition.type_ == "Ready") != (condition.status == "True"));
            wrong.map(|condition| {
                [
                    node.name_any(),
                    condition.type_.clone(),
                    condition.reason.clone(),
                    condition.message.clone(),
                ]
            })
        })
        .collect();
    if !wrong.is_empty() {
        let _ = write!(
            text,
            "\n{}",
            table(["NODE", "CONDITION", "REASON", "MESSAGE"], wrong)
        );
    }
    text
}
