//! What a run is made with.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use serde::Serialize;
use snafu::OptionExt;

use crate::error::Result;

/// Knobs of a measurement.
#[derive(Clone, Debug, Args)]
pub(crate) struct Arguments {
    /// Branches in the pool, leases in a burst
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=500))]
    branches: u32,
    /// Measured pairs of samples [default: 9, with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: Option<u32>,
    /// Pairs thrown away before [default: 1]
    #[arg(long)]
    warmups: Option<u32>,
    /// Length of each run of pgbench [default: 5, with --quick 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: Option<u32>,
    /// Servers that start at a time, in agent and floor alike [default: cores + 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    starts: Option<u32>,
    /// Few branches and pairs: does it work, not how fast
    #[arg(long)]
    quick: bool,
    /// Control: room for the leased branches only, so that nothing is refilled during a burst
    #[arg(long)]
    no_refill: bool,
    /// Major version of Postgres
    #[arg(long, default_value_t = 15)]
    major: u32,
    /// The agent's program [default: branchpool-agent beside this program]
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
    /// The operator's program, for `crd` [default: branchpool-operator beside this program]
    #[arg(long, value_name = "FILE")]
    operator: Option<PathBuf>,
    /// Directory for the results
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    output: PathBuf,
    /// The run is given up after this
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    time_limit: u64,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Options {
    pub(crate) branches: u32,
    pub(crate) pairs: usize,
    pub(crate) warmups: usize,
    /// Of each run of pgbench.
    pub(crate) seconds: u32,
    pub(crate) starts: u32,
    pub(crate) major: u32,
    pub(crate) max_branches: u32,
    pub(crate) quick: bool,
    /// `postgres.tuning` of the pool.
    pub(crate) tuning: &'static str,
    #[serde(skip)]
    pub(crate) agent: PathBuf,
    /// Whether it is there is seen when it is started.
    #[serde(skip)]
    pub(crate) operator: PathBuf,
    #[serde(skip)]
    pub(crate) output: PathBuf,
    pub(crate) time_limit: Duration,
    /// Bytes of the file that holds the filesystem, sparse.
    pub(crate) size: u64,
}

impl Arguments {
    pub(crate) fn settle(self) -> Result<Options> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let own = std::env::current_exe().ok();
        let beside = |name: &str| own.as_ref().map(|own| own.with_file_name(name));
        let operator = self.operator.or_else(|| beside("branchpool-operator"));
        let agent = self.agent.or_else(|| beside("branchpool-agent"));
        let agent = agent
            .filter(|agent| agent.exists())
            .whatever_context("there is no branchpool-agent beside this program: build it in the same profile, or give --agent")?;
        let (pairs, branches) = if self.quick {
            (2, self.branches.min(10))
        } else {
            (9, self.branches)
        };
        Ok(Options {
            branches,
            pairs: self.pairs.unwrap_or(pairs) as usize,
            warmups: self.warmups.unwrap_or(1) as usize,
            seconds: self.seconds.unwrap_or(if self.quick { 1 } else { 5 }),
            starts: self
                .starts
                .unwrap_or(u32::try_from(cores + 1).unwrap_or(u32::MAX)),
            major: self.major,
            max_branches: if self.no_refill {
                branches
            } else {
                2 * branches
            },
            quick: self.quick,
            tuning: "Ephemeral",
            agent,
            operator: operator.unwrap_or_default(),
            output: self.output,
            time_limit: Duration::from_secs(self.time_limit),
            size: 20 << 30,
        })
    }
}
