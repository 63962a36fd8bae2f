//! What nodes are told of pools, and what they answered.

use std::collections::BTreeSet;

use branchpool_agent_api::problem::reason;
use branchpool_crds::BranchPoolSpec;
use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use tracing::{info, warn};

use super::{Controller, Notice, desired_pool, state::PoolFacts};
use crate::{
    clock, hook,
    index::{Agent, Index},
    leases::refusal,
    plan::{
        Millis, NodeName, SECOND, Uid,
        leases::CallError,
        placement::{Candidate, Order, Share, Standing, place},
    },
};

/// A node that is silent keeps its share for so long.
const PATIENCE: Millis = 30 * SECOND;
/// Between two tries to tell a node the same.
const RETRY: Millis = 2 * SECOND;

/// What a node was told last of a pool.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    /// Of the agent: another one is told anew.
    instance: String,
    /// Of everything that was said.
    digest: String,
    under_way: bool,
    refused: Option<String>,
    retry_at: Millis,
}

impl Controller {
    /// Tells the pool's nodes what is new; answers when to look again.
    pub(super) fn look_at_pool(&mut self, uid: &Uid, index: &Index) -> Millis {
        let Some(pool) = self.pools.get(uid) else {
            return u64::MAX;
        };
        let now = clock::now();
        let standings = self.standings(pool, index, now);
        let mut due = standings
            .iter()
            .filter(|(_, standing, _)| *standing == Standing::Silent)
            .map(|(_, _, agent)| agent.silent_since + PATIENCE)
            .min()
            .unwrap_or(u64::MAX);
        let spec = self.sources.resolve(pool);
        if let Ok(spec) = &spec
            && !pool.deleting
        {
            let candidates = standings
                .iter()
                .map(|(node, standing, agent)| candidate(uid, node, *standing, agent));
            let candidates: Vec<Candidate> = candidates.collect();
            for (node, order) in place(pool.demand(), &candidates).unwrap_or_default() {
                if let Some(agent) = index.agents.get(&node) {
                    due = due.min(self.tell(uid, &node, agent, order, spec, now));
                }
            }
        }
        let trouble = spec.err();
        due.min(self.write_pool(
            uid,
            index,
            &standings_by_node(&standings),
            trouble.as_ref(),
            now,
        ))
    }

    /// What each node is to the pool.
    fn standings<'a>(
        &self,
        pool: &PoolFacts,
        index: &'a Index,
        now: Millis,
    ) -> Vec<(NodeName, Standing, &'a Agent)> {
        let agents = index.agents.iter();
        agents
            .filter(|(name, agent)| !self.left(name, agent))
            .map(|(name, agent)| {
                (
                    name.clone(),
                    self.standing(pool, name, agent, now),
                    &**agent,
                )
            })
            .collect()
    }

    fn standing(&self, pool: &PoolFacts, name: &NodeName, agent: &Agent, now: Millis) -> Standing {
        let Some(facts) = self.nodes.get(name) else {
            // An empty list of nodes is no proof that all are gone.
            return if self.nodes.is_empty() {
                Standing::Silent
            } else {
                Standing::Unfit
            };
        };
        if !facts.has_labels(&pool.spec.node_selector) {
            return Standing::Unfit;
        }
        let Some(status) = &agent.node else {
            return Standing::Resting;
        };
        if !status.postgres_majors.contains(&pool.spec.postgres.version) {
            return Standing::Unfit;
        }
        if facts.cordoned {
            return Standing::Resting;
        }
        if !agent.connected {
            return if now < agent.silent_since + PATIENCE {
                Standing::Silent
            } else {
                Standing::Resting
            };
        }
        if !status.ready {
            return Standing::Silent;
        }
        if status.gates.is_empty() {
            Standing::Eligible
        } else {
            Standing::Pressed
        }
    }

    fn tell(
        &mut self,
        uid: &Uid,
        node: &NodeName,
        agent: &Agent,
        order: Order,
        spec: &BranchPoolSpec,
        now: Millis,
    ) -> Millis {
        let Some(pool) = self.pools.get(uid) else {
            return u64::MAX;
        };
        let body = match order {
            Order::Hold(share) => {
                let mut spec = spec.clone();
                spec.replicas = share.replicas;
                spec.max_branches = share.max_branches;
                serde_json::to_value(spec).ok()
            }
            Order::Remove => None,
        };
        let digest = digest(pool.generation, body.as_ref());
        let desired = body.map(|spec| desired_pool(&pool.id, pool.generation, spec));
        self.say(uid, node, agent, digest, desired, now)
    }

    /// Says it unless it was said; answers when to try again.
    fn say(
        &mut self,
        uid: &Uid,
        node: &NodeName,
        agent: &Agent,
        digest: String,
        desired: Option<branchpool_agent_api::DesiredPool>,
        now: Millis,
    ) -> Millis {
        let Some(instance) = agent.instance.clone().filter(|_| agent.connected) else {
            return u64::MAX;
        };
        let key = (node.clone(), uid.clone());
        if let Some(sent) = self.sent.get(&key) {
            if sent.under_way {
                return u64::MAX;
            }
            let same = sent.digest == digest && sent.instance == instance;
            if same && now < sent.retry_at {
                return if sent.retry_at == u64::MAX {
                    u64::MAX
                } else {
                    sent.retry_at
                };
            }
        }
        let refused = self.sent.get(&key).and_then(|sent| sent.refused.clone());
        let sent = Sent {
            instance,
            digest,
            under_way: true,
            refused,
            retry_at: u64::MAX,
        };
        self.sent.insert(key, sent);
        let (client, notices) = (agent.client.clone(), self.notices.clone());
        let (metrics, epoch) = (self.metrics.clone(), *self.epoch.borrow());
        let (node, uid) = (node.clone(), uid.clone());
        tokio::spawn(async move {
            let result = match desired {
                Some(mut desired) => {
                    desired.epoch = Some(epoch);
                    let told = client.apply_pool(uid.as_str(), &desired).await;
                    told.map(|_| ())
                }
                None => client.remove_pool(uid.as_str(), Some(epoch)).await,
            };
            metrics.agent_call("pool", result.is_ok());
            hook::reached("pool-told");
            let notice = Notice::Told(node, uid, result.map_err(|error| refusal(&error)));
            let _stopped = notices.send(notice).await;
        });
        u64::MAX
    }

    pub(super) fn answered(&mut self, node: &NodeName, uid: &Uid, result: Result<(), CallError>) {
        let Some(sent) = self.sent.get_mut(&(node.clone(), uid.clone())) else {
            return;
        };
        sent.under_way = false;
        match result {
            Ok(()) => {
                info!(node = %node, pool = %uid, "the node was told its share");
                sent.refused = None;
            }
            Err(CallError::Refused { reason, .. }) if reason == reason::POOL_NOT_FOUND => {
                sent.refused = None;
            }
            Err(CallError::Refused {
                reason: why, epoch, ..
            }) if why == reason::STALE_EPOCH => {
                sent.retry_at = clock::now() + RETRY;
                let _full = self.deposed.try_send(epoch);
            }
            Err(CallError::Refused {
                message, reason, ..
            }) => {
                warn!(node = %node, pool = %uid, reason, "the node refused the pool: {message}");
                sent.refused = Some(message);
                sent.retry_at = clock::now() + 15 * RETRY;
            }
            Err(CallError::Unreachable(why)) => {
                warn!(node = %node, pool = %uid, "the node could not be told: {why}");
                sent.retry_at = clock::now() + RETRY;
            }
        }
    }

    pub(super) fn refusal_of(&self, node: &NodeName, uid: &Uid) -> Option<&str> {
        let sent = self.sent.get(&(node.clone(), uid.clone()))?;
        sent.refused.as_deref()
    }

    /// Pools that agents have and nobody wants any more.
    pub(super) fn look_for_orphans(&mut self, index: &Index) {
        let mut alone: BTreeSet<Uid> = BTreeSet::new();
        for agent in index.agents.values() {
            let uids = agent.pools.keys().map(|uid| Uid::from(uid.as_str()));
            alone.extend(
                uids.filter(|uid| !self.pools.contains_key(uid) && !self.opaque.contains(uid)),
            );
        }
        self.orphans.retain(|uid, _| alone.contains(uid));
        for uid in alone {
            match self.orphans.get(&uid) {
                Some(true) => self.remove_orphan(&uid, index),
                Some(false) => {}
                None => {
                    self.orphans.insert(uid.clone(), false);
                    self.confirm_gone(uid, index);
                }
            }
        }
    }

    fn remove_orphan(&mut self, uid: &Uid, index: &Index) {
        let now = clock::now();
        for (node, agent) in &index.agents {
            if agent.pools.contains_key(uid.as_str()) {
                self.say(uid, node, agent, "removed".to_owned(), None, now);
            }
        }
    }

    /// By a live read: a list may be older than what an agent says.
    fn confirm_gone(&self, uid: Uid, index: &Index) {
        let mut pools = index.agents.values().flat_map(|agent| agent.pools.values());
        let Some(name) = pools
            .find(|pool| pool.uid == uid.as_str())
            .map(|pool| pool.name.clone())
        else {
            return;
        };
        // Somebody else's pools are somebody else's.
        if !self.scope.holds(&name.namespace) {
            return;
        }
        let (client, notices) = (self.cluster.client(), self.notices.clone());
        tokio::spawn(async move {
            let api: kube::Api<branchpool_crds::BranchPool> =
                kube::Api::namespaced(client, &name.namespace);
            let found = api.get_metadata_opt(&name.name).await;
            let gone = found.is_ok_and(|found| {
                found.and_then(|found| found.metadata.uid).as_deref() != Some(uid.as_str())
            });
            let _stopped = notices.send(Notice::Confirmed(uid, gone)).await;
        });
    }

    /// What was said to nodes and of pools that are gone.
    pub(super) fn forget_answers(&mut self, index: &Index) {
        let (pools, orphans) = (&self.pools, &self.orphans);
        self.sent.retain(|(node, uid), sent| {
            let known = pools.contains_key(uid) || orphans.contains_key(uid);
            sent.under_way || (index.agents.contains_key(node) && known)
        });
    }
}

fn standings_by_node(standings: &[(NodeName, Standing, &Agent)]) -> Vec<(NodeName, Standing)> {
    let pairs = standings
        .iter()
        .map(|(node, standing, _)| (node.clone(), *standing));
    pairs.collect()
}

fn candidate(uid: &Uid, name: &NodeName, standing: Standing, agent: &Agent) -> Candidate {
    let pool = agent.pools.get(uid.as_str());
    let existing = |pool: &branchpool_agent_api::PoolStatus| {
        pool.ready + pool.warming + pool.leased + pool.cleaning
    };
    let others = agent.pools.values().filter(|pool| pool.uid != uid.as_str());
    let taken: u32 = others
        .map(|pool| existing(pool).max(pool.desired + pool.leased))
        .sum();
    let slots = agent.node.as_ref().map_or(0, |node| node.max_branches);
    Candidate {
        name: name.clone(),
        standing,
        room: slots.saturating_sub(taken),
        held: pool.map_or(0, |pool| pool.ready + pool.warming),
        existing: pool.map_or(0, existing),
        in_force: pool.map(|pool| Share {
            replicas: pool.desired,
            max_branches: pool.max_branches,
        }),
    }
}

fn digest(generation: i64, body: Option<&serde_json::Value>) -> String {
    let Some(body) = body else {
        return "removed".to_owned();
    };
    // Maps are sorted, so equal bodies have equal texts.
    let text = format!("{generation} {body}");
    HEXLOWER.encode(&Sha256::digest(text)[..16])
}
