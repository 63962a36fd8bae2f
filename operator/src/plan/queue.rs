//! Who gets the next branch of a pool: by priority, then by time of creation, then by UID.

use std::collections::{BTreeSet, HashMap};

use branchpool_crds::Priority;

use super::{Millis, Uid};

/// Place of a lease in its pool's queue; the lowest comes first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    pub priority: Priority,
    pub created: Millis,
    pub uid: Uid,
}

/// Leases that wait for a branch of one pool. A lease is in it once, and may leave from any place.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    order: BTreeSet<Rank>,
    ranks: HashMap<Uid, Rank>,
}

impl Queue {
    /// A lease that is in the queue moves to its new rank.
    pub fn insert(&mut self, rank: Rank) {
        if let Some(old) = self.ranks.insert(rank.uid.clone(), rank.clone()) {
            self.order.remove(&old);
        }
        self.order.insert(rank);
    }

    /// Whether it was there.
    pub fn remove(&mut self, uid: &Uid) -> bool {
        match self.ranks.remove(uid) {
            Some(rank) => self.order.remove(&rank),
            None => false,
        }
    }

    pub fn contains(&self, uid: &Uid) -> bool {
        self.ranks.contains_key(uid)
    }

    pub fn pop(&mut self) -> Option<Uid> {
        let first = self.order.pop_first()?;
        self.ranks.remove(&first.uid);
        Some(first.uid)
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// First to last; the index is the number of leases before.
    pub fn iter(&self) -> impl Iterator<Item = &Uid> {
        self.order.iter().map(|rank| &rank.uid)
    }

    /// Leases before this one.
    pub fn position(&self, uid: &Uid) -> Option<u32> {
        let rank = self.ranks.get(uid)?;
        let before = self.order.range(..rank).count();
        Some(u32::try_from(before).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};

    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

    use super::*;

    const PRODUCERS: usize = 16;
    const ITEMS: usize = 48_000;
    const BRANCHES: usize = 40;
    const SEED: u64 = 4_711;

    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    struct Account {
        accepted: u32,
        bound: u32,
        released: u32,
    }

    /// Each producer's items in order of time, the producers mixed with each other.
    fn arrivals(weights: [u32; 3], rng: &mut StdRng) -> Vec<Rank> {
        let mut producers: Vec<VecDeque<Rank>> = (0..PRODUCERS)
            .map(|producer| {
                (0..ITEMS / PRODUCERS)
                    .map(|item| Rank {
                        priority: drawn(weights, rng),
                        created: item as Millis / 10,
                        uid: format!("{producer}-{item}").into(),
                    })
                    .collect()
            })
            .collect();
        let mut turns: Vec<usize> = (0..ITEMS).map(|turn| turn % PRODUCERS).collect();
        turns.shuffle(rng);
        let next = |producer: usize| producers[producer].pop_front();
        turns.into_iter().filter_map(next).collect()
    }

    fn drawn(weights: [u32; 3], rng: &mut StdRng) -> Priority {
        let [high, medium, low] = weights;
        match rng.random_range(0..high + medium + low) {
            n if n < high => Priority::High,
            n if n < high + medium => Priority::Medium,
            _ => Priority::Low,
        }
    }

    /// Every item goes in, is bound to one of few branches, and gives it back; every account is exact
    /// and nobody who is bound has somebody of a better rank left waiting.
    fn stress(weights: [u32; 3]) {
        let mut rng = StdRng::seed_from_u64(SEED);
        let mut arriving = VecDeque::from(arrivals(weights, &mut rng));
        let mut ranks = BTreeMap::new();
        let mut queue = Queue::default();
        let mut accounts: BTreeMap<Uid, Account> = BTreeMap::new();
        let mut free: Vec<usize> = (0..BRANCHES).collect();
        let mut held: Vec<(usize, Uid)> = Vec::new();
        while !arriving.is_empty() || !queue.is_empty() || !held.is_empty() {
            if let Some(rank) = arriving.pop_front() {
                assert!(!queue.contains(&rank.uid), "{} twice", rank.uid);
                accounts.entry(rank.uid.clone()).or_default().accepted += 1;
                ranks.insert(rank.uid.clone(), rank.clone());
                queue.insert(rank);
            }
            while let Some(branch) = free.pop() {
                let Some(uid) = queue.pop() else {
                    free.push(branch);
                    break;
                };
                let worst_waiting = queue.iter().next();
                assert!(worst_waiting.is_none_or(|next| ranks[next] > ranks[&uid]));
                assert!(held.iter().all(|(other, _)| *other != branch), "shared");
                accounts.entry(uid.clone()).or_default().bound += 1;
                held.push((branch, uid));
            }
            // Sometimes several at a time, so that the queue runs empty as well as full.
            for _ in 0..rng.random_range(0..3) {
                if !held.is_empty() {
                    let index = rng.random_range(0..held.len());
                    let (branch, uid) = held.swap_remove(index);
                    accounts.entry(uid).or_default().released += 1;
                    free.push(branch);
                }
            }
        }
        let exact = Account {
            accepted: 1,
            bound: 1,
            released: 1,
        };
        let lost = accounts
            .values()
            .filter(|account| account.bound < account.accepted);
        assert_eq!(lost.count(), 0, "lost");
        let duplicated = accounts.values().filter(|account| account.bound > 1);
        assert_eq!(duplicated.count(), 0, "duplicated");
        assert_eq!(accounts.len(), ITEMS);
        assert!(accounts.values().all(|account| *account == exact));
        assert_eq!(free.len(), BRANCHES);
    }

    #[test]
    fn stress_uniform() {
        stress([1, 1, 1]);
    }

    #[test]
    fn stress_mostly_high() {
        stress([90, 5, 5]);
    }

    #[test]
    fn stress_mostly_low() {
        stress([5, 5, 90]);
    }

    #[test]
    fn a_lease_leaves_from_any_place_and_positions_follow() {
        let mut queue = Queue::default();
        for (uid, priority, created) in [
            ("low", Priority::Low, 1),
            ("late", Priority::Medium, 9),
            ("early", Priority::Medium, 2),
            ("high", Priority::High, 30),
        ] {
            queue.insert(Rank {
                priority,
                created,
                uid: uid.into(),
            });
        }
        assert_eq!(queue.position(&"late".into()), Some(2));
        assert!(queue.remove(&"high".into()), "the head");
        assert!(!queue.remove(&"high".into()));
        assert_eq!(queue.position(&"late".into()), Some(1));
        assert_eq!(queue.pop(), Some("early".into()));
        assert_eq!(queue.pop(), Some("late".into()));
        assert_eq!(queue.pop(), Some("low".into()));
        assert_eq!(queue.pop(), None);
    }

    proptest! {
        /// Against a list that is sorted each time.
        #[test]
        fn agrees_with_a_sorted_list(steps in prop::collection::vec((0_u8..4, 0_u8..20, 0_u8..3, 0_u64..5), 0..200)) {
            let mut queue = Queue::default();
            let mut model: Vec<Rank> = Vec::new();
            for (step, uid, priority, created) in steps {
                let uid = Uid::from(uid.to_string());
                let priority = [Priority::High, Priority::Medium, Priority::Low][usize::from(priority)];
                match step {
                    0 | 1 => {
                        let rank = Rank { priority, created, uid };
                        model.retain(|other| other.uid != rank.uid);
                        model.push(rank.clone());
                        queue.insert(rank);
                    }
                    2 => {
                        let before = model.len();
                        model.retain(|other| other.uid != uid);
                        prop_assert_eq!(queue.remove(&uid), model.len() < before);
                    }
                    _ => {
                        model.sort();
                        let first = (!model.is_empty()).then(|| model.remove(0).uid);
                        prop_assert_eq!(queue.pop(), first);
                    }
                }
                model.sort();
                prop_assert!(queue.iter().eq(model.iter().map(|rank| &rank.uid)));
                prop_assert_eq!(queue.len(), model.len());
                for (index, rank) in model.iter().enumerate() {
                    prop_assert_eq!(queue.position(&rank.uid), u32::try_from(index).ok());
                }
            }
        }
    }
}
