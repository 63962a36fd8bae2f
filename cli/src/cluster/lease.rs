//! A lease as its status tells of it.

use branchpool_crds::{BranchLease, BranchLeaseStatus, LeasePhase};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// What can be said of a lease now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The operator has said nothing yet.
    Unanswered,
    /// In the queue, or for another reason not bound; in words.
    Waiting(String),
    Bound,
    /// It will never be bound: the phase, and why.
    Finished(LeasePhase, String),
}

pub(super) fn progress(lease: &BranchLease) -> Progress {
    let Some(status) = &lease.status else {
        return Progress::Unanswered;
    };
    let ready = ready(status);
    let why = || ready.map_or_else(|| "no reason is given".to_owned(), reason);
    if status.phase.is_finished() {
        return Progress::Finished(status.phase, why());
    }
    match ready {
        Some(condition) if condition.status == "True" => Progress::Bound,
        None if status.queue_position.is_none() => Progress::Unanswered,
        _ => Progress::Waiting(waiting(status, ready)),
    }
}

fn waiting(status: &BranchLeaseStatus, ready: Option<&Condition>) -> String {
    let place = match status.queue_position {
        Some(0) => Some("next in the queue".to_owned()),
        Some(1) => Some("1 lease before it in the queue".to_owned()),
        Some(count) => Some(format!("{count} leases before it in the queue")),
        None => None,
    };
    let parts: Vec<_> = place.into_iter().chain(ready.map(reason)).collect();
    parts.join("; ")
}

fn reason(condition: &Condition) -> String {
    if condition.message.is_empty() {
        condition.reason.clone()
    } else {
        condition.message.clone()
    }
}

pub(super) fn ready(status: &BranchLeaseStatus) -> Option<&Condition> {
    status
        .conditions
        .iter()
        .find(|condition| condition.type_ == "Ready")
}

/// Whether the status answers the spec as it is now.
pub(super) fn is_answered(lease: &BranchLease) -> bool {
    let status = lease.status.as_ref();
    status.is_some_and(|status| Some(status.observed_generation) >= lease.metadata.generation)
}

/// Milliseconds since 1970; 0 for none.
pub(super) fn millis(time: Option<&Time>) -> u64 {
    time.and_then(|time| u64::try_from(time.0.as_millisecond()).ok())
        .unwrap_or(0)
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
