use branchpool_agent_api::LeasePhase as Phase;
use branchpool_crds::{LeasePhase, Priority};

use super::{
    super::{sample, status::READY, *},
    world::{Fate, World},
};
use crate::plan::SECOND;

fn lease(index: u32) -> LeaseObject {
    sample::object(&format!("u{index}"), &format!("l{index}"), 1_000 * SECOND)
}

fn phase(world: &World, uid: &str) -> LeasePhase {
    world.objects[uid].status.phase
}

fn reason(world: &World, uid: &str) -> String {
    let conditions = &world.objects[uid].status.conditions;
    let ready = conditions.iter().find(|condition| condition.type_ == READY);
    ready.map_or_else(String::new, |ready| ready.reason.clone())
}

#[test]
fn two_writes_a_lease_and_one_at_its_end() {
    let mut world = World::new(&[("a", 2)]);
    world.create(lease(1));
    world.settle();
    assert_eq!(phase(&world, "u1"), LeasePhase::Bound);
    assert_eq!(world.secrets.len(), 1);
    assert_eq!(world.writes, 2);
    world.delete("u1");
    world.settle();
    assert_eq!(world.writes, 3);
    assert!(world.secrets.is_empty());
    assert!(world.agents["a"].leases.is_empty(), "forgotten");
    assert!(world.machine.entries.is_empty());
}

#[test]
fn branches_go_by_priority_then_time_and_a_deleted_lease_is_skipped() {
    let mut world = World::new(&[("a", 0)]);
    let priorities = [Priority::Low, Priority::High, Priority::Medium];
    for index in 0..9_u32 {
        let mut object = lease(index);
        object.priority = priorities[index as usize % 3];
        object.created += u64::from(index) * SECOND;
        world.create(object);
    }
    world.settle();
    assert_eq!(reason(&world, "u0"), "Queued");
    let position = |world: &World, uid: &str| world.objects[uid].status.queue_position;
    assert_eq!(position(&world, "u1"), Some(0));
    world.delete("u1");
    world.settle();
    for _ in 0..8 {
        world.add_branch("a");
        world.settle();
    }
    let order: Vec<&str> = world.handed.iter().map(Uid::as_str).collect();
    assert_eq!(order, ["u4", "u7", "u2", "u5", "u8", "u0", "u3", "u6"]);
}

#[test]
fn places_in_the_queue_are_told_every_ten_seconds_at_most() {
    let mut world = World::new(&[("a", 0)]);
    for index in 0..3 {
        world.create(lease(index));
    }
    world.settle();
    let writes = world.writes;
    world.delete("u0");
    world.settle();
    assert_eq!(world.writes, writes);
    world.pass(11 * SECOND);
    world.settle();
    assert_eq!(world.objects["u1"].status.queue_position, Some(0));
    assert_eq!(world.writes, writes + 2);
    world.pass(11 * SECOND);
    world.settle();
    assert_eq!(world.writes, writes + 2, "nothing moved");
}

#[test]
fn who_waits_too_long_or_for_no_pool_fails_and_goes_after_a_while() {
    let mut world = World::new(&[("a", 0)]);
    world.create(lease(1));
    let mut other = lease(2);
    other.pool.name = "nowhere".into();
    world.create(other);
    world.settle();
    assert_eq!(reason(&world, "u2"), "PoolNotFound");
    world.pass(301 * SECOND);
    world.settle();
    assert_eq!(phase(&world, "u1"), LeasePhase::Failed);
    assert_eq!(reason(&world, "u1"), "AdmissionTimeout");
    assert_eq!(reason(&world, "u2"), "PoolNotFound");
    assert_eq!(phase(&world, "u2"), LeasePhase::Failed);
    world.pass(3_599 * SECOND);
    world.settle();
    assert_eq!(world.objects.len(), 2);
    world.pass(2 * SECOND);
    world.settle();
    assert!(world.objects.is_empty());
}

#[test]
fn limits_and_what_is_not_supported_fail_with_a_reason() {
    let mut world = World::new(&[("a", 1)]);
    world.create(LeaseObject {
        ttl: Some(7_201 * SECOND),
        ..lease(1)
    });
    world.create(LeaseObject {
        from_lease: true,
        ..lease(2)
    });
    world.settle();
    assert_eq!(reason(&world, "u1"), "TTLTooLong");
    assert_eq!(reason(&world, "u2"), "NotSupported");
    assert_eq!(world.handed, [] as [Uid; 0]);
}

#[test]
fn a_renewal_counts_from_its_time_and_the_future_is_now() {
    let mut world = World::new(&[("a", 1)]);
    world.create(LeaseObject {
        ttl: Some(600 * SECOND),
        ..lease(1)
    });
    world.settle();
    let expires = |world: &World| {
        let time = world.objects["u1"].status.expiration_time.clone().unwrap();
        u64::try_from(time.0.as_millisecond()).unwrap()
    };
    let bound = world.now;
    assert_eq!(expires(&world), bound + 600 * SECOND);
    world.pass(300 * SECOND);
    let renewed = world.now - 100 * SECOND;
    world.change("u1", |object| object.renew_time = Some(renewed));
    world.settle();
    assert_eq!(expires(&world), renewed + 600 * SECOND);
    let future = world.now + 9_999 * SECOND;
    world.change("u1", |object| object.renew_time = Some(future));
    world.settle();
    assert_eq!(expires(&world), world.now + 600 * SECOND);
    let writes = world.writes;
    world.pass(60 * SECOND);
    world.settle();
    assert_eq!(world.writes, writes, "renewed once");
}

#[test]
fn an_expired_lease_loses_its_secret_first() {
    let mut world = World::new(&[("a", 1)]);
    world.create(lease(1));
    world.settle();
    world.at_agent("a", "u1.l1", |lease| lease.phase = Phase::Expired);
    world.hear_agent(&"a".into());
    assert!(matches!(
        world.under_way[0].1,
        Operation::DeleteSecret { .. }
    ));
    world.settle();
    assert_eq!(phase(&world, "u1"), LeasePhase::Expired);
    assert_eq!(world.objects["u1"].status.host, None);
    assert!(world.secrets.is_empty());
    assert!(world.agents["a"].leases.is_empty());
}

#[test]
fn a_reset_is_answered_and_waits_for_a_branch() {
    let mut world = World::new(&[("a", 2)]);
    world.create(LeaseObject {
        reset_token: Some("first".into()),
        ..lease(1)
    });
    world.settle();
    let status = |world: &World| world.objects["u1"].status.clone();
    assert_eq!(
        status(&world).observed_reset_token.as_deref(),
        Some("first")
    );
    assert_eq!(
        status(&world).branch.as_deref(),
        Some("a-0"),
        "fresh as it is"
    );
    world.change("u1", |object| object.reset_token = Some("second".into()));
    world.settle();
    assert_eq!(status(&world).branch.as_deref(), Some("a-1"));
    assert_eq!(
        status(&world).observed_reset_token.as_deref(),
        Some("second")
    );
    world.change("u1", |object| object.reset_token = Some("third".into()));
    world.settle();
    assert_eq!(reason(&world, "u1"), "Resetting");
    world.add_branch("a");
    world.settle();
    assert_eq!(reason(&world, "u1"), "Bound");
    assert_eq!(
        status(&world).observed_reset_token.as_deref(),
        Some("third")
    );
}

#[test]
fn a_silent_node_is_told_and_a_gone_one_is_the_end() {
    let mut world = World::new(&[("a", 1), ("b", 0)]);
    world.create(lease(1));
    world.settle();
    world.cut(&"a".into());
    world.pass(5 * SECOND);
    world.settle();
    assert_eq!(reason(&world, "u1"), "Bound");
    world.pass(6 * SECOND);
    world.settle();
    assert_eq!(reason(&world, "u1"), "NodeUnreachable");
    assert_eq!(phase(&world, "u1"), LeasePhase::Bound);
    world.resync(&"a".into());
    world.settle();
    assert_eq!(reason(&world, "u1"), "Bound");
    world.cut(&"a".into());
    world.tell(Event::Nodes(BTreeSet::new()));
    world.settle();
    assert_eq!(phase(&world, "u1"), LeasePhase::Bound, "an empty list");
    world.tell(Event::Nodes(BTreeSet::from(["b".into()])));
    world.settle();
    assert_eq!(phase(&world, "u1"), LeasePhase::Lost);
    assert_eq!(reason(&world, "u1"), "NodeGone");
    assert!(world.secrets.is_empty());
    assert_eq!(world.warnings, ["NodeGone"]);
}

#[test]
fn a_lost_answer_leads_to_no_second_branch() {
    let mut world = World::new(&[("a", 2), ("b", 1)]);
    world.create(lease(1));
    world.hear();
    world.finish(0, Fate::Deaf);
    world.settle_patiently();
    assert_eq!(phase(&world, "u1"), LeasePhase::Bound);
    let held: usize = world.agents.values().map(|agent| agent.leases.len()).sum();
    assert_eq!(held, 1, "a second branch was given back");
}

#[test]
fn a_lease_deleted_while_the_operator_was_away_is_cleaned_up_by_its_agents_word() {
    let mut world = World::new(&[("a", 1)]);
    world.create(lease(1));
    world.settle();
    world.delete("u1");
    world.start();
    world.settle();
    assert!(world.secrets.is_empty());
    assert!(world.agents["a"].leases.is_empty());
    assert!(world.machine.entries.is_empty());
}

#[test]
fn a_lease_of_the_same_name_keeps_its_own_secret() {
    let mut world = World::new(&[("a", 2)]);
    world.create(lease(1));
    world.settle();
    world.delete("u1");
    world.create(sample::object("v1", "l1", world.now));
    world.settle();
    assert_eq!(phase(&world, "v1"), LeasePhase::Bound);
    assert_eq!(world.secrets["l1"].1.as_str(), "v1");
    assert_eq!(world.agents["a"].leases.len(), 1);
}

#[test]
fn leases_of_one_name_change_its_secret_one_after_the_other() {
    let mut world = World::new(&[("a", 3)]);
    for uid in ["u1", "u2"] {
        world.create(sample::object(uid, "l1", world.now));
        world.hear();
        // The agent hands out a branch, and nobody learns of it.
        world.finish(0, Fate::Works);
        world.delete(uid);
        world.start();
    }
    world.create(sample::object("u3", "l1", world.now));
    world.settle_patiently();
    assert_eq!(phase(&world, "u3"), LeasePhase::Bound);
    assert_eq!(world.secrets["l1"].1.as_str(), "u3");
    assert_eq!(world.agents["a"].leases.len(), 1);
}

#[test]
fn a_secret_that_an_undecodable_lease_may_have_stays() {
    let mut world = World::new(&[("a", 2)]);
    world.create(lease(1));
    world.settle();
    world.delete("u1");
    // A newer operator served another lease of the name, and was replaced by this one.
    world.secrets.get_mut("l1").unwrap().1 = "v1".into();
    world.opaque.insert("v1".into());
    world.create(sample::object("v1", "l1", world.now));
    world.create(lease(2));
    world.start();
    world.settle_patiently();
    assert_eq!(world.secrets["l1"].1.as_str(), "v1");
    assert_eq!(phase(&world, "v1"), LeasePhase::Pending, "left alone");
    assert_eq!(phase(&world, "u2"), LeasePhase::Bound, "goes on");
    world.delete("v1");
    world.settle();
    assert!(!world.secrets.contains_key("l1"), "nobody can have it");
    assert_eq!(world.agents["a"].leases.len(), 1, "that of u2");
}

#[test]
fn a_lease_that_did_not_end_after_all_gets_its_secret_back() {
    let mut world = World::new(&[("a", 1)]);
    world.create(lease(1));
    world.settle();
    world.cut(&"a".into());
    // By the clock it must be over, so its Secret goes; then the node is back and says otherwise.
    world.pass(3_631 * SECOND);
    world.finish(0, Fate::Works);
    assert!(world.secrets.is_empty());
    world.finish(0, Fate::NotDone);
    world.resync(&"a".into());
    world.settle_patiently();
    assert_eq!(phase(&world, "u1"), LeasePhase::Bound);
    assert_eq!(world.secrets["l1"].1.as_str(), "u1");
}

#[test]
fn a_foreign_secret_of_the_name_is_left_alone() {
    let mut world = World::new(&[("a", 1)]);
    world.create(lease(1));
    world.hear();
    world.finish(0, Fate::Works);
    let (uid, operation) = world.under_way.remove(0);
    assert!(matches!(operation, Operation::CreateSecret(..)));
    let refused = WriteError::Foreign("a Secret l1 is there that is not a lease's".into());
    world.tell(Event::Done(uid, Outcome::SecretCreated(Err(refused))));
    world.settle();
    assert_eq!(phase(&world, "u1"), LeasePhase::Failed);
    assert_eq!(reason(&world, "u1"), "SecretNameConflict");
    assert!(world.agents["a"].leases.is_empty(), "given back");
    assert_eq!(world.warnings, ["SecretNameConflict"]);
}

#[test]
fn who_asks_gets_the_connection_and_then_it_is_written() {
    let mut world = World::new(&[("a", 1)]);
    world.create(LeaseObject {
        wants_secret: false,
        ..lease(1)
    });
    world.hear();
    world.tell(Event::Ask("u1".into()));
    world.settle();
    let [(_, Ok(answer))] = world.answers.as_slice() else {
        panic!("{:?}", world.answers);
    };
    assert_eq!(answer.password.as_deref(), Some("secret"));
    assert!(world.secrets.is_empty());
    assert_eq!(phase(&world, "u1"), LeasePhase::Bound);
    world.tell(Event::Ask("u1".into()));
    world.settle();
    assert_eq!(world.answers.len(), 2, "asked again");
}

#[test]
fn a_lease_that_nobody_named_is_not_the_operators() {
    let mut world = World::new(&[("a", 1)]);
    let foreign = sample::bound("by-hand", 0);
    let agent = world.agents.get_mut("a").unwrap();
    agent.leases.insert("by-hand".into(), foreign);
    world.resync(&"a".into());
    world.settle();
    assert_eq!(world.agents["a"].leases.len(), 1);
}
