//! Leases that wait: who gets the next branch, and what the others are told.

use branchpool_agent_api::PoolName;

use super::{
    Machine, Operation,
    entry::{Place, condition},
    status,
};
use crate::plan::{Millis, SECOND, Uid};

/// A lease that waits hears of its place no more often.
const POSITION_EVERY: Millis = 10 * SECOND;
/// Places written at a time, once a second.
const POSITIONS_AT_ONCE: usize = 10;

impl Machine {
    pub(super) fn tick(&mut self, now: Millis) {
        while let Some((at, uid)) = self.wakeups.first().cloned()
            && at <= now
        {
            self.wakeups.pop_first();
            if let Some(entry) = self.entries.get_mut(&uid) {
                entry.wake = None;
                self.touched.insert(uid);
            }
        }
        while let Some((at, pool)) = self.pool_wakeups.first().cloned()
            && at <= now
        {
            self.pool_wakeups.pop_first();
            self.queues.dirty.insert(pool);
        }
        if now >= self.positions_at + SECOND {
            self.positions_at = now;
            let moved = self.queues.waiting().filter(|(position, uid)| {
                self.entries.get(*uid).is_some_and(|entry| {
                    now >= entry.position_at + POSITION_EVERY
                        && entry.live().and_then(|object| object.status.queue_position)
                            != Some(*position)
                })
            });
            let moved: Vec<Uid> = moved
                .take(POSITIONS_AT_ONCE)
                .map(|(_, uid)| uid.clone())
                .collect();
            self.touched.extend(moved);
        }
    }

    /// Gives the pool's ready branches to those who wait, the first first.
    pub(super) fn allocate(&mut self, pool: &PoolName, now: Millis) {
        let Some(terms) = self.pools.get(pool) else {
            return;
        };
        let placement = terms.placement;
        while self.settled
            && let Some(uid) = self.queues.first(pool).cloned()
        {
            let Some(node) = self.fleet.reserve(pool, placement, &uid, now) else {
                if let Some(at) = self.fleet.next_try(pool, now) {
                    self.pool_wakeups.insert((at, pool.clone()));
                }
                return;
            };
            self.queues.remove(pool, &uid);
            self.entry(&uid).place = Place::Assigned(node);
            self.advance(&uid, now);
        }
    }

    /// Tells a lease that waits why, and its place.
    pub(super) fn announce(&mut self, uid: &Uid, now: Millis) {
        let Some(entry) = self.entries.get(uid) else {
            return;
        };
        let Some(object) = entry.live() else { return };
        let Some(position) = self.queues.position(&object.pool, uid) else {
            return;
        };
        if !self.settled || entry.busy.is_some() || now < entry.retry_at {
            return;
        }
        let terms = self.pools.get(&object.pool);
        let wanted = status::pending(object, terms, Some(position));
        let wanted = status::with_times(wanted, &object.status);
        let mut same_but_place = wanted.clone();
        same_but_place.queue_position = object.status.queue_position;
        let due = now >= entry.position_at + POSITION_EVERY;
        let first = condition(&object.status.conditions, status::READY).is_none();
        if wanted == object.status || (same_but_place == object.status && !due && !first) {
            return;
        }
        let operation = Operation::Patch(object.id.clone(), Box::new(wanted));
        self.entry(uid).position_at = now;
        self.begin(uid, operation, now);
    }
}
