//! Whatever fails in whatever order: in the end each lease has one branch or a reason, and after all
//! leases are deleted nothing is left anywhere.

use std::collections::BTreeMap;

use branchpool_agent_api::LeasePhase as Phase;
use branchpool_crds::{LeasePhase, Priority};
use proptest::{prelude::*, test_runner::RngSeed};

use super::{
    super::{sample, *},
    world::{Fate, World},
};
use crate::plan::SECOND;

#[derive(Clone, Copy, Debug)]
enum Step {
    Create(u8),
    Delete(u8),
    Hear,
    HearAgent(u8),
    Finish(u8, Fate),
    Pass(u16),
    Crash,
    Cut(u8),
    Heal(u8),
    Branch(u8),
    Expire(u8),
    Reset(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let fate = prop_oneof![
        8 => Just(Fate::Works),
        1 => Just(Fate::Deaf),
        1 => Just(Fate::NotDone),
    ];
    let step = prop_oneof![
        6 => any::<u8>().prop_map(Step::Create),
        3 => any::<u8>().prop_map(Step::Delete),
        20 => Just(Step::Hear),
        20 => any::<u8>().prop_map(Step::HearAgent),
        40 => (any::<u8>(), fate).prop_map(|(index, fate)| Step::Finish(index, fate)),
        3 => (0_u16..5_000).prop_map(Step::Pass),
        1 => Just(Step::Crash),
        1 => any::<u8>().prop_map(Step::Cut),
        3 => any::<u8>().prop_map(Step::Heal),
        5 => any::<u8>().prop_map(Step::Branch),
        1 => any::<u8>().prop_map(Step::Expire),
        1 => any::<u8>().prop_map(Step::Reset),
    ];
    prop::collection::vec(step, 1..250)
}

const NODES: [&str; 2] = ["a", "b"];

fn take(world: &mut World, step: Step, made: &mut u32) {
    let picked = |world: &World, index: u8| {
        let uids: Vec<_> = world.objects.keys().cloned().collect();
        let count = uids.len().max(1);
        uids.get(usize::from(index) % count).cloned()
    };
    let node = |index: u8| NODES[usize::from(index) % 2];
    match step {
        Step::Create(kind) => {
            *made += 1;
            // Names come again, UIDs do not.
            let name = format!("l{}", kind % 8);
            if world.objects.values().all(|object| object.id.name != name) {
                let mut object = sample::object(&format!("u{made}"), &name, world.now);
                object.priority =
                    [Priority::High, Priority::Medium, Priority::Low][usize::from(kind) % 3];
                object.wants_secret = !kind.is_multiple_of(5);
                world.create(object);
            }
        }
        Step::Delete(index) => {
            if let Some(uid) = picked(world, index) {
                world.delete(uid.as_str());
            }
        }
        Step::Hear => drop(world.hear()),
        Step::HearAgent(index) => drop(world.hear_agent(&node(index).into())),
        Step::Finish(index, fate) => {
            if !world.under_way.is_empty() {
                let index = usize::from(index) % world.under_way.len();
                world.finish(index, fate);
            }
        }
        Step::Pass(time) => world.pass(u64::from(time)),
        Step::Crash => world.start(),
        Step::Cut(index) => world.cut(&node(index).into()),
        Step::Heal(index) => world.resync(&node(index).into()),
        Step::Branch(index) => world.add_branch(node(index)),
        Step::Expire(index) => {
            let node = node(index);
            let bound = world.agents[node].leases.iter();
            let id = bound
                .filter(|(_, lease)| lease.phase == Phase::Bound)
                .map(|(id, _)| id.clone())
                .next();
            if let Some(id) = id {
                world.at_agent(node, &id, |lease| lease.phase = Phase::Expired);
            }
        }
        Step::Reset(index) => {
            let uid = picked(world, index);
            if let Some(uid) = uid
                && world.objects[&uid].status.phase == LeasePhase::Bound
            {
                world.change(uid.as_str(), |object| {
                    object.reset_token = Some(object.generation.to_string());
                });
            }
        }
    }
}

fn no_branch_is_shared(world: &World) -> Result<(), TestCaseError> {
    let mut holders: BTreeMap<&str, &str> = BTreeMap::new();
    for agent in world.agents.values() {
        for (id, lease) in agent
            .leases
            .iter()
            .filter(|(_, lease)| lease.phase == Phase::Bound)
        {
            let other = holders.insert(&lease.branch, id);
            prop_assert_eq!(other, None, "of {}", lease.branch);
        }
    }
    Ok(())
}

/// The API server's word, the agents' and the Secrets agree.
fn everything_agrees(world: &World) -> Result<(), TestCaseError> {
    for (uid, object) in &world.objects {
        let records: Vec<_> = world
            .agents
            .iter()
            .flat_map(|(node, agent)| {
                agent
                    .leases
                    .iter()
                    .map(move |(id, lease)| (node, id, lease))
            })
            .filter(|(_, id, _)| parse_agent_id(id).0 == *uid)
            .collect();
        let secret = world.secrets.get(&object.id.name);
        if object.status.phase == LeasePhase::Bound {
            prop_assert_eq!(records.len(), 1, "{:?}", object);
            let (node, _, lease) = records[0];
            prop_assert_eq!(object.status.node.as_deref(), Some(node.as_str()));
            prop_assert_eq!(object.status.branch.as_ref(), Some(&lease.branch));
            let mine = secret.is_some_and(|(_, lease)| lease == uid);
            prop_assert_eq!(mine, object.wants_secret, "{:?}", secret);
        } else {
            prop_assert_eq!(records.len(), 0, "{:?}", object);
            prop_assert!(secret.is_none(), "{:?} {:?}", object, secret);
        }
    }
    Ok(())
}

/// The same cases each time. Rarer ones are looked for by hand, with `PROPTEST_CASES` and
/// `PROPTEST_RNG_SEED`.
fn config() -> ProptestConfig {
    let by_hand = std::env::var_os("PROPTEST_CASES").is_some();
    let config = ProptestConfig::default();
    if by_hand {
        return config;
    }
    ProptestConfig {
        cases: 2_000,
        rng_seed: RngSeed::Fixed(0x5eed_1234),
        ..config
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn nothing_is_shared_and_nothing_is_left(steps in steps(), branches in 0_u32..4) {
        let mut world = World::new(&[(NODES[0], branches), (NODES[1], 1)]);
        let mut made = 0;
        for step in steps {
            take(&mut world, step, &mut made);
            no_branch_is_shared(&world)?;
        }
        for node in NODES {
            world.resync(&node.into());
        }
        world.settle_patiently();
        no_branch_is_shared(&world)?;
        everything_agrees(&world)?;
        let free: usize = world.agents.values().map(|agent| agent.ready.len()).sum();
        let waits = world.objects.values().any(|object| object.status.phase == LeasePhase::Pending);
        prop_assert!(free == 0 || !waits, "{free} branches are ready, and leases wait");
        for uid in world.objects.keys().cloned().collect::<Vec<_>>() {
            world.delete(uid.as_str());
        }
        world.settle_patiently();
        world.pass(40 * SECOND);
        world.settle();
        prop_assert!(world.secrets.is_empty(), "{:?}", world.secrets);
        for agent in world.agents.values() {
            prop_assert!(agent.leases.is_empty(), "{:?}", agent.leases);
        }
        prop_assert!(world.machine.entries.is_empty(), "{:?}", world.machine.entries);
        prop_assert!(world.machine.names.is_empty(), "{:?}", world.machine.names);
    }
}
