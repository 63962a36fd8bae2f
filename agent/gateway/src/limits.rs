//! What strangers may take, and who has to go when they take more.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::oneshot;

/// Bounds of the gateway.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Longest start-up packet, in bytes. 10,000 as in Postgres.
    pub startup_packet: usize,
    /// From the accepted connection to the proof of the password, TLS handshake included. 10 s.
    pub startup_time: Duration,
    /// Connections that have not proved a password yet. When there are more, the oldest of the
    /// address with the most of them is dropped, so silent clients cannot keep others out. 2,048.
    pub unauthenticated: usize,
    /// The same for one address (IPv6: one /64 network). 1,024.
    pub unauthenticated_per_address: usize,
    /// Connections in all; further ones are refused with `53300`. 10,000.
    pub connections: usize,
    /// How long a client waits for a suspended branch. 30 s.
    pub wake_time: Duration,
    /// How long a branch's server may take to open a session. 60 s.
    pub backend_time: Duration,
    /// How long a client may take to read the last words of its session. 5 s.
    pub goodbye_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            startup_packet: 10_000,
            startup_time: Duration::from_secs(10),
            unauthenticated: 2_048,
            unauthenticated_per_address: 1_024,
            connections: 10_000,
            wake_time: Duration::from_secs(30),
            backend_time: Duration::from_secs(60),
            goodbye_time: Duration::from_secs(5),
        }
    }
}

/// Who has connected and proved nothing yet.
#[derive(Clone, Debug)]
pub(crate) struct Strangers {
    limits: (usize, usize),
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    /// By age.
    all: BTreeMap<u64, (IpAddr, oneshot::Sender<()>)>,
    by_address: HashMap<IpAddr, BTreeSet<u64>>,
}

/// A place among the strangers, until it is dropped.
#[derive(Debug)]
pub(crate) struct Stranger {
    table: Arc<Mutex<Table>>,
    id: u64,
    evicted: oneshot::Receiver<()>,
}

impl Strangers {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            limits: (limits.unauthenticated, limits.unauthenticated_per_address),
            table: Arc::default(),
        }
    }

    /// Admits, at the cost of an older one when there are too many.
    pub(crate) fn admit(&self, address: IpAddr) -> Stranger {
        let address = network(address);
        let (in_all, per_address) = self.limits;
        let mut table = lock(&self.table);
        let of_address = table.by_address.get(&address).map_or(0, BTreeSet::len);
        if of_address > 0 && of_address >= per_address {
            table.evict_oldest(address);
        } else if table.all.len() >= in_all {
            table.evict_any();
        }
        let (evict, evicted) = oneshot::channel();
        let id = table.next;
        table.next += 1;
        table.all.insert(id, (address, evict));
        table.by_address.entry(address).or_default().insert(id);
        Stranger {
            table: Arc::clone(&self.table),
            id,
            evicted,
        }
    }
}

impl Stranger {
    /// Resolves when another one needs the place.
    pub(crate) async fn evicted(&mut self) {
        let _ = (&mut self.evicted).await;
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        lock(&self.table).remove(self.id);
    }
}

impl Table {
    fn remove(&mut self, id: u64) -> Option<oneshot::Sender<()>> {
        let (address, evict) = self.all.remove(&id)?;
        if let Some(ids) = self.by_address.get_mut(&address) {
            ids.remove(&id);
            if ids.is_empty() {
                self.by_address.remove(&address);
            }
        }
        Some(evict)
    }

    fn evict_oldest(&mut self, address: IpAddr) {
        let oldest = self
            .by_address
            .get(&address)
            .and_then(|ids| ids.first().copied());
        if let Some(evict) = oldest.and_then(|id| self.remove(id)) {
            let _ = evict.send(());
        }
    }

    fn evict_any(&mut self) {
        let busiest = self
            .by_address
            .iter()
            .max_by_key(|(_, ids)| ids.len())
            .map(|(address, _)| *address);
        if let Some(address) = busiest {
            self.evict_oldest(address);
        }
    }
}

/// One who has an IPv6 address has 2^64 of them.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let prefix = address.to_bits() & !u128::from(u64::MAX);
            IpAddr::V6(Ipv6Addr::from_bits(prefix))
        }
        v4 @ IpAddr::V4(_) => v4,
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strangers(in_all: usize, per_address: usize) -> Strangers {
        Strangers::new(&Limits {
            unauthenticated: in_all,
            unauthenticated_per_address: per_address,
            ..Limits::default()
        })
    }

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn is_evicted(stranger: &mut Stranger) -> bool {
        stranger.evicted.try_recv().is_ok()
    }

    #[test]
    fn the_oldest_of_an_address_makes_room() {
        let strangers = strangers(10, 2);
        let mut first = strangers.admit(address(1));
        let mut other = strangers.admit(address(2));
        let mut second = strangers.admit(address(1));
        let mut third = strangers.admit(address(1));
        assert!(is_evicted(&mut first));
        assert!([&mut other, &mut second, &mut third].map(is_evicted) == [false; 3]);
    }

    #[test]
    fn in_all_the_busiest_address_makes_room() {
        let strangers = strangers(3, 10);
        let mut quiet = strangers.admit(address(1));
        let mut first = strangers.admit(address(2));
        let mut second = strangers.admit(address(2));
        let mut new = strangers.admit(address(3));
        assert!(is_evicted(&mut first));
        assert!([&mut quiet, &mut second, &mut new].map(is_evicted) == [false; 3]);
    }

    #[test]
    fn who_leaves_makes_room() {
        let strangers = strangers(10, 1);
        drop(strangers.admit(address(1)));
        let mut next = strangers.admit(address(1));
        assert!(!is_evicted(&mut next));
        drop(next);
        let table = lock(&strangers.table);
        assert!(table.all.is_empty() && table.by_address.is_empty());
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let parse = |text: &str| network(text.parse().unwrap());
        assert_eq!(parse("2001:db8::1"), parse("2001:db8::ffff:1"));
        assert_ne!(parse("2001:db8::1"), parse("2001:db8:0:1::1"));
        assert_eq!(parse("::ffff:10.0.0.1"), address(1));
    }
}
