//! What the agents say, in memory. One task writes it; anybody reads the last version of it.

use std::{collections::BTreeMap, sync::Arc};

use branchpool_agent_api::{Change, Client, NodeStatus, PoolStatus, WatchEvent};
use tokio::sync::{mpsc, watch};

use crate::{
    clock,
    metrics::Metrics,
    plan::{
        Millis, NodeName,
        leases::{AgentEvent, Event},
    },
};

/// An agent's Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AgentPod {
    pub node: NodeName,
    pub uid: String,
    /// `IP:port`.
    pub address: String,
}

/// One agent, as last heard.
#[derive(Clone, Debug)]
pub(crate) struct Agent {
    pub pod: AgentPod,
    pub client: Client,
    /// Its Pod is there.
    pub present: bool,
    pub connected: bool,
    /// When it became silent; the time of its discovery before it was heard.
    pub silent_since: Millis,
    /// Why it is silent.
    pub trouble: Option<String>,
    pub instance: Option<String>,
    pub node: Option<Arc<NodeStatus>>,
    /// By UID.
    pub pools: BTreeMap<String, PoolStatus>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Index {
    pub agents: BTreeMap<NodeName, Arc<Agent>>,
    /// The agents' Pods were listed completely.
    pub discovered: bool,
}

/// What goes into the index.
#[derive(Debug)]
pub(crate) enum Report {
    Found(AgentPod, Client),
    Gone(NodeName),
    /// Its node left the cluster.
    Forget(NodeName),
    Discovered,
    /// The watch goes on where it broke: what was known is still so.
    Resumed(NodeName),
    Heard(NodeName, Box<WatchEvent>),
    Silent(NodeName, String),
}

pub(crate) struct Writer {
    index: watch::Sender<Index>,
    leases: mpsc::Sender<Event>,
    metrics: Metrics,
}

impl Writer {
    pub(crate) fn new(
        leases: mpsc::Sender<Event>,
        metrics: Metrics,
    ) -> (Self, watch::Receiver<Index>) {
        let (index, reader) = watch::channel(Index::default());
        let writer = Self {
            index,
            leases,
            metrics,
        };
        (writer, reader)
    }

    pub(crate) async fn run(self, mut reports: mpsc::Receiver<Report>) {
        while let Some(report) = reports.recv().await {
            let Some((node, event)) = self.take(report) else {
                continue;
            };
            if self.leases.send(Event::Agent(node, event)).await.is_err() {
                return;
            }
        }
    }

    /// Into the index; answers what leases have to know.
    fn take(&self, report: Report) -> Option<(NodeName, AgentEvent)> {
        match report {
            Report::Found(pod, client) => {
                self.index.send_modify(|index| {
                    let known = index.agents.get(&pod.node);
                    let agent = Agent {
                        client,
                        present: true,
                        connected: false,
                        silent_since: clock::now(),
                        trouble: Some("it was just found".to_owned()),
                        instance: known.and_then(|known| known.instance.clone()),
                        node: known.and_then(|known| known.node.clone()),
                        pools: known.map(|known| known.pools.clone()).unwrap_or_default(),
                        pod: pod.clone(),
                    };
                    index.agents.insert(pod.node.clone(), Arc::new(agent));
                });
                Some((pod.node, AgentEvent::Silent))
            }
            Report::Gone(node) => {
                // The node may come back, and its leases with it: its numbers stay until the node goes.
                self.silent(&node, "its Pod is gone");
                self.modify(&node, |agent| agent.present = false);
                Some((node, AgentEvent::Silent))
            }
            Report::Forget(node) => {
                self.metrics.agent_gone(node.as_str());
                self.index.send_modify(|index| {
                    // It may have come back meanwhile.
                    if index.agents.get(&node).is_some_and(|agent| !agent.present) {
                        index.agents.remove(&node);
                    }
                });
                None
            }
            Report::Discovered => {
                self.index.send_modify(|index| index.discovered = true);
                None
            }
            Report::Resumed(node) => {
                self.modify(&node, |agent| {
                    agent.connected = true;
                    agent.trouble = None;
                });
                Some((node, AgentEvent::Resumed))
            }
            Report::Silent(node, why) => {
                self.silent(&node, &why);
                Some((node, AgentEvent::Silent))
            }
            Report::Heard(node, event) => {
                self.metrics.agent(node.as_str(), true, Some(clock::now()));
                let event = self.heard(&node, *event)?;
                Some((node, event))
            }
        }
    }

    fn silent(&self, node: &NodeName, why: &str) {
        self.metrics.agent(node.as_str(), false, None);
        self.modify(node, |agent| {
            if agent.connected {
                agent.silent_since = clock::now();
            }
            agent.connected = false;
            agent.trouble = Some(why.to_owned());
        });
    }

    fn heard(&self, node: &NodeName, event: WatchEvent) -> Option<AgentEvent> {
        Some(match event.change {
            Change::Snapshot {
                node: status,
                pools,
                leases,
            } => {
                self.modify(node, |agent| {
                    agent.connected = true;
                    agent.trouble = None;
                    agent.instance = Some(status.instance.clone());
                    agent.pools = pools
                        .iter()
                        .map(|pool| (pool.uid.clone(), pool.clone()))
                        .collect();
                    agent.node = Some(Arc::from(status));
                });
                AgentEvent::Snapshot { pools, leases }
            }
            Change::Node(status) => {
                self.modify(node, |agent| agent.node = Some(Arc::from(status)));
                return None;
            }
            Change::Pool(pool) => {
                self.modify(node, |agent| {
                    agent.pools.insert(pool.uid.clone(), (*pool).clone());
                });
                AgentEvent::Pool(pool)
            }
            Change::PoolGone { uid } => {
                self.modify(node, |agent| drop(agent.pools.remove(&uid)));
                AgentEvent::PoolGone(uid)
            }
            Change::Lease(lease) => AgentEvent::Lease(Box::new(Arc::unwrap_or_clone(lease))),
            Change::LeaseGone { uid } => AgentEvent::LeaseGone(uid),
            Change::Bookmark => return None,
        })
    }

    fn modify(&self, node: &NodeName, change: impl FnOnce(&mut Agent)) {
        self.index.send_modify(|index| {
            if let Some(agent) = index.agents.get_mut(node) {
                change(Arc::make_mut(agent));
            }
        });
    }
}
