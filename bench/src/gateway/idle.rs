//! What the agent's memory grows by for connections that do nothing.

use std::fs;

use serde::Serialize;
use snafu::{OptionExt, ResultExt, whatever};

use crate::{
    agent::Agent,
    error::Result,
    gateway::{client::Session, leases::Leased},
    options::Options,
    report::Table,
};

/// Below what a branch allows, the preconnected session and reserved ones left out.
const PER_BRANCH: u32 = 40;
const CONNECTIONS: u32 = 1_000;

#[derive(Debug, Serialize)]
pub(crate) struct Idle {
    connections: usize,
    branches: usize,
    /// Resident memory of the agent without its servers, in kB: with the leases and without a
    /// client, with all of them, and after they have left.
    before_kb: u64,
    with_kb: u64,
    after_kb: u64,
    kb_per_connection: f64,
}

pub(crate) async fn measure(agent: &Agent, options: &Options) -> Result<Idle> {
    let branches = options.branches.min(CONNECTIONS / PER_BRANCH);
    let mut leases = Vec::new();
    for number in 0..branches {
        leases.push(Leased::take(agent, &format!("idle-{number}")).await?);
    }
    let before_kb = resident(agent, options)?;
    let mut sessions = Vec::new();
    for _ in 0..PER_BRANCH {
        for lease in &leases {
            let (mut session, _) = Session::open(&lease.target).await?;
            session.first_row("SELECT 1").await?;
            sessions.push(session);
        }
    }
    let with_kb = resident(agent, options)?;
    // They are all alive.
    for session in &mut sessions {
        let answer = session.first_row("SELECT 2").await?;
        if answer != "2" {
            whatever!("SELECT 2 was answered with {answer}");
        }
    }
    let connections = sessions.len();
    drop(sessions);
    for lease in leases {
        lease.release(agent).await?;
    }
    agent.wait_calm().await?;
    let after_kb = resident(agent, options)?;
    let grown = u32::try_from(with_kb.saturating_sub(before_kb)).unwrap_or(u32::MAX);
    let number = u32::try_from(connections).unwrap_or(u32::MAX);
    Ok(Idle {
        connections,
        branches: branches as usize,
        before_kb,
        with_kb,
        after_kb,
        kb_per_connection: f64::from(grown) / f64::from(number),
    })
}

/// Of all processes that run the agent's program, in kB.
fn resident(agent: &Agent, options: &Options) -> Result<u64> {
    let program = fs::canonicalize(&options.agent).whatever_context("no agent's program")?;
    let mut sum = 0;
    for pid in agent.daemon.account.processes() {
        if fs::read_link(format!("/proc/{pid}/exe")).ok().as_ref() != Some(&program) {
            continue;
        }
        let status = fs::read_to_string(format!("/proc/{pid}/status"));
        let status = status.whatever_context("the agent is gone")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        sum += number.whatever_context("the agent's memory is not told")?;
    }
    if sum == 0 {
        whatever!("no process runs {}", program.display());
    }
    Ok(sum)
}

impl Idle {
    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new(
            &format!(
                "Resident memory of the agent, kB; {} idle connections to {} branches",
                self.connections, self.branches
            ),
            &["before", "with them", "after", "per connection"],
        );
        table.row(&[
            self.before_kb.to_string(),
            self.with_kb.to_string(),
            self.after_kb.to_string(),
            format!("{:.1}", self.kb_per_connection),
        ]);
        table
    }
}
