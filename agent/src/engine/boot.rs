//! The start of the agent: what the journal says is compared with what is there, servers that run
//! are taken over, and what a crash left half-done is ended.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use branchpool_agent_api::Quarantined;
use branchpool_sys::{cgroup::Base, process};
use serde::de::DeserializeOwned;
use snafu::{ResultExt, Snafu};

use super::{
    committer,
    steps::slot_user,
    suspend,
    world::{World, slot_group_name},
};
use crate::{
    blocking::{Interrupted, blocking},
    golden,
    journal::{self, Contents, Kind},
    plan::{self, Node, Observed, ObservedBranch, PoolUid, Records, Slot, State},
    postgres::{
        pidfile::PidFile,
        server::{self, Server},
    },
    storage::{
        Branches,
        ids::BranchId,
        scan::{self, Scan},
    },
};

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("{source}"), context(false))]
    Journal { source: journal::Error },
    #[snafu(display("{source}"), context(false))]
    Scan { source: scan::Error },
    #[snafu(display("what an interrupted build left could not be removed: {source}"))]
    Discard {
        source: crate::storage::branches::Error,
    },
    #[snafu(display(
        "the cgroups of an earlier run could not be cleared: {}",
        crate::postgres::chain(source)
    ))]
    Cgroup {
        source: branchpool_sys::cgroup::Error,
    },
    #[snafu(display("the start was interrupted: {source}"), context(false))]
    Interrupted { source: Interrupted },
}

/// The journal's contents as typed records.
pub(super) fn records(contents: &Contents) -> Result<Records, Error> {
    let mut records = Records::default();
    for (key, record) in decode(contents, Kind::Pool)? {
        if let Ok(uid) = key.parse() {
            records.pools.insert(uid, record);
        }
    }
    for (key, record) in decode(contents, Kind::Generation)? {
        let parsed = key.rsplit_once('/').and_then(|(pool, number)| {
            Some((pool.parse::<PoolUid>().ok()?, number.parse::<u64>().ok()?))
        });
        if let Some(key) = parsed {
            records.generations.insert(key, record);
        }
    }
    for (key, record) in decode(contents, Kind::Branch)? {
        if let Ok(id) = key.parse() {
            records.branches.insert(id, record);
        }
    }
    for (key, record) in decode(contents, Kind::Lease)? {
        records.leases.insert(plan::LeaseUid(key), record);
    }
    let epoch = contents.get(Kind::Meta, committer::EPOCH);
    records.epoch = epoch
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or(0);
    Ok(records)
}

fn decode<T: DeserializeOwned>(contents: &Contents, kind: Kind) -> Result<Vec<(String, T)>, Error> {
    contents
        .decode(kind)
        .map(|(key, record)| Ok((key.to_owned(), record?)))
        .collect()
}

/// Whether the machine was started anew since the journal was last opened.
pub(super) fn rebooted(contents: &Contents, boot_id: &str) -> bool {
    let last = contents.get(Kind::Meta, committer::BOOT);
    let last: Option<String> = last.and_then(|text| serde_json::from_str(text).ok());
    last.is_some_and(|last| last != boot_id)
}

/// What is there: on disk, and running. What runs and is nobody's is ended.
pub(super) async fn observe(
    world: &Arc<World>,
    cgroups: &Base,
    records: &Records,
    rebooted: bool,
    boot_id: String,
) -> Result<(Observed, BTreeMap<BranchId, Running>), Error> {
    let scan = {
        let (branches, records) = (world.branches.clone(), records.clone());
        blocking(move || scan(&branches, &records)).await??
    };
    let running = if rebooted {
        BTreeMap::new()
    } else {
        running(world, records)
    };
    clear_cgroups(world, cgroups, &running).await?;
    let observed = observed(world, &scan, &running, records, rebooted, boot_id);
    Ok((observed, running))
}

/// Reads the disk, and clears away what an interrupted build left. Blocks.
fn scan(branches: &Branches, records: &Records) -> Result<Scan, Error> {
    let layout = branches.layout();
    let mut scan = Scan::read(layout, branches.key())?;
    // Only what the journal says was begun here; anything else is somebody else's.
    let unfinished = |pool: &PoolUid, number: u64| {
        let record = records.generations.get(&(pool.clone(), number));
        record.is_some_and(|record| record.image.is_none())
    };
    for image in std::mem::take(&mut scan.building) {
        if unfinished(&image.pool, image.generation) {
            let id = branches.new_id();
            branches
                .trash_building(&image.pool, image.generation, &id)
                .context(DiscardSnafu)?;
        } else {
            scan.building.push(image);
        }
    }
    for image in std::mem::take(&mut scan.golden) {
        let interrupted = !image.info.read_only
            && records
                .generations
                .contains_key(&(image.pool.clone(), image.generation));
        if interrupted || unfinished(&image.pool, image.generation) {
            let id = branches.new_id();
            branches
                .trash_golden(&image.pool, image.generation, &id)
                .context(DiscardSnafu)?;
        } else {
            scan.golden.push(image);
        }
    }
    // With the new tombstones in it.
    let tombstones = Scan::read(layout, branches.key())?.tombstones;
    Ok(Scan { tombstones, ..scan })
}

/// A server of an earlier agent that still runs.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) slot: Slot,
    pub(super) pid: u32,
    pub(super) pidfd: std::os::fd::OwnedFd,
    pub(super) ready: bool,
}

/// The servers that can be proven to be those of the journal's branches: in the cgroup of the
/// branch's slot, and named by the pid file of its data directory.
fn running(world: &World, records: &Records) -> BTreeMap<BranchId, Running> {
    let mut found = BTreeMap::new();
    for (id, record) in &records.branches {
        let Ok(group) = world.slot_group(record.slot) else {
            continue;
        };
        let Ok(processes) = group.processes() else {
            continue;
        };
        if processes.is_empty() {
            continue;
        }
        let Ok(Some(file)) = PidFile::read(&world.layout.branch(id)) else {
            continue;
        };
        if !processes.contains(&file.pid) {
            continue;
        }
        let Ok(pidfd) = process::open(file.pid) else {
            continue;
        };
        // The number may have been given to another process in between.
        let still = group
            .processes()
            .is_ok_and(|processes| processes.contains(&file.pid));
        if still {
            // One that somebody was given, though the journal does not know of it, is not to be
            // given to anybody else.
            let unused = world.unused.is(record.slot, id);
            let ready = unused && file.is_ready(file.pid);
            found.insert(
                *id,
                Running {
                    slot: record.slot,
                    pid: file.pid,
                    pidfd,
                    ready,
                },
            );
        }
    }
    found
}

fn observed(
    world: &World,
    scan: &Scan,
    running: &BTreeMap<BranchId, Running>,
    records: &Records,
    rebooted: bool,
    boot_id: String,
) -> Observed {
    let branches = scan.branches.iter().map(|entry| {
        let server = running.get(&entry.id);
        let seen = ObservedBranch {
            running: server.is_some(),
            ready: server.is_some_and(|server| server.ready),
        };
        (entry.id, seen)
    });
    let mut strays: Vec<Quarantined> = scan
        .strays
        .iter()
        .map(|stray| stray_of(world, &stray.path, &stray.why.to_string()))
        .collect();
    let mut golden = BTreeSet::new();
    for image in &scan.golden {
        let key = (image.pool.clone(), image.generation);
        let sealed = records
            .generations
            .get(&key)
            .is_some_and(|record| record.image.is_some());
        if sealed && image.info.read_only {
            golden.insert(key);
        } else {
            let path = world
                .layout
                .golden_generation(&image.pool, image.generation);
            strays.push(stray_of(world, &path, "the journal knows no such image"));
        }
    }
    for image in &scan.building {
        let path = world
            .layout
            .building_generation(&image.pool, image.generation);
        strays.push(stray_of(world, &path, "the journal knows no such build"));
    }
    Observed {
        branches: branches.collect(),
        tombstones: scan.tombstones.iter().map(|entry| entry.id).collect(),
        golden,
        strays,
        rebooted,
        boot_id,
    }
}

fn stray_of(world: &World, path: &Path, why: &str) -> Quarantined {
    let relative = path.strip_prefix(world.layout.root()).unwrap_or(path);
    Quarantined {
        path: relative.display().to_string(),
        reason: "Unknown".to_owned(),
        message: format!("{why}; it is left alone, move or delete it by hand"),
    }
}

/// Ends every process in our cgroups that belongs to no server which is taken over.
pub(super) async fn clear_cgroups(
    world: &World,
    cgroups: &Base,
    running: &BTreeMap<BranchId, Running>,
) -> Result<(), Error> {
    let kept: BTreeSet<String> = running
        .values()
        .map(|server| slot_group_name(server.slot))
        .collect();
    for name in cgroups.names().context(CgroupSnafu)? {
        if kept.contains(&name) {
            continue;
        }
        let group = cgroups.group(&name).context(CgroupSnafu)?;
        server::kill_group(&group).await.context(CgroupSnafu)?;
    }
    // Mounts of servers that are gone would keep their branches from being reclaimed.
    for slot in 0..world.slots() {
        let slot = Slot(slot);
        let target = world.layout.slot_mount(slot.0);
        if !kept.contains(&slot_group_name(slot)) && target.exists() {
            let _not_mounted = world.supervisor.unmount(&target).await;
        }
    }
    Ok(())
}

/// Takes the running servers over.
pub(super) async fn take_over(world: &Arc<World>, running: BTreeMap<BranchId, Running>) {
    for (id, found) in running {
        let Ok(group) = world.slot_group(found.slot) else {
            continue;
        };
        let server = Server {
            pid: found.pid,
            pidfd: Arc::new(found.pidfd),
            supervisor: world.supervisor.clone(),
            group,
            data_dir: world.layout.branch(&id),
            mount: world
                .user_per_branch
                .then(|| world.layout.slot_mount(found.slot.0)),
            ipc_namespace: world.isolation.ipc_namespace,
        };
        tracing::info!(branch = %id, pid = found.pid, user = slot_user(world, found.slot).uid, "took over a running server");
        let runtime = world.runtime(id);
        let mut runtime = runtime.lock().await;
        super::steps::watch_exit(world, &mut runtime, id, server);
    }
}

/// Of the branches whose servers were started before: what a lease needs must be there before it is
/// answered, or asked for by a client.
pub(super) async fn prepare_addresses(world: &Arc<World>, node: &Node) -> Result<(), Error> {
    let taken_over = node.branches.values().filter(|branch| {
        matches!(
            branch.state,
            State::Started | State::Leased { .. } | State::Parked { .. }
        )
    });
    let mut preparing = tokio::task::JoinSet::new();
    for branch in taken_over {
        let Some(facts) = world.image(&branch.pool, branch.generation) else {
            continue;
        };
        let (addresses, pool) = (Arc::clone(&world.addresses), branch.pool.clone());
        let (id, endpoint) = (branch.id, branch.endpoint);
        preparing.spawn_blocking(move || {
            addresses.prepare(endpoint, id, &pool, &facts.role, &facts.database);
        });
    }
    while let Some(prepared) = preparing.join_next().await {
        prepared.map_err(Interrupted::from)?;
    }
    for branch in node.branches.values() {
        match &branch.state {
            State::Leased {
                server: plan::Server::Down { .. },
                ..
            } => world.addresses.restarting(&branch.id),
            State::Leased {
                server: plan::Server::Suspended,
                ..
            } => {
                if let Some(asleep) = world.addresses.asleep(&branch.id) {
                    suspend::watch_for_wishes(world, branch.id, asleep);
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// The facts of all sealed images.
pub(super) fn images(records: &Records) -> Vec<(PoolUid, u64, golden::Facts)> {
    records
        .generations
        .iter()
        .filter_map(|((pool, number), record)| {
            let facts = serde_json::from_value(record.image.as_ref()?.facts.clone()).ok()?;
            Some((pool.clone(), *number, facts))
        })
        .collect()
}
