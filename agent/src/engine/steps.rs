//! The steps of a branch's life up to its hand-over: snapshot, start, preconnect; and the restart of a
//! leased server.

use std::{io, path::Path, sync::Arc, time::Duration};

use branchpool_supervisor::protocol::{IdMount, User};
use rustix::fs::{Gid, Uid};
use tokio::{sync::oneshot, time::timeout};

use super::{
    addresses::Release,
    desired::Settings,
    files,
    world::{Runtime, World},
};
use crate::{
    blocking::blocking,
    golden::Facts,
    plan::{Event, Failure, PoolUid, Slot},
    postgres::{
        chain,
        config::{self, Control, Phase, Profile},
        pidfile,
        sandbox::Isolation,
        server::{self, Launch, Server},
        session::{Session, Startup, WAIT_FOR_EVER},
    },
    storage::{
        ids::{BranchId, EndpointId},
        tree::remove_tree,
    },
};

/// Share of the CPU of a branch that warms, against 100 of one that is leased: moderately lower,
/// for a very low one would hold the locks that others wait for.
const WARMING_WEIGHT: u32 = 50;
pub(super) const LEASED_WEIGHT: u32 = 100;
/// A restart may have to recover.
const RESTART_TIMEOUT: Duration = Duration::from_secs(120);
pub(super) const SESSION_TIMEOUT: Duration = Duration::from_secs(10);

fn failure(reason: &str, message: impl Into<String>) -> Failure {
    Failure {
        reason: reason.to_owned(),
        message: message.into(),
    }
}

/// What the journal has to hold first is `committed`.
pub(super) async fn snapshot(
    world: &Arc<World>,
    id: BranchId,
    pool: PoolUid,
    generation: u64,
    committed: u64,
    limit: Duration,
) -> Result<(), Failure> {
    world.committer.committed(committed).await;
    world.after_hand_outs().await;
    let runtime = world.runtime(id);
    let branches = world.branches.clone();
    // The guard goes along, so that a snapshot that is given up for its time keeps others away.
    let guard = runtime.lock_owned().await;
    let work = blocking(move || {
        let result = branches.snapshot(&pool, generation, &id);
        drop(guard);
        result
    });
    match timeout(limit, work).await {
        Ok(Ok(Ok(_))) => Ok(()),
        Ok(Ok(Err(error))) => Err(failure("SnapshotFailed", error.to_string())),
        Ok(Err(error)) => Err(failure("SnapshotFailed", error.to_string())),
        Err(_) => Err(failure(
            "SnapshotFailed",
            format!(
                "the snapshot was not made within {} s; is the disk overloaded?",
                limit.as_secs()
            ),
        )),
    }
}

/// A branch, where it is reached, and what it was made from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    pub(super) branch: BranchId,
    pub(super) endpoint: EndpointId,
    pub(super) generation: u64,
}

/// Starts the server of a fresh branch.
pub(super) async fn start(
    world: &Arc<World>,
    origin: Origin,
    slot: Slot,
    pool: &PoolUid,
    limit: Duration,
) -> Result<(), Failure> {
    let runtime = world.runtime(origin.branch);
    let mut runtime = runtime.lock().await;
    let facts = launch(
        world,
        &mut runtime,
        origin,
        slot,
        pool,
        Phase::Warming,
        limit,
    )
    .await?;
    prepare_address(world, origin, pool, &facts).await
}

/// Starts the server of a leased branch again, after all that ran on its data is gone.
pub(super) async fn restart(
    world: &Arc<World>,
    origin: Origin,
    slot: Slot,
    pool: &PoolUid,
    committed: u64,
) -> Result<(), Failure> {
    let id = origin.branch;
    world.committer.committed(committed).await;
    let runtime = world.runtime(id);
    let mut runtime = runtime.lock().await;
    if let Some(watch) = runtime.exit_watch.take() {
        watch.abort();
    }
    runtime.server = None;
    let group = world
        .slot_group(slot)
        .map_err(|error| failure("StartFailed", chain(&error)))?;
    server::kill_group(&group).await.map_err(|error| {
        failure("StartFailed", format!(
            "processes of the old server are still there, so a new one is not started on their data: {}",
            chain(&error)
        ))
    })?;
    // Nothing runs on the data any more, so the pid file says nothing; and a server that finds a
    // pipe in its place, as a superuser of the branch may put there, would wait for ever.
    let pid_file = world.layout.branch(&id).join(pidfile::FILE_NAME);
    files::absent(std::fs::remove_file(&pid_file)).map_err(|error| {
        failure(
            "StartFailed",
            format!("the old server's pid file could not be removed: {error}"),
        )
    })?;
    let phase = Phase::HandedOver;
    launch(
        world,
        &mut runtime,
        origin,
        slot,
        pool,
        phase,
        RESTART_TIMEOUT,
    )
    .await?;
    world.addresses.serving(&id);
    Ok(())
}

/// What the branch's image is known to be comes back.
async fn launch(
    world: &Arc<World>,
    runtime: &mut Runtime,
    origin: Origin,
    slot: Slot,
    pool: &PoolUid,
    phase: Phase,
    limit: Duration,
) -> Result<Arc<Facts>, Failure> {
    let Origin {
        branch: id,
        generation,
        ..
    } = origin;
    let started = std::time::Instant::now();
    let settings = world.settings(pool).ok_or_else(|| {
        failure(
            "StartFailed",
            format!("the settings of pool {pool} are not known any more"),
        )
    })?;
    let facts = image(world, pool, generation)?;
    let text = render(&facts, &settings, phase);
    let user = slot_user(world, slot);
    let layout = world.layout.clone();
    let mount = world.user_per_branch.then(|| IdMount {
        source: layout.branch(&id),
        target: layout.slot_mount(slot.0),
        on_disk: disk_user(world),
        inside: user,
    });
    let target = mount.as_ref().map(|mount| mount.target.clone());
    if phase == Phase::Warming {
        world.unused.begin(slot, &id).map_err(|error| {
            failure(
                "StartFailed",
                format!("it could not be marked as unused: {error}"),
            )
        })?;
    }
    let prepared = blocking(move || prepare(&layout, id, target.as_deref(), user, &text)).await;
    prepared
        .map_err(String::from)
        .and_then(|result| result.map_err(|error| error.to_string()))
        .map_err(|error| {
            failure(
                "StartFailed",
                format!("its run directory could not be made: {error}"),
            )
        })?;

    let group = world
        .slot_group(slot)
        .map_err(|error| failure("StartFailed", chain(&error)))?;
    let weight = if phase == Phase::Warming {
        WARMING_WEIGHT
    } else {
        LEASED_WEIGHT
    };
    group
        .set_limits(settings.limits)
        .and_then(|()| group.set_cpu_weight(weight))
        .map_err(|error| failure("StartFailed", chain(&error)))?;
    let installation = world
        .installations
        .iter()
        // The pool may want another major by now, which cannot read this branch's data.
        .find(|installation| installation.major == facts.major)
        .ok_or_else(|| {
            let major = facts.major;
            failure(
                "StartFailed",
                format!("Postgres {major} is not installed on this node any more"),
            )
        })?;
    let layout = &world.layout;
    let launch = Launch {
        installation,
        control: Control {
            data_dir: mount
                .as_ref()
                .map_or_else(|| layout.branch(&id), |mount| mount.target.clone()),
            config_file: layout.branch_config(&id),
            hba_file: layout.hba(pool, generation),
            ident_file: layout.ident(pool, generation),
            socket_dir: layout.branch_socket_dir(&id),
            tuning: settings.tuning,
            ipc_namespace: world.isolation.ipc_namespace,
        },
        overrides: Vec::new(),
        mount,
        user,
        group: &group,
        isolation: Isolation {
            outbound: settings.outbound,
            ..world.isolation
        },
        log: &layout.log(id.as_str()),
        timeout: limit,
    };
    let server = server::start(&world.supervisor, &world.watcher, launch)
        .await
        .map_err(|error| failure("StartFailed", error.to_string()))?;
    watch_exit(world, runtime, id, server);
    world.metrics.start.observe(started.elapsed().as_secs_f64());
    Ok(facts)
}

/// Ahead of the lease, for it takes some milliseconds.
pub(super) async fn prepare_address(
    world: &Arc<World>,
    origin: Origin,
    pool: &PoolUid,
    facts: &Arc<Facts>,
) -> Result<(), Failure> {
    let (addresses, pool, facts) = (
        Arc::clone(&world.addresses),
        pool.clone(),
        Arc::clone(facts),
    );
    let Origin {
        branch, endpoint, ..
    } = origin;
    blocking(move || addresses.prepare(endpoint, branch, &pool, &facts.role, &facts.database))
        .await
        .map_err(|error| failure("StartFailed", error.to_string()))
}

/// Tells the core when the server ends by itself.
pub(super) fn watch_exit(world: &Arc<World>, runtime: &mut Runtime, id: BranchId, server: Server) {
    let (watched, world) = (server.clone(), Arc::clone(world));
    runtime.exit_watch = Some(tokio::spawn(async move {
        let detail = match watched.ended().await {
            Ok(()) => format!("process {} is gone", watched.pid),
            Err(error) => error.to_string(),
        };
        world.addresses.restarting(&id);
        world.tell(Event::ServerExited { branch: id, detail }).await;
    }));
    runtime.server = Some(server);
}

pub(super) fn slot_user(world: &World, slot: Slot) -> User {
    if world.user_per_branch {
        let id = world.uid_base + slot.0;
        User { uid: id, gid: id }
    } else {
        disk_user(world)
    }
}

fn disk_user(world: &World) -> User {
    User {
        uid: world.disk_user.uid,
        gid: world.disk_user.gid,
    }
}

pub(super) fn image(world: &World, pool: &PoolUid, generation: u64) -> Result<Arc<Facts>, Failure> {
    world.image(pool, generation).ok_or_else(|| {
        failure(
            "StartFailed",
            format!("the golden image {generation} of pool {pool} is not known any more"),
        )
    })
}

pub(super) fn render(facts: &Facts, settings: &Settings, phase: Phase) -> String {
    let profile = Profile {
        tuning: settings.tuning,
        parameters: settings.parameters.clone(),
        carried_over: facts.carried_over.clone(),
        preload_libraries: facts.shared_preload_libraries.clone(),
    };
    config::render(&profile, phase)
}

/// Directories and files of a server outside its data: readable by it, writable by the agent only,
/// but for the socket's directory.
fn prepare(
    layout: &crate::storage::Layout,
    id: BranchId,
    mount_target: Option<&Path>,
    user: User,
    config: &str,
) -> io::Result<()> {
    let run = layout.branch_run(&id);
    files::make_dir(&run, 0o711)?;
    let sockets = layout.branch_socket_dir(&id);
    // An earlier server that was killed left its socket and lock file.
    remove_tree(&sockets)?;
    files::make_dir(&sockets, 0o700)?;
    rustix::fs::chown(
        &sockets,
        Some(Uid::from_raw(user.uid)),
        Some(Gid::from_raw(user.gid)),
    )?;
    if let Some(target) = mount_target {
        files::make_dir(target, 0o711)?;
    }
    files::replace(&layout.branch_config(&id), config)
}

/// Opens the session that waits for the first client, and proves that it answers.
pub(super) async fn preconnect(
    world: &Arc<World>,
    origin: Origin,
    pool: &PoolUid,
    limit: Duration,
) -> Result<(), Failure> {
    let Origin {
        branch: id,
        generation,
        ..
    } = origin;
    let facts = image(world, pool, generation)?;
    // Again, if its last session ended and its address with it.
    prepare_address(world, origin, pool, &facts).await?;
    let started = std::time::Instant::now();
    let runtime = world.runtime(id);
    let _alone = runtime.lock().await;
    let session = timeout(
        limit.min(SESSION_TIMEOUT),
        connect(world, id, pool, generation),
    )
    .await
    .map_err(|_| {
        failure(
            "PreconnectFailed",
            "its server did not answer the first session in time",
        )
    })?
    .map_err(|error| failure("PreconnectFailed", error))?;
    hold(world, id, session);
    world
        .metrics
        .preconnect
        .observe(started.elapsed().as_secs_f64());
    Ok(())
}

pub(super) async fn connect(
    world: &World,
    id: BranchId,
    pool: &PoolUid,
    generation: u64,
) -> Result<Session, String> {
    let image = image(world, pool, generation).map_err(|failure| failure.message)?;
    let startup = Startup {
        user: image.role.clone(),
        database: image.database.clone(),
        parameters: world
            .settings(pool)
            .and_then(|settings| settings.session_parameters.clone())
            .unwrap_or_else(|| world.addresses.profile(pool)),
    };
    let mut session = Session::open(&world.layout.branch_socket_dir(&id), startup)
        .await
        .map_err(|error| error.to_string())?;
    session
        .execute(WAIT_FOR_EVER)
        .await
        .map_err(|error| error.to_string())?;
    let one = session
        .query_one("SELECT 1")
        .await
        .map_err(|error| error.to_string())?;
    if one.as_deref() == Some("1") {
        Ok(session)
    } else {
        Err(format!("SELECT 1 was answered with {one:?}"))
    }
}

/// Keeps a session until it is asked for or ends by itself.
fn hold(world: &Arc<World>, id: BranchId, mut session: Session) {
    let (release, released) = oneshot::channel();
    world.addresses.hold_session(id, release);
    let world = Arc::clone(world);
    tokio::spawn(async move {
        tokio::select! {
            error = session.closed() => {
                tracing::warn!(branch = %id, %error, "the preconnected session ended");
                world.tell(Event::SessionClosed { branch: id }).await;
            }
            release = released => match release {
                Ok(Release::Offer(branch)) => offer(&branch, session).await,
                Ok(Release::Close) | Err(_) => session.terminate().await,
            },
        }
    });
}

/// A client may have been faster than the session: then it is of no use any more.
async fn offer(branch: &branchpool_gateway::Branch, session: Session) {
    match session.into_gateway() {
        Ok(session) => {
            if let Err(unwanted) = branch.offer_session(session) {
                unwanted.terminate().await;
            }
        }
        Err(session) => session.terminate().await,
    }
}
