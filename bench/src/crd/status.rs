//! How soon a pool's status tells of a change while leases come and go, and how often it is written.

use std::time::{Duration, Instant};

use branchpool_crds::BranchPool;
use futures_util::{TryStreamExt as _, future::try_join_all, pin_mut};
use kube::api::{WatchEvent, WatchParams};
use serde::Serialize;
use serde_json::json;
use snafu::{OptionExt, ResultExt};
use tokio::{sync::mpsc, time::timeout};

use super::{
    follow::{Kind, WAITING, WATCH_SECONDS},
    stage::Stage,
};
use crate::{
    error::Result,
    options::Options,
    report::{Latencies, Table, milliseconds},
};

/// Leases that come and go at a time.
const CHURN: usize = 4;
/// For a change to be told.
const PATIENCE: Duration = Duration::from_secs(30);
/// Two of the operator's looks at what only time changes.
const QUIET: Duration = Duration::from_secs(11);

#[derive(Clone, Debug, Serialize)]
pub(super) struct Status {
    /// From the answer to a change of the pool's spec to the watch's telling that the status has seen it.
    latencies_ms: Vec<f64>,
    /// Between two statuses that differ, as the watch tells them.
    gaps_ms: Vec<f64>,
    leases_meanwhile: usize,
    writes_in_quiet: usize,
}

/// A status, and when it was told.
type Told = (Instant, BranchPool);

pub(super) async fn measure(stage: &Stage, leases: &Kind, options: &Options) -> Result<Status> {
    stage.wait_calm().await?;
    let (tell, mut told) = mpsc::channel(WAITING);
    let pool = stage.change_pool(&json!({})).await?;
    let version = pool.metadata.resource_version.unwrap_or_default();
    let watching = tokio::spawn(follow(stage.pools(), version, tell));
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let watch = leases.watch().await?;
    let worker = async |worker: usize| {
        let mut done = 0_usize;
        while !*stopped.borrow() {
            let name = format!("churn-{worker}-{done}");
            watch.create(leases, &name).await?;
            leases.delete(&name).await?;
            done += 1;
        }
        Ok(done)
    };
    let changes = async {
        let result = changes(stage, &mut told, options).await;
        stop.send_replace(true);
        result
    };
    let churn = try_join_all((0..CHURN).map(worker));
    let ((latencies_ms, gaps_ms), done) = tokio::try_join!(changes, churn)?;
    watching.abort();
    watch.told_once()?;
    stage.wait_calm().await?;
    let before = stage.operators_requests("patch", "branchpools/status")?;
    tokio::time::sleep(QUIET).await;
    let after = stage.operators_requests("patch", "branchpools/status")?;
    Ok(Status {
        latencies_ms,
        gaps_ms,
        leases_meanwhile: done.into_iter().sum(),
        writes_in_quiet: after - before,
    })
}

/// Each change comes at another time of the second that statuses are apart.
async fn changes(
    stage: &Stage,
    told: &mut mpsc::Receiver<Told>,
    options: &Options,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let count = 5 * options.pairs;
    let (mut latencies, mut gaps) = (Vec::new(), Vec::new());
    // The first that is told may be of a change of the spec.
    let mut known = None;
    let mut written: Option<Instant> = None;
    for number in 0..count {
        let pause = u64::try_from(137 * number % 1_000).unwrap_or(0);
        tokio::time::sleep(Duration::from_millis(pause)).await;
        let ttl = format!("{}m", 60 + number % 2);
        let pool = stage
            .change_pool(&json!({ "lease": { "defaultTTL": ttl } }))
            .await?;
        let (sent, generation) = (Instant::now(), pool.metadata.generation.unwrap_or(0));
        loop {
            let next = timeout(PATIENCE, told.recv()).await;
            let next = next.whatever_context("the pool's status does not change")?;
            let (at, pool) = next.whatever_context("the watch of the pool ended")?;
            let seen = pool
                .status
                .as_ref()
                .map_or(0, |status| status.observed_generation);
            if known.as_ref().is_some_and(|known| *known != pool.status) {
                gaps.extend(written.map(|before| milliseconds(at.duration_since(before))));
                written = Some(at);
            }
            known = Some(pool.status);
            if seen >= generation {
                latencies.push(milliseconds(at.saturating_duration_since(sent)));
                break;
            }
        }
    }
    Ok((latencies, gaps))
}

async fn follow(pools: kube::Api<BranchPool>, version: String, tell: mpsc::Sender<Told>) {
    let Ok(events) = pools
        .watch(&WatchParams::default().timeout(WATCH_SECONDS), &version)
        .await
    else {
        return;
    };
    pin_mut!(events);
    while let Ok(Some(event)) = events.try_next().await {
        if let WatchEvent::Added(pool) | WatchEvent::Modified(pool) = event {
            let _left = tell.send((Instant::now(), pool)).await;
        }
    }
}

impl Status {
    pub(super) fn table(&self) -> Table {
        let title = format!(
            "A pool's status while {} leases came and went, ms",
            self.leases_meanwhile
        );
        let mut table = Table::new(&title, &["", "p50", "p95", "max", "least"]);
        for (name, values) in [
            ("a change until it is told", &self.latencies_ms),
            ("between two statuses", &self.gaps_ms),
        ] {
            let all = Latencies::of(values.iter().copied());
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            let mut row = vec![name.to_owned()];
            row.extend([all.p50, all.p95, all.max, least].map(|ms| format!("{ms:.0}")));
            table.row(&row);
        }
        let writes = self.writes_in_quiet;
        table.row(&[
            "writes in 11 s without a change".to_owned(),
            writes.to_string(),
        ]);
        table
    }
}
