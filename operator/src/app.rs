//! The whole operator: health, enrolment and the lease API at once, the controllers while it leads.

use std::sync::Arc;

use branchpool_trust::{OperatorIdentity, TlsListener, enrol, operator, serve::serve};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{Api, Client, core::DeserializeGuard};
use snafu::{ResultExt, Snafu};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Duration, sleep},
};
use tower::ServiceExt;
use tracing::{info, warn};

use crate::{
    agents::{Connect, Discovery, Mutual, Plain},
    cli::Cli,
    cluster::Cluster,
    election::{self, Election},
    events::Events,
    follow::Scope,
    index::{Index, Writer},
    lease_api,
    leases::{self, QUESTIONS, Question},
    metrics::Metrics,
    pools, served,
    trust::{Keeper, PodReviewer},
};

/// Events that wait for a controller; who brings more waits too.
const WAITING: usize = 4_096;
/// Between two tries to get at the CA.
const RETRY: Duration = Duration::from_secs(2);

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("{source}"), context(false))]
    Served { source: served::Error },
    #[snafu(display("{source}"), context(false))]
    Election { source: election::Error },
    #[snafu(display("the operator has no certificate: {source}"), context(false))]
    Identity { source: operator::Error },
    #[snafu(display(
        "{address} cannot be listened on ({source}): free the address, or choose another with --listen"
    ))]
    Listen {
        address: std::net::SocketAddr,
        source: std::io::Error,
    },
    #[snafu(display("a controller ended, which it never should: see the log before this"))]
    Ended,
}

/// Serves until `stop` is there.
pub async fn run(cli: Cli, client: Client, stop: impl Future<Output = ()>) -> Result<(), Error> {
    let metrics = Metrics::default();
    let (reached, ready) = watch::channel(false);
    let health = served::health(cli.metrics_listen, metrics.clone(), ready).await?;
    tokio::pin!(stop);
    let keeper = tokio::select! {
        () = &mut stop => return Ok(()),
        keeper = patiently(&cli, &client) => keeper,
    };
    reached.send_replace(true);
    let names = service_names(&cli);
    let identity = OperatorIdentity::start(keeper.authority(), names)?;
    let cluster = Cluster::new(client.clone(), cli.api_writes, metrics.clone());
    let (leading, leads) = watch::channel(None);
    let mut always = JoinSet::new();
    always.spawn(Arc::clone(&keeper).follow());
    let (stop_serving, stopping) = watch::channel(false);
    let listening = listen(&cli, &cluster, &keeper, &identity, leads, stopping).await?;
    let leases: Api<Lease> = Api::namespaced(client.clone(), &cli.namespace);
    let mut election = Election::new(leases, cli.lease_name.clone(), &cli.name, metrics.clone());
    let epoch = tokio::select! {
        () = &mut stop => return Ok(()),
        epoch = async {
            served::check_schemas(client.clone(), &metrics).await;
            election.win().await
        } => epoch,
    };
    let (epoch, epochs) = watch::channel(epoch);
    let (deposed, mut newer) = mpsc::channel(1);
    let connect: Arc<dyn Connect> = if cli.agents_in_plain_http {
        warn!("agents are reached without TLS");
        Arc::new(Plain)
    } else {
        Arc::new(Mutual { identity })
    };
    let (mut tasks, questions, index) = start(&cli, cluster, connect, &metrics, epochs, deposed);
    tasks.spawn(keeper.rotate(index));
    leading.send_replace(Some(questions));
    let result = tokio::select! {
        kept = election.keep(&epoch, &mut newer, async {
            stop.await;
            // No new questions, and those under way are answered before the leadership goes.
            leading.send_replace(None);
            stop_serving.send_replace(true);
            let _ended = listening.await;
        }) => kept.map_err(Error::from),
        _ended = tasks.join_next() => Err(Error::Ended),
    };
    tasks.shutdown().await;
    always.abort_all();
    if result.is_ok() {
        let epoch = *epoch.borrow();
        election.give_up(epoch).await;
    }
    health.abort();
    info!("stopped");
    result
}

/// The CA, however long the API server takes.
async fn patiently(cli: &Cli, client: &Client) -> Arc<Keeper> {
    loop {
        match Keeper::open(client, &cli.namespace, &cli.agent_namespace).await {
            Ok(keeper) => return keeper,
            Err(error) => warn!("{error}"),
        }
        sleep(RETRY).await;
    }
}

fn service_names(cli: &Cli) -> Vec<String> {
    let service = format!("{}.{}.svc", cli.service_name, cli.namespace);
    let qualified = format!("{service}.cluster.local");
    vec![service, qualified, "localhost".to_owned()]
}

/// Enrolment and the lease API, by TLS.
async fn listen(
    cli: &Cli,
    cluster: &Cluster,
    keeper: &Keeper,
    identity: &OperatorIdentity,
    leads: lease_api::Leading,
    stopping: watch::Receiver<bool>,
) -> Result<tokio::task::JoinHandle<()>, Error> {
    let address = cli.listen;
    let tcp = TcpListener::bind(address)
        .await
        .context(ListenSnafu { address })?;
    let reviewer = PodReviewer {
        client: cluster.client(),
        account: format!(
            "system:serviceaccount:{}:{}",
            cli.agent_namespace, cli.agent_service_account
        ),
    };
    let router = enrol::router(reviewer, keeper.authority())
        .merge(lease_api::router(cluster.clone(), leads));
    let answer = move |request| {
        let router = router.clone();
        async move {
            match router.oneshot(request).await {
                Ok(response) => response,
                Err(never) => match never {},
            }
        }
    };
    let listener = TlsListener::new(tcp, identity.listener.clone());
    info!(%address, "serving enrolment and leases");
    Ok(tokio::spawn(serve(listener, answer, stopping)))
}

fn start(
    cli: &Cli,
    cluster: Cluster,
    connect: Arc<dyn Connect>,
    metrics: &Metrics,
    epochs: watch::Receiver<u64>,
    deposed: mpsc::Sender<Option<u64>>,
) -> (JoinSet<()>, mpsc::Sender<Question>, watch::Receiver<Index>) {
    let client = cluster.client();
    let scope = Scope::new(cli.watch_namespaces.clone());
    let record = Events::start(client.clone(), &cli.name);
    let (lease_events, lease_inbox) = mpsc::channel(WAITING);
    let (notices, notice_inbox) = mpsc::channel(WAITING);
    let (reports, report_inbox) = mpsc::channel(WAITING);
    let (questions, question_inbox) = mpsc::channel(QUESTIONS);
    let (writer, index) = Writer::new(lease_events.clone(), metrics.clone());
    let mut tasks = JoinSet::new();
    tasks.spawn(writer.run(report_inbox));
    let discovery = Discovery {
        api: Api::<DeserializeGuard<Pod>>::namespaced(client.clone(), &cli.agent_namespace),
        selector: cli.agent_selector.clone(),
        port: cli.agent_port,
        connect,
        reports: reports.clone(),
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
        index: index.clone(),
        epoch: epochs,
        deposed,
        leases: lease_events.clone(),
        agents: reports,
        notices: notices.clone(),
        record,
        metrics: metrics.clone(),
        scope: scope.clone(),
        agent_namespace: cli.agent_namespace.clone(),
    });
    tasks.spawn(controller.run(notice_inbox));
    tasks.spawn(leases::follow_leases(
        scope.clone(),
        client.clone(),
        lease_events,
    ));
    tasks.spawn(pools::follow_pools(scope, client.clone(), notices.clone()));
    tasks.spawn(pools::follow_nodes(client, notices));
    (tasks, questions, index)
}
