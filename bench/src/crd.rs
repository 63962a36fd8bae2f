//! Leases as Kubernetes' users take them: a BranchLease is created, and the client's own watch tells that
//! it is Bound. Beside it a bare custom resource, created and seen by the same client.

mod check;
mod floor;
mod follow;
mod rate;
mod stage;
mod status;

use std::{collections::BTreeSet, time::Duration};

use branchpool_crds::BranchLease;
use futures_util::future::try_join_all;
use kube::api::{ApiResource, DynamicObject};
use serde::Serialize;
use serde_json::json;
use snafu::whatever;

use self::{
    follow::Kind,
    stage::{Spent, Stage},
};
use crate::{
    agent::POOL,
    error::Result,
    machine::Machine,
    options::Options,
    report::{Latencies, Ratio, Table, Timed, median, milliseconds},
};

pub(crate) const CHECKS: [&str; 6] = [
    "each lease was told Bound exactly once, with a branch of its own",
    "the Secret of each lease of a burst opens a branch with the source's rows that no other lease has written to",
    "the pool is full and calm, with no lease and no Secret left, before and after each sample",
    "no lease took more writes of the operator than its Secret and one status",
    "no process, branch or tombstone is left at the end",
    "variants alternate, and their order does",
];

/// Nodes, with an agent each.
pub(crate) const NODES: usize = 2;
/// Requests at a time outside of bursts.
const AT_A_TIME: usize = 16;

#[derive(Debug, Serialize)]
pub(crate) struct Samples {
    leases: Vec<Sample>,
    floor: Vec<Sample>,
    leases_all: Latencies,
    floor_all: Latencies,
    /// Of each pair's percentiles.
    ratio_p50: Ratio,
    ratio_p95: Ratio,
    rates: Vec<rate::Rate>,
    status: status::Status,
}

/// A burst.
#[derive(Clone, Debug, Serialize)]
struct Sample {
    latencies_ms: Vec<f64>,
    /// Until all were seen.
    cpu: Cpu,
    load: f64,
}

/// Of one object, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Cpu {
    operator: f64,
    /// With the servers of branches that are handed out, and of those that are made in the meantime.
    agents: f64,
    apiserver_and_etcd: f64,
    client: f64,
}

impl Cpu {
    fn each(before: Spent, after: Spent, count: usize) -> Self {
        let count = f64::from(u32::try_from(count.max(1)).unwrap_or(u32::MAX));
        let each = |of: fn(&Spent) -> Duration| {
            milliseconds(of(&after).saturating_sub(of(&before))) / count
        };
        Self {
            operator: each(|spent| spent.operator),
            agents: each(|spent| spent.agents),
            apiserver_and_etcd: each(|spent| spent.apiserver),
            client: each(|spent| spent.client),
        }
    }

    fn cells(samples: &[Self]) -> [String; 4] {
        let of = |value: fn(&Self) -> f64| format!("{:.2}", median(samples.iter().map(value)));
        [
            of(|cpu| cpu.operator),
            of(|cpu| cpu.agents),
            of(|cpu| cpu.apiserver_and_etcd),
            of(|cpu| cpu.client),
        ]
    }
}

pub(crate) async fn measure(machines: &[Machine], options: &Options) -> Result<Samples> {
    let stage = Stage::start(machines, options).await?;
    let client = stage.client();
    let leases = Kind::new(
        &client,
        ApiResource::erase::<BranchLease>(&()),
        json!({ "poolRef": { "name": POOL } }),
        |lease| lease.data["status"]["phase"] == "Bound",
    );
    let floor = Kind::new(&client, floor::resource(), json!({ "text": POOL }), |_| {
        true
    });
    let (mut of_leases, mut of_floor) = (Vec::new(), Vec::new());
    for round in 0..options.warmups + options.pairs {
        let prefix = format!("burst-{round}");
        if round % 2 == 0 {
            of_floor.push(floor_burst(&stage, &floor, &prefix, options).await?);
            of_leases.push(lease_burst(&stage, machines, &leases, &prefix, options).await?);
        } else {
            of_leases.push(lease_burst(&stage, machines, &leases, &prefix, options).await?);
            of_floor.push(floor_burst(&stage, &floor, &prefix, options).await?);
        }
        let p95 = |samples: &[Sample]| samples.last().map_or(0.0, |last| last.latencies().p95);
        eprintln!(
            "crd {round}: p95 Bound {:.1} ms, floor {:.1} ms",
            p95(&of_leases),
            p95(&of_floor)
        );
    }
    let rates = rate::measure(&stage, machines, &leases, options).await?;
    let status = status::measure(&stage, &leases, options).await?;
    stage.wait_calm().await?;
    stage.stop(machines).await?;
    let leases = of_leases.split_off(options.warmups);
    let floor = of_floor.split_off(options.warmups);
    Ok(Samples {
        leases_all: Latencies::of_all(&leases),
        floor_all: Latencies::of_all(&floor),
        ratio_p50: Ratio::of_latencies(&leases, &floor, |latencies| latencies.p50),
        ratio_p95: Ratio::of_latencies(&leases, &floor, |latencies| latencies.p95),
        leases,
        floor,
        rates,
        status,
    })
}

/// All at once; what the watch saw of each.
async fn burst(
    stage: &Stage,
    kind: &Kind,
    names: &[String],
) -> Result<(Sample, Vec<DynamicObject>)> {
    kind.warm_connections(names.len()).await?;
    let watch = kind.watch().await?;
    let before = stage.spent()?;
    let seen = try_join_all(names.iter().map(|name| watch.create(kind, name))).await?;
    let after = stage.spent()?;
    let told: BTreeSet<String> = watch.told_once()?.into_iter().collect();
    if !told.iter().eq(names.iter().collect::<BTreeSet<_>>()) {
        whatever!("{} were created, the watch told {told:?}", names.len());
    }
    let (latencies, objects): (Vec<_>, _) = seen.into_iter().unzip();
    let sample = Sample {
        latencies_ms: latencies.into_iter().map(milliseconds).collect(),
        cpu: Cpu::each(before, after, names.len()),
        load: crate::report::load(),
    };
    Ok((sample, objects))
}

fn names(prefix: &str, count: u32) -> Vec<String> {
    (0..count)
        .map(|number| format!("{prefix}-{number}"))
        .collect()
}

async fn floor_burst(
    stage: &Stage,
    floor: &Kind,
    prefix: &str,
    options: &Options,
) -> Result<Sample> {
    let names = names(prefix, options.branches);
    let (sample, _) = burst(stage, floor, &names).await?;
    floor.delete_all(&names, AT_A_TIME).await?;
    Ok(sample)
}

async fn lease_burst(
    stage: &Stage,
    machines: &[Machine],
    leases: &Kind,
    prefix: &str,
    options: &Options,
) -> Result<Sample> {
    let names = names(prefix, options.branches);
    let writes = check::Writes::so_far(stage)?;
    let (sample, objects) = burst(stage, leases, &names).await?;
    check::branches(stage, &objects).await?;
    leases.delete_all(&names, AT_A_TIME).await?;
    calm(stage, machines).await?;
    writes.at_most(stage, names.len())?;
    Ok(sample)
}

/// Full again, and the disk's cleaner done.
async fn calm(stage: &Stage, machines: &[Machine]) -> Result<()> {
    stage.wait_calm().await?;
    for machine in machines {
        machine.settle().await?;
    }
    Ok(())
}

impl Timed for Sample {
    fn latencies_ms(&self) -> &[f64] {
        &self.latencies_ms
    }
}

const CPU: [&str; 4] = ["operator", "agents", "apiserver+etcd", "client"];

impl Samples {
    pub(crate) fn tables(&self, options: &Options) -> Vec<Table> {
        let title = format!(
            "{} BranchLeases at once until Bound, ms, and CPU-ms of each",
            options.branches
        );
        let head = [&["", "p50", "p95", "p99", "max"], &CPU[..]].concat();
        let mut bursts = Table::new(&title, &head);
        for (name, all, samples) in [
            ("create to Bound", self.leases_all, &self.leases),
            ("bare resource", self.floor_all, &self.floor),
        ] {
            let mut row = vec![name.to_owned()];
            row.extend([all.p50, all.p95, all.p99, all.max].map(|ms| format!("{ms:.1}")));
            let cpu: Vec<Cpu> = samples.iter().map(|sample| sample.cpu).collect();
            row.extend(Cpu::cells(&cpu));
            bursts.row(&row);
        }
        bursts.row(&[
            "ratio".to_owned(),
            self.ratio_p50.to_string(),
            self.ratio_p95.to_string(),
        ]);
        vec![bursts, rate::table(&self.rates), self.status.table()]
    }
}
