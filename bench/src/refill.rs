//! Filling an empty pool, beside the floor that makes the same branches with bare calls.

use std::time::Duration;

use serde::Serialize;

use crate::{
    agent::{Agent, Endpoint, Span},
    checks,
    error::Result,
    floor::Floor,
    machine::Machine,
    options::Options,
    report::{Ratio, Table, milliseconds},
};

#[derive(Debug, Serialize)]
pub(crate) struct Samples {
    agent: Vec<Sample>,
    floor: Vec<Sample>,
    ratio_wall: Ratio,
    ratio_cpu: Ratio,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Sample {
    wall_ms: f64,
    /// Agent, supervisor and servers; of the floor, its process and the servers.
    cpu_ms: f64,
    /// Of the whole sample until the disk is back where it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    empty_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshots_ms: Option<f64>,
    load: f64,
}

impl Sample {
    fn new(span: Span) -> Self {
        Self {
            wall_ms: milliseconds(span.wall),
            cpu_ms: milliseconds(span.cpu),
            empty_ms: None,
            snapshots_ms: None,
            load: crate::report::load(),
        }
    }
}

pub(crate) const CHECKS: [&str; 5] = [
    "every branch of every sample answers with the source's rows, from a server of its own",
    "agent and floor start the same program with the same arguments and configuration on the same image",
    "the pool is empty and every tombstone is deleted before the next sample",
    "no process, branch or tombstone is left at the end",
    "variants alternate, and their order does",
];

pub(crate) async fn measure(machine: &Machine, options: &Options) -> Result<Samples> {
    let mut agent = Agent::start(machine, options, Endpoint::Sockets).await?;
    let mut agents = vec![sample_agent(&mut agent, options, None).await?];
    // The floor copies a server of the agent, so the first one had to be the agent's.
    agent.refill(options).await?;
    let mut floor = Floor::start(&agent, machine, options).await?;
    agent.empty(options).await?;
    machine.settle().await?;
    let mut floors = Vec::new();
    for round in 0..options.warmups + options.pairs {
        if round % 2 == 0 {
            floors.push(sample_floor(&mut floor, machine, options).await?);
            agents.push(sample_agent(&mut agent, options, Some(machine)).await?);
        } else {
            agents.push(sample_agent(&mut agent, options, Some(machine)).await?);
            floors.push(sample_floor(&mut floor, machine, options).await?);
        }
        eprintln!(
            "refill {round}: agent {:.0} ms, {:.0} CPU ms; floor {:.0} ms, {:.0} CPU ms",
            last(&agents).0,
            last(&agents).1,
            last(&floors).0,
            last(&floors).1
        );
    }
    floor.stop().await?;
    agent.stop(machine.root()).await?;
    let agents = agents.split_off(1 + options.warmups);
    let floors = floors.split_off(options.warmups);
    Ok(Samples {
        ratio_wall: Ratio::of(
            agents.iter().map(|s| s.wall_ms),
            floors.iter().map(|s| s.wall_ms),
        ),
        ratio_cpu: Ratio::of(
            agents.iter().map(|s| s.cpu_ms),
            floors.iter().map(|s| s.cpu_ms),
        ),
        agent: agents,
        floor: floors,
    })
}

fn last(samples: &[Sample]) -> (f64, f64) {
    samples
        .last()
        .map_or((0.0, 0.0), |sample| (sample.wall_ms, sample.cpu_ms))
}

async fn sample_agent(
    agent: &mut Agent,
    options: &Options,
    machine: Option<&Machine>,
) -> Result<Sample> {
    let mut sample = Sample::new(agent.refill(options).await?);
    checks::distinct_servers(&agent.socket_directories()?, options.branches).await?;
    sample.empty_ms = Some(milliseconds(agent.empty(options).await?));
    if let Some(machine) = machine {
        machine.settle().await?;
    }
    Ok(sample)
}

async fn sample_floor(floor: &mut Floor, machine: &Machine, options: &Options) -> Result<Sample> {
    let (span, snapshots): (Span, Duration) = floor.refill(options.branches).await?;
    let mut sample = Sample::new(span);
    sample.snapshots_ms = Some(milliseconds(snapshots));
    checks::distinct_servers(&floor.socket_directories()?, options.branches).await?;
    floor.empty().await?;
    machine.settle().await?;
    Ok(sample)
}

impl Samples {
    pub(crate) fn table(&self, options: &Options) -> Table {
        let mut table = Table::new(
            &format!("Refill of {} branches", options.branches),
            &["", "agent", "floor", "ratio [min-max]"],
        );
        let median = |samples: &[Sample], value: fn(&Sample) -> f64| {
            crate::report::median(samples.iter().map(value))
        };
        for (name, value, ratio) in [
            (
                "wall ms",
                (|s| s.wall_ms) as fn(&Sample) -> f64,
                self.ratio_wall,
            ),
            ("CPU ms", |s| s.cpu_ms, self.ratio_cpu),
        ] {
            table.row(&[
                name.to_owned(),
                format!("{:.0}", median(&self.agent, value)),
                format!("{:.0}", median(&self.floor, value)),
                ratio.to_string(),
            ]);
        }
        table
    }
}
