//! The gateway beside direct connections, pgbouncer and a bare copying loop: how fast a client is in, how much it gets
//! through, and what it costs to let it stay.

mod client;
mod connect;
mod idle;
pub(crate) mod leases;
pub(crate) mod refusals;
mod servers;
mod throughput;

use serde::Serialize;

use crate::{
    agent::{Agent, Endpoint},
    error::Result,
    machine::Machine,
    options::Options,
    report::Table,
};

pub(crate) const CHECKS: [&str; 6] = [
    "each first row through the gateway came from a backend older than the connection, each direct one from a new one",
    "each connection shows the server that the lease's socket shows, with the source's rows",
    "pgbench counts no failure, and each of its TPC-B transactions is in the tables",
    "all idle connections answer",
    "no process, branch or tombstone is left at the end",
    "variants alternate, and their order does",
];

#[derive(Debug, Serialize)]
pub(crate) struct Samples {
    connects: connect::Connects,
    throughput: [throughput::Throughput; 2],
    idle: idle::Idle,
}

pub(crate) async fn measure(machine: &Machine, options: &Options) -> Result<Samples> {
    // Nothing is refilled while something is measured.
    let options = &Options {
        max_branches: options.branches,
        ..options.clone()
    };
    let (agent, direct) = start(machine, options).await?;
    let connects = connect::measure(&agent, &direct, options).await?;
    let idle = idle::measure(&agent, options).await?;
    let workloads = &throughput::WORKLOADS;
    let throughput = throughput::measure(&agent, &direct, machine, options, workloads).await?;
    stop(agent, direct, machine, options).await?;

    let durable = &Options {
        tuning: "Durable",
        branches: 1,
        max_branches: 1,
        ..options.clone()
    };
    let (agent, direct) = start(machine, durable).await?;
    let workloads = &throughput::DURABLE;
    let on_disk = throughput::measure(&agent, &direct, machine, durable, workloads).await?;
    stop(agent, direct, machine, durable).await?;
    Ok(Samples {
        connects,
        throughput: [throughput, on_disk],
        idle,
    })
}

async fn start(machine: &Machine, options: &Options) -> Result<(Agent, servers::Direct)> {
    let mut agent = Agent::start(machine, options, Endpoint::Gateway).await?;
    agent.refill(options).await?;
    agent.wait_calm().await?;
    let direct = servers::Direct::start(&agent, machine, options).await?;
    Ok((agent, direct))
}

async fn stop(
    mut agent: Agent,
    direct: servers::Direct,
    machine: &Machine,
    options: &Options,
) -> Result<()> {
    direct.stop().await?;
    agent.empty(options).await?;
    agent.stop(machine.root()).await
}

impl Samples {
    pub(crate) fn tables(&self) -> [Table; 4] {
        let [ephemeral, durable] = &self.throughput;
        [
            self.connects.table(),
            ephemeral.table(),
            durable.table(),
            self.idle.table(),
        ]
    }
}
