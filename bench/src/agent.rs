//! The real agent, in a process and a CPU account of its own, with one pool.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use branchpool_agent_api::{
    Change, DesiredPool, PoolName, PoolStatus,
    client::{Client, Target, Watch},
};
use serde_json::{Value, json};
use snafu::{OptionExt, ResultExt, whatever};
use tokio::time::{sleep, timeout};

use crate::{account::Account, error::Result, machine::Machine, options::Options, process::Daemon};

pub(crate) const POOL: &str = "bench";
pub(crate) const ROLE: &str = "app";
pub(crate) const DATABASE: &str = "app";

/// For anything that the agent is waited for.
const PATIENCE: Duration = Duration::from_mins(2);

#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) daemon: Daemon,
    pub(crate) client: Client,
    pub(crate) run: PathBuf,
    pub(crate) tcp: String,
    uid: String,
    branches: u32,
    generation: u64,
    endpoint: Endpoint,
}

/// How clients reach branches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Sockets,
    /// As well, without TLS.
    Gateway,
}

impl Endpoint {
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Sockets => &["--gateway", "none"],
            Self::Gateway => &["--gateway", "127.0.0.1:0", "--gateway-plaintext"],
        }
    }

    /// Room for the sessions of gateway and pgbouncer at the same time.
    fn parameters(self) -> Value {
        match self {
            Self::Sockets => json!({}),
            Self::Gateway => json!({ "max_connections": "100" }),
        }
    }
}

/// What happened until the pool was full.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) wall: Duration,
    pub(crate) cpu: Duration,
}

/// Of the pool, with so many branches ready.
pub(crate) fn spec(options: &Options, endpoint: Endpoint, replicas: u32) -> Value {
    json!({
        "replicas": replicas,
        "maxBranches": options.max_branches,
        "postgres": { "version": options.major, "database": DATABASE, "role": ROLE, "tuning": options.tuning, "parameters": endpoint.parameters() },
        "source": { "sql": { "scripts": [{
            "name": "items",
            "sql": "CREATE TABLE items AS SELECT id, md5(id::text) AS body FROM generate_series(1, 100000) AS id;
                    ALTER TABLE items ADD PRIMARY KEY (id);",
        }] } },
        "warming": { "mode": "Phased", "preconnect": "WhileWarming", "startConcurrency": options.starts, "preconnectConcurrency": options.starts },
        // Deleted as soon as may be: the next sample waits for it.
        "cleanup": { "tombstones": { "delay": "0s" } },
    })
}

impl Agent {
    /// Answering, its image built, its pool empty.
    pub(crate) async fn start(
        machine: &Machine,
        options: &Options,
        endpoint: Endpoint,
    ) -> Result<Self> {
        let manifest = machine.directory().join("pool.json");
        let object = json!({
            "apiVersion": "branchpool.dev/v1alpha1",
            "kind": "BranchPool",
            "metadata": { "name": POOL },
            "spec": spec(options, endpoint, 0),
        });
        fs::write(&manifest, object.to_string()).whatever_context("cannot write the manifest")?;
        let account = Account::create("agent")?;
        let run = machine.memory().join("run");
        let tcp = free_address()?;
        let mut command = crate::process::in_account(&account, &options.agent)?;
        command
            .arg("standalone")
            .arg("-f")
            .arg(&manifest)
            .arg("--root")
            .arg(machine.root())
            .arg("--run-dir")
            .arg(&run)
            .args(["--listen", &tcp])
            .args(endpoint.arguments());
        let log = machine.directory().join("agent.log");
        let mut agent = Self {
            daemon: Daemon::start("agent", command, account, log)?,
            client: Client::new(Target::Unix(run.join("agent.sock"))),
            run,
            tcp,
            uid: String::new(),
            branches: options.branches,
            generation: 1,
            endpoint,
        };
        agent.wait_serving().await?;
        let status = agent.wait(|pool| pool.golden.generation > 0).await?;
        agent.uid = status.uid;
        Ok(agent)
    }

    async fn wait_serving(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.client.ready().await.is_err() {
            if let Some(status) = self.daemon.ended()? {
                whatever!("the agent ended with {status}: {}", self.log());
            }
            if Instant::now() > deadline {
                whatever!("the agent does not answer: {}", self.log());
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    pub(crate) fn log(&self) -> String {
        self.daemon.log()
    }

    /// Changes the pool's size, as an operator does.
    async fn set_target(&mut self, options: &Options, replicas: u32) -> Result<()> {
        self.generation += 1;
        let desired = DesiredPool {
            namespace: PoolName::DEFAULT_NAMESPACE.to_owned(),
            name: POOL.to_owned(),
            generation: self.generation,
            epoch: None,
            spec: spec(options, self.endpoint, replicas),
        };
        self.client
            .apply_pool(&self.uid, &desired)
            .await
            .whatever_context("the pool was not taken in")?;
        Ok(())
    }

    /// Fills the empty pool; timed from the request to the event that says that it is full.
    pub(crate) async fn refill(&mut self, options: &Options) -> Result<Span> {
        let mut watch = self.watch().await?;
        let (cpu, started) = (self.daemon.account.cpu()?, Instant::now());
        self.set_target(options, self.branches).await?;
        let branches = self.branches;
        self.follow(&mut watch, |pool| pool.ready == branches)
            .await?;
        let wall = started.elapsed();
        let cpu = self.daemon.account.cpu()?.saturating_sub(cpu);
        Ok(Span { wall, cpu })
    }

    /// Empties the pool, and waits until the last tombstone is gone.
    pub(crate) async fn empty(&mut self, options: &Options) -> Result<Duration> {
        let mut watch = self.watch().await?;
        let started = Instant::now();
        self.set_target(options, 0).await?;
        self.follow(&mut watch, |pool| existing(pool) == 0).await?;
        Ok(started.elapsed())
    }

    /// Waits until the pool is full and nothing else goes on.
    pub(crate) async fn wait_calm(&self) -> Result<()> {
        let branches = self.branches;
        self.wait(|pool| pool.ready == branches && existing(pool) == branches)
            .await?;
        Ok(())
    }

    async fn watch(&self) -> Result<Watch> {
        self.client
            .watch(None)
            .await
            .whatever_context("cannot watch the agent")
    }

    async fn wait(&self, wanted: impl Fn(&PoolStatus) -> bool) -> Result<PoolStatus> {
        self.follow(&mut self.watch().await?, wanted).await
    }

    async fn follow(
        &self,
        watch: &mut Watch,
        wanted: impl Fn(&PoolStatus) -> bool,
    ) -> Result<PoolStatus> {
        let mut last = None;
        let found = timeout(PATIENCE, async {
            loop {
                let event = watch
                    .next()
                    .await
                    .whatever_context("the watch broke off")?
                    .whatever_context("the agent ended the watch")?;
                let pools = match event.change {
                    Change::Snapshot { pools, .. } => pools,
                    Change::Pool(pool) => vec![*pool],
                    _ => continue,
                };
                for pool in pools {
                    if pool.name.name == POOL {
                        if wanted(&pool) {
                            return Ok(pool);
                        }
                        last = Some(pool);
                    }
                }
            }
        })
        .await;
        match found {
            Ok(found) => found,
            Err(_) => whatever!(
                "the pool did not become as waited for, but {last:?}; {}",
                self.log()
            ),
        }
    }

    /// Directories of the sockets of all branches with a server.
    pub(crate) fn socket_directories(&self) -> Result<Vec<PathBuf>> {
        let directory = self.run.join("b");
        let entries = fs::read_dir(&directory)
            .with_whatever_context(|_| format!("cannot read {}", directory.display()))?;
        Ok(entries
            .flatten()
            .map(|entry| entry.path().join("s"))
            .filter(|sockets| sockets.join(".s.PGSQL.5432").exists())
            .collect())
    }

    /// Stops the agent in order, and makes sure that nothing of it is left.
    pub(crate) async fn stop(self, root: &Path) -> Result<()> {
        self.daemon.stop().await?;
        for kind in ["branches", "trash"] {
            crate::checks::shards_are_empty(&root.join(kind))?;
        }
        Ok(())
    }
}

/// Everything of a pool that takes room on the disk.
pub(crate) fn existing(pool: &PoolStatus) -> u32 {
    pool.ready + pool.warming + pool.leased + pool.cleaning + pool.quarantined + pool.tombstones
}

/// Free a moment ago; the agent takes no port 0.
pub(crate) fn free_address() -> Result<String> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0");
    let address = listener.and_then(|listener| listener.local_addr());
    Ok(address.whatever_context("no free TCP port")?.to_string())
}
