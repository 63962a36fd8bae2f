//! Single decisions, one scenario a test.

use branchpool_agent::plan::{
    Action, Command, Event, LeaseUid, Limits, PoolSpec, Refusal, State, WarmingMode,
};
use branchpool_agent_api::{LeasePhase, PoolName};

use crate::world::{World, pool_name, pool_uid, spec};

pub(crate) fn filled(spec: PoolSpec) -> World {
    let mut world = World::new(spec, Limits::default());
    world.settle();
    world
}

pub(crate) fn lease(world: &mut World, name: &str) -> LeaseUid {
    let uid = LeaseUid(name.into());
    let pool = pool_name();
    let command = Command::Lease {
        uid: uid.clone(),
        pool,
        ttl: None,
        holder: None,
        epoch: None,
    };
    world.command(Some(uid.clone()), command);
    while !world.pending.is_empty() {
        world.finish(0, true);
    }
    uid
}

#[test]
fn a_wrong_pool_name_is_an_error_and_never_another_pool() {
    let mut world = filled(spec(2, 4, WarmingMode::Phased));
    let pool = PoolName {
        namespace: "default".into(),
        name: "shopp".into(),
    };
    let uid = LeaseUid("a".into());
    world.command(
        Some(uid.clone()),
        Command::Lease {
            uid,
            pool: pool.clone(),
            ttl: None,
            holder: None,
            epoch: None,
        },
    );
    assert_eq!(
        world.refused,
        [Refusal::PoolNotFound {
            pool,
            known: vec![pool_name()]
        }]
    );
    assert!(world.node.leases.is_empty());
}

#[test]
fn the_oldest_ready_branch_goes_first() {
    let mut world = filled(spec(3, 6, WarmingMode::Phased));
    let oldest = world
        .node
        .branches
        .values()
        .min_by_key(|branch| branch.serial)
        .unwrap()
        .id;
    let uid = lease(&mut world, "a");
    assert_eq!(world.answered[&uid].0, oldest);
}

#[test]
fn the_same_uid_gets_the_same_branch() {
    let mut world = filled(spec(3, 6, WarmingMode::Phased));
    let uid = lease(&mut world, "a");
    let first = world.answered[&uid];
    lease(&mut world, "a");
    assert_eq!(world.answered[&uid], first);
    assert_eq!(world.node.leases.len(), 1);
}

#[test]
fn a_ttl_beyond_the_pool_s_is_refused_and_not_cut() {
    let mut world = filled(spec(1, 2, WarmingMode::Phased));
    let uid = LeaseUid("a".into());
    let ttl = Some(600_001);
    let command = Command::Lease {
        uid: uid.clone(),
        pool: pool_name(),
        ttl,
        holder: None,
        epoch: None,
    };
    world.command(Some(uid), command);
    assert!(matches!(
        world.refused[..],
        [Refusal::TtlTooLong {
            asked: 600_001,
            most: 600_000,
            ..
        }]
    ));
}

#[test]
fn an_older_epoch_is_refused() {
    let mut world = filled(spec(1, 2, WarmingMode::Phased));
    world.command(
        None,
        Command::Release {
            uid: LeaseUid("x".into()),
            epoch: Some(5),
        },
    );
    world.command(
        None,
        Command::Release {
            uid: LeaseUid("x".into()),
            epoch: Some(4),
        },
    );
    assert_eq!(
        world.refused.last(),
        Some(&Refusal::StaleEpoch {
            given: 4,
            current: 5
        })
    );
    world.settle();
    world.crash(0, false);
    world.command(
        None,
        Command::Release {
            uid: LeaseUid("x".into()),
            epoch: Some(4),
        },
    );
    assert_eq!(
        world.refused.last(),
        Some(&Refusal::StaleEpoch {
            given: 4,
            current: 5
        })
    );
}

#[test]
fn an_older_desired_state_is_refused() {
    let mut world = filled(spec(1, 2, WarmingMode::Phased));
    let apply = |replicas, generation| Command::Apply {
        spec: Box::new(PoolSpec {
            observed_generation: generation,
            ..spec(replicas, 2, WarmingMode::Phased)
        }),
        body: serde_json::Value::Null,
        epoch: None,
    };
    world.command(None, apply(2, 3));
    world.settle();
    world.crash(0, false);
    world.command(None, apply(1, 2));
    assert!(matches!(
        world.refused.last(),
        Some(Refusal::StaleGeneration {
            given: 2,
            current: 3,
            ..
        })
    ));
    world.settle();
    let pool = &world.node.pools[&pool_uid()];
    assert_eq!(pool.spec.target, 2);
    world.command(None, apply(1, 3));
    world.settle();
    assert_eq!(world.node.pools[&pool_uid()].spec.target, 1);
}

#[test]
fn a_lease_expires_by_itself_and_a_renewed_one_later() {
    let mut world = filled(spec(2, 4, WarmingMode::Phased));
    let (short, long) = (lease(&mut world, "short"), lease(&mut world, "long"));
    world.tick(50_000);
    world.command(
        Some(long.clone()),
        Command::Renew {
            uid: long.clone(),
            ttl: None,
            epoch: None,
        },
    );
    world.tick(11_000);
    assert_eq!(world.node.leases[&short].phase, LeasePhase::Expired);
    assert_eq!(world.node.leases[&long].phase, LeasePhase::Bound);
    world.settle();
}

#[test]
fn after_a_reboot_a_running_ephemeral_branch_is_lost_and_a_durable_one_comes_back() {
    for durable in [false, true] {
        let mut world = filled(PoolSpec {
            durable,
            ..spec(2, 4, WarmingMode::Phased)
        });
        let uid = lease(&mut world, "a");
        world.crash(0, true);
        let expected = if durable {
            LeasePhase::Bound
        } else {
            LeasePhase::Lost
        };
        assert_eq!(world.node.leases[&uid].phase, expected);
        world.settle();
    }
}

#[test]
fn a_parked_lease_survives_restart_and_reboot() {
    let mut world = filled(spec(2, 4, WarmingMode::Phased));
    let uid = lease(&mut world, "a");
    world.event(Event::Drain);
    while !world.pending.is_empty() {
        world.finish(0, true);
    }
    assert!(world.drained);
    assert_eq!(world.branches.len(), 1, "only the leased branch is kept");
    world.crash(0, true);
    let found = &world.node.leases[&uid];
    assert!(found.is_bound());
    assert_eq!(found.reason.as_deref(), Some("Restarting"));
    world.settle();
    let found = &world.node.leases[&uid];
    assert_eq!((found.restarts, found.reason.as_deref()), (1, None));
}

#[test]
fn a_branch_that_keeps_failing_is_retried_later_and_never_stops_the_pool() {
    let mut world = World::new(spec(4, 8, WarmingMode::Phased), Limits::default());
    for _ in 0..200 {
        let start = world
            .pending
            .iter()
            .position(|action| matches!(action, Action::Start { .. }));
        match start {
            Some(index) => world.finish(index, false),
            None if world.pending.is_empty() => match world.node.deadline(world.now) {
                Some(deadline) => world.tick(deadline - world.now.mono),
                None => break,
            },
            None => world.finish(0, true),
        }
        world.check();
    }
    let pool = &world.node.pools[&pool_uid()];
    assert!(pool.failures > 5, "it went on trying: {}", pool.failures);
    assert!(pool.counts().quarantined <= world.limits.quarantine);
    world.settle();
}

#[test]
fn a_new_image_replaces_without_going_below_what_is_ready() {
    let mut world = filled(spec(4, 8, WarmingMode::Phased));
    let mut newer = spec(4, 8, WarmingMode::Phased);
    newer.image_key = "image-2".into();
    world.apply(newer);
    let mut least = u32::MAX;
    while !world.pending.is_empty() {
        world.finish(0, true);
        least = least.min(world.node.pools[&pool_uid()].counts().ready);
    }
    assert_eq!(least, 4);
    world.settle();
    assert!(
        world
            .node
            .branches
            .values()
            .all(|branch| branch.generation == 2)
    );
    assert!(
        !world.golden.contains(&(pool_uid(), 1)),
        "the older image went with its last branch"
    );
}

#[test]
fn a_removed_pool_keeps_its_leases_until_they_end() {
    let mut world = filled(spec(2, 4, WarmingMode::Phased));
    let uid = lease(&mut world, "a");
    world.command(
        None,
        Command::Remove {
            pool: pool_uid(),
            epoch: None,
        },
    );
    while !world.pending.is_empty() {
        world.finish(0, true);
    }
    assert_eq!(world.node.branches.len(), 1);
    assert!(matches!(
        world.node.branches.values().next().unwrap().state,
        State::Leased { .. }
    ));
    world.command(
        Some(uid.clone()),
        Command::Release {
            uid: uid.clone(),
            epoch: None,
        },
    );
    world.settle();
    assert!(world.node.pools.is_empty() && world.golden.is_empty());
}

#[test]
fn tombstones_beyond_their_bounds_go_before_their_delay() {
    let mut wanted = spec(20, 60, WarmingMode::Phased);
    wanted.cleanup.tombstones.delay = 1_000_000_000;
    let mut world = filled(wanted);
    for n in 0..20 {
        let uid = lease(&mut world, &format!("l{n}"));
        world.command(
            Some(uid.clone()),
            Command::Release {
                uid: uid.clone(),
                epoch: None,
            },
        );
    }
    for _ in 0..2_000 {
        if world.pending.is_empty() {
            world.tick(20);
        } else {
            world.finish(0, true);
        }
    }
    assert_eq!(
        world.trash.len(),
        8,
        "maxCount of them wait for their delay"
    );
}

#[test]
fn a_lease_that_ends_while_it_is_parked_does_not_hold_up_the_drain() {
    let mut world = filled(spec(2, 4, WarmingMode::Phased));
    let uid = lease(&mut world, "a");
    world.event(Event::Drain);
    world.command(
        Some(uid.clone()),
        Command::Release {
            uid: uid.clone(),
            epoch: None,
        },
    );
    world.drain_out();
    assert!(world.branches.is_empty(), "the branch of nobody was kept");
}

#[test]
fn a_server_that_dies_between_its_session_and_the_news_of_it_is_never_ready() {
    let mut world = World::new(spec(1, 4, WarmingMode::Phased), Limits::default());
    let session = |action: &Action| matches!(action, Action::Preconnect { .. });
    while !world.pending.iter().any(session) {
        world.finish(0, true);
    }
    let at = world.pending.iter().position(session).unwrap();
    world.finish_unheard(at);
    let id = *world.branches.keys().next().unwrap();
    world.branches.get_mut(&id).unwrap().running = false;
    let detail = "signal 9".into();
    world.event(Event::ServerExited { branch: id, detail });
    world.hear();
    assert!(!matches!(world.node.branches[&id].state, State::Ready));
    world.settle();
}

#[test]
fn a_leased_server_that_dies_between_its_restart_and_the_news_of_it_is_restarted_again() {
    let mut world = filled(spec(1, 4, WarmingMode::Phased));
    let uid = lease(&mut world, "a");
    let id = world.node.leases[&uid].branch;
    let die = |world: &mut World| {
        world.branches.get_mut(&id).unwrap().running = false;
        let detail = "signal 9".into();
        world.event(Event::ServerExited { branch: id, detail });
    };
    world.settle();
    die(&mut world);
    while !matches!(world.pending.first(), Some(Action::Restart { .. })) {
        world.finish(0, true);
    }
    world.finish_unheard(0);
    die(&mut world);
    world.hear();
    world.settle();
    assert!(world.branches[&id].running);
}

#[test]
fn a_leased_server_that_dies_again_and_again_is_restarted_ever_later() {
    let mut world = filled(spec(1, 4, WarmingMode::Phased));
    let uid = lease(&mut world, "a");
    let id = world.node.leases[&uid].branch;
    world.settle();
    let mut waits = Vec::new();
    for _ in 0..4 {
        world.branches.get_mut(&id).unwrap().running = false;
        let detail = "signal 9".into();
        world.event(Event::ServerExited { branch: id, detail });
        let died = world.now.mono;
        while !world.branches[&id].running {
            if world.pending.is_empty() {
                let due = world.node.deadline(world.now).unwrap();
                world.tick(due - world.now.mono);
            }
            world.finish(0, true);
        }
        waits.push(world.now.mono - died);
    }
    assert_eq!(waits, [0, 250, 500, 1_000]);
}

#[test]
fn a_hand_over_cut_short_is_done_again() {
    let mut world = filled(spec(1, 4, WarmingMode::Phased));
    let uid = lease(&mut world, "a");
    let id = world.node.leases[&uid].branch;
    world.log.clear();
    world.crash(0, false);
    assert!(world.log.contains(&format!("hand over {id}")));
}

#[test]
fn an_address_outlives_a_crash_while_the_branch_it_left_is_still_being_restarted() {
    let mut world = filled(spec(2, 4, WarmingMode::Phased));
    let uid = lease(&mut world, "a");
    world.settle();
    let old = world.node.leases[&uid].branch;
    world.branches.get_mut(&old).unwrap().running = false;
    let detail = "signal 9".into();
    world.event(Event::ServerExited {
        branch: old,
        detail,
    });
    let restarting = |action: &Action| matches!(action, Action::Restart { .. });
    assert!(world.pending.iter().any(restarting));
    let command = Command::Reset {
        uid: uid.clone(),
        reset_token: "token".into(),
        epoch: None,
    };
    world.command(Some(uid.clone()), command);
    world.crash(u64::MAX, false);
    assert_ne!(world.node.leases[&uid].branch, old);
    world.settle();
}
