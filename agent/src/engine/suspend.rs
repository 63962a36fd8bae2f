//! Servers that nobody uses: stopped cleanly, and wanted again.

use std::sync::Arc;

use branchpool_gateway::Branch;

use super::{
    stop::{stop_server, sync},
    world::World,
};
use crate::{
    plan::{Event, Millis, Slot, StopMode, Suspension},
    storage::ids::BranchId,
};

/// Stops the server of a branch that was not used after `unused_since`. Who comes from now on waits at
/// the gateway.
pub(super) async fn suspend(
    world: &Arc<World>,
    id: BranchId,
    slot: Slot,
    unused_since: Millis,
) -> Result<Suspension, String> {
    let runtime = world.runtime(id);
    let mut runtime = runtime.lock().await;
    let Some(branch) = world.addresses.fall_asleep(&id, unused_since, world.clock) else {
        return Ok(Suspension::Used);
    };
    if !stop_server(world, &mut runtime, slot, StopMode::Fast).await? {
        return Err("its server did not shut down in order".to_owned());
    }
    sync(world, id).await?;
    watch_for_wishes(world, id, branch);
    Ok(Suspension::Asleep)
}

/// Tells the core when somebody wants the branch.
pub(super) fn watch_for_wishes(world: &Arc<World>, id: BranchId, branch: Arc<Branch>) {
    let world = Arc::clone(world);
    tokio::spawn(async move {
        tokio::select! {
            () = branch.wake_requested() => world.tell(Event::Wanted { branch: id }).await,
            () = branch.ended() => {}
        }
    });
}
