//! What a lease's status says, and why.

use branchpool_agent_api::{Lease, LeasePhase as Phase};
use branchpool_crds::{BranchLeaseStatus, LeasePhase, LocalReference};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::{
    LeaseObject, PoolTerms,
    entry::{Failure, condition},
};
use crate::plan::{Millis, NodeName, SECOND};

pub(super) const READY: &str = "Ready";
pub(super) const RENEWED: &str = "Renewed";

fn time(at: Millis) -> Time {
    let at = i64::try_from(at).unwrap_or(i64::MAX);
    Time(Timestamp::from_millisecond(at).unwrap_or(Timestamp::MAX))
}

fn new_condition(kind: &str, status: &str, why: &Failure, object: &LeaseObject) -> Condition {
    Condition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: why.reason.clone(),
        message: why.message.clone(),
        observed_generation: Some(object.generation),
        last_transition_time: time(0),
    }
}

/// Conditions keep the time of their last change of status; a new one gets the time of now, which the
/// caller left in it, or is told by [`stamped`].
pub(super) fn with_times(
    mut status: BranchLeaseStatus,
    before: &BranchLeaseStatus,
) -> BranchLeaseStatus {
    for new in &mut status.conditions {
        if let Some(old) = condition(&before.conditions, &new.type_)
            && old.status == new.status
            && status.phase.is_finished() == before.phase.is_finished()
        {
            new.last_transition_time = old.last_transition_time.clone();
        }
    }
    status
}

/// Gives conditions that were never written before the time of now. Times are whole seconds, as API
/// servers store them.
pub(super) fn stamped(mut status: BranchLeaseStatus, now: Millis) -> BranchLeaseStatus {
    for new in &mut status.conditions {
        if new.last_transition_time == time(0) {
            new.last_transition_time = time(now / SECOND * SECOND);
        }
    }
    status
}

/// The binding as it was told once, and stays to the end for reading.
fn carried(object: &LeaseObject) -> BranchLeaseStatus {
    BranchLeaseStatus {
        observed_generation: object.generation,
        queue_position: None,
        conditions: Vec::new(),
        ..object.status.clone()
    }
}

pub(super) fn bound(object: &LeaseObject, node: &NodeName, lease: &Lease) -> BranchLeaseStatus {
    // A server that sleeps is woken by who connects; saying so would cost a write each time.
    let ready = match lease.reason.as_deref() {
        None | Some("Suspended" | "Waking") => new_condition(
            READY,
            "True",
            &Failure::new("Bound", "the branch accepts connections"),
            object,
        ),
        Some(reason) => {
            let message = lease.message.clone().unwrap_or_default();
            new_condition(READY, "False", &Failure::new(reason, message), object)
        }
    };
    BranchLeaseStatus {
        observed_generation: object.generation,
        phase: LeasePhase::Bound,
        host: Some(lease.host.clone()),
        port: Some(u32::from(lease.port)),
        database: Some(lease.database.clone()),
        user: Some(lease.user.clone()),
        binding: object.wants_secret.then(|| LocalReference {
            name: object.id.name.clone(),
        }),
        node: Some(node.to_string()),
        branch: Some(lease.branch.clone()),
        bound_time: Some(time(lease.bound_at / SECOND * SECOND)),
        expiration_time: Some(time(lease.expires_at / SECOND * SECOND)),
        queue_position: None,
        // A branch that was just handed out is fresh: the token that came with its lease is answered.
        observed_reset_token: if object.status.phase == LeasePhase::Bound {
            let answered = lease.observed_reset_token.as_ref();
            answered
                .or(object.status.observed_reset_token.as_ref())
                .cloned()
        } else {
            object.reset_token.clone()
        },
        conditions: vec![ready],
    }
}

pub(super) fn pending(
    object: &LeaseObject,
    pool: Option<&PoolTerms>,
    position: Option<u32>,
) -> BranchLeaseStatus {
    let why = match pool {
        None => Failure::new("PoolNotFound", no_pool(object)),
        Some(_) => Failure::new(
            "Queued",
            "no branch is ready: the lease waits for its turn in the pool's queue",
        ),
    };
    BranchLeaseStatus {
        queue_position: pool.and(position),
        phase: LeasePhase::Pending,
        conditions: vec![new_condition(READY, "False", &why, object)],
        ..carried(object)
    }
}

fn no_pool(object: &LeaseObject) -> String {
    format!(
        "there is no BranchPool {} in namespace {}: create it, or a lease that names another pool",
        object.pool.name, object.pool.namespace
    )
}

pub(super) fn admission_timeout(
    object: &LeaseObject,
    pool: Option<&PoolTerms>,
    wait: Millis,
) -> Failure {
    match pool {
        None => Failure::new("PoolNotFound", no_pool(object)),
        Some(_) => Failure::new(
            "AdmissionTimeout",
            format!(
                "no branch became free within {} s: raise the pool's replicas and maxBranches, or its lease.admissionWait",
                wait / SECOND
            ),
        ),
    }
}

pub(super) fn resetting(
    object: &LeaseObject,
    node: &NodeName,
    lease: &Lease,
    why: &str,
) -> BranchLeaseStatus {
    let why = Failure::new(
        "Resetting",
        format!("the reset waits for a ready branch on node {node}: {why}"),
    );
    BranchLeaseStatus {
        conditions: vec![new_condition(READY, "False", &why, object)],
        ..bound(object, node, lease)
    }
}

pub(super) fn unreachable(object: &LeaseObject, node: &NodeName) -> BranchLeaseStatus {
    let why = Failure::new(
        "NodeUnreachable",
        format!(
            "the agent of node {node} does not answer; the branch may work all the same. See the BranchNode {node} and its agent's Pod"
        ),
    );
    BranchLeaseStatus {
        conditions: vec![new_condition(READY, "Unknown", &why, object)],
        observed_generation: object.status.observed_generation,
        ..carried(object)
    }
}

pub(super) fn not_renewed(object: &LeaseObject, why: &Failure) -> Condition {
    new_condition(RENEWED, "False", why, object)
}

pub(super) fn expired() -> Failure {
    Failure::new(
        "Expired",
        "its time ran out: set spec.renewTime of a lease before status.expirationTime",
    )
}

pub(super) fn node_gone(node: &NodeName) -> Failure {
    Failure::new(
        "NodeGone",
        format!("node {node} left the cluster, and the branch with it: create another lease"),
    )
}

pub(super) fn branch_gone(node: &NodeName) -> Failure {
    Failure::new(
        "BranchGone",
        format!("node {node} does not have the branch any more: create another lease"),
    )
}

/// What an agent's record of an ended lease means.
pub(super) fn ended(record: &Lease) -> (LeasePhase, Failure) {
    match record.phase {
        Phase::Expired => (LeasePhase::Expired, expired()),
        Phase::Released => (
            LeasePhase::Lost,
            Failure::new(
                "Released",
                "the lease was given back at its node: create another lease",
            ),
        ),
        Phase::Bound | Phase::Lost => {
            let reason = record.reason.clone().unwrap_or_else(|| "Lost".to_owned());
            let message = record
                .message
                .clone()
                .unwrap_or_else(|| "the branch is lost: create another lease".to_owned());
            (LeasePhase::Lost, Failure::new(reason, message))
        }
    }
}

/// The end; where the branch was stays readable, its connection does not.
pub(super) fn finished(
    object: &LeaseObject,
    phase: LeasePhase,
    why: &Failure,
    now: Millis,
) -> BranchLeaseStatus {
    let mut ready = new_condition(READY, "False", why, object);
    // The end's own time, whatever was said before: it is when the retention begins.
    ready.last_transition_time = time(now / SECOND * SECOND);
    BranchLeaseStatus {
        phase,
        host: None,
        port: None,
        database: None,
        user: None,
        binding: None,
        conditions: vec![ready],
        ..carried(object)
    }
}
