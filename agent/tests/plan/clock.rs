//! The same decisions come out whatever the clock: no threshold in milliseconds and no first item
//! steers the order of work.

use std::{cmp::Reverse, collections::BinaryHeap};

use branchpool_agent::plan::{Action, Command, LeaseUid, Limits, WarmingMode};

use crate::world::{World, pool_name, spec};

/// How long each kind of action takes, in milliseconds.
#[derive(Clone, Copy)]
struct Durations {
    snapshot: u64,
    start: u64,
    preconnect: u64,
    /// Of the very first snapshot, instead.
    first_snapshot: u64,
}

const USUAL: Durations = Durations {
    snapshot: 5,
    start: 40,
    preconnect: 10,
    first_snapshot: 5,
};

impl Durations {
    fn times(self, factor: u64) -> Self {
        Self {
            snapshot: self.snapshot * factor,
            start: self.start * factor,
            preconnect: self.preconnect * factor,
            first_snapshot: self.first_snapshot * factor,
        }
    }
}

/// Most actions of a kind that were under way at once.
#[derive(Debug, Default, PartialEq, Eq)]
struct HighWater {
    snapshots: usize,
    starts: usize,
    preconnects: usize,
}

/// Fills a pool of 100, leases 60 of it at once, lets it fill again, in virtual time.
fn decisions(mode: WarmingMode, durations: Durations) -> (Vec<String>, HighWater) {
    let limits = Limits {
        slots: 400,
        ..Limits::default()
    };
    let mut world = World::new(spec(100, 200, mode), limits);
    let mut ends: BinaryHeap<Reverse<(u64, u64, String)>> = BinaryHeap::new();
    let mut serial = 0;
    let mut snapshots = 0;
    let mut high = HighWater::default();
    let mut leased = false;
    loop {
        // Whatever has no duration here ends at once.
        while let Some(index) = world
            .pending
            .iter()
            .position(|action| duration(action, durations, 1).is_none())
        {
            world.finish(index, true);
        }
        note_new(&world, &mut ends, &mut serial, &mut snapshots, durations);
        let count = |kind: fn(&Action) -> bool| world.pending.iter().filter(|a| kind(a)).count();
        high.snapshots = high
            .snapshots
            .max(count(|a| matches!(a, Action::Snapshot { .. })));
        high.starts = high
            .starts
            .max(count(|a| matches!(a, Action::Start { .. })));
        high.preconnects = high
            .preconnects
            .max(count(|a| matches!(a, Action::Preconnect { .. })));
        if let Some(Reverse((time, _, name))) = ends.pop() {
            let span = time.saturating_sub(world.now.mono);
            world.now.mono += span;
            world.now.wall += span;
            let index = world
                .pending
                .iter()
                .position(|action| format!("{action:?}") == name);
            world.finish(index.expect("it is under way"), true);
        } else if leased {
            world.check();
            break;
        } else {
            leased = true;
            for n in 0..60 {
                let uid = LeaseUid(format!("lease-{n}"));
                let pool = pool_name();
                let command = Command::Lease {
                    uid: uid.clone(),
                    pool,
                    ttl: None,
                    holder: None,
                    epoch: None,
                };
                world.command(Some(uid), command);
            }
        }
    }
    assert_eq!(world.answered.len(), 60);
    assert_eq!(
        world.node.pools.values().next().unwrap().counts().ready,
        100
    );
    (world.log, high)
}

fn duration(action: &Action, durations: Durations, snapshots: u64) -> Option<u64> {
    match action {
        Action::Snapshot { .. } if snapshots == 0 => Some(durations.first_snapshot),
        Action::Snapshot { .. } => Some(durations.snapshot),
        Action::Start { .. } => Some(durations.start),
        Action::Preconnect { .. } => Some(durations.preconnect),
        _ => None,
    }
}

fn note_new(
    world: &World,
    ends: &mut BinaryHeap<Reverse<(u64, u64, String)>>,
    serial: &mut u64,
    snapshots: &mut u64,
    durations: Durations,
) {
    for action in &world.pending {
        let name = format!("{action:?}");
        if ends.iter().any(|Reverse((_, _, known))| *known == name) {
            continue;
        }
        if let Some(span) = duration(action, durations, *snapshots) {
            *snapshots += u64::from(matches!(action, Action::Snapshot { .. }));
            *serial += 1;
            ends.push(Reverse((world.now.mono + span, *serial, name)));
        }
    }
}

#[test]
fn a_clock_ten_times_slower_changes_no_decision() {
    for mode in [WarmingMode::Phased, WarmingMode::Pipelined] {
        let (usual, high) = decisions(mode, USUAL);
        let (slow, slow_high) = decisions(mode, USUAL.times(10));
        assert_eq!(usual, slow);
        assert_eq!(high, slow_high);
    }
}

#[test]
fn a_slow_first_item_steers_nothing() {
    let slow_first = Durations {
        first_snapshot: 5_000,
        ..USUAL
    };
    let (_, usual) = decisions(WarmingMode::Phased, USUAL);
    let (_, slow) = decisions(WarmingMode::Phased, slow_first);
    assert_eq!(
        usual, slow,
        "the concurrency in use follows from the settings alone"
    );
}

#[test]
fn phased_asks_for_all_snapshots_of_a_batch_before_its_first_start() {
    let (log, high) = decisions(WarmingMode::Phased, USUAL);
    let first_start = log
        .iter()
        .position(|line| line.starts_with("start"))
        .unwrap();
    let before = log[..first_start]
        .iter()
        .filter(|line| line.starts_with("snapshot"))
        .count();
    assert_eq!(before, 100);
    assert_eq!(
        high,
        HighWater {
            snapshots: 16,
            starts: 3,
            preconnects: 3
        }
    );
}

#[test]
fn pipelined_starts_what_is_there() {
    let (log, _) = decisions(WarmingMode::Pipelined, USUAL);
    let first_start = log
        .iter()
        .position(|line| line.starts_with("start"))
        .unwrap();
    let before = log[..first_start]
        .iter()
        .filter(|line| line.starts_with("snapshot"))
        .count();
    assert!(before < 100, "{before} snapshots before the first start");
}
