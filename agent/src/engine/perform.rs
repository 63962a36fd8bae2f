//! From an [`Action`] to the task that carries it out and tells how it ended.

use std::{sync::Arc, time::Instant};

use super::{
    build,
    hand_over::HandOver,
    steps::{self, Origin},
    stop, suspend,
    world::World,
};
use crate::{
    blocking::blocking,
    plan::{Action, Completion, Event, Failure, Kick, Node, PoolUid},
    storage::ids::BranchId,
};

/// Bounded by the concurrency that the core allows each kind of action.
#[expect(clippy::too_many_lines, reason = "one arm for each kind of action")]
pub(super) fn spawn(node: &Node, world: &Arc<World>, action: Action) {
    let world = Arc::clone(world);
    match action {
        Action::Snapshot {
            branch,
            pool,
            generation,
            entry,
            deadline,
        } => {
            let committed = world.committer.submit(vec![entry], Vec::new(), None);
            tell_the_end(Arc::clone(&world), async move {
                let started = Instant::now();
                let limit = world.clock.until(deadline);
                let result =
                    steps::snapshot(&world, branch, pool, generation, committed, limit).await;
                let took = started.elapsed().as_secs_f64();
                world.metrics.snapshot.observe(took);
                note_failure(&world, &result);
                Completion::Snapshotted { branch, result }
            });
        }
        Action::Start {
            branch,
            slot,
            pool,
            deadline,
        } => {
            let Some(origin) = origin(node, branch) else {
                return;
            };
            tell_the_end(Arc::clone(&world), async move {
                let limit = world.clock.until(deadline);
                let result = steps::start(&world, origin, slot, &pool, limit).await;
                note_failure(&world, &result);
                Completion::Started { branch, result }
            });
        }
        Action::Preconnect {
            branch,
            pool,
            deadline,
        } => {
            let Some(origin) = origin(node, branch) else {
                return;
            };
            tell_the_end(Arc::clone(&world), async move {
                let limit = world.clock.until(deadline);
                let result = steps::preconnect(&world, origin, &pool, limit).await;
                note_failure(&world, &result);
                Completion::Preconnected { branch, result }
            });
        }
        Action::Restart { branch, slot, pool } => {
            let Some(origin) = origin(node, branch) else {
                return;
            };
            let committed = world.committer.submitted();
            tell_the_end(Arc::clone(&world), async move {
                let result = steps::restart(&world, origin, slot, &pool, committed).await;
                if result.is_ok() {
                    world.metrics.restarts.inc();
                }
                Completion::Restarted { branch, result }
            });
        }
        Action::LookIdle { branch } => {
            let found = world.addresses.used(&branch, world.clock);
            tell_the_end(world, async move { Completion::Looked { branch, found } });
        }
        Action::Suspend {
            branch,
            unused_since,
        } => {
            let Some(slot) = node.branches.get(&branch).map(|state| state.slot) else {
                return;
            };
            tell_the_end(Arc::clone(&world), async move {
                let result = suspend::suspend(&world, branch, slot, unused_since).await;
                Completion::Suspended { branch, result }
            });
        }
        Action::HandOver { branch } => hand_over(node, &world, branch),
        Action::Stop {
            branch,
            mode,
            after,
        } => {
            let Some(slot) = node.branches.get(&branch).map(|state| state.slot) else {
                return;
            };
            let committed = world.committer.submitted();
            tell_the_end(Arc::clone(&world), async move {
                let result = stop::stop(&world, branch, slot, mode, &after, committed).await;
                Completion::Stopped { branch, result }
            });
        }
        Action::Delete { id, kick } => tell_the_end(Arc::clone(&world), async move {
            let result = delete(&world, id, kick).await;
            if result.is_ok() {
                world.metrics.deleted.inc();
            }
            Completion::Deleted { id, result }
        }),
        Action::DropGolden {
            pool,
            generation,
            id,
        } => drop_golden(world, pool, generation, id),
        Action::Build {
            pool,
            generation,
            entry,
        } => {
            let committed = world.committer.submit(vec![entry], Vec::new(), None);
            let cancelled = world.begin_build(pool.clone());
            tell_the_end(Arc::clone(&world), async move {
                world.committer.committed(committed).await;
                let result = build::build(&world, &pool, generation, cancelled).await;
                Completion::Built {
                    pool,
                    generation,
                    result,
                }
            });
        }
        // The actor's own.
        Action::Journal { .. }
        | Action::Reply { .. }
        | Action::CancelBuild { .. }
        | Action::Drained => {}
    }
}

/// Every action that the core waits for ends here, whatever became of it.
fn tell_the_end(world: Arc<World>, work: impl Future<Output = Completion> + Send + 'static) {
    tokio::spawn(async move {
        let completion = work.await;
        world.tell(Event::Done(completion)).await;
    });
}

fn hand_over(node: &Node, world: &World, branch: BranchId) {
    let Some(state) = node.branches.get(&branch) else {
        return;
    };
    // Before anybody hears of it.
    if let Err(error) = world.unused.end(state.slot) {
        tracing::warn!(%branch, %error, "the branch is still marked as unused");
    }
    world.addresses.offer_session(&branch);
    world.hand_over(HandOver {
        branch,
        slot: state.slot,
        generation: state.generation,
        pool: state.pool.clone(),
        runtime: world.runtime(branch),
    });
}

fn drop_golden(world: Arc<World>, pool: PoolUid, generation: u64, id: BranchId) {
    tell_the_end(Arc::clone(&world), async move {
        let (branches, uid) = (world.branches.clone(), pool.clone());
        let result = blocking(move || branches.trash_golden(&uid, generation, &id))
            .await
            .map_err(String::from)
            .and_then(|result| result.map_err(|error| error.to_string()));
        Completion::GoldenDropped {
            pool,
            generation,
            id,
            result,
        }
    });
}

fn origin(node: &Node, id: BranchId) -> Option<Origin> {
    node.branches.get(&id).map(|branch| Origin {
        branch: id,
        endpoint: branch.endpoint,
        generation: branch.generation,
    })
}

fn note_failure(world: &World, result: &Result<(), Failure>) {
    if let Err(failure) = result {
        world.metrics.warming_failed(&failure.reason);
    }
}

async fn delete(world: &Arc<World>, id: BranchId, kick: Option<Kick>) -> Result<(), String> {
    let branches = world.branches.clone();
    blocking(move || branches.delete_tombstone(&id))
        .await?
        .map_err(|error| error.to_string())?;
    if let Some(kick) = kick {
        reclaim(world, kick);
    }
    Ok(())
}

/// Nobody waits for it: asking for a commit may take until the filesystem's own next one, half a
/// minute, when another commit comes in between. One at a time.
fn reclaim(world: &Arc<World>, kick: Kick) {
    let Ok(turn) = Arc::clone(&world.reclaim_turn).try_acquire_owned() else {
        return;
    };
    let branches = world.branches.clone();
    tokio::task::spawn_blocking(move || {
        let result = match kick {
            Kick::Soon => branches.kick_cleaner(),
            Kick::Now => branches.reclaim(),
        };
        if let Err(error) = result {
            tracing::warn!(%error, "the space of deleted branches comes back later");
        }
        drop(turn);
    });
}
