//! What a hand-over changes on the branch, after its holder has been told of it.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};

use super::{
    files,
    steps::{LEASED_WEIGHT, SESSION_TIMEOUT, connect, image, render},
    world::{SharedRuntime, World},
};
use crate::{
    blocking::blocking,
    plan::{PoolUid, Preconnect, Slot},
    postgres::{chain, config::Phase, server::Server},
    storage::ids::BranchId,
};

/// A hand-over makes all processes of a server read its configuration again, some milliseconds of CPU
/// time: between two of them others get their turn.
const SPAN: Duration = Duration::from_millis(5);

/// How long a new holder is left alone before that: a client that connects at once would share the
/// processors with those processes, and its own session would read the configuration ahead of its first
/// query.
const GRACE: Duration = Duration::from_millis(50);

/// A branch that was given to a holder.
#[derive(Debug)]
pub(super) struct HandOver {
    pub(super) branch: BranchId,
    pub(super) slot: Slot,
    pub(super) generation: u64,
    pub(super) pool: PoolUid,
    /// Of the time of the decision: a branch that goes meanwhile must not get a new one.
    pub(super) runtime: SharedRuntime,
}

/// Carries them out in their order, [`SPAN`] apart, the first after a quiet time at once.
pub(super) async fn run(world: Arc<World>, mut queue: mpsc::UnboundedReceiver<HandOver>) {
    while let Some(next) = queue.recv().await {
        world.after_hand_outs().await;
        let world = Arc::clone(&world);
        tokio::spawn(async move { carry_out(&world, next).await });
        sleep(SPAN).await;
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the core must not wait for it; bounded by the branches there are: each is handed over once"
)]
pub(super) fn queue() -> (
    mpsc::UnboundedSender<HandOver>,
    mpsc::UnboundedReceiver<HandOver>,
) {
    mpsc::unbounded_channel()
}

/// Makes the branch its holder's.
async fn carry_out(world: &Arc<World>, next: HandOver) {
    {
        let runtime = next.runtime.lock().await;
        // A session that no gateway can pass on would be in the way of DROP DATABASE; what it warmed
        // stays.
        world.addresses.close_session(&next.branch);
        if runtime.server.is_none() {
            return;
        }
        set_weight(world, &next);
        warm_up(world, &next).await;
    }
    sleep(GRACE).await;
    let runtime = next.runtime.lock().await;
    if let Some(server) = &runtime.server
        && let Err(error) = apply_settings(world, &next, server).await
    {
        let branch = next.branch;
        tracing::warn!(%branch, %error, "the leased branch keeps the settings of a warming one");
    }
}

fn set_weight(world: &World, next: &HandOver) {
    let weight = world
        .slot_group(next.slot)
        .and_then(|group| group.set_cpu_weight(LEASED_WEIGHT));
    if let Err(error) = weight {
        let (branch, error) = (next.branch, chain(&error));
        tracing::warn!(%branch, error, "the leased branch keeps its lower CPU weight");
    }
}

async fn apply_settings(world: &World, next: &HandOver, server: &Server) -> Result<(), String> {
    let settings = world
        .settings(&next.pool)
        .ok_or_else(|| format!("pool {} is not known any more", next.pool))?;
    let facts = image(world, &next.pool, next.generation).map_err(|failure| failure.message)?;
    let text = render(&facts, &settings, Phase::HandedOver);
    let path = world.layout.branch_config(&next.branch);
    blocking(move || files::replace(&path, &text))
        .await?
        .map_err(|error| error.to_string())?;
    server.reload().map_err(|error| error.to_string())
}

/// Opens and closes the first session, where that is to be done at the lease.
async fn warm_up(world: &Arc<World>, next: &HandOver) {
    let (id, settings) = (next.branch, world.settings(&next.pool));
    if settings.is_some_and(|settings| settings.preconnect == Preconnect::OnLease) {
        match timeout(
            SESSION_TIMEOUT,
            connect(world, id, &next.pool, next.generation),
        )
        .await
        {
            Ok(Ok(session)) => session.terminate().await,
            Ok(Err(error)) => tracing::warn!(branch = %id, %error, "no session at hand-over"),
            Err(_) => tracing::warn!(branch = %id, "no session at hand-over in time"),
        }
    }
}
