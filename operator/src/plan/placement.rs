//! How many branches of a pool each node is to hold.
//!
//! Each node gets a share of `replicas` and of `maxBranches`. What nodes are allowed together never
//! exceeds `maxBranches`, not even while shares move: a share grows only by what others have given
//! up, as their agents report it.

use std::{cmp::Reverse, collections::BTreeMap};

use branchpool_crds::Placement;

use super::NodeName;

/// What a node is to a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// May hold branches.
    Eligible,
    /// Short of something: it keeps what it has and gets nothing more.
    Pressed,
    /// Not heard of for a moment: its share stays as it is.
    Silent,
    /// Cordoned, stopping, or silent for long: it is to hold nothing, and keeps its golden image.
    Resting,
    /// Not a node for this pool: labels, or no such Postgres.
    Unfit,
}

/// What a node was told last, as its agent reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    pub replicas: u32,
    pub max_branches: u32,
}

#[derive(Clone, Debug)]
pub struct Candidate {
    pub name: NodeName,
    pub standing: Standing,
    /// Most branches of this pool that fit.
    pub room: u32,
    /// Ready and in the making.
    pub held: u32,
    /// All that exist, leased ones included.
    pub existing: u32,
    /// Absent: the node does not know the pool.
    pub in_force: Option<Share>,
}

impl Candidate {
    fn active(&self) -> bool {
        matches!(self.standing, Standing::Eligible | Standing::Pressed)
    }

    fn replicas_in_force(&self) -> u32 {
        self.in_force.map_or(0, |share| share.replicas)
    }

    /// What the node may have by now without asking again.
    fn committed(&self) -> u32 {
        // A node with no replicas makes no branches, whatever its share of maxBranches is.
        let allowed = self
            .in_force
            .filter(|share| share.replicas > 0)
            .map_or(0, |share| share.max_branches);
        allowed.max(self.existing)
    }

    /// Most that it may have.
    fn most(&self) -> u32 {
        match self.standing {
            Standing::Pressed => self.room.min(self.existing.max(self.held)),
            _ => self.room,
        }
    }

    fn most_replicas(&self) -> u32 {
        match self.standing {
            Standing::Pressed => self.most().min(self.held),
            _ => self.room,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Demand {
    pub replicas: u32,
    pub max_branches: u32,
    pub placement: Placement,
}

/// What a node is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Hold(Share),
    /// It drops what is not leased.
    Remove,
}

/// The orders for all nodes that have something to be told. `None`: no node can hold branches, and
/// what the nodes have stays as it is.
pub fn place(demand: Demand, nodes: &[Candidate]) -> Option<BTreeMap<NodeName, Order>> {
    if !nodes.iter().any(Candidate::active) {
        return None;
    }
    let ideal = ideal_shares(demand, nodes);
    let granted = granted_shares(demand, nodes, &ideal);
    let orders = nodes.iter().zip(granted).filter_map(|(node, share)| {
        let order = match node.standing {
            Standing::Silent => return None,
            Standing::Unfit => node.in_force.map(|_| Order::Remove)?,
            Standing::Resting => node.in_force.map(|_| Order::Hold(Share::resting()))?,
            // Nothing of a maxBranches below the number of nodes.
            _ if share.max_branches == 0 => node.in_force.map(|_| Order::Hold(Share::resting()))?,
            Standing::Eligible | Standing::Pressed => Order::Hold(share),
        };
        Some((node.name.clone(), order))
    });
    Some(orders.collect())
}

impl Share {
    /// No branches are made; a share of maxBranches is at least 1.
    pub const fn resting() -> Self {
        Self {
            replicas: 0,
            max_branches: 1,
        }
    }
}

fn ideal_shares(demand: Demand, nodes: &[Candidate]) -> Vec<Share> {
    let silent = |field: fn(&Share) -> u32| -> u32 {
        nodes
            .iter()
            .filter(|node| node.standing == Standing::Silent)
            .filter_map(|node| node.in_force.as_ref())
            .map(field)
            .sum()
    };
    let replicas = demand.replicas.saturating_sub(silent(|s| s.replicas));
    let max = (demand.max_branches).saturating_sub(silent(|share| share.max_branches));
    let active: Vec<usize> = (0..nodes.len())
        .filter(|index| nodes[*index].active())
        .collect();
    // Who has most comes first, so that a remainder stays where it is.
    let mut order = active.clone();
    order.sort_by_key(|index| {
        let node = &nodes[*index];
        let weight = match demand.placement {
            Placement::Spread => node.replicas_in_force(),
            Placement::Pack => node.replicas_in_force().max(node.existing),
        };
        (Reverse(weight), node.name.clone())
    });
    let divide = |total: u32, bounds: &[(u32, u32)]| match demand.placement {
        Placement::Spread => level(total, bounds),
        Placement::Pack => fill(total, bounds),
    };
    let bounds: Vec<_> = order
        .iter()
        .map(|index| (0, nodes[*index].most_replicas()))
        .collect();
    let replicas = divide(replicas.min(max), &bounds);
    let bounds: Vec<_> = order
        .iter()
        .zip(&replicas)
        .map(|(index, lower)| (*lower, nodes[*index].most().max(*lower)))
        .collect();
    let maxima = divide(max, &bounds);
    let mut shares = vec![Share::default(); nodes.len()];
    for ((index, replicas), max_branches) in order.into_iter().zip(replicas).zip(maxima) {
        shares[index] = Share {
            replicas,
            max_branches,
        };
    }
    shares
}

/// As even as the bounds allow; who comes first gets what does not divide.
fn level(total: u32, bounds: &[(u32, u32)]) -> Vec<u32> {
    let at = |level: u32| {
        bounds
            .iter()
            .map(move |(low, high)| level.clamp(*low, *high))
    };
    let sum = |level: u32| at(level).map(u64::from).sum::<u64>();
    // Highest level that is not too much.
    let (mut low, mut high) = (0, total);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if sum(middle) <= u64::from(total) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    let mut shares: Vec<u32> = at(low).collect();
    let mut left = u64::from(total).saturating_sub(sum(low));
    for (share, (_, high)) in shares.iter_mut().zip(bounds) {
        if left > 0 && *share == low && *share < *high {
            *share += 1;
            left -= 1;
        }
    }
    shares
}

/// One after the other, none below its lower bound.
fn fill(total: u32, bounds: &[(u32, u32)]) -> Vec<u32> {
    let lower: u32 = bounds.iter().map(|(low, _)| low).sum();
    let mut left = total.saturating_sub(lower);
    bounds
        .iter()
        .map(|(low, high)| {
            let more = left.min(high.saturating_sub(*low));
            left -= more;
            low + more
        })
        .collect()
}

fn granted_shares(demand: Demand, nodes: &[Candidate], ideal: &[Share]) -> Vec<Share> {
    let committed = nodes.iter().map(|node| u64::from(node.committed()));
    let mut together: u64 = committed.sum();
    let grant = |(node, ideal): (&Candidate, &Share)| {
        let has = node.committed();
        let spare = u64::from(demand.max_branches).saturating_sub(together);
        let more = u64::from(ideal.max_branches.saturating_sub(has)).min(spare);
        together += more;
        let may_have = u64::from(has) + more;
        let max_branches = u32::try_from(may_have)
            .unwrap_or(u32::MAX)
            .min(ideal.max_branches);
        Share {
            replicas: ideal.replicas.min(max_branches),
            max_branches,
        }
    };
    nodes.iter().zip(ideal).map(grant).collect()
}

/// How a pool's branches lie on one node, for who chooses one of them.
#[derive(Clone, Debug)]
pub struct Stock {
    pub node: NodeName,
    /// Ready, less those that calls under way count on.
    pub available: u32,
    pub leased: u32,
}

/// The node that the next lease goes to.
pub fn choose(placement: Placement, stocks: impl Iterator<Item = Stock>) -> Option<NodeName> {
    let stocked = stocks.filter(|stock| stock.available > 0);
    let best = match placement {
        Placement::Spread => {
            stocked.max_by_key(|stock| (stock.available, Reverse(stock.node.clone())))
        }
        Placement::Pack => stocked.max_by_key(|stock| (stock.leased, Reverse(stock.node.clone()))),
    };
    best.map(|stock| stock.node)
}

#[cfg(test)]
mod tests;
