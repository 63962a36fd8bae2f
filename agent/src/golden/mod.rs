//! Golden images: from a source to a sealed, read-only subvolume that branches are made of.

mod checks;
mod discard;
mod error;
mod facts;
mod files;
mod scrub;
mod seal;
mod sql;
mod subvolume;
mod tool;
mod workshop;

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use branchpool_supervisor::client::Supervisor;
use branchpool_sys::cgroup::Group;

pub use self::{checks::Error as CheckError, error::Error, facts::Facts};
use self::{error::Result, workshop::Workshop};
use crate::{
    postgres::{
        config::{Profile, Tuning},
        installation::{Installation, OsUser},
        parameters::Parameters,
        readiness::Watcher,
        sandbox::Isolation,
    },
    storage::{Layout, PoolUid},
};

/// What a golden image is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoldenSpec {
    pub pool: PoolUid,
    /// From 1; must not exist yet.
    pub generation: u64,
    pub source: Source,
    /// Run as the superuser `postgres` in the pool's database after the source is in.
    pub prepare: Vec<Script>,
    pub major: u32,
    pub database: String,
    pub role: String,
    /// Whether the role is a superuser in branches.
    pub superuser: bool,
    pub parameters: Parameters,
    /// Of the branches; the build itself never flushes before its end.
    pub tuning: Tuning,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Scripts for `psql`, run in this order by the pool's role, which is a superuser meanwhile.
    Sql { scripts: Vec<Script> },
    /// A prepared data directory below the layout's `sources`.
    Subvolume { name: String },
}

#[derive(Clone, PartialEq, Eq)]
pub struct Script {
    pub name: String,
    pub sql: String,
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The text may be long, and may hold secrets.
        write!(f, "Script({:?}, {} bytes)", self.name, self.sql.len())
    }
}

/// What builds need of this node.
#[derive(Clone, Debug)]
pub struct Env {
    pub supervisor: Supervisor,
    pub watcher: Watcher,
    pub layout: Layout,
    pub installations: Arc<[Installation]>,
    /// Owner of all images on disk; servers and tools of a build run as this user.
    pub disk_user: OsUser,
    /// For everything that this build runs; one build at a time.
    pub group: Group,
    pub isolation: Isolation,
    /// For the whole build.
    pub time_limit: Duration,
}

/// A sentence about what a build does now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    pub message: String,
}

/// Where the steps of a build tell what they do.
struct Report<'a> {
    sink: &'a (dyn Fn(Progress) + Send + Sync),
    current: Mutex<String>,
}

impl Report<'_> {
    fn step(&self, message: impl Into<String>) {
        let message = message.into();
        tracing::info!("{message}");
        self.current
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone_from(&message);
        (self.sink)(Progress { message });
    }

    fn current(&self) -> String {
        self.current
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// Builds and seals the image of `spec`. After an error, or when the future is dropped, no
/// process of it runs any more; after an error nothing of it is left on disk either, and after a
/// drop what `building` holds of it is the caller's to remove.
pub async fn build(
    env: &Env,
    spec: &GoldenSpec,
    progress: impl Fn(Progress) + Send + Sync,
) -> Result<Facts> {
    let report = Report {
        sink: &progress,
        current: Mutex::default(),
    };
    let workshop = Workshop::open(env, spec)?;
    let built = tokio::time::timeout(env.time_limit, steps(&workshop, &report)).await;
    let built = built.unwrap_or_else(|_| {
        error::TimedOutSnafu {
            step: report.current(),
            limit: env.time_limit,
        }
        .fail()
    });
    let closed = workshop.close().await;
    // Why the build failed counts more than what went wrong while tidying up.
    let facts = built?;
    closed.map(|()| facts)
}

async fn steps(workshop: &Workshop<'_>, report: &Report<'_>) -> Result<Facts> {
    let spec = workshop.spec;
    let origin = match &spec.source {
        Source::Sql { .. } => sql::create(workshop, report).await?,
        Source::Subvolume { name } => subvolume::create(workshop, name, report).await?,
    };
    let profile = Profile {
        tuning: spec.tuning,
        parameters: spec.parameters.clone(),
        carried_over: origin.carried_over.clone(),
        preload_libraries: origin.preload_libraries.clone(),
    };
    if matches!(spec.source, Source::Subvolume { .. }) {
        subvolume::clean(workshop, &profile, report).await?;
    }

    report.step("Starting a server on the image with the pool's settings");
    let server = workshop.start(&profile, &[]).await?;
    if let Source::Sql { scripts } = &spec.source {
        sql::load(workshop, scripts, report).await?;
        report.step("Removing credentials and outward connections");
        scrub::databases(workshop).await?;
    }
    for script in &spec.prepare {
        report.step(format!("Running the prepare step {}", script.name));
        workshop
            .run_script("prepare step", script, "postgres")
            .await?;
    }
    scrub::set_superuser(workshop, spec.superuser).await?;
    let catalog = facts::read_catalog(workshop).await?;
    report.step("Shutting the image's server down");
    workshop.stop(&server).await?;

    report.step("Sealing the image");
    let sealed = seal::seal(workshop).await?;
    report.step(format!(
        "Generation {} is sealed: {} MiB",
        spec.generation,
        sealed.bytes >> 20
    ));
    Ok(Facts::new(workshop, origin, catalog, sealed))
}
