//! The agents as the machine knows them: who answers, and how many branches are ready where.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use branchpool_agent_api::{PoolName, PoolStatus};
use branchpool_crds::Placement;

use super::Uid;
use crate::plan::{Millis, NodeName, placement};

#[derive(Debug)]
enum Link {
    Synced,
    Silent { since: Millis },
}

/// A branch that a call counts on. It is given up when the agent's own count has taken note of the
/// lease: the lease comes first in the watch, the count that includes it after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reservation {
    Called,
    LeaseSeen,
}

#[derive(Debug, Default)]
struct Stock {
    uid: String,
    ready: u32,
    leased: u32,
    reserved: HashMap<Uid, Reservation>,
    /// The agent had nothing, or did not answer: not before this time, or its next count.
    not_before: Millis,
}

#[derive(Debug)]
struct Agent {
    link: Link,
    pools: BTreeMap<PoolName, Stock>,
}

#[derive(Debug, Default)]
pub(super) struct Fleet {
    agents: BTreeMap<NodeName, Agent>,
    /// Nodes of the cluster, from a complete list; empty before that.
    cluster: BTreeSet<NodeName>,
    closed: BTreeSet<NodeName>,
}

impl Fleet {
    pub(super) fn set_cluster(&mut self, nodes: BTreeSet<NodeName>) {
        // An empty list is no proof that every node is gone.
        if !nodes.is_empty() {
            self.cluster = nodes;
        }
    }

    pub(super) fn set_closed(&mut self, nodes: BTreeSet<NodeName>) {
        self.closed = nodes;
    }

    pub(super) fn is_synced(&self, node: &NodeName) -> bool {
        let agent = self.agents.get(node);
        agent.is_some_and(|agent| matches!(agent.link, Link::Synced))
    }

    /// Since when the node is silent; for one that was never heard of, since the beginning.
    pub(super) fn silent_since(&self, node: &NodeName) -> Option<Millis> {
        match self.agents.get(node).map(|agent| &agent.link) {
            Some(Link::Synced) => None,
            Some(Link::Silent { since }) => Some(*since),
            None => Some(0),
        }
    }

    /// The cluster has no such node any more, and nothing answers for it.
    pub(super) fn is_gone(&self, node: &NodeName) -> bool {
        !self.cluster.is_empty() && !self.cluster.contains(node) && !self.is_synced(node)
    }

    pub(super) fn drop_gone(&mut self) -> Vec<NodeName> {
        let gone = self.agents.keys().filter(|node| self.is_gone(node));
        let gone: Vec<NodeName> = gone.cloned().collect();
        for node in &gone {
            self.agents.remove(node);
        }
        gone
    }

    pub(super) fn snapshot(
        &mut self,
        node: &NodeName,
        pools: &[PoolStatus],
        leases: &HashSet<Uid>,
    ) {
        let agent = self.agent(node);
        agent.link = Link::Synced;
        let mut stocks = BTreeMap::new();
        for pool in pools {
            let mut stock = agent.pools.remove(&pool.name).unwrap_or_default();
            // What this snapshot knows of is counted in it.
            stock.reserved.retain(|uid, _| !leases.contains(uid));
            stock.count(pool);
            stocks.insert(pool.name.clone(), stock);
        }
        agent.pools = stocks;
    }

    pub(super) fn resumed(&mut self, node: &NodeName) {
        self.agent(node).link = Link::Synced;
    }

    pub(super) fn silent(&mut self, node: &NodeName, now: Millis) {
        let agent = self.agent(node);
        if matches!(agent.link, Link::Synced) {
            agent.link = Link::Silent { since: now };
        }
    }

    pub(super) fn pool(&mut self, node: &NodeName, pool: &PoolStatus) {
        let stock = self.agent(node).pools.entry(pool.name.clone()).or_default();
        if !stock.uid.is_empty() && stock.uid != pool.uid && pool.desired == 0 {
            // What is left of a pool of the same name that was deleted.
            return;
        }
        stock
            .reserved
            .retain(|_, state| *state == Reservation::Called);
        stock.count(pool);
    }

    pub(super) fn pool_gone(&mut self, node: &NodeName, uid: &str) {
        self.agent(node).pools.retain(|_, stock| stock.uid != uid);
    }

    pub(super) fn lease_seen(&mut self, node: &NodeName, pool: &PoolName, uid: &Uid) {
        if let Some(state) = self
            .agent(node)
            .pools
            .get_mut(pool)
            .and_then(|stock| stock.reserved.get_mut(uid))
        {
            *state = Reservation::LeaseSeen;
        }
    }

    /// The node for the pool's next lease, with its branch counted as taken.
    pub(super) fn reserve(
        &mut self,
        pool: &PoolName,
        placement: Placement,
        uid: &Uid,
        now: Millis,
    ) -> Option<NodeName> {
        let open = self.agents.iter().filter(|(node, agent)| {
            matches!(agent.link, Link::Synced) && !self.closed.contains(*node)
        });
        let stocks = open.filter_map(|(node, agent)| {
            let stock = agent.pools.get(pool)?;
            Some(placement::Stock {
                node: node.clone(),
                available: stock.available(now),
                leased: stock.leased,
            })
        });
        let node = placement::choose(placement, stocks)?;
        let stock = self.agents.get_mut(&node)?.pools.get_mut(pool)?;
        stock.reserved.insert(uid.clone(), Reservation::Called);
        Some(node)
    }

    /// The call came to nothing. `not_before`: ask the node no sooner, unless it counts anew.
    /// The pools that count anew for it.
    pub(super) fn give_up(&mut self, node: &NodeName, uid: &Uid, until: Millis) -> Vec<PoolName> {
        let mut freed = Vec::new();
        let stocks = self.agents.get_mut(node).map(|agent| &mut agent.pools);
        for (pool, stock) in stocks.into_iter().flatten() {
            if stock.reserved.remove(uid).is_some() {
                stock.not_before = stock.not_before.max(until);
                freed.push(pool.clone());
            }
        }
        freed
    }

    /// Nothing is left of the lease, whatever calls for it came to.
    pub(super) fn forget(&mut self, uid: &Uid) -> Vec<PoolName> {
        let nodes: Vec<NodeName> = self.agents.keys().cloned().collect();
        let freed = nodes.iter().map(|node| self.give_up(node, uid, 0));
        freed.flatten().collect()
    }

    /// Nothing was ready for a lease that has its branch.
    pub(super) fn pause(&mut self, node: &NodeName, pool: &PoolName, until: Millis) {
        let stock = self
            .agents
            .get_mut(node)
            .and_then(|agent| agent.pools.get_mut(pool));
        if let Some(stock) = stock {
            stock.not_before = stock.not_before.max(until);
        }
    }

    /// When a node that was passed over may be asked again.
    pub(super) fn next_try(&self, pool: &PoolName, now: Millis) -> Option<Millis> {
        let stocks = self
            .agents
            .values()
            .filter_map(|agent| agent.pools.get(pool));
        let later = stocks.map(|stock| stock.not_before).filter(|at| *at > now);
        later.min()
    }

    pub(super) fn has_ready(&self, node: &NodeName, pool: &PoolName, now: Millis) -> bool {
        let stock = self
            .agents
            .get(node)
            .and_then(|agent| agent.pools.get(pool));
        stock.is_some_and(|stock| stock.available(now) > 0)
    }

    fn agent(&mut self, node: &NodeName) -> &mut Agent {
        self.agents.entry(node.clone()).or_insert_with(|| Agent {
            link: Link::Silent { since: 0 },
            pools: BTreeMap::new(),
        })
    }
}

impl Stock {
    fn count(&mut self, pool: &PoolStatus) {
        self.uid.clone_from(&pool.uid);
        self.ready = pool.ready;
        self.leased = pool.leased;
        self.not_before = 0;
    }

    fn available(&self, now: Millis) -> u32 {
        if now < self.not_before {
            return 0;
        }
        let reserved = u32::try_from(self.reserved.len()).unwrap_or(u32::MAX);
        self.ready.saturating_sub(reserved)
    }
}
