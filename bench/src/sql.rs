//! What SQL over HTTP costs, and what of that is the session that each request opens.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::Serialize;
use snafu::{OptionExt, ResultExt, whatever};
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use crate::{
    agent::{Agent, DATABASE, Endpoint, ROLE},
    burst::Connection,
    error::Result,
    gateway::leases::Leased,
    machine::Machine,
    options::Options,
    report::{Ratio, Table, median, milliseconds},
};

pub(crate) const CHECKS: [&str; 3] = [
    "each answer is the row that was asked for",
    "ways alternate, and their order does",
    "no process, branch or tombstone is left at the end",
];

/// Queries of each round.
const QUERIES: u32 = 200;
/// The most rows that the table has.
const ROWS: u32 = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Way {
    /// A request to the agent, over a connection that is kept.
    Http,
    /// A session of its own at the branch's socket.
    Fresh,
    /// One session for all, emptied by `DISCARD ALL` before each query.
    Kept,
}

impl Way {
    const ALL: [Self; 3] = [Self::Http, Self::Fresh, Self::Kept];

    const fn text(self) -> &'static str {
        match self {
            Self::Http => "SQL over HTTP",
            Self::Fresh => "a session for each query",
            Self::Kept => "one session, DISCARD ALL before each",
        }
    }
}

/// Of one query, in milliseconds; a round's mean.
#[derive(Clone, Copy, Debug, Serialize)]
struct Sample {
    wall: f64,
    /// Of the agent and its servers.
    cpu: f64,
}

type Value = fn(&Sample) -> f64;

#[derive(Debug, Serialize)]
pub(crate) struct Samples {
    http: Vec<Sample>,
    fresh: Vec<Sample>,
    kept: Vec<Sample>,
}

pub(crate) async fn measure(machine: &Machine, options: &Options) -> Result<Samples> {
    let options = &Options {
        branches: 1,
        max_branches: 1,
        ..options.clone()
    };
    let mut agent = Agent::start(machine, options, Endpoint::Gateway).await?;
    agent.refill(options).await?;
    agent.wait_calm().await?;
    let lease = Leased::take(&agent, "sql").await?;
    let course = Course::start(&agent, &lease).await;
    let samples = course?.rounds(&agent, options).await?;
    lease.release(&agent).await?;
    agent.empty(options).await?;
    agent.stop(machine.root()).await?;
    Ok(samples)
}

/// The three ways to one branch.
struct Course {
    path: String,
    http: Connection,
    sockets: PathBuf,
    kept: Client,
}

impl Course {
    async fn start(agent: &Agent, lease: &Leased) -> Result<Self> {
        Ok(Self {
            path: format!("/v1/leases/{}/sql", lease.uid),
            http: Connection::unix(&agent.run.join("agent.sock")).await?,
            kept: open(&lease.sockets).await?,
            sockets: lease.sockets.clone(),
        })
    }

    async fn rounds(mut self, agent: &Agent, options: &Options) -> Result<Samples> {
        let mut samples: [Vec<Sample>; 3] = Default::default();
        for round in 0..options.warmups + options.pairs {
            for turn in 0..Way::ALL.len() {
                let way = (round + turn) % Way::ALL.len();
                let sample = self.round(agent, Way::ALL[way]).await?;
                if round >= options.warmups {
                    samples[way].push(sample);
                }
            }
        }
        let [http, fresh, kept] = samples;
        Ok(Samples { http, fresh, kept })
    }

    async fn round(&mut self, agent: &Agent, way: Way) -> Result<Sample> {
        let (cpu, started) = (agent.daemon.account.cpu()?, Instant::now());
        for number in 1..=QUERIES {
            // All over the table.
            let id = number * (ROWS / QUERIES);
            let sql = format!("SELECT id FROM items WHERE id = {id}");
            let seen = match way {
                Way::Http => self.request(&sql).await?,
                Way::Fresh => ask(&open(&self.sockets).await?, &sql).await?,
                Way::Kept => {
                    let emptied = self.kept.simple_query("DISCARD ALL").await;
                    emptied.whatever_context("a session was not emptied")?;
                    ask(&self.kept, &sql).await?
                }
            };
            if seen != id.to_string() {
                whatever!("{sql} was answered with {seen}");
            }
        }
        let each = |time: Duration| milliseconds(time) / f64::from(QUERIES);
        let wall = each(started.elapsed());
        let cpu = each(agent.daemon.account.cpu()?.saturating_sub(cpu));
        Ok(Sample { wall, cpu })
    }

    async fn request(&mut self, sql: &str) -> Result<String> {
        let body = serde_json::json!({ "query": sql }).to_string();
        let request = format!(
            "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.path,
            body.len()
        );
        let answer = self.http.ask(request.as_bytes()).await?;
        let text = String::from_utf8_lossy(&answer.body);
        if answer.status != 200 {
            whatever!("{sql} was answered with {}: {text}", answer.status);
        }
        let answer: serde_json::Value =
            serde_json::from_str(&text).whatever_context("an answer is no JSON")?;
        Ok(answer["rows"][0]["id"].to_string())
    }
}

async fn open(sockets: &Path) -> Result<Client> {
    let mut config = tokio_postgres::Config::new();
    config.host_path(sockets).user(ROLE).dbname(DATABASE);
    let opened = config.connect(NoTls).await;
    let (client, connection) = opened.whatever_context("no session at the branch's socket")?;
    tokio::spawn(connection);
    Ok(client)
}

async fn ask(client: &Client, sql: &str) -> Result<String> {
    let messages = client.simple_query(sql).await;
    let messages = messages.whatever_context("a query failed")?;
    let rows = messages.iter().filter_map(|message| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    });
    rows.last().whatever_context("a query has no row")
}

impl Samples {
    pub(crate) fn table(&self) -> Table {
        let title = "One query, median ms of the rounds; ratios to a session for each query";
        let head = ["", "wall", "CPU", "wall ratio", "CPU ratio"];
        let mut table = Table::new(title, &head);
        let all = [&self.http, &self.fresh, &self.kept];
        let values: [Value; 2] = [|sample| sample.wall, |sample| sample.cpu];
        for (way, samples) in Way::ALL.into_iter().zip(all) {
            let mut row = vec![way.text().to_owned()];
            row.extend(values.map(|value| format!("{:.2}", median(samples.iter().map(value)))));
            row.extend(values.map(|value| {
                let own = samples.iter().map(value);
                Ratio::of(own, self.fresh.iter().map(value)).to_string()
            }));
            table.row(&row);
        }
        table
    }
}
