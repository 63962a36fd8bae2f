//! Random interleavings of everything that happens to a node, checked after each step.

use branchpool_agent::{
    plan::{Command, Completion, Event, LeaseUid, Limits, State, WarmingMode},
    storage::ids::BranchId,
};
use branchpool_agent_api::Gate;
use proptest::prelude::*;

use crate::world::{World, pool_name, spec};

#[derive(Clone, Copy, Debug)]
enum Step {
    Lease(u8),
    Renew(u8),
    Reset(u8, u8),
    Release(u8),
    Forget(u8),
    Finish(usize, bool),
    /// Ends many actions well, so that runs get somewhere.
    FinishMany(u8),
    /// Ends an action well, and tells later.
    FinishUnheard(usize),
    Hear,
    Wait(u32),
    ServerDies(usize),
    LeasedServerDies(usize),
    SessionDies(usize),
    /// Somebody connects to a leased branch.
    Wanted(usize),
    TombstoneGone(usize),
    Stray(u8),
    Gate(bool),
    Target(u8),
    Image(u8),
    Settings(u8),
    Kill(u64),
    Reboot(u64),
    Drain,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..8_u8).prop_map(Step::Lease),
        1 => (0..8_u8).prop_map(Step::Renew),
        3 => (0..8_u8, 0..3_u8).prop_map(|(lease, token)| Step::Reset(lease, token)),
        4 => (0..8_u8).prop_map(Step::Release),
        1 => (0..8_u8).prop_map(Step::Forget),
        16 => (any::<usize>(), prop::bool::weighted(0.85)).prop_map(|(i, ok)| Step::Finish(i, ok)),
        8 => (1..40_u8).prop_map(Step::FinishMany),
        4 => any::<usize>().prop_map(Step::FinishUnheard),
        3 => Just(Step::Hear),
        4 => prop_oneof![1..100_u32, 1_000..100_000_u32].prop_map(Step::Wait),
        2 => any::<usize>().prop_map(Step::ServerDies),
        2 => any::<usize>().prop_map(Step::LeasedServerDies),
        1 => any::<usize>().prop_map(Step::SessionDies),
        2 => any::<usize>().prop_map(Step::Wanted),
        1 => any::<usize>().prop_map(Step::TombstoneGone),
        1 => any::<u8>().prop_map(Step::Stray),
        1 => any::<bool>().prop_map(Step::Gate),
        1 => (0..7_u8).prop_map(Step::Target),
        1 => (0..3_u8).prop_map(Step::Image),
        1 => (0..3_u8).prop_map(Step::Settings),
        2 => any::<u64>().prop_map(Step::Kill),
        1 => any::<u64>().prop_map(Step::Reboot),
        1 => Just(Step::Drain),
    ]
}

fn uid(n: u8) -> LeaseUid {
    LeaseUid(format!("lease-{n}"))
}

fn play(world: &mut World, step: Step) {
    match step {
        Step::Lease(n) => {
            let (ttl, holder) = (None, None);
            let command = Command::Lease {
                uid: uid(n),
                pool: pool_name(),
                ttl,
                holder,
                epoch: None,
            };
            world.command(Some(uid(n)), command);
        }
        Step::Renew(n) => {
            let command = Command::Renew {
                uid: uid(n),
                ttl: None,
                epoch: None,
            };
            world.command(Some(uid(n)), command);
        }
        Step::Reset(n, token) => {
            let reset_token = format!("token-{token}");
            let command = Command::Reset {
                uid: uid(n),
                reset_token,
                epoch: None,
            };
            world.command(Some(uid(n)), command);
        }
        Step::Release(n) => {
            world.command(
                Some(uid(n)),
                Command::Release {
                    uid: uid(n),
                    epoch: None,
                },
            );
        }
        Step::Forget(n) => world.command(
            None,
            Command::Forget {
                uid: uid(n),
                epoch: None,
            },
        ),
        Step::Finish(index, success) => world.finish(index, success),
        Step::FinishMany(count) => (0..count).for_each(|_| world.finish(0, true)),
        Step::FinishUnheard(index) => world.finish_unheard(index),
        Step::Hear => drop(world.hear()),
        Step::Wait(by) => world.tick(by.into()),
        Step::ServerDies(pick) => {
            let running = world.branches.iter().filter(|(_, disk)| disk.running);
            let running: Vec<_> = running.map(|(id, _)| *id).collect();
            server_dies(world, &running, pick);
        }
        Step::LeasedServerDies(pick) => {
            let leases = world.node.leases.values();
            let bound = leases.filter(|lease| lease.is_bound());
            let mut running: Vec<_> = bound.map(|lease| lease.branch).collect();
            running.retain(|id| world.branches.get(id).is_some_and(|disk| disk.running));
            server_dies(world, &running, pick);
        }
        Step::SessionDies(pick) => {
            let ready = world.node.branches.values();
            let mut ready: Vec<_> = ready
                .filter(|branch| branch.state == State::Ready)
                .map(|branch| branch.id)
                .collect();
            ready.extend(
                world
                    .unheard
                    .iter()
                    .filter_map(|completion| match completion {
                        Completion::Preconnected { branch, .. } => Some(*branch),
                        _ => None,
                    }),
            );
            if let Some(branch) = ready.get(pick % ready.len().max(1)) {
                world.event(Event::SessionClosed { branch: *branch });
            }
        }
        Step::Wanted(pick) => {
            let bound = world.node.leases.values().filter(|lease| lease.is_bound());
            let bound: Vec<_> = bound.map(|lease| lease.branch).collect();
            if let Some(branch) = bound.get(pick % bound.len().max(1)).copied() {
                world.event(Event::Wanted { branch });
            }
        }
        Step::TombstoneGone(pick) => {
            let id = world
                .trash
                .iter()
                .nth(pick % world.trash.len().max(1))
                .copied();
            if let Some(id) = id {
                world.trash.remove(&id);
            }
        }
        Step::Stray(n) => drop(world.foreign.insert(format!("branches/00/stray-{n}"))),
        Step::Gate(shut) => {
            let gate = Gate {
                reason: "DiskPressure".into(),
                message: "the filesystem is full".into(),
            };
            let gates = if shut { vec![gate] } else { Vec::new() };
            world.event(Event::Gates {
                gates,
                reclaim: shut,
            });
        }
        Step::Target(target) => change(world, |spec| spec.target = target.into()),
        Step::Image(n) => change(world, |spec| spec.image_key = format!("image-{n}")),
        Step::Settings(n) => change(world, |spec| spec.settings_key = format!("settings-{n}")),
        Step::Kill(done) => world.crash(done, false),
        Step::Reboot(done) => world.crash(done, true),
        Step::Drain => world.event(Event::Drain),
    }
}

fn server_dies(world: &mut World, running: &[BranchId], pick: usize) {
    let Some(id) = running.get(pick % running.len().max(1)).copied() else {
        return;
    };
    if let Some(disk) = world.branches.get_mut(&id) {
        disk.running = false;
    }
    let detail = "signal 9".into();
    world.event(Event::ServerExited { branch: id, detail });
}

fn change(world: &mut World, edit: impl FnOnce(&mut branchpool_agent::plan::PoolSpec)) {
    let Some(pool) = world.node.pools.values().next() else {
        return;
    };
    let mut spec = pool.spec.clone();
    edit(&mut spec);
    world.apply(spec);
}

fn run(steps: Vec<Step>, mode: WarmingMode) {
    let limits = Limits {
        slots: 9,
        quarantine: 1,
        leases: 50,
        deletion_spacing: 20,
    };
    let mut spec = spec(4, 8, mode);
    spec.lease.idle_timeout = Some(9_000);
    let mut world = World::new(spec, limits);
    for step in steps {
        play(&mut world, step);
        world.check();
    }
    let before = world.foreign.clone();
    if world.node.is_draining() {
        world.drain_out();
        world.crash(0, false);
    }
    world.settle();
    assert_eq!(world.foreign, before, "something foreign was touched");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn phased_node_keeps_its_promises(steps in prop::collection::vec(step(), 1..160)) {
        run(steps, WarmingMode::Phased);
    }

    #[test]
    fn pipelined_node_keeps_its_promises(steps in prop::collection::vec(step(), 1..160)) {
        run(steps, WarmingMode::Pipelined);
    }
}
