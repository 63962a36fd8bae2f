//! Everything at once, at random: `CHAOS_SEED` repeats the choices of a run, `CHAOS_SECONDS` and
//! `CHAOS_STEPS` bound it.

mod patience;
mod settle;

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use branchpool_agent_api::{
    Lease, LeasePhase, LeaseRequest, RenewRequest, ResetRequest, client::ClientError,
};
use branchpool_sys::btrfs;
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use rustix::process::Signal;

use self::patience::{connect_patiently, mark, patiently};
use crate::{
    inspect::names,
    node::{Node, Setup, ask, pool, pool_name, request, send, wait_gone},
};

const MAX_BRANCHES: u32 = 14;
/// Leases held at a time, so that quarantined branches and a full pool fit beside them.
const MAX_HELD: usize = 5;
const REPLICAS: [u32; 4] = [1, 2, 4, 5];
/// The supervisor's back-off makes more of these in a row slow.
const AGENT_KILLS: u32 = 2;

fn manifest(replicas: u32) -> String {
    pool(
        "items",
        replicas,
        MAX_BRANCHES,
        "  cleanup: {tombstones: {delay: 1s}}\n",
    )
}

/// A lease as its holder knows it.
#[derive(Debug)]
struct Held {
    lease: Lease,
    /// The row that only its branch has.
    mark: String,
    short: bool,
}

struct Chaos {
    node: Node,
    rng: StdRng,
    held: BTreeMap<String, Held>,
    /// Who got each branch.
    given: BTreeMap<String, String>,
    /// Paths below the root, and whether each is a subvolume.
    strays: BTreeMap<String, bool>,
    replicas: u32,
    agent_kills: u32,
    next: u32,
    history: History,
}

/// Told when the test fails.
struct History {
    seed: u64,
    steps: Vec<String>,
}

impl Drop for History {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("CHAOS_SEED={}\n{}", self.seed, self.steps.join("\n"));
        }
    }
}

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_left_in_chaos() {
    let seed = variable("CHAOS_SEED").unwrap_or_else(|| rand::rng().next_u64());
    let limit = Duration::from_secs(variable("CHAOS_SECONDS").unwrap_or(45));
    let steps: u32 = variable("CHAOS_STEPS").unwrap_or(u32::MAX);
    println!("CHAOS_SEED={seed}");
    let node = Node::start(Setup::new(manifest(4))).await;
    node.wait_full("items").await;
    let mut chaos = Chaos {
        node,
        rng: StdRng::seed_from_u64(seed),
        held: BTreeMap::new(),
        given: BTreeMap::new(),
        strays: BTreeMap::new(),
        replicas: 4,
        agent_kills: 0,
        next: 0,
        history: History {
            seed,
            steps: Vec::new(),
        },
    };
    let end = Instant::now() + limit;
    for step in 0..steps {
        if Instant::now() > end {
            break;
        }
        chaos.step().await;
        chaos.check_cheaply().await;
        if step % 10 == 9 {
            chaos.check_data().await;
        }
    }
    println!(
        "{} steps, {} branches given",
        chaos.history.steps.len(),
        chaos.given.len()
    );
    chaos.settle().await;
}

impl Chaos {
    fn note(&mut self, step: impl Into<String>) {
        self.history.steps.push(step.into());
    }

    async fn step(&mut self) {
        match self.rng.random_range(0..29) {
            0..5 => self.lease(false).await,
            5..7 => self.lease(true).await,
            7..9 => self.burst().await,
            9..13 => self.release().await,
            13..16 => self.reset().await,
            16..18 => self.renew().await,
            18 => self.kill_agent().await,
            19 => self.kill_manager(),
            20 => self.stop_and_start().await,
            21..23 => self.kill_leased(),
            23 => self.kill_other(),
            24 => self.remove_tombstone().await,
            25 => self.stray().await,
            26 => self.change_replicas(),
            _ => {
                let pause = self.rng.random_range(0..400);
                self.note(format!("pause {pause}"));
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
        }
    }

    fn fresh_uid(&mut self) -> String {
        self.next += 1;
        format!("lease-{}", self.next)
    }

    fn pick(&mut self) -> Option<String> {
        let uids: Vec<String> = self.held.keys().cloned().collect();
        uids.choose(&mut self.rng).cloned()
    }

    async fn lease(&mut self, short: bool) {
        if self.held.len() >= MAX_HELD {
            return;
        }
        let uid = self.fresh_uid();
        self.note(format!("lease {uid} short={short}"));
        let result = lease(&self.node, &uid, short).await;
        self.take(uid, short, result).await;
    }

    async fn burst(&mut self) {
        let count = MAX_HELD.saturating_sub(self.held.len());
        let uids: Vec<String> = (0..count).map(|_| self.fresh_uid()).collect();
        self.note(format!("burst {uids:?}"));
        let asked = uids.iter().map(|uid| lease(&self.node, uid, false));
        let results = futures_util::future::join_all(asked).await;
        for (uid, result) in uids.into_iter().zip(results) {
            self.take(uid, false, result).await;
        }
    }

    async fn take(&mut self, uid: String, short: bool, result: Result<Lease, ClientError>) {
        let lease = match result {
            Ok(lease) => lease,
            // The answer got lost, and the term was over before the next.
            Err(error) if short && error.is("LeaseEnded") => return,
            Err(error) => return assert!(error.is("NoBranchReady"), "{uid}: {error}"),
        };
        self.given_to(&uid, &lease.branch);
        let mut held = Held {
            lease,
            mark: String::new(),
            short,
        };
        // A short one may be over by now.
        if short {
            assert_eq!(held.lease.expires_at - held.lease.bound_at, 1_000);
        } else {
            mark(&self.node, &mut held, &uid).await;
        }
        self.held.insert(uid, held);
    }

    fn given_to(&mut self, uid: &str, branch: &str) {
        let before = self.given.insert(branch.to_owned(), uid.to_owned());
        assert_eq!(before, None, "{branch} was given out twice, now to {uid}");
    }

    async fn release(&mut self) {
        let Some(uid) = self.pick() else { return };
        self.note(format!("release {uid}"));
        let held = self.held.remove(&uid).unwrap();
        let lease = patiently(&self.node, async || {
            self.node.client.release(&uid, None).await
        })
        .await
        .unwrap();
        let expired = held.short && lease.phase == LeasePhase::Expired;
        assert!(lease.phase == LeasePhase::Released || expired, "{lease:?}");
    }

    async fn reset(&mut self) {
        let Some(uid) = self.pick() else { return };
        if self.held[&uid].short {
            return;
        }
        self.note(format!("reset {uid}"));
        self.next += 1;
        let request = ResetRequest {
            token: format!("token-{}", self.next),
            epoch: None,
        };
        let result = patiently(&self.node, async || {
            self.node.client.reset(&uid, &request).await
        })
        .await;
        let lease = match result {
            Ok(lease) => lease,
            Err(error) => return assert!(error.is("NoBranchReady"), "{uid}: {error}"),
        };
        self.given_to(&uid, &lease.branch);
        let mut held = self.held.remove(&uid).unwrap();
        assert_eq!(lease.uri, held.lease.uri, "a reset keeps the address");
        held.lease = lease;
        mark(&self.node, &mut held, &format!("{uid} {}", request.token)).await;
        self.held.insert(uid, held);
    }

    async fn renew(&mut self) {
        let Some(uid) = self.pick() else { return };
        if self.held[&uid].short {
            return;
        }
        self.note(format!("renew {uid}"));
        let request = RenewRequest {
            ttl_seconds: Some(self.rng.random_range(4_000..8_000)),
            epoch: None,
        };
        let lease = patiently(&self.node, async || {
            self.node.client.renew(&uid, &request).await
        })
        .await
        .unwrap();
        let held = self.held.get_mut(&uid).unwrap();
        assert!(lease.expires_at > held.lease.bound_at + 4_000_000 - 1);
        assert_eq!(lease.branch, held.lease.branch);
        held.lease = lease;
    }

    async fn kill_agent(&mut self) {
        if self.agent_kills >= AGENT_KILLS {
            return self.kill_manager();
        }
        self.note("kill the agent");
        self.agent_kills += 1;
        self.node.wait_serving().await;
        self.node.kill_agent();
    }

    fn kill_manager(&mut self) {
        self.note("kill supervisor and agent");
        self.agent_kills = 0;
        self.node.kill_manager();
        self.node.launch();
    }

    async fn stop_and_start(&mut self) {
        self.note("stop and start");
        self.agent_kills = 0;
        self.node.wait_serving().await;
        let status = self.node.stop();
        assert!(status.success(), "{status}\n{}", self.node.log());
        self.node.launch();
    }

    fn kill_leased(&mut self) {
        let Some(uid) = self.pick() else { return };
        let Some(pid) = self.node.postmaster_of(&self.held[&uid].lease.branch) else {
            return;
        };
        self.note(format!("kill the server of {uid}"));
        send(pid, Signal::KILL);
        wait_gone(pid);
    }

    fn kill_other(&mut self) {
        let leased: Vec<u32> = self
            .held
            .values()
            .filter_map(|held| self.node.postmaster_of(&held.lease.branch))
            .collect();
        let mut others = self.node.postmasters();
        others.retain(|pid| !leased.contains(pid));
        if let Some(pid) = others.choose(&mut self.rng).copied() {
            self.note(format!("kill server {pid}, of nobody"));
            send(pid, Signal::KILL);
        }
    }

    async fn remove_tombstone(&mut self) {
        self.node.wait_serving().await;
        let trash = self.node.root().join("trash");
        let shards = names(&trash).into_iter().map(|shard| trash.join(shard));
        let found: Vec<PathBuf> = shards
            .flat_map(|shard| {
                let entries = names(&shard);
                entries.into_iter().map(move |name| shard.join(name))
            })
            .filter(|path| {
                let relative = path.strip_prefix(self.node.root()).unwrap();
                !self.strays.contains_key(&*relative.to_string_lossy())
            })
            .collect();
        if let Some(path) = found.choose(&mut self.rng) {
            self.history
                .steps
                .push(format!("remove {}", path.display()));
            let shard = btrfs::open_dir(path.parent().unwrap()).unwrap();
            // The agent may be faster.
            let _gone = btrfs::delete(shard, path.file_name().unwrap());
        }
    }

    async fn stray(&mut self) {
        self.node.wait_serving().await;
        let n = self.strays.len();
        let pool = self.node.client.pool(&pool_name("items")).await;
        let Ok(uid) = pool.map(|pool| pool.uid) else {
            return;
        };
        let (path, subvolume) = match self.rng.random_range(0..8) {
            0 => (format!("branches/0a/note-{n}"), false),
            1 => (format!("branches/03/copy-{n}"), true),
            // Of the right form, but not signed.
            2 => (format!("branches/00/aaaaaaaaaaa{}a", letter(n)), true),
            3 => (format!("trash/0f/keep-{n}"), true),
            4 => (format!("trash/00/aaaaaaaaaaaa{}", letter(n)), true),
            5 => (format!("golden/{uid}/{}", 7_000 + n), true),
            6 => (format!("golden/readme-{n}.txt"), false),
            _ => (format!("building/{uid}-{}", 7_000 + n), true),
        };
        if self.strays.contains_key(&path) {
            return;
        }
        self.note(format!("put {path}"));
        let full = self.node.root().join(&path);
        let file = if subvolume {
            let parent = btrfs::open_dir(full.parent().unwrap()).unwrap();
            btrfs::create_subvolume(parent, full.file_name().unwrap()).unwrap();
            full.join("content")
        } else {
            full
        };
        fs::write(file, &path).unwrap();
        self.strays.insert(path, subvolume);
    }

    fn change_replicas(&mut self) {
        self.replicas = *REPLICAS.choose(&mut self.rng).unwrap();
        self.note(format!("{} replicas", self.replicas));
        let new = self.node.manifest_dir().join("new");
        fs::write(&new, manifest(self.replicas)).unwrap();
        fs::rename(new, self.node.manifest_dir().join("pools.yaml")).unwrap();
    }

    /// What must hold at any time, as far as the agent answers.
    async fn check_cheaply(&mut self) {
        let Ok(leases) = self.node.client.leases().await else {
            return;
        };
        let bound: Vec<&Lease> = leases
            .iter()
            .filter(|lease| lease.phase == LeasePhase::Bound)
            .collect();
        let branches: BTreeSet<&str> = bound.iter().map(|lease| lease.branch.as_str()).collect();
        assert_eq!(
            branches.len(),
            bound.len(),
            "a branch in two leases: {bound:#?}"
        );
        for (uid, held) in self.held.iter().filter(|(_, held)| !held.short) {
            let lease = bound.iter().find(|lease| lease.uid == *uid);
            let lease = lease.unwrap_or_else(|| panic!("{uid} is not bound: {leases:#?}"));
            assert_eq!(lease.branch, held.lease.branch, "{uid}");
            assert_eq!(lease.uri, held.lease.uri, "{uid}");
            assert_eq!(lease.expires_at, held.lease.expires_at, "{uid}");
        }
        for lease in &bound {
            assert!(
                self.held.contains_key(&lease.uid),
                "{} was released",
                lease.uid
            );
        }
        if let Ok(pools) = self.node.client.pools().await {
            for pool in pools {
                let existing =
                    pool.ready + pool.warming + pool.leased + pool.cleaning + pool.quarantined;
                assert!(existing <= MAX_BRANCHES, "{pool:#?}");
            }
        }
    }

    async fn check_data(&mut self) {
        for (uid, held) in self.held.iter().filter(|(_, held)| !held.short) {
            let client = connect_patiently(&self.node, &held.lease).await;
            let bodies = ask(&client, "SELECT body FROM items ORDER BY id").await;
            assert_eq!(
                bodies.unwrap(),
                format!("one,two,three,{}", held.mark),
                "{uid}"
            );
        }
        let short = self.held.iter().filter(|(_, held)| held.short);
        let short: Vec<String> = short.map(|(uid, _)| uid.clone()).collect();
        for uid in short {
            let ended = |lease: &Lease| lease.phase != LeasePhase::Bound;
            let lease = self.node.wait_lease(&uid, ended).await;
            assert_eq!(lease.phase, LeasePhase::Expired, "{lease:?}");
            self.held.remove(&uid);
        }
    }
}

fn letter(n: usize) -> char {
    char::from(b'a' + u8::try_from(n % 26).unwrap())
}

async fn lease(node: &Node, uid: &str, short: bool) -> Result<Lease, ClientError> {
    let request = LeaseRequest {
        ttl_seconds: short.then_some(1),
        ..request("items")
    };
    let asked = patiently(node, async || node.client.lease(uid, &request).await).await;
    asked.map(|(lease, _)| lease)
}
