//! The end of a branch: its server stops, and what it was becomes a tombstone.

use std::{fs, io, path::Path, sync::Arc, time::Duration};

use super::{
    files,
    world::{Runtime, World},
};
use crate::{
    blocking::blocking,
    plan::{After, Slot, StopMode, Stopped},
    postgres::{chain, server},
    storage::{ids::BranchId, tree::remove_tree},
};

/// Immediate needs milliseconds; fast writes all dirty buffers.
const IMMEDIATE_TIMEOUT: Duration = Duration::from_secs(5);
const FAST_TIMEOUT: Duration = Duration::from_secs(60);

/// Nothing of the branch runs any more after `Ok`.
pub(super) async fn stop(
    world: &Arc<World>,
    id: BranchId,
    slot: Slot,
    mode: StopMode,
    after: &After,
    committed: u64,
) -> Result<Stopped, String> {
    world.committer.committed(committed).await;
    let started = std::time::Instant::now();
    let runtime = world.runtime(id);
    let mut runtime = runtime.lock().await;
    world.addresses.forget(&id).await;
    let clean = stop_server(world, &mut runtime, slot, mode).await?;
    let mut bytes = 0;
    match after {
        After::Park if clean => sync(world, id).await?,
        After::Park => {}
        After::Quarantine(_) => remove_run_files(world, id, false).await?,
        After::Trash => bytes = trash(world, id).await?,
    }
    drop(runtime);
    world.forget_runtime(id);
    world.metrics.stop.observe(started.elapsed().as_secs_f64());
    Ok(Stopped { bytes, clean })
}

/// Ends everything that runs on the branch. `true`: its server shut down cleanly.
pub(super) async fn stop_server(
    world: &World,
    runtime: &mut Runtime,
    slot: Slot,
    mode: StopMode,
) -> Result<bool, String> {
    if let Some(watch) = runtime.exit_watch.take() {
        watch.abort();
    }
    let Some(server) = runtime.server.take() else {
        // Nothing that this agent started; but a start of an earlier one may have been cut short.
        let group = world.slot_group(slot).map_err(|error| chain(&error))?;
        server::kill_group(&group)
            .await
            .map_err(|error| chain(&error))?;
        let target = world.layout.slot_mount(slot.0);
        world
            .supervisor
            .unmount(&target)
            .await
            .map_err(|error| chain(&error))?;
        return Ok(false);
    };
    let (mode, limit) = match mode {
        StopMode::Immediate => (server::StopMode::Immediate, IMMEDIATE_TIMEOUT),
        StopMode::Fast => (server::StopMode::Fast, FAST_TIMEOUT),
    };
    match server.stop(mode, limit).await {
        Ok(()) => Ok(mode == server::StopMode::Fast),
        Err(server::Error::Killed { .. }) => Ok(false),
        Err(error) => {
            runtime.server = Some(server);
            Err(error.to_string())
        }
    }
}

pub(super) async fn sync(world: &World, id: BranchId) -> Result<(), String> {
    let path = world.layout.branch(&id);
    blocking(move || {
        let directory = branchpool_sys::btrfs::open_dir(&path)?;
        branchpool_sys::btrfs::syncfs(&directory)
    })
    .await?
    .map_err(|error| format!("its data could not be flushed: {error}"))
}

async fn trash(world: &World, id: BranchId) -> Result<u64, String> {
    remove_run_files(world, id, true).await?;
    let branches = world.branches.clone();
    blocking(move || {
        let bytes = own_bytes(&branches.layout().branch(&id)).unwrap_or(0);
        branches.trash_branch(&id).map(|()| bytes)
    })
    .await?
    .map_err(|error| error.to_string())
}

/// Bytes written since the snapshot: what its deletion will give back.
fn own_bytes(path: &Path) -> io::Result<u64> {
    let directory = branchpool_sys::btrfs::open_dir(path)?;
    branchpool_sys::btrfs::own_bytes(&directory)
}

async fn remove_run_files(world: &World, id: BranchId, with_log: bool) -> Result<(), String> {
    let layout = world.layout.clone();
    blocking(move || {
        if with_log {
            files::absent(fs::remove_file(layout.log(id.as_str())))?;
        }
        remove_tree(&layout.branch_run(&id))
    })
    .await?
    .map_err(|error| format!("its run directory could not be removed: {error}"))
}
