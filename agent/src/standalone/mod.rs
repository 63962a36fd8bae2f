//! An agent without a cluster: manifests from files instead of an operator.

pub mod manifests;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use branchpool_agent_api::{DesiredPool, PoolName};
use branchpool_crds::{BranchPool, Manifests, Source};
use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tracing::{error, info};

use self::manifests::Loaded;
use crate::{engine::Engine, http::Service, storage::PoolUid};

/// Namespace of objects that name none.
const NAMESPACE: &str = "default";

/// Manifests that are in force and followed.
#[derive(Debug)]
pub struct Following {
    engine: Engine,
    sets: watch::Receiver<Loaded>,
}

/// Puts the manifests in force as they are now, so that whoever asks next finds their pools.
pub async fn start(engine: Engine, paths: &[PathBuf]) -> Result<Following, manifests::Error> {
    let mut following = Following {
        sets: manifests::watch(paths).await?,
        engine,
    };
    following.take_in().await;
    Ok(following)
}

impl Following {
    /// Applies the manifests again whenever they change. Returns when they cannot be watched.
    pub async fn run(mut self) {
        while self.sets.changed().await.is_ok() {
            self.take_in().await;
        }
    }

    async fn take_in(&mut self) {
        let loaded = self.sets.borrow_and_update().clone();
        match loaded {
            Ok(manifests) => apply(&self.engine, &manifests).await,
            Err(problem) => {
                error!("the manifests are not taken in, what was in force stays so: {problem}");
                self.engine.report_manifests(Some(problem.to_string()));
            }
        }
    }
}

/// Makes the engine hold exactly the pools of a set.
async fn apply(engine: &Engine, manifests: &Manifests) {
    let mut problems = Vec::new();
    let mut wanted = BTreeSet::new();
    let known: BTreeMap<String, _> = engine
        .pools()
        .into_iter()
        .map(|pool| (pool.uid.clone(), pool))
        .collect();
    for pool in &manifests.pools {
        let name = name_of(pool);
        let uid = uid_of(&name);
        wanted.insert(uid.to_string());
        let desired = engine.with_generation(&uid, desired(pool, &name, manifests));
        match engine.apply_pool(uid.to_string(), desired).await {
            Ok(_) => info!(pool = %name, "pool applied"),
            Err(problem) => {
                error!(pool = %name, %problem, "the pool is not taken in");
                problems.push(format!("pool {name}: {problem}"));
            }
        }
    }
    for (uid, pool) in known {
        if wanted.contains(&uid) {
            continue;
        }
        match engine.remove_pool(uid, None).await {
            Ok(()) => info!(pool = %pool.name, "pool removed"),
            Err(problem) => problems.push(format!("pool {}: {problem}", pool.name)),
        }
    }
    engine.report_manifests((!problems.is_empty()).then(|| problems.join("; ")));
}

fn name_of(pool: &BranchPool) -> PoolName {
    let metadata = &pool.metadata;
    PoolName {
        namespace: metadata
            .namespace
            .clone()
            .unwrap_or_else(|| NAMESPACE.to_owned()),
        name: metadata.name.clone().unwrap_or_default(),
    }
}

/// The same name is the same pool, over restarts as well.
fn uid_of(name: &PoolName) -> PoolUid {
    let digest = HEXLOWER.encode(&Sha256::digest(format!("{name}"))[..16]);
    digest
        .parse()
        .expect("32 hexadecimal digits should be a pool uid")
}

/// As an operator would send it: with the scripts of the `ConfigMap` in place of its name.
fn desired(pool: &BranchPool, name: &PoolName, manifests: &Manifests) -> DesiredPool {
    let mut spec = pool.spec.clone();
    let scripts = manifests.scripts(pool);
    if let Source::Sql(sql) = &mut spec.source {
        sql.config_map_ref = None;
        sql.scripts = scripts;
    }
    DesiredPool {
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        generation: 1,
        epoch: None,
        spec: serde_json::to_value(spec).expect("a spec that was read should be written"),
    }
}
