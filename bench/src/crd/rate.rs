//! How many leases a second go through: created, Bound and deleted, so many at a time.

use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, TryStreamExt as _, future::try_join_all, stream};
use kube::api::DynamicObject;
use serde::Serialize;
use serde_json::json;

use super::{
    AT_A_TIME, CPU, Cpu, calm, check,
    follow::{Departures, Kind},
    names,
    stage::Stage,
};
use crate::{
    error::Result,
    machine::Machine,
    options::Options,
    report::{Latencies, Table, milliseconds},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Way {
    /// The whole pool, and nothing is refilled meanwhile: what the control plane does.
    Pool,
    /// For some seconds, with the refill of what was handed out: what the machine does.
    Sustained,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Rate {
    way: Way,
    leases: usize,
    /// From the first creation to the last lease seen Bound.
    bound_seconds: f64,
    /// And until the last deletion was answered and the last Secret gone.
    whole_seconds: f64,
    latencies: Latencies,
    cpu: Cpu,
    load: f64,
}

impl Rate {
    fn a_second(&self) -> f64 {
        f64::from(u32::try_from(self.leases).unwrap_or(u32::MAX)) / self.whole_seconds
    }
}

pub(super) async fn measure(
    stage: &Stage,
    machines: &[Machine],
    leases: &Kind,
    options: &Options,
) -> Result<Vec<Rate>> {
    let mut rates = Vec::new();
    stage
        .change_pool(&json!({ "maxBranches": options.branches }))
        .await?;
    for round in 0..options.pairs {
        calm(stage, machines).await?;
        rates.push(whole_pool(stage, leases, &format!("pool-{round}"), options).await?);
    }
    stage
        .change_pool(&json!({ "maxBranches": options.max_branches }))
        .await?;
    for round in 0..options.pairs {
        calm(stage, machines).await?;
        rates.push(sustained(stage, leases, &format!("rate-{round}"), options).await?);
    }
    calm(stage, machines).await?;
    Ok(rates)
}

async fn whole_pool(stage: &Stage, leases: &Kind, prefix: &str, options: &Options) -> Result<Rate> {
    let names = names(prefix, options.branches);
    leases.warm_connections(AT_A_TIME).await?;
    let watch = leases.watch().await?;
    let mut departures = Departures::watch(stage.secrets()).await?;
    let (before, started) = (stage.spent()?, Instant::now());
    let bound: Vec<(Duration, DynamicObject)> =
        stream::iter(names.iter().map(|name| watch.create(leases, name)))
            .buffer_unordered(AT_A_TIME)
            .try_collect()
            .await?;
    let bound_seconds = started.elapsed().as_secs_f64();
    leases.delete_all(&names, AT_A_TIME).await?;
    departures.wait(names.len()).await?;
    let rate = Rate {
        way: Way::Pool,
        leases: bound.len(),
        bound_seconds,
        whole_seconds: started.elapsed().as_secs_f64(),
        latencies: Latencies::of(bound.iter().map(|(latency, _)| milliseconds(*latency))),
        cpu: Cpu::each(before, stage.spent()?, bound.len()),
        load: crate::report::load(),
    };
    watch.told_once()?;
    let objects: Vec<_> = bound.into_iter().map(|(_, object)| object).collect();
    check::distinct(&objects)?;
    tell(&rate);
    Ok(rate)
}

/// Each worker deletes its lease when it is Bound, and takes another.
async fn sustained(stage: &Stage, leases: &Kind, prefix: &str, options: &Options) -> Result<Rate> {
    leases.warm_connections(AT_A_TIME).await?;
    let watch = leases.watch().await?;
    let length = Duration::from_secs(options.seconds.into());
    let mut departures = Departures::watch(stage.secrets()).await?;
    let (before, started) = (stage.spent()?, Instant::now());
    let worker = async |worker: usize| {
        let mut latencies = Vec::new();
        while started.elapsed() < length {
            let name = format!("{prefix}-{worker}-{}", latencies.len());
            let (latency, _) = watch.create(leases, &name).await?;
            latencies.push(milliseconds(latency));
            leases.delete(&name).await?;
        }
        Ok(latencies)
    };
    let latencies: Vec<Vec<f64>> = try_join_all((0..AT_A_TIME).map(worker)).await?;
    let bound_seconds = started.elapsed().as_secs_f64();
    let count = latencies.iter().map(Vec::len).sum();
    departures.wait(count).await?;
    let rate = Rate {
        way: Way::Sustained,
        leases: count,
        bound_seconds,
        whole_seconds: started.elapsed().as_secs_f64(),
        latencies: Latencies::of(latencies.into_iter().flatten()),
        cpu: Cpu::each(before, stage.spent()?, count),
        load: crate::report::load(),
    };
    watch.told_once()?;
    tell(&rate);
    Ok(rate)
}

fn tell(rate: &Rate) {
    eprintln!(
        "crd {:?}: {} leases, {:.0} a second; operator {:.2}, apiserver and etcd {:.2}, agents {:.2} CPU-ms each",
        rate.way,
        rate.leases,
        rate.a_second(),
        rate.cpu.operator,
        rate.cpu.apiserver_and_etcd,
        rate.cpu.agents,
    );
}

pub(super) fn table(rates: &[Rate]) -> Table {
    let title = format!("Leases created, Bound and deleted, {AT_A_TIME} at a time; CPU-ms of each");
    let head = [&["", "a second", "Bound a second", "p50", "p95"], &CPU[..]].concat();
    let mut table = Table::new(&title, &head);
    for (way, name) in [
        (Way::Pool, "whole pool, nothing refilled"),
        (Way::Sustained, "sustained, with refill"),
    ] {
        let rates: Vec<&Rate> = rates.iter().filter(|rate| rate.way == way).collect();
        let of = |value: fn(&Rate) -> f64| {
            format!(
                "{:.1}",
                crate::report::median(rates.iter().map(|rate| value(rate)))
            )
        };
        let mut row = vec![name.to_owned()];
        row.extend([
            of(Rate::a_second),
            of(|rate| rate.a_second() * rate.whole_seconds / rate.bound_seconds),
            of(|rate| rate.latencies.p50),
            of(|rate| rate.latencies.p95),
        ]);
        let cpu: Vec<Cpu> = rates.iter().map(|rate| rate.cpu).collect();
        row.extend(Cpu::cells(&cpu));
        table.row(&row);
    }
    table
}
