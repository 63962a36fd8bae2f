//! What the agents say, in memory. One task writes it; anybody reads the last version of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use branchpool_agent_api::{Change, Client, NodeStatus, PoolStatus, WatchEvent};
use tokio::sync::{mpsc, oneshot, watch};

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
    /// Its node left the cluster, and nothing is left of it.
    Forget(NodeName),
    Discovered,
    /// All nodes of the cluster, from a complete list.
    Nodes(BTreeSet<NodeName>),
    /// The watch goes on where it broke, if what was known before is still known: the answer says so.
    Resumed(NodeName, oneshot::Sender<bool>),
    Heard(NodeName, Box<WatchEvent>),
    Silent(NodeName, String),
}

pub(crate) struct Writer {
    index: watch::Sender<Index>,
    leases: mpsc::Sender<Event>,
    metrics: Metrics,
    /// Nodes of the cluster; empty before they were listed.
    cluster: BTreeSet<NodeName>,
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
            cluster: BTreeSet::new(),
        };
        (writer, reader)
    }

    pub(crate) async fn run(mut self, mut reports: mpsc::Receiver<Report>) {
        while let Some(report) = reports.recv().await {
            let Some(event) = self.take(report) else {
                continue;
            };
            if self.leases.send(event).await.is_err() {
                return;
            }
        }
    }

    /// Into the index; answers what leases have to know.
    fn take(&mut self, report: Report) -> Option<Event> {
        let (node, event) = match report {
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
                (pod.node, AgentEvent::Silent)
            }
            Report::Gone(node) => {
                // The node may come back, and its leases with it: its numbers stay until the node goes.
                self.silent(&node, "its Pod is gone");
                self.modify(&node, |agent| agent.present = false);
                (node, AgentEvent::Silent)
            }
            Report::Forget(node) => {
                self.metrics.agent_gone(node.as_str());
                self.index.send_modify(|index| {
                    // It may have come back meanwhile.
                    if index.agents.get(&node).is_some_and(|agent| !agent.present) {
                        index.agents.remove(&node);
                    }
                });
                return None;
            }
            Report::Discovered => {
                self.index.send_modify(|index| index.discovered = true);
                return None;
            }
            Report::Nodes(nodes) => {
                // In this order for leases too: what they drop is what is forgotten here.
                self.cluster.clone_from(&nodes);
                self.forget_left();
                return Some(Event::Nodes(nodes));
            }
            Report::Resumed(node, answer) => {
                let known = self.knows(&node);
                let _gone = answer.send(known);
                if !known {
                    return None;
                }
                self.modify(&node, |agent| {
                    agent.connected = true;
                    agent.trouble = None;
                });
                (node, AgentEvent::Resumed)
            }
            Report::Silent(node, why) => {
                self.silent(&node, &why);
                (node, AgentEvent::Silent)
            }
            Report::Heard(node, event) => {
                self.metrics.agent(node.as_str(), true, Some(clock::now()));
                let event = self.heard(&node, *event)?;
                (node, event)
            }
        };
        Some(Event::Agent(node, event))
    }

    fn knows(&self, node: &NodeName) -> bool {
        let index = self.index.borrow();
        let agent = index.agents.get(node);
        agent.is_some_and(|agent| agent.instance.is_some())
    }

    /// A node that left the cluster and does not answer counts nothing any more, whether its Pod is
    /// still listed or not. When it comes back it has to say everything anew.
    fn forget_left(&self) {
        // An empty list is no proof that every node is gone.
        if self.cluster.is_empty() {
            return;
        }
        self.index.send_if_modified(|index| {
            let mut changed = false;
            for (node, agent) in &mut index.agents {
                let left = !agent.connected && !self.cluster.contains(node);
                if left && agent.instance.is_some() {
                    let agent = Arc::make_mut(agent);
                    agent.instance = None;
                    agent.node = None;
                    agent.pools.clear();
                    changed = true;
                }
            }
            changed
        });
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
        self.forget_left();
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

#[cfg(test)]
mod tests {
    use branchpool_agent_api::Target;

    use super::*;

    fn resumed(writer: &mut Writer, node: &NodeName) -> (bool, Option<Event>) {
        let (ask, mut answer) = oneshot::channel();
        let event = writer.take(Report::Resumed(node.clone(), ask));
        (answer.try_recv().unwrap(), event)
    }

    #[test]
    fn a_node_that_left_counts_nothing_and_tells_everything_when_it_is_back() {
        let (leases, _inbox) = mpsc::channel(1);
        let (mut writer, index) = Writer::new(leases, Metrics::default());
        let node = NodeName::from("node-1");
        let pod = AgentPod {
            node: node.clone(),
            uid: "pod".to_owned(),
            address: "192.0.2.1:1".to_owned(),
        };
        let client = Client::new(Target::Tcp(pod.address.clone()));
        let others = || Report::Nodes(BTreeSet::from([NodeName::from("node-2")]));
        writer.take(Report::Found(pod, client));
        writer.modify(&node, |agent| {
            agent.instance = Some("first".to_owned());
            agent.connected = true;
        });
        writer.take(others());
        assert!(writer.knows(&node), "it answers, so it is there");
        writer.take(Report::Silent(node.clone(), "cut".to_owned()));
        assert!(!writer.knows(&node));
        let (may, event) = resumed(&mut writer, &node);
        assert!(!may && event.is_none());
        assert!(!index.borrow().agents[&node].connected);

        writer.modify(&node, |agent| agent.instance = Some("first".to_owned()));
        writer.take(Report::Nodes(BTreeSet::from([node.clone()])));
        let (may, event) = resumed(&mut writer, &node);
        assert!(may && event.is_some(), "only silent, it goes on");
    }
}
