//! The pool controller: each node is told its share, and statuses say what came of it.

mod desired;
mod namespace;
mod nodes;
mod sources;
mod state;
mod status;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use branchpool_agent_api::DesiredPool;
use branchpool_crds::{BranchPool, BranchPoolStatus};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::{Client, core::ObjectMeta};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};

use crate::{
    clock,
    cluster::Cluster,
    events::Events,
    follow::{self, Change, Scope},
    index::{Index, Report},
    metrics::Metrics,
    plan::{
        NodeName, Uid,
        leases::{CallError, Event, ObjectRef, WriteError},
    },
};

use self::{
    desired::Sent,
    namespace::NoAgents,
    nodes::NodeReports,
    sources::Sources,
    state::{NodeFacts, PoolFacts, terms},
};

/// Between two looks at everything: changes that come together are looked at together.
const BREATH: Duration = Duration::from_millis(20);
/// Looked at also when nothing happened, for what only time changes.
const REST: Duration = Duration::from_secs(5);

/// What the controller is told.
#[derive(Debug)]
pub(crate) enum Notice {
    Pool(Change<BranchPool>),
    Node(Change<Node>),
    Source(sources::Key, sources::Content),
    /// A node's answer to what it was told about a pool.
    Told(NodeName, Uid, Result<(), CallError>),
    PoolWritten(Uid, Box<BranchPoolStatus>, Result<(), WriteError>),
    NodeWritten(NodeName, nodes::Written),
    /// Why no agent can be there, where that is known: reason and sentence.
    AgentNamespace(Option<(&'static str, String)>),
    /// Whether a pool that agents have, and the API server's list has not, is gone.
    Confirmed(Uid, bool),
}

pub(crate) struct Controller {
    cluster: Cluster,
    index: watch::Receiver<Index>,
    epoch: watch::Receiver<u64>,
    deposed: mpsc::Sender<Option<u64>>,
    leases: mpsc::Sender<Event>,
    /// To the index.
    agents: mpsc::Sender<Report>,
    notices: mpsc::Sender<Notice>,
    record: Events,
    metrics: Metrics,
    scope: Scope,
    pools: BTreeMap<Uid, PoolFacts>,
    /// Pools that exist and cannot be decoded.
    opaque: BTreeSet<Uid>,
    pools_listed: bool,
    nodes: BTreeMap<NodeName, NodeFacts>,
    nodes_listed: bool,
    sources: Sources,
    sent: BTreeMap<(NodeName, Uid), Sent>,
    /// Pools of agents alone: `true` when they are gone for sure.
    orphans: BTreeMap<Uid, bool>,
    reports: NodeReports,
    closed: BTreeSet<NodeName>,
    agent_namespace: String,
    no_agents: NoAgents,
    settled: bool,
    started: Instant,
}

/// What the controller is given.
pub(crate) struct Parts {
    pub(crate) cluster: Cluster,
    pub(crate) index: watch::Receiver<Index>,
    pub(crate) epoch: watch::Receiver<u64>,
    pub(crate) deposed: mpsc::Sender<Option<u64>>,
    pub(crate) leases: mpsc::Sender<Event>,
    pub(crate) agents: mpsc::Sender<Report>,
    /// The way back to the controller.
    pub(crate) notices: mpsc::Sender<Notice>,
    pub(crate) record: Events,
    pub(crate) metrics: Metrics,
    pub(crate) scope: Scope,
    pub(crate) agent_namespace: String,
}

impl Controller {
    pub(crate) fn new(parts: Parts) -> Self {
        Self {
            sources: Sources::new(parts.cluster.client(), parts.notices.clone()),
            cluster: parts.cluster,
            index: parts.index,
            epoch: parts.epoch,
            deposed: parts.deposed,
            leases: parts.leases,
            agents: parts.agents,
            notices: parts.notices,
            record: parts.record,
            metrics: parts.metrics,
            scope: parts.scope,
            pools: BTreeMap::new(),
            opaque: BTreeSet::new(),
            pools_listed: false,
            nodes: BTreeMap::new(),
            nodes_listed: false,
            sent: BTreeMap::new(),
            orphans: BTreeMap::new(),
            reports: NodeReports::default(),
            closed: BTreeSet::new(),
            agent_namespace: parts.agent_namespace,
            no_agents: NoAgents::default(),
            settled: false,
            started: Instant::now(),
        }
    }

    pub(crate) async fn run(mut self, mut notices: mpsc::Receiver<Notice>) {
        let mut next = Instant::now() + REST;
        loop {
            tokio::select! {
                notice = notices.recv() => {
                    let Some(notice) = notice else { return };
                    self.take(notice).await;
                }
                changed = self.index.changed() => {
                    if changed.is_err() {
                        return;
                    }
                }
                () = sleep_until(next) => {}
            }
            tokio::time::sleep(BREATH).await;
            while let Ok(notice) = notices.try_recv() {
                self.take(notice).await;
            }
            let due = self.look().await;
            let wait = due.saturating_sub(clock::now()).max(1);
            next = Instant::now() + REST.min(Duration::from_millis(wait));
        }
    }

    async fn take(&mut self, notice: Notice) {
        match notice {
            Notice::Pool(change) => self.pool_changed(change).await,
            Notice::Node(change) => self.node_changed(change).await,
            Notice::Source(key, content) => self.sources.take(&key, content),
            Notice::Told(node, pool, result) => self.answered(&node, &pool, result),
            Notice::PoolWritten(uid, status, result) => {
                if let Some(pool) = self.pools.get_mut(&uid) {
                    pool.written(*status, &result);
                }
            }
            Notice::NodeWritten(node, written) => self.reports.written(&node, written),
            Notice::AgentNamespace(why) => self.no_agents.answered(why),
            Notice::Confirmed(uid, gone) => {
                if gone {
                    self.orphans.insert(uid, true);
                } else {
                    self.orphans.remove(&uid);
                }
            }
        }
    }

    /// Looks at everything; answers when to look again at the latest.
    async fn look(&mut self) -> u64 {
        let index = self.index.borrow_and_update().clone();
        self.settle(&index).await;
        self.tell_closed(&index).await;
        if !(self.pools_listed && self.nodes_listed && index.discovered) {
            return u64::MAX;
        }
        self.sources.want(self.pools.values());
        self.look_for_agents(&index);
        let mut due = u64::MAX;
        for uid in self.pools.keys().cloned().collect::<Vec<_>>() {
            due = due.min(self.look_at_pool(&uid, &index));
        }
        self.look_for_orphans(&index);
        self.forget_answers(&index);
        due.min(self.look_at_nodes(&index).await)
    }

    async fn pool_changed(&mut self, change: Change<BranchPool>) {
        match change {
            Change::Seen(pool) => {
                let Some(facts) = PoolFacts::read(*pool) else {
                    return;
                };
                self.opaque.remove(&facts.id.uid);
                let event = Event::Pool(Box::new(terms(&facts)));
                match self.pools.get_mut(&facts.id.uid) {
                    Some(known) => known.update(facts),
                    None => drop(self.pools.insert(facts.id.uid.clone(), facts)),
                }
                let _stopped = self.leases.send(event).await;
            }
            // What its nodes were told stays in force.
            Change::Invalid(metadata) => self.opaque.extend(metadata.uid.map(Uid::from)),
            Change::Deleted(metadata) => self.pool_deleted(&metadata).await,
            Change::Listed(uids) => {
                let gone: Vec<Uid> = (self.pools.keys().chain(&self.opaque))
                    .filter(|uid| !uids.contains(*uid))
                    .cloned()
                    .collect();
                for uid in gone {
                    self.drop_pool(&uid, false).await;
                }
                self.pools_listed = true;
            }
        }
    }

    async fn pool_deleted(&mut self, metadata: &ObjectMeta) {
        if let Some(uid) = metadata.uid.as_deref().map(Uid::from) {
            self.drop_pool(&uid, true).await;
        }
    }

    /// `sure`: the API server said so of this very pool.
    async fn drop_pool(&mut self, uid: &Uid, sure: bool) {
        self.opaque.remove(uid);
        if sure {
            self.orphans.insert(uid.clone(), true);
        }
        let Some(gone) = self.pools.remove(uid) else {
            return;
        };
        // Another one may have the name already.
        if self.pools.values().all(|pool| pool.name() != gone.name()) {
            let event = Event::PoolDeleted(gone.name());
            let _stopped = self.leases.send(event).await;
        }
    }

    async fn node_changed(&mut self, change: Change<Node>) {
        match change {
            Change::Seen(node) => {
                if let Some((name, facts)) = NodeFacts::read(*node) {
                    self.nodes.insert(name, facts);
                }
            }
            Change::Deleted(metadata) => {
                if let Some(name) = metadata.name {
                    self.nodes.remove(name.as_str());
                }
            }
            Change::Listed(uids) => {
                self.nodes.retain(|_, node| uids.contains(&node.uid));
                self.nodes_listed = true;
            }
            Change::Invalid(_) => return,
        }
        if self.nodes_listed {
            let names = self.nodes.keys().cloned().collect();
            let _stopped = self.agents.send(Report::Nodes(names)).await;
        }
    }
}

/// Brings pools and nodes of the API server to the controller.
pub(crate) async fn follow_pools(scope: Scope, client: Client, notices: mpsc::Sender<Notice>) {
    let mut changes = follow::changes(scope.apis(&client), &follow::config());
    while let Some(change) = changes.next().await {
        let _stopped = notices.send(Notice::Pool(change)).await;
    }
}

pub(crate) async fn follow_nodes(client: Client, notices: mpsc::Sender<Notice>) {
    let api = vec![kube::Api::all(client)];
    let mut changes = follow::changes(api, &follow::config());
    while let Some(change) = changes.next().await {
        let _stopped = notices.send(Notice::Node(change)).await;
    }
}

/// What a node is told of a pool, without the epoch.
fn desired_pool(id: &ObjectRef, generation: i64, spec: serde_json::Value) -> DesiredPool {
    DesiredPool {
        namespace: id.namespace.clone(),
        name: id.name.clone(),
        generation: u64::try_from(generation).unwrap_or(0),
        epoch: None,
        spec,
    }
}
