//! The shell around the core: carries out what [`crate::plan`] decides.

mod actor;
mod addresses;
mod boot;
mod build;
mod committer;
mod config;
mod desired;
mod files;
mod hand_over;
mod leftovers;
mod metrics;
mod perform;
mod precedence;
mod publish;
mod sampler;
mod service;
mod steps;
mod stop;
mod suspend;
mod unused;
mod world;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use branchpool_agent_api::{DesiredPool, Isolation as IsolationReport, TrustStatus};
use branchpool_sys::{
    cgroup::{self, Base},
    probe::{self, Feature},
};
use rand::{SeedableRng, rngs::StdRng};
use snafu::{ResultExt, Snafu};
use tokio::sync::{mpsc, watch};

pub use config::Config;

use self::{
    actor::{Actor, Envelope},
    addresses::Addresses,
    committer::Committer,
    desired::Abilities,
    metrics::Metrics,
    publish::{Facts, Publisher},
    unused::Unused,
    world::{Clock, Parts, World},
};
use crate::{
    blocking::{Interrupted, blocking},
    http::WatchLog,
    journal::{self, Journal},
    plan::{Command, Node, PoolUid, Reach, Records},
    postgres::{readiness, sandbox::Isolation},
    sql::Sql,
    storage::{Branches, ids::NodeKey, layout},
};

/// Commands that may wait for the core; more wait at their connections.
const COMMANDS: usize = 1024;
/// Ends of steps that may wait for the core; more wait with their steps.
const EVENTS: usize = 4096;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("{source}"))]
    Layout { source: layout::Error },
    #[snafu(display("{source}"))]
    Journal { source: journal::Error },
    #[snafu(display("{source}"))]
    NodeKey { source: crate::storage::ids::Error },
    #[snafu(display("{}", crate::postgres::chain(source)))]
    Cgroup { source: cgroup::Error },
    #[snafu(display("{source}"))]
    Watcher { source: readiness::Error },
    #[snafu(display(
        "cannot open {}: {source}; is the run directory writable?",
        path.display()
    ))]
    Unused {
        path: std::path::PathBuf,
        source: std::io::Error,
    },
    #[snafu(display("{source}"))]
    Boot { source: boot::Error },
    #[snafu(display("the start was interrupted: {source}"), context(false))]
    Interrupted { source: Interrupted },
}

impl Error {
    /// sysexits.h: 64 to 78 where a new try would end the same.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Layout { .. } | Self::NodeKey { .. } => 78,
            Self::Journal {
                source: journal::Error::Locked { .. },
            } => 69,
            Self::Journal {
                source: journal::Error::Damaged { .. } | journal::Error::Newer { .. },
            } => 65,
            Self::Cgroup { .. } => 71,
            _ => 1,
        }
    }
}

/// What is known of an operator.
#[derive(Debug, Default)]
enum Operator {
    #[default]
    None,
    Known {
        /// Why it has not certified this agent, or not anew.
        problem: Option<String>,
    },
}

/// A running engine. Clones share it.
#[derive(Clone, Debug)]
pub struct Engine {
    commands: mpsc::Sender<Envelope>,
    log: WatchLog,
    world: Arc<World>,
    abilities: Arc<Abilities>,
    drained: watch::Receiver<bool>,
    events: mpsc::Sender<crate::plan::Event>,
    journal: Journal,
    /// What is wrong with the manifests of a standalone agent.
    manifests: Arc<Mutex<Option<String>>>,
    operator: Arc<Mutex<Operator>>,
    cgroups: Base,
    sql: Sql,
}

impl Engine {
    /// Takes over what is there and starts to work.
    pub async fn start(config: Config) -> Result<Self, Error> {
        let path = config.layout.journal();
        let (journal, contents) = blocking(move || Journal::open(&path))
            .await?
            .context(JournalSnafu)?;
        let key = NodeKey::load_or_create(&config.layout.node_key()).context(NodeKeySnafu)?;
        let boot_id = journal::boot_id().context(JournalSnafu)?;
        let rebooted = boot::rebooted(&contents, &boot_id);
        let records = boot::records(&contents).context(BootSnafu)?;

        let cgroup_layout = cgroup::Layout::detect().context(CgroupSnafu)?;
        let cgroups = Base::open(&cgroup_layout, &config.cgroup_name).context(CgroupSnafu)?;
        let (isolation, report) = isolation(&config, &cgroups).await?;
        if report.user_per_branch {
            config.layout.close_branches().context(LayoutSnafu)?;
        }
        let (events, event_receiver) = mpsc::channel(EVENTS);
        let abilities = Arc::new(abilities(&config, &report));
        let facts = Arc::new(Facts {
            name: config.name.clone(),
            instance: format!("{:016x}", rand::random::<u64>()),
            isolation: report.clone(),
            postgres_majors: config.majors(),
        });
        let addresses = Arc::new(Addresses::new(
            config.layout.clone(),
            key.clone(),
            config.reach,
        ));
        let sql = Sql::new(config.sql);
        let (hand_overs, handed_over) = hand_over::queue();
        let path = config.layout.unused();
        let unused = Unused::open(&path).context(UnusedSnafu { path })?;
        let world = Arc::new(World::new(Parts {
            clock: Clock::new(),
            branches: Branches::new(config.layout.clone(), key.clone()),
            supervisor: config.supervisor,
            watcher: readiness::Watcher::new().context(WatcherSnafu)?,
            committer: Committer::start(journal.clone(), config.layout, Arc::clone(&addresses)),
            addresses,
            installations: config.installations,
            disk_user: config.disk_user,
            uid_base: config.uid_base,
            isolation,
            user_per_branch: report.user_per_branch,
            build_time_limit: config.build_time_limit,
            log_cap: config.log_cap,
            metrics: Metrics::new(sql.metrics().clone()),
            events: events.clone(),
            hand_overs,
            unused,
            cgroups: cgroups.clone(),
            slots: config.limits.slots,
        }));

        let (observed, running) = boot::observe(&world, &cgroups, &records, rebooted, boot_id)
            .await
            .context(BootSnafu)?;
        restore_images(&world, &records);
        restore_settings(&world, &abilities, &records);
        boot::take_over(&world, running).await;

        let rng = StdRng::from_rng(&mut rand::rng());
        let now = world.clock.now();
        let on_disk = observed.branches.keys().copied().collect();
        let (node, effects) = Node::adopt(config.limits, key.clone(), rng, records, observed, now);
        boot::prepare_addresses(&world, &node)
            .await
            .context(BootSnafu)?;
        let leftovers = leftovers::Leftovers::new(&world.layout, key, &node, on_disk);
        blocking(move || leftovers.remove()).await?;
        let log = WatchLog::new(publish::node_status(&node, &world, &facts));
        let mut publisher = Publisher::new(log.clone(), Arc::clone(&facts));
        publisher.note_all(&node);
        let (commands, command_receiver) = mpsc::channel(COMMANDS);
        let (drained_sender, drained) = watch::channel(false);
        let actor = Actor::new(
            node,
            Arc::clone(&world),
            publisher,
            command_receiver,
            event_receiver,
            drained_sender,
        );
        tokio::spawn(actor.run(effects));
        tokio::spawn(sampler::run(Arc::clone(&world)));
        tokio::spawn(hand_over::run(Arc::clone(&world), handed_over));
        Ok(Self {
            commands,
            log,
            world,
            abilities,
            drained,
            events,
            journal,
            manifests: Arc::default(),
            operator: Arc::default(),
            cgroups,
            sql,
        })
    }

    /// Stops handing out, parks what is leased, and ends the rest; then closes the journal. What is
    /// not done in time is done at the next start. `true`: all was done.
    pub async fn drain(&self, limit: Duration) -> bool {
        let _gone = self.events.send(crate::plan::Event::Drain).await;
        let mut drained = self.drained.clone();
        // A journal that refuses, as on a full disk, must not hold up the end either.
        let done = tokio::time::timeout(limit, async {
            let _actor_ended = drained.wait_for(|drained| *drained).await;
            let committer = &self.world.committer;
            committer.committed(committer.submitted()).await;
        })
        .await
        .is_ok();
        self.log.close();
        self.journal.clone().close().await;
        if done {
            self.remove_cgroups().await;
        }
        done
    }

    /// Ends every process of every branch at once. Leases keep their data.
    pub async fn kill_all(&self) {
        let nothing_kept = BTreeMap::new();
        if let Err(error) = boot::clear_cgroups(&self.world, &self.cgroups, &nothing_kept).await {
            tracing::warn!(%error, "not all processes could be ended");
        }
        self.remove_cgroups().await;
    }

    async fn remove_cgroups(&self) {
        let cgroups = self.cgroups.clone();
        let removed = blocking(move || {
            for name in cgroups.names()? {
                cgroups.group(&name)?.remove()?;
            }
            cgroups.remove()
        });
        match removed.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(
                error = crate::postgres::chain(&error),
                "cgroups stay behind"
            ),
            Err(error) => tracing::warn!(%error, "cgroups stay behind"),
        }
    }

    /// Shown as the node's condition `Manifests`.
    pub fn report_manifests(&self, problem: Option<String>) {
        *self
            .manifests
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = problem;
    }

    /// What an operator has certified, and why not, or not anew. From the first report on the node is ready
    /// only with a certificate.
    pub fn report_operator(&self, trust: Option<TrustStatus>, problem: Option<String>) {
        *self.operator.lock().unwrap_or_else(PoisonError::into_inner) = Operator::Known { problem };
        self.log.trust(trust);
    }

    /// Counts the generations of a pool that no API server counts: up with each change.
    pub fn with_generation(&self, uid: &PoolUid, mut desired: DesiredPool) -> DesiredPool {
        let known = self
            .log
            .known_pool(uid.as_str())
            .map_or(0, |pool| pool.observed_generation);
        let unchanged = self
            .world
            .applied(uid)
            .is_some_and(|spec| spec == desired.spec);
        desired.generation = if unchanged { known } else { known + 1 };
        desired
    }

    async fn ask(
        &self,
        command: Command,
        settings: Option<Arc<desired::Settings>>,
    ) -> Option<Result<Box<crate::plan::Answer>, crate::plan::Refusal>> {
        actor::ask(&self.commands, command, settings).await
    }

    /// What the node's gateway is to be served with.
    pub fn gateway(&self) -> (branchpool_gateway::Directory, branchpool_gateway::Metrics) {
        let directory = self.world.addresses.directory().clone();
        (directory, self.world.metrics.gateway.clone())
    }

    /// What clients of the gateway are to trust, for answers about leases; told once.
    pub fn set_authority(&self, pem: String) {
        let _told_before = self.world.authority.set(pem);
    }

    /// The supervisor is gone, and with it every start of a server.
    pub async fn supervisor_lost(&self) {
        self.world.supervisor.closed().await;
    }
}

fn restore_images(world: &World, records: &Records) {
    for (pool, number, facts) in boot::images(records) {
        if let Err(error) = build::write_auth(&world.layout, &pool, number, &facts.role) {
            tracing::error!(%pool, %error, "the files that say who may connect could not be written");
        }
        world.set_image(pool, number, facts);
    }
}

/// Settings of the pools that the journal knows, so that leases can be served before anybody sends
/// the pools again.
fn restore_settings(world: &World, abilities: &Abilities, records: &Records) {
    for (uid, record) in &records.pools {
        let desired = serde_json::from_value(record.body.clone());
        let Ok(desired) = desired else {
            tracing::error!(pool = %uid, "the journal's record of the pool cannot be read; apply the pool again");
            continue;
        };
        match desired::convert(uid, &desired, abilities) {
            Ok((_, settings)) => {
                world.set_settings(uid.clone(), Arc::new(settings));
            }
            Err(problem) => {
                tracing::error!(pool = %uid, %problem, "the pool is no longer valid on this node; apply it again");
            }
        }
    }
}

fn abilities(config: &Config, report: &IsolationReport) -> Abilities {
    Abilities {
        separate: separate(report),
        open_api: config.open_api,
        gateway: config.reach != Reach::Socket,
        default_concurrency: config.default_concurrency,
        majors: config.majors(),
    }
}

/// Whether a superuser of one branch is kept from the others.
fn separate(isolation: &IsolationReport) -> bool {
    isolation.user_per_branch && isolation.ipc_namespace && isolation.network_namespace
}

/// Which walls this node can put between branches.
async fn isolation(config: &Config, cgroups: &Base) -> Result<(Isolation, IsolationReport), Error> {
    let root = config.layout.mounts();
    let missing = blocking(move || probe::missing_isolation(&root)).await?;
    let lacks = |feature: Feature| missing.iter().any(|missing| missing.feature == feature);
    let user_per_branch = !lacks(Feature::IdMappedMounts);
    let landlock = !lacks(Feature::LandlockPaths);
    let complete = landlock && !lacks(Feature::LandlockTcp) && !lacks(Feature::LandlockScopes);
    let isolation = Isolation {
        ipc_namespace: !lacks(Feature::IpcNamespace),
        network_namespace: !lacks(Feature::NetworkNamespace),
        landlock,
        outbound: false,
    };
    let level = match (
        user_per_branch,
        isolation.ipc_namespace && isolation.network_namespace,
        complete,
    ) {
        (true, true, true) => "Full",
        (true, true, false) => "NoLandlock",
        (true, false, _) => "SharedNamespaces",
        (false, _, _) => "SharedUser",
    };
    let mut reasons: Vec<String> = missing.into_iter().map(|missing| missing.reason).collect();
    reasons.extend(cgroups.missing().iter().map(|controller| {
        format!(
            "the cgroup controller {} is not available, so its limits are not in force",
            controller.name()
        )
    }));
    let report = IsolationReport {
        level: level.to_owned(),
        cgroup: cgroups.kind().to_owned(),
        user_per_branch,
        ipc_namespace: isolation.ipc_namespace,
        network_namespace: isolation.network_namespace,
        landlock_abi: if landlock {
            branchpool_sys::sandbox::probe().unwrap_or(0)
        } else {
            0
        },
        missing: reasons,
    };
    Ok((isolation, report))
}
