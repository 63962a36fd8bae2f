//! More leases than branches.

use std::collections::{BTreeMap, BTreeSet};

use branchpool_crds::{BranchLease, LeasePhase};
use kube::{ResourceExt, api::PostParams};
use libtest_mimic::Failed;
use serde_json::json;
use tokio::task::JoinSet;

use crate::stage::{Done, Stage, eventually, phase};

const BRANCHES: usize = 40;
const LEASES: usize = 100;

pub(crate) async fn a_hundred_leases_over_forty_branches(stage: &mut Stage) -> Done {
    let limits = json!({"replicas": BRANCHES, "maxBranches": BRANCHES});
    stage.fill("busy", &limits).await?;
    let counts = stage.branches().await?;
    assert!(
        counts.values().filter(|count| **count > 0).count() >= 2,
        "over two nodes: {counts:?}"
    );
    let created = create_all(stage).await?;
    let mut held = eventually(
        "forty are bound, and the others are told that they wait",
        async || {
            let leases = stage.all_leases().await.ok()?;
            let told = leases.iter().filter(|lease| {
                let status = lease.status.as_ref();
                status.is_some_and(|status| status.queue_position.is_some())
            });
            let queued = told.count();
            let held = bound(&leases);
            (held.len() == BRANCHES && queued == LEASES - BRANCHES).then_some(held)
        },
    )
    .await?;
    let mut ever = held.clone();
    let mut waiting: BTreeMap<_, _> = created
        .into_iter()
        .filter(|(_, name)| !held.contains(name))
        .collect();
    // Who is next gives up.
    let (_, skipped) = waiting.pop_first().unwrap();
    stage.release(&skipped).await?;
    one_by_one(stage, &mut held, &mut ever, waiting.into_values().take(25)).await?;
    no_branch_is_shared(stage).await?;
    // The rest at once, as fast as it goes.
    loop {
        for name in &held {
            stage.release(name).await?;
        }
        let left = stage.all_leases().await?.len();
        if left == 0 {
            break;
        }
        held = eventually("others are bound", async || {
            let held = bound(&stage.all_leases().await.ok()?);
            (held.len() == left.min(BRANCHES)).then_some(held)
        })
        .await?;
        no_branch_is_shared(stage).await?;
        for name in &held {
            assert!(ever.insert(name.clone()), "{name} twice");
        }
    }
    assert_eq!(ever.len(), LEASES - 1, "all but the one that was deleted");
    assert!(!ever.contains(&skipped));
    stage.nothing_leased().await?;
    stage.full("busy", BRANCHES as u64).await?;
    eventually("only the pool's branches are on the nodes", async || {
        let counts = stage.branches().await.ok()?;
        (counts.values().sum::<u64>() == BRANCHES as u64).then_some(())
    })
    .await?;
    stage.drop_pool("busy").await?;
    nothing_on_disk(stage)
}

type Rank = (
    branchpool_crds::Priority,
    k8s_openapi::jiff::Timestamp,
    String,
);

/// At once; answers who comes before whom.
async fn create_all(stage: &Stage) -> Result<BTreeMap<Rank, String>, Failed> {
    let mut creating = JoinSet::new();
    for index in 0..LEASES {
        let priority = ["High", "Medium", "Low"][index % 3];
        let spec = json!({"poolRef": {"name": "busy"}, "priority": priority});
        let lease = Stage::lease_of(&format!("busy-{index}"), &spec);
        let leases = stage.leases();
        creating.spawn(async move { leases.create(&PostParams::default(), &lease).await });
    }
    let mut created = BTreeMap::new();
    for lease in creating.join_all().await {
        let lease = lease?;
        let time = lease.creation_timestamp().unwrap().0;
        created.insert(
            (lease.spec.priority, time, lease.uid().unwrap()),
            lease.name_any(),
        );
    }
    Ok(created)
}

/// Each release binds exactly the next one.
async fn one_by_one(
    stage: &Stage,
    held: &mut BTreeSet<String>,
    ever: &mut BTreeSet<String>,
    expected: impl Iterator<Item = String>,
) -> Done {
    for expected in expected {
        // Of those that were first, so that what was bound here stays seen.
        let released = held.pop_first().unwrap();
        stage.release(&released).await?;
        let next = eventually("the next one is bound", async || {
            let mut now = bound(&stage.all_leases().await.ok()?);
            now.remove(&released);
            let new: Vec<_> = now.difference(held).cloned().collect();
            assert!(new.len() <= 1, "{new:?} for one branch");
            new.into_iter().next()
        })
        .await?;
        assert_eq!(next, expected);
        assert!(ever.insert(next.clone()), "{next} twice");
        held.insert(next);
    }
    Ok(())
}

fn bound(leases: &[BranchLease]) -> BTreeSet<String> {
    let bound = leases
        .iter()
        .filter(|lease| phase(lease) == LeasePhase::Bound);
    bound.map(ResourceExt::name_any).collect()
}

/// By the agents' word, not by the status.
async fn no_branch_is_shared(stage: &Stage) -> Done {
    let held = stage.held().await?;
    let mut branches = BTreeSet::new();
    for lease in held.iter().filter(|lease| lease["phase"] == "Bound") {
        assert!(
            branches.insert(lease["branch"].to_string()),
            "{lease} shares its branch"
        );
    }
    Ok(())
}

fn nothing_on_disk(stage: &mut Stage) -> Done {
    let Some(own) = stage.hands("the nodes' disks may be out of reach") else {
        return Ok(());
    };
    for node in &own.nodes {
        let parents = std::fs::read_dir(node.path("/var/lib/branchpool/branches"))?;
        for parent in parents {
            let parent = parent?.path();
            if parent.is_dir() {
                let left: Vec<_> = std::fs::read_dir(&parent)?.collect();
                assert!(
                    left.is_empty(),
                    "{} on {}: {left:?}",
                    parent.display(),
                    node.name()
                );
            }
        }
    }
    Ok(())
}
