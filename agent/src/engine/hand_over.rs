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
    postgres::{chain, config::Phase},
    storage::ids::BranchId,
};

/// A hand-over makes all processes of a server read its configuration again, some milliseconds of CPU
/// time: between two of them others get their turn.
const SPAN: Duration = Duration::from_millis(5);

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

/// Makes the branch its holder's. A session that no gateway can pass on would be in the way of DROP
/// DATABASE, so it ends; what it warmed stays.
async fn carry_out(world: &Arc<World>, next: HandOver) {
    let HandOver {
        branch: id,
        slot,
        generation,
        pool,
        runtime,
    } = next;
    let runtime = runtime.lock().await;
    world.addresses.close_session(&id);
    let Some(server) = runtime.server.clone() else {
        return;
    };
    let weight = world
        .slot_group(slot)
        .and_then(|group| group.set_cpu_weight(LEASED_WEIGHT));
    if let Err(error) = weight {
        tracing::warn!(branch = %id, error = chain(&error), "the leased branch keeps its lower CPU weight");
    }
    let settings = world.settings(&pool);
    let text = settings
        .as_ref()
        .ok_or_else(|| format!("pool {pool} is not known any more"))
        .and_then(|settings| {
            image(world, &pool, generation)
                .map(|facts| render(&facts, settings, Phase::HandedOver))
                .map_err(|failure| failure.message)
        });
    let layout = world.layout.clone();
    let written = match text {
        Ok(text) => blocking(move || files::replace(&layout.branch_config(&id), &text))
            .await
            .map_err(String::from)
            .and_then(|result| result.map_err(|error| error.to_string())),
        Err(error) => Err(error),
    };
    let reloaded = written.and_then(|()| server.reload().map_err(|error| error.to_string()));
    if let Err(error) = reloaded {
        tracing::warn!(branch = %id, %error, "the leased branch keeps the settings of a warming one");
    }
    if settings.is_some_and(|settings| settings.preconnect == Preconnect::OnLease) {
        match timeout(SESSION_TIMEOUT, connect(world, id, &pool, generation)).await {
            Ok(Ok(session)) => session.terminate().await,
            Ok(Err(error)) => tracing::warn!(branch = %id, %error, "no session at hand-over"),
            Err(_) => tracing::warn!(branch = %id, "no session at hand-over in time"),
        }
    }
}
