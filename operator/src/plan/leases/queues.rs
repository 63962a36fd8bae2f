//! The queues of all pools.

use std::collections::{BTreeMap, BTreeSet};

use branchpool_agent_api::PoolName;

use crate::plan::{
    Uid,
    queue::{Queue, Rank},
};

#[derive(Debug, Default)]
pub(super) struct Queues {
    queues: BTreeMap<PoolName, Queue>,
    /// Pools whose queue, branches or nodes have changed.
    pub(super) dirty: BTreeSet<PoolName>,
}

impl Queues {
    pub(super) fn insert(&mut self, pool: &PoolName, rank: Rank) {
        let queue = self.queues.entry(pool.clone()).or_default();
        if !queue.contains(&rank.uid) {
            self.dirty.insert(pool.clone());
        }
        queue.insert(rank);
    }

    pub(super) fn remove(&mut self, pool: &PoolName, uid: &Uid) {
        if let Some(queue) = self.queues.get_mut(pool) {
            queue.remove(uid);
            if queue.is_empty() {
                self.queues.remove(pool);
            }
        }
    }

    pub(super) fn first(&self, pool: &PoolName) -> Option<&Uid> {
        self.queues.get(pool)?.iter().next()
    }

    pub(super) fn position(&self, pool: &PoolName, uid: &Uid) -> Option<u32> {
        self.queues.get(pool)?.position(uid)
    }

    pub(super) fn lengths(&self) -> impl Iterator<Item = (&PoolName, usize)> {
        self.queues.iter().map(|(pool, queue)| (pool, queue.len()))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    /// All that wait, each with the number of leases before it.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (u32, &Uid)> {
        self.queues
            .values()
            .flat_map(|queue| (0..).zip(queue.iter()))
    }

    pub(super) fn of(&self, pool: &PoolName) -> impl Iterator<Item = &Uid> {
        self.queues.get(pool).into_iter().flat_map(Queue::iter)
    }

    pub(super) fn all_dirty(&mut self) {
        self.dirty.extend(self.queues.keys().cloned());
    }
}
