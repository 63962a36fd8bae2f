//! Servers that nobody uses.

use branchpool_agent::plan::{Event, LeaseUid, Server, State, WarmingMode};

use crate::{
    scenarios::{filled, lease},
    world::{World, spec},
};

fn server(world: &World, uid: &LeaseUid) -> Server {
    let branch = world.node.leases[uid].branch;
    match &world.node.branches[&branch].state {
        State::Leased { server, .. } => server.clone(),
        other => panic!("{other:?}"),
    }
}

fn idle(open_connections_count: bool) -> World {
    let mut spec = spec(1, 4, WarmingMode::Phased);
    spec.lease.idle_timeout = Some(5_000);
    spec.lease.open_connections_count = open_connections_count;
    filled(spec)
}

fn finish_all(world: &mut World, success: bool) {
    while !world.pending.is_empty() {
        world.finish(0, success);
    }
}

#[test]
fn a_server_that_nobody_uses_sleeps_until_somebody_comes() {
    let mut world = idle(true);
    let uid = lease(&mut world, "a");
    let branch = world.node.leases[&uid].branch;
    finish_all(&mut world, true);
    world.tick(4_999);
    assert!(world.pending.is_empty());
    world.tick(1);
    finish_all(&mut world, true);
    assert_eq!(server(&world, &uid), Server::Suspended);
    assert_eq!(world.node.leases[&uid].reason.as_deref(), Some("Suspended"));
    // Neither a crash nor a reboot wakes it.
    world.crash(0, true);
    finish_all(&mut world, true);
    assert_eq!(server(&world, &uid), Server::Suspended);
    world.event(Event::Wanted { branch });
    finish_all(&mut world, true);
    assert_eq!(server(&world, &uid), Server::Running);
    let lease = &world.node.leases[&uid];
    assert_eq!((lease.restarts, &lease.reason), (0, &None));
}

#[test]
fn an_open_connection_keeps_a_server_up_if_it_is_to_count() {
    for (counts, expected) in [(true, Server::Running), (false, Server::Suspended)] {
        let mut world = idle(counts);
        let uid = lease(&mut world, "a");
        finish_all(&mut world, true);
        world.tick(5_000);
        // Somebody is connected.
        world.finish(0, false);
        finish_all(&mut world, true);
        assert_eq!(server(&world, &uid), expected);
    }
}

#[test]
fn who_comes_while_a_server_is_suspended_gets_it_back() {
    let mut world = idle(true);
    let uid = lease(&mut world, "a");
    let branch = world.node.leases[&uid].branch;
    finish_all(&mut world, true);
    world.tick(5_000);
    world.finish(0, true);
    assert_eq!(server(&world, &uid), Server::Suspending);
    world.event(Event::Wanted { branch });
    finish_all(&mut world, true);
    assert_eq!(server(&world, &uid), Server::Running);
}
