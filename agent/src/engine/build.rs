//! Building a golden image, one at a time.

use std::{io, sync::Arc};

use tokio::sync::oneshot;

use super::{desired::Settings, files, world::World};
use crate::{
    blocking::blocking,
    golden::{self, GoldenSpec},
    plan::{Image, PoolUid},
    postgres::{chain, config, installation::own_user, server},
    storage::Layout,
};

/// Builds generation `number` of a pool's image, unless `cancelled` resolves first.
pub(super) async fn build(
    world: &Arc<World>,
    pool: &PoolUid,
    number: u64,
    cancelled: oneshot::Receiver<()>,
) -> Result<Image, String> {
    let turn = world
        .build_turn
        .acquire()
        .await
        .map_err(|error| error.to_string())?;
    let settings = world
        .settings(pool)
        .ok_or_else(|| format!("pool {pool} is not known any more"))?;
    let started = std::time::Instant::now();
    let built = tokio::select! {
        built = run(world, pool, number, &settings) => built,
        _ = cancelled => Err("the build was given up for a newer one, or for the end of the agent".to_owned()),
    };
    if built.is_err() {
        discard(world, pool, number).await;
    }
    drop(turn);
    let facts = built?;
    world.metrics.build.observe(started.elapsed().as_secs_f64());
    let bytes = facts.bytes;
    let value = serde_json::to_value(&facts).map_err(|error| error.to_string())?;
    world.set_image(pool.clone(), number, facts);
    Ok(Image {
        bytes,
        database: settings.database.clone(),
        role: settings.role.clone(),
        facts: value,
    })
}

async fn run(
    world: &Arc<World>,
    pool: &PoolUid,
    number: u64,
    settings: &Settings,
) -> Result<golden::Facts, String> {
    let group = world.build_group().map_err(|error| chain(&error))?;
    let env = golden::Env {
        supervisor: world.supervisor.clone(),
        watcher: world.watcher.clone(),
        layout: world.layout.clone(),
        installations: Arc::clone(&world.installations),
        disk_user: world.disk_user.clone(),
        group,
        isolation: world.isolation,
        time_limit: world.build_time_limit,
    };
    let spec = GoldenSpec {
        pool: pool.clone(),
        generation: number,
        source: settings.source.clone(),
        prepare: settings.prepare.clone(),
        major: settings.major,
        database: settings.database.clone(),
        role: settings.role.clone(),
        superuser: settings.superuser,
        parameters: settings.parameters.clone(),
        tuning: settings.tuning,
    };
    write_auth(&world.layout, pool, number, &settings.role).map_err(|error| {
        format!("the files that say who may connect could not be written: {error}")
    })?;
    golden::build(&env, &spec, |_| {})
        .await
        .map_err(|error| error.to_string())
}

/// What an abandoned build left.
async fn discard(world: &World, pool: &PoolUid, number: u64) {
    let killed = match world.build_group() {
        Ok(group) => server::kill_group(&group).await,
        Err(error) => Err(error),
    };
    if let Err(error) = killed {
        tracing::warn!(%pool, error = chain(&error), "processes of a build could not be killed");
    }
    let (branches, pool) = (world.branches.clone(), pool.clone());
    let id = branches.new_id();
    let discarded = blocking(move || {
        branches.trash_building(&pool, number, &id)?;
        branches.trash_golden(&pool, number, &id)?;
        branches.delete_tombstone(&id)
    });
    match discarded.await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!(%error, "an unfinished image could not be removed"),
        Err(error) => tracing::warn!(%error, "an unfinished image could not be removed"),
    }
}

/// Who may connect to the branches of an image: the agent's own user, and roles with a password.
pub(super) fn write_auth(
    layout: &Layout,
    pool: &PoolUid,
    generation: u64,
    role: &str,
) -> io::Result<()> {
    let agent = own_user().map_err(io::Error::other)?;
    let directory = layout.auth_pool(pool);
    files::make_dir(&directory, 0o711)?;
    files::replace(&layout.hba(pool, generation), &config::hba(role))?;
    files::replace(
        &layout.ident(pool, generation),
        &config::ident(role, &agent.name),
    )
}

/// Of a pool that is gone. One that comes back has its image built first, which writes them anew.
pub(super) fn remove_auth(layout: &Layout, pool: &PoolUid) {
    let directory = layout.auth_pool(pool);
    if let Err(error) = std::fs::remove_dir_all(&directory)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%pool, %error, directory = %directory.display(), "a directory could not be removed");
    }
}
