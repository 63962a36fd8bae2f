//! `BranchNode`s, and what leases have to know of nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use branchpool_crds::{BranchNode, BranchNodeSpec, BranchNodeStatus};
use kube::Api;
use tokio::time::Instant;
use tracing::{info, warn};

use super::{Controller, Notice};
use crate::{
    clock,
    cluster::{Cluster, describe},
    index::{self, Agent, Index},
    plan::{
        Millis, NodeName, SECOND,
        leases::Event,
        nodes::{Report, WRITE_EVERY, status},
    },
};

/// Agents that were found have so long to be heard before leases are handed out without them.
const HEARING: Duration = Duration::from_secs(5);
const RETRY: Millis = 10 * SECOND;

/// What came of a write.
#[derive(Debug)]
pub(crate) enum Written {
    Status(String, Box<BranchNodeStatus>),
    Deleted,
    Failed(String),
}

#[derive(Debug, Default)]
struct Kept {
    /// UID and status of the object, once it was read or made.
    known: Option<(String, BranchNodeStatus)>,
    busy: bool,
    /// The node left the cluster, and its object is gone.
    retired: bool,
    not_before: Millis,
}

#[derive(Debug, Default)]
pub(super) struct NodeReports {
    kept: BTreeMap<NodeName, Kept>,
}

impl NodeReports {
    pub(super) fn written(&mut self, node: &NodeName, written: Written) {
        let Some(kept) = self.kept.get_mut(node) else {
            return;
        };
        kept.busy = false;
        match written {
            Written::Status(uid, status) => kept.known = Some((uid, *status)),
            Written::Deleted => {
                *kept = Kept {
                    retired: true,
                    ..Kept::default()
                };
            }
            Written::Failed(why) => {
                warn!(node = %node, "the BranchNode was not written: {why}");
                // It may have been deleted by hand.
                kept.known = None;
                kept.not_before = clock::now() + RETRY;
            }
        }
    }
}

impl Controller {
    /// Once everything is known: leases may be handed out.
    pub(super) async fn settle(&mut self, index: &Index) {
        if self.settled || !(self.pools_listed && self.nodes_listed && index.discovered) {
            return;
        }
        let heard = index.agents.values().all(|agent| agent.connected);
        let late = Instant::now() >= self.started + HEARING;
        if heard || late {
            self.settled = true;
            info!(
                pools = self.pools.len(),
                agents = index.agents.len(),
                "everything is known that can be known now"
            );
            let _stopped = self.leases.send(Event::Settled).await;
        }
    }

    /// Nodes whose branches nobody is to get.
    pub(super) async fn tell_closed(&mut self, index: &Index) {
        let cordoned = self.nodes.iter().filter(|(_, node)| node.cordoned);
        let mut closed: BTreeSet<NodeName> = cordoned.map(|(name, _)| name.clone()).collect();
        let stopping = index
            .agents
            .iter()
            .filter(|(_, agent)| agent.node.as_ref().is_some_and(|node| !node.ready));
        closed.extend(stopping.map(|(name, _)| name.clone()));
        if closed != self.closed {
            self.closed.clone_from(&closed);
            let _stopped = self.leases.send(Event::Closed(closed)).await;
        }
    }

    /// Answers when to look again.
    pub(super) async fn look_at_nodes(&mut self, index: &Index) -> Millis {
        if !self.settled {
            return u64::MAX;
        }
        let now = clock::now();
        let mut due = u64::MAX;
        let kept = &mut self.reports.kept;
        kept.retain(|node, kept| kept.busy || index.agents.contains_key(node));
        for (node, agent) in &index.agents {
            if self.nodes.is_empty() || self.nodes.contains_key(node) {
                due = due.min(self.report(node, agent, now));
            }
            if !self.left(node, agent) {
                continue;
            }
            due = due.min(self.retire(node, now));
            let retired = self.reports.kept.get(node).is_some_and(|kept| kept.retired);
            if retired && !agent.present {
                let forget = index::Report::Forget(node.clone());
                let _stopped = self.agents.send(forget).await;
            }
        }
        due
    }

    /// The cluster has no such node any more, and nothing answers for it. Its agent's Pod is listed for a
    /// minute longer, as nobody is there to end it.
    pub(super) fn left(&self, node: &NodeName, agent: &Agent) -> bool {
        // An empty list of nodes is no proof that all are gone.
        !self.nodes.is_empty() && !self.nodes.contains_key(node) && !agent.connected
    }

    fn report(&mut self, node: &NodeName, agent: &Agent, now: Millis) -> Millis {
        let cordoned = self.nodes.get(node).is_some_and(|node| node.cordoned);
        let kept = self.reports.kept.entry(node.clone()).or_default();
        if kept.busy {
            return u64::MAX;
        }
        kept.retired = false;
        if now < kept.not_before {
            return kept.not_before;
        }
        let report = Report {
            node: agent.node.as_deref(),
            pools: agent.pools.values().collect(),
            connected: agent.connected,
            trouble: agent.trouble.as_deref(),
            cordoned,
        };
        let before = kept.known.as_ref().map(|(_, status)| status);
        let new = match (&kept.known, status(&report, before, now)) {
            (_, Some(new)) => new,
            (Some(_), None) => return u64::MAX,
            (None, None) => BranchNodeStatus::default(),
        };
        kept.busy = true;
        kept.not_before = now + WRITE_EVERY;
        let known = kept.known.clone();
        let (cluster, notices, node) = (self.cluster.clone(), self.notices.clone(), node.clone());
        tokio::spawn(async move {
            let written = write(&cluster, &node, known, new).await;
            let written = written.unwrap_or_else(|error| Written::Failed(describe(&error)));
            let _stopped = notices.send(Notice::NodeWritten(node, written)).await;
        });
        now + WRITE_EVERY
    }

    /// The node left the cluster.
    fn retire(&mut self, node: &NodeName, now: Millis) -> Millis {
        let kept = self.reports.kept.entry(node.clone()).or_default();
        if kept.retired {
            return u64::MAX;
        }
        if kept.busy || now < kept.not_before {
            return kept.not_before.max(now + SECOND);
        }
        kept.busy = true;
        kept.not_before = now + RETRY;
        let (cluster, notices, node) = (self.cluster.clone(), self.notices.clone(), node.clone());
        tokio::spawn(async move {
            let api: Api<BranchNode> = Api::all(cluster.client());
            let written = match cluster
                .delete("node_delete", &api, node.as_str(), None)
                .await
            {
                Ok(()) => Written::Deleted,
                Err(kube::Error::Api(status)) if status.code == 404 => Written::Deleted,
                Err(error) => Written::Failed(describe(&error)),
            };
            let _stopped = notices.send(Notice::NodeWritten(node, written)).await;
        });
        u64::MAX
    }
}

/// With the object made first where it is not there.
async fn write(
    cluster: &Cluster,
    node: &NodeName,
    known: Option<(String, BranchNodeStatus)>,
    new: BranchNodeStatus,
) -> Result<Written, kube::Error> {
    let api: Api<BranchNode> = Api::all(cluster.client());
    let (uid, before) = match known {
        Some(known) => known,
        None => read_or_make(cluster, &api, node).await?,
    };
    if before != new {
        cluster
            .patch_status("node_status", &api, node.as_str(), &uid, &new)
            .await?;
    }
    Ok(Written::Status(uid, Box::new(new)))
}

async fn read_or_make(
    cluster: &Cluster,
    api: &Api<BranchNode>,
    node: &NodeName,
) -> Result<(String, BranchNodeStatus), kube::Error> {
    if let Some(found) = api.get_opt(node.as_str()).await? {
        let uid = found.metadata.uid.unwrap_or_default();
        return Ok((uid, found.status.unwrap_or_default()));
    }
    let object = BranchNode::new(node.as_str(), BranchNodeSpec {});
    let made = cluster.create("node_create", api, &object).await?;
    Ok((
        made.metadata.uid.unwrap_or_default(),
        BranchNodeStatus::default(),
    ))
}
