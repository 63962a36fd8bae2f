use serde_json::{Value, json};

use super::*;

fn lease(status: &Value) -> BranchLease {
    serde_json::from_value(json!({
        "apiVersion": "branchpool.dev/v1alpha1",
        "kind": "BranchLease",
        "metadata": {"name": "a", "generation": 2},
        "spec": {"poolRef": {"name": "shop"}},
        "status": status,
    }))
    .unwrap()
}

fn condition(status: &str, reason: &str, message: &str) -> Value {
    json!([{
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }])
}

#[test]
fn the_queue_is_told_in_words() {
    let queued = |position: u32| {
        progress(&lease(&json!({
            "phase": "Pending",
            "queuePosition": position,
            "conditions": condition("False", "Queued", "all branches are leased"),
        })))
    };
    for (position, words) in [
        (0, "next in the queue; all branches are leased"),
        (1, "1 lease before it in the queue; all branches are leased"),
        (
            12,
            "12 leases before it in the queue; all branches are leased",
        ),
    ] {
        assert_eq!(queued(position), Progress::Waiting(words.to_owned()));
    }
}

#[test]
fn nothing_is_made_of_no_answer() {
    assert_eq!(progress(&lease(&Value::Null)), Progress::Unanswered);
    assert_eq!(progress(&lease(&json!({}))), Progress::Unanswered);
}

#[test]
fn bound_is_what_the_condition_says() {
    let bound = json!({"phase": "Bound", "conditions": condition("True", "Bound", "")});
    assert_eq!(progress(&lease(&bound)), Progress::Bound);
    // The Secret comes first; until the condition is there the lease is not of use.
    let unready = json!({"phase": "Bound", "conditions": condition("False", "Resetting", "")});
    assert_eq!(
        progress(&lease(&unready)),
        Progress::Waiting("Resetting".to_owned())
    );
}

#[test]
fn a_finished_lease_says_why() {
    let lost = json!({"phase": "Lost", "conditions": condition("False", "NodeRebooted", "the node was rebooted")});
    assert_eq!(
        progress(&lease(&lost)),
        Progress::Finished(LeasePhase::Lost, "the node was rebooted".to_owned())
    );
}

#[test]
fn an_answer_is_to_the_spec_of_now() {
    assert!(!is_answered(&lease(&json!({"observedGeneration": 1}))));
    assert!(is_answered(&lease(&json!({"observedGeneration": 2}))));
    assert!(!is_answered(&lease(&Value::Null)));
}
