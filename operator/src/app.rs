//! The whole operator: health at once, the controllers while it leads.

use std::sync::Arc;

use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{Api, Client, core::DeserializeGuard};
use snafu::Snafu;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tracing::info;

use crate::{
    agents::{Connect, Discovery},
    cli::Cli,
    cluster::Cluster,
    election::{self, Election},
    events::Events,
    follow::Scope,
    index::Writer,
    leases::{self, QUESTIONS},
    metrics::Metrics,
    pools, served,
};

/// Events that wait for a controller; who brings more waits too.
const WAITING: usize = 4_096;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("{source}"), context(false))]
    Served { source: served::Error },
    #[snafu(display("{source}"), context(false))]
    Election { source: election::Error },
    #[snafu(display("a controller ended, which it never should: see the log before this"))]
    Ended,
}

/// Serves until `stop` is there.
pub async fn run(
    cli: Cli,
    client: Client,
    connect: Arc<dyn Connect>,
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let metrics = Metrics::default();
    let (reached, ready) = watch::channel(false);
    let health = served::health(cli.metrics_listen, metrics.clone(), ready).await?;
    tokio::pin!(stop);
    let leases: Api<Lease> = Api::namespaced(client.clone(), &cli.namespace);
    let mut election = Election::new(leases, cli.lease_name.clone(), &cli.name, metrics.clone());
    let epoch = tokio::select! {
        () = &mut stop => return Ok(()),
        epoch = async {
            served::check_schemas(client.clone(), &metrics).await;
            reached.send_replace(true);
            election.win().await
        } => epoch,
    };
    let (epoch, epochs) = watch::channel(epoch);
    let (deposed, mut newer) = mpsc::channel(1);
    let mut tasks = start(&cli, client, connect, &metrics, epochs, deposed);
    let result = tokio::select! {
        kept = election.keep(&epoch, &mut newer, &mut stop) => kept.map_err(Error::from),
        _ended = tasks.join_next() => Err(Error::Ended),
    };
    tasks.abort_all();
    health.abort();
    info!("stopped");
    result
}

fn start(
    cli: &Cli,
    client: Client,
    connect: Arc<dyn Connect>,
    metrics: &Metrics,
    epochs: watch::Receiver<u64>,
    deposed: mpsc::Sender<Option<u64>>,
) -> JoinSet<()> {
    let cluster = Cluster::new(client.clone(), cli.api_writes, metrics.clone());
    let scope = Scope::new(cli.watch_namespaces.clone());
    let record = Events::start(client.clone(), &cli.name);
    let (lease_events, lease_inbox) = mpsc::channel(WAITING);
    let (notices, notice_inbox) = mpsc::channel(WAITING);
    let (reports, report_inbox) = mpsc::channel(WAITING);
    let (_questions, question_inbox) = mpsc::channel(QUESTIONS);
    let (writer, index) = Writer::new(lease_events.clone(), metrics.clone());
    let mut tasks = JoinSet::new();
    tasks.spawn(writer.run(report_inbox));
    let discovery = Discovery {
        api: Api::<DeserializeGuard<Pod>>::namespaced(client.clone(), &cli.agent_namespace),
        selector: cli.agent_selector.clone(),
        port: cli.agent_port,
        connect,
        reports,
    };
    tasks.spawn(discovery.run());
    let controller = leases::Controller::new(leases::Parts {
        cluster: cluster.clone(),
        index: index.clone(),
        epoch: epochs.clone(),
        deposed: deposed.clone(),
        events: lease_events.clone(),
        record: record.clone(),
        metrics: metrics.clone(),
    });
    tasks.spawn(controller.run(lease_inbox, question_inbox));
    let controller = pools::Controller::new(pools::Parts {
        cluster,
        index,
        epoch: epochs,
        deposed,
        leases: lease_events.clone(),
        notices: notices.clone(),
        record,
        metrics: metrics.clone(),
        scope: scope.clone(),
    });
    tasks.spawn(controller.run(notice_inbox));
    tasks.spawn(leases::follow_leases(scope.clone(), client.clone(), lease_events));
    tasks.spawn(pools::follow_pools(scope, client.clone(), notices.clone()));
    tasks.spawn(pools::follow_nodes(client, notices));
    tasks
}
