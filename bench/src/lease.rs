//! Bursts of leases, beside a server on the same HTTP stack that answers with a constant.

use std::{collections::BTreeSet, fs, path::PathBuf, process::Stdio, time::Duration};

use branchpool_agent_api::{Lease, LeasePhase, LeaseRequest, PoolName};
use serde::Serialize;
use snafu::{OptionExt, ResultExt, whatever};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Child,
};

use crate::{
    account::{Account, own_cpu},
    agent::{Agent, Endpoint, POOL},
    burst::{self, Answer, Connection},
    checks,
    error::Result,
    machine::Machine,
    options::Options,
    report::{Latencies, Ratio, Table, Timed, milliseconds},
};

pub(crate) const CHECKS: [&str; 5] = [
    "each lease was accepted once, bound to a branch of its own, and released once",
    "the branch behind each lease's address answers with the source's rows",
    "the pool is full and calm before each burst",
    "no process, branch or tombstone is left at the end",
    "variants alternate, and their order does",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Transport {
    Unix,
    Tcp,
}

#[derive(Debug, Serialize)]
pub(crate) struct Samples {
    answer_bytes: usize,
    transports: Vec<Compared>,
}

#[derive(Debug, Serialize)]
struct Compared {
    transport: Transport,
    agent: Vec<Sample>,
    floor: Vec<Sample>,
    agent_all: Latencies,
    floor_all: Latencies,
    /// Of each pair's 95th percentiles.
    ratio_p95: Ratio,
    ratio_p50: Ratio,
}

#[derive(Clone, Debug, Serialize)]
struct Sample {
    latencies_ms: Vec<f64>,
    /// The whole burst as the clients saw it.
    client_cpu_ms: f64,
    server_cpu_ms: f64,
    load: f64,
}

impl Timed for Sample {
    fn latencies_ms(&self) -> &[f64] {
        &self.latencies_ms
    }
}

pub(crate) async fn measure(machine: &Machine, options: &Options) -> Result<Samples> {
    let mut agent = Agent::start(machine, options, Endpoint::Sockets).await?;
    agent.refill(options).await?;
    agent.wait_calm().await?;
    let mut agents = [
        Server::agent(&agent, Transport::Unix, options),
        Server::agent(&agent, Transport::Tcp, options),
    ];
    // Of the agent's own making, for its size.
    let answer = agents[0].warm_up(&agent).await?;
    agent.wait_calm().await?;
    let floor = Floor::start(machine, &answer).await?;
    let mut floors = [
        Server::floor(&floor, Transport::Unix, options),
        Server::floor(&floor, Transport::Tcp, options),
    ];
    let mut samples: [(Vec<Sample>, Vec<Sample>); 2] = Default::default();
    for round in 0..options.warmups + options.pairs {
        for (at, (of_agent, of_floor)) in samples.iter_mut().enumerate() {
            if round % 2 == 0 {
                of_floor.push(floors[at].sample(&floor.account).await?.0);
                of_agent.push(agents[at].leases(&agent, machine).await?);
            } else {
                of_agent.push(agents[at].leases(&agent, machine).await?);
                of_floor.push(floors[at].sample(&floor.account).await?.0);
            }
            let p95 = |samples: &[Sample]| samples.last().map_or(0.0, |last| last.latencies().p95);
            eprintln!(
                "lease {round} {:?}: p95 agent {:.2} ms, floor {:.2} ms",
                agents[at].transport,
                p95(of_agent),
                p95(of_floor)
            );
        }
    }
    drop(floor);
    agent.empty(options).await?;
    agent.stop(machine.root()).await?;
    let transports = [Transport::Unix, Transport::Tcp].into_iter().zip(samples);
    let transports = transports.map(|(transport, (mut agent, mut floor))| {
        let (agent, floor) = (
            agent.split_off(options.warmups),
            floor.split_off(options.warmups),
        );
        Compared {
            transport,
            agent_all: Latencies::of_all(&agent),
            floor_all: Latencies::of_all(&floor),
            ratio_p95: Ratio::of_latencies(&agent, &floor, |latencies| latencies.p95),
            ratio_p50: Ratio::of_latencies(&agent, &floor, |latencies| latencies.p50),
            agent,
            floor,
        }
    });
    Ok(Samples {
        answer_bytes: answer.len(),
        transports: transports.collect(),
    })
}

/// One of the two servers, by one transport.
struct Server {
    transport: Transport,
    socket: PathBuf,
    tcp: String,
    bursts: u32,
    branches: u32,
}

impl Server {
    fn agent(agent: &Agent, transport: Transport, options: &Options) -> Self {
        let socket = agent.run.join("agent.sock");
        Self::new(transport, socket, &agent.tcp, options)
    }

    fn floor(floor: &Floor, transport: Transport, options: &Options) -> Self {
        Self::new(transport, floor.socket.clone(), &floor.tcp, options)
    }

    fn new(transport: Transport, socket: PathBuf, tcp: &str, options: &Options) -> Self {
        Self {
            transport,
            socket,
            tcp: tcp.to_owned(),
            bursts: 0,
            branches: options.branches,
        }
    }

    /// Kept-alive connections, made anew for each burst: a server closes those that are idle for
    /// long, as they are while the pool fills.
    async fn connections(&self) -> Result<Vec<Connection>> {
        let mut connections = Vec::new();
        for _ in 0..self.branches {
            let mut connection = match self.transport {
                Transport::Unix => Connection::unix(&self.socket).await?,
                Transport::Tcp => Connection::tcp(&self.tcp).await?,
            };
            burst::prime(&mut connection).await?;
            connections.push(connection);
        }
        Ok(connections)
    }

    /// One burst, and the ids of its leases.
    async fn sample(&mut self, server: &Account) -> Result<(Sample, Vec<String>, Vec<Answer>)> {
        self.bursts += 1;
        let uids: Vec<String> = (0..self.branches)
            .map(|number| format!("{:?}-{}-{number}", self.transport, self.bursts).to_lowercase())
            .collect();
        let request = LeaseRequest {
            pool: PoolName::new(PoolName::DEFAULT_NAMESPACE, POOL),
            ttl_seconds: None,
            holder: None,
            epoch: None,
        };
        let body = serde_json::to_string(&request).whatever_context("no JSON")?;
        let requests = uids
            .iter()
            .map(|uid| burst::put(&format!("/v1/leases/{uid}"), &body))
            .collect();
        let mut connections = self.connections().await?;
        let (own, cpu) = (own_cpu(), server.cpu()?);
        let answers = burst::run(&mut connections, requests).await?;
        let (own, cpu) = (
            own_cpu().saturating_sub(own),
            server.cpu()?.saturating_sub(cpu),
        );
        if let Some(refused) = answers.iter().find(|answer| answer.status != 201) {
            whatever!(
                "a lease was answered with {}: {}",
                refused.status,
                String::from_utf8_lossy(&refused.body)
            );
        }
        let sample = Sample {
            latencies_ms: answers
                .iter()
                .map(|answer| milliseconds(answer.latency))
                .collect(),
            client_cpu_ms: milliseconds(own),
            server_cpu_ms: milliseconds(cpu),
            load: crate::report::load(),
        };
        Ok((sample, uids, answers))
    }

    /// A burst that counts, with its whole account, and the way back to a full pool.
    async fn leases(&mut self, agent: &Agent, machine: &Machine) -> Result<Sample> {
        let (sample, uids, answers) = self.sample(&agent.daemon.account).await?;
        let leases = answers
            .iter()
            .map(|answer| serde_json::from_slice(&answer.body));
        let leases: Vec<Lease> = leases
            .collect::<Result<_, _>>()
            .whatever_context("no lease")?;
        self.validate(agent, &uids, &leases).await?;
        agent.wait_calm().await?;
        machine.settle().await?;
        Ok(sample)
    }

    async fn warm_up(&mut self, agent: &Agent) -> Result<Vec<u8>> {
        let (_, uids, mut answers) = self.sample(&agent.daemon.account).await?;
        for uid in uids {
            let released = agent.client.release(&uid, None).await;
            released.whatever_context("a lease was not released")?;
        }
        Ok(answers.pop().whatever_context("no answer")?.body)
    }

    async fn validate(&self, agent: &Agent, uids: &[String], leases: &[Lease]) -> Result<()> {
        let wanted: BTreeSet<&str> = uids.iter().map(String::as_str).collect();
        let accepted: BTreeSet<&str> = leases.iter().map(|lease| lease.uid.as_str()).collect();
        if wanted != accepted || leases.len() != uids.len() {
            whatever!(
                "{} leases were asked for, {} were accepted",
                uids.len(),
                accepted.len()
            );
        }
        let hosts: Vec<PathBuf> = leases
            .iter()
            .map(|lease| PathBuf::from(&lease.host))
            .collect();
        checks::distinct_servers(&hosts, self.branches).await?;
        for uid in uids {
            let lease = agent.client.release(uid, None).await;
            let lease = lease.whatever_context("a lease was not released")?;
            if lease.phase != LeasePhase::Released {
                whatever!("lease {uid} was released and is {:?}", lease.phase);
            }
            agent
                .client
                .forget(uid, None)
                .await
                .whatever_context("a lease was not forgotten")?;
        }
        Ok(())
    }
}

/// The constant answer's process.
#[derive(Debug)]
struct Floor {
    _child: Child,
    account: Account,
    socket: PathBuf,
    tcp: String,
}

impl Floor {
    async fn start(machine: &Machine, answer: &[u8]) -> Result<Self> {
        let socket = machine.directory().join("floor.sock");
        let file = machine.directory().join("answer.json");
        fs::write(&file, answer).whatever_context("cannot write the constant answer")?;
        let account = Account::create("http")?;
        let own = std::env::current_exe().whatever_context("cannot find this program")?;
        let mut child = crate::process::in_account(&account, &own)?
            .arg("http-floor")
            .args([&socket, &file])
            .stdout(Stdio::piped())
            .spawn()
            .whatever_context("cannot start the constant answer's process")?;
        let output = child.stdout.take().whatever_context("no pipe")?;
        let line = tokio::time::timeout(
            Duration::from_secs(10),
            BufReader::new(output).lines().next_line(),
        )
        .await
        .whatever_context("the constant answer's process says nothing")?
        .whatever_context("the constant answer's process cannot be read")?;
        Ok(Self {
            _child: child,
            account,
            socket,
            tcp: line.whatever_context("the constant answer's process ended")?,
        })
    }
}

impl Samples {
    pub(crate) fn table(&self, options: &Options) -> Table {
        let mut table = Table::new(
            &format!("{} leases at once, ms", options.branches),
            &["", "p50", "p95", "p99", "max", "client CPU", "server CPU"],
        );
        for compared in &self.transports {
            let transport = compared.transport;
            for (name, all, samples) in [
                ("agent", compared.agent_all, &compared.agent),
                ("floor", compared.floor_all, &compared.floor),
            ] {
                let cpu = |value: fn(&Sample) -> f64| {
                    format!("{:.1}", crate::report::median(samples.iter().map(value)))
                };
                let mut row = vec![format!("{transport:?} {name}")];
                row.extend([all.p50, all.p95, all.p99, all.max].map(|ms| format!("{ms:.2}")));
                row.extend([cpu(|s| s.client_cpu_ms), cpu(|s| s.server_cpu_ms)]);
                table.row(&row);
            }
            table.row(&[
                format!("{transport:?} ratio"),
                compared.ratio_p50.to_string(),
                compared.ratio_p95.to_string(),
            ]);
        }
        table
    }
}
