//! When refill has to wait because something of the node runs short.

use branchpool_agent_api::{Gate, Space};

/// What was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    pub space: Space,
    /// Bytes.
    pub memory_total: u64,
    pub memory_available: u64,
    /// Processes and threads of the node, and how many there may be.
    pub processes: u64,
    pub processes_most: u64,
    /// Descriptors of the agent, and how many it may have.
    pub descriptors: u64,
    pub descriptors_most: u64,
}

/// What follows from a sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    pub gates: Vec<Gate>,
    /// Space is getting short: tombstones go at once, before refill has to stop.
    pub reclaim: bool,
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A gate that is shut opens only when a quarter more than its bound is free, so that it does not
/// flap.
fn with_slack(bound: u64, shut: bool) -> u64 {
    if shut { bound + bound / 4 } else { bound }
}

/// Free bytes below which no branch is made: 5 % of the filesystem, within 128 MiB and 10 GiB. Btrfs
/// keeps the last 50 MiB or so of what it calls free for itself.
fn least_free(space: &Space) -> u64 {
    (space.total / 20).clamp(128 * MIB, 10 * GIB)
}

/// Room for metadata below which no branch is made: 1 %, within 16 MiB and 1 GiB.
fn least_metadata(space: &Space) -> u64 {
    (space.total / 100).clamp(16 * MIB, GIB)
}

/// The gates that are shut now; `before` are those that were.
pub fn pressure(sample: &Sample, before: &[Gate]) -> Pressure {
    let was_shut = |reason: &str| before.iter().any(|gate| gate.reason == reason);
    let mut gates = Vec::new();
    let mut shut = |reason: &str, message: String| {
        gates.push(Gate {
            reason: reason.to_owned(),
            message,
        });
    };
    let space = &sample.space;
    let mib = |bytes: u64| bytes / MIB;

    let least = with_slack(least_free(space), was_shut("DiskPressure"));
    if space.free < least {
        shut(
            "DiskPressure",
            format!(
                "{} MiB are free on the branch filesystem, and {} MiB have to stay free; release leases, or enlarge it",
                mib(space.free),
                mib(least)
            ),
        );
    }
    let metadata = space.metadata_free + space.unallocated;
    let least = with_slack(least_metadata(space), was_shut("MetadataPressure"));
    if metadata < least {
        shut(
            "MetadataPressure",
            format!(
                "the branch filesystem has {} MiB left for metadata, and {} MiB have to stay free; run a balance, or enlarge it",
                mib(metadata),
                mib(least)
            ),
        );
    }
    let least = (sample.memory_total / 20).clamp(128 * MIB, 4 * GIB);
    let least = with_slack(least, was_shut("MemoryPressure"));
    if sample.memory_available < least {
        shut(
            "MemoryPressure",
            format!(
                "{} MiB of memory are available, and {} MiB have to stay free; hold fewer branches on this node",
                mib(sample.memory_available),
                mib(least)
            ),
        );
    }
    for (reason, what, used, most) in [
        (
            "ProcessPressure",
            "processes of the node",
            sample.processes,
            sample.processes_most,
        ),
        (
            "DescriptorPressure",
            "descriptors of the agent",
            sample.descriptors,
            sample.descriptors_most,
        ),
    ] {
        let left = most.saturating_sub(used);
        if left < with_slack(most / 10, was_shut(reason)) {
            shut(
                reason,
                format!(
                    "{used} of {most} {what} are in use; raise the limit, or hold fewer branches on this node"
                ),
            );
        }
    }
    let reclaim = space.free < 2 * least_free(space) || metadata < 2 * least_metadata(space);
    Pressure { gates, reclaim }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roomy() -> Sample {
        Sample {
            space: Space {
                total: 100 * GIB,
                used: 10 * GIB,
                free: 90 * GIB,
                unallocated: 80 * GIB,
                metadata_free: GIB,
            },
            memory_total: 16 * GIB,
            memory_available: 12 * GIB,
            processes: 300,
            processes_most: 32_768,
            descriptors: 100,
            descriptors_most: 65_536,
        }
    }

    fn reasons(sample: &Sample, before: &[Gate]) -> Vec<String> {
        pressure(sample, before)
            .gates
            .into_iter()
            .map(|gate| gate.reason)
            .collect()
    }

    #[test]
    fn room_for_everything_shuts_nothing() {
        assert_eq!(pressure(&roomy(), &[]), Pressure::default());
    }

    #[test]
    fn each_shortage_has_its_reason() {
        type Spoil = fn(&mut Sample);
        let cases: [(&str, Spoil); 5] = [
            ("DiskPressure", |s| s.space.free = 4 * GIB),
            ("MetadataPressure", |s| {
                s.space.unallocated = 0;
                s.space.metadata_free = 900 * MIB;
            }),
            ("MemoryPressure", |s| s.memory_available = 700 * MIB),
            ("ProcessPressure", |s| s.processes = 30_000),
            ("DescriptorPressure", |s| s.descriptors = 60_000),
        ];
        for (reason, spoil) in cases {
            let mut sample = roomy();
            spoil(&mut sample);
            assert_eq!(reasons(&sample, &[]), [reason]);
        }
    }

    #[test]
    fn a_shut_gate_opens_later_than_it_shuts() {
        let mut sample = roomy();
        sample.space.free = 5 * GIB - 1;
        let shut = pressure(&sample, &[]).gates;
        assert_eq!(shut.len(), 1);
        sample.space.free = 6 * GIB;
        assert_eq!(reasons(&sample, &shut), ["DiskPressure"]);
        assert_eq!(reasons(&sample, &[]), Vec::<String>::new());
        sample.space.free = 7 * GIB;
        assert_eq!(reasons(&sample, &shut), Vec::<String>::new());
    }

    #[test]
    fn tombstones_go_before_refill_stops() {
        let mut sample = roomy();
        sample.space.free = 8 * GIB;
        assert_eq!(
            pressure(&sample, &[]),
            Pressure {
                gates: Vec::new(),
                reclaim: true
            }
        );
    }
}
