//! Finds the agents by their Pods, and listens to each: one watch a node, resumed where it broke.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use branchpool_agent_api::{Client, ClientError, Target, client::Tls};
use branchpool_trust::{OperatorIdentity, agent_name};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, core::DeserializeGuard};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{Instant, sleep},
};
use tracing::{info, warn};

use crate::{
    follow::{self, Change},
    index::{AgentPod, Report},
    plan::{NodeName, Uid},
};

/// Between two tries to reach an agent, doubling up to the second.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A connection that held for so long was a good one: the pauses begin anew.
const GOOD: Duration = Duration::from_secs(10);

/// How the operator reaches an agent.
pub(crate) trait Connect: Send + Sync + 'static {
    fn client(&self, agent: &AgentPod) -> Result<Client, String>;
}

/// Plain HTTP, for agents on loopback addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain;

impl Connect for Plain {
    fn client(&self, agent: &AgentPod) -> Result<Client, String> {
        Ok(Client::new(Target::Tcp(agent.address.clone())))
    }
}

/// Mutual TLS: each agent has to show a certificate for its own node.
#[derive(Clone, Debug)]
pub(crate) struct Mutual {
    pub(crate) identity: OperatorIdentity,
}

impl Connect for Mutual {
    fn client(&self, agent: &AgentPod) -> Result<Client, String> {
        let name = agent_name(agent.node.as_str()).map_err(|error| error.to_string())?;
        let tls = Tls::new(&*agent.address, &name, self.identity.agents.clone());
        let tls = tls.map_err(|error| error.to_string())?;
        Ok(Client::new(Target::Tls(tls)))
    }
}

pub(crate) struct Discovery {
    pub(crate) api: Api<DeserializeGuard<Pod>>,
    pub(crate) selector: String,
    pub(crate) port: u16,
    pub(crate) connect: Arc<dyn Connect>,
    pub(crate) reports: mpsc::Sender<Report>,
}

/// The Pods that were found, and who listens to their agents.
#[derive(Default)]
struct Found {
    by_uid: BTreeMap<Uid, AgentPod>,
    streams: BTreeMap<NodeName, (AgentPod, JoinHandle<()>)>,
}

impl Discovery {
    pub(crate) async fn run(self) {
        let config = follow::config().labels(&self.selector);
        let mut found = Found::default();
        let mut changes = follow::changes(vec![self.api.clone()], &config);
        while let Some(change) = changes.next().await {
            self.take(&mut found, change).await;
        }
    }

    async fn take(&self, found: &mut Found, change: Change<Pod>) {
        match change {
            Change::Seen(pod) => {
                let Some(uid) = pod.metadata.uid.as_deref().map(Uid::from) else {
                    return;
                };
                match self.agent_of(&pod) {
                    Some(agent) => {
                        found.by_uid.insert(uid, agent);
                    }
                    None => drop(found.by_uid.remove(&uid)),
                }
            }
            Change::Deleted(metadata) => {
                if let Some(uid) = metadata.uid.as_deref() {
                    found.by_uid.remove(uid);
                }
            }
            Change::Listed(uids) => {
                found.by_uid.retain(|uid, _| uids.contains(uid));
                self.match_streams(found).await;
                let _stopped = self.reports.send(Report::Discovered).await;
                return;
            }
            Change::Invalid(_) => return,
        }
        self.match_streams(found).await;
    }

    /// `None`: it does not run, or is about to stop.
    fn agent_of(&self, pod: &Pod) -> Option<AgentPod> {
        let status = pod.status.as_ref()?;
        let ip = status.pod_ip.as_deref().filter(|ip| !ip.is_empty())?;
        let ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
        if ended || pod.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let address = if ip.contains(':') {
            format!("[{ip}]:{}", self.port)
        } else {
            format!("{ip}:{}", self.port)
        };
        Some(AgentPod {
            node: pod.spec.as_ref()?.node_name.as_deref()?.into(),
            uid: pod.metadata.uid.clone()?,
            address,
        })
    }

    async fn match_streams(&self, found: &mut Found) {
        let mut wanted: BTreeMap<NodeName, AgentPod> = BTreeMap::new();
        for agent in found.by_uid.values() {
            // While a Pod replaces another there may be two; either is the same agent's place.
            wanted
                .entry(agent.node.clone())
                .or_insert_with(|| agent.clone());
        }
        let gone: BTreeSet<NodeName> = found
            .streams
            .iter()
            .filter(|(node, (pod, _))| wanted.get(*node) != Some(pod))
            .map(|(node, _)| node.clone())
            .collect();
        for node in gone {
            if let Some((_, stream)) = found.streams.remove(&node) {
                stream.abort();
            }
            if !wanted.contains_key(&node) {
                info!(node = %node, "the agent's Pod is gone");
                let _stopped = self.reports.send(Report::Gone(node)).await;
            }
        }
        for (node, pod) in wanted {
            if found.streams.contains_key(&node) {
                continue;
            }
            let client = match self.connect.client(&pod) {
                Ok(client) => client,
                Err(error) => {
                    warn!(node = %node, "the agent cannot be reached: {error}");
                    continue;
                }
            };
            info!(node = %node, address = pod.address, "found an agent");
            let report = Report::Found(pod.clone(), client.clone());
            let _stopped = self.reports.send(report).await;
            let stream = tokio::spawn(listen(node.clone(), client, self.reports.clone()));
            found.streams.insert(node, (pod, stream));
        }
    }
}

/// Listens for ever; a cut is healed from the last revision that was heard.
async fn listen(node: NodeName, client: Client, reports: mpsc::Sender<Report>) {
    let mut since: Option<(String, u64)> = None;
    let mut pause = FIRST_PAUSE;
    loop {
        let started = Instant::now();
        let why = match listen_once(&node, &client, &reports, &mut since).await {
            Ok(()) => "it ended its watch".to_owned(),
            Err(Some(error)) => error.to_string(),
            Err(None) => return,
        };
        let report = Report::Silent(node.clone(), why.clone());
        if reports.send(report).await.is_err() {
            return;
        }
        if started.elapsed() >= GOOD {
            pause = FIRST_PAUSE;
        }
        warn!(node = %node, pause = ?pause, "the agent's watch broke: {why}");
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// `Err(None)`: nobody listens any more.
async fn listen_once(
    node: &NodeName,
    client: &Client,
    reports: &mpsc::Sender<Report>,
    since: &mut Option<(String, u64)>,
) -> Result<(), Option<ClientError>> {
    // What was silent before has to say everything: meanwhile calls may have been made.
    let from = since
        .as_ref()
        .map(|(instance, revision)| (instance.as_str(), *revision));
    let mut watch = client.watch(from).await.map_err(Some)?;
    let mut resumed = from.is_some();
    while let Some(event) = watch.next().await.map_err(Some)? {
        if let branchpool_agent_api::Change::Snapshot { node, .. } = &event.change {
            *since = Some((node.instance.clone(), event.revision));
        } else if let Some((_, revision)) = since {
            *revision = event.revision;
        }
        let snapshot = matches!(event.change, branchpool_agent_api::Change::Snapshot { .. });
        if resumed && !snapshot {
            let (ask, answer) = oneshot::channel();
            let report = Report::Resumed(node.clone(), ask);
            reports.send(report).await.map_err(|_| None)?;
            if !answer.await.map_err(|_| None)? {
                *since = None;
                resumed = false;
                watch = client.watch(None).await.map_err(Some)?;
                continue;
            }
        }
        resumed = false;
        let report = Report::Heard(node.clone(), Box::new(event));
        reports.send(report).await.map_err(|_| None)?;
    }
    Ok(())
}
