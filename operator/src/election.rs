//! Leadership by a coordination Lease. The rule is in `plan::leader`.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{Api, api::PostParams, core::ObjectMeta};
use snafu::Snafu;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};
use tracing::{debug, info, warn};

use crate::{
    cluster::describe,
    metrics::Metrics,
    plan::leader::{
        LEASE_DURATION, Observation, RENEW_DEADLINE, RETRY_PERIOD, Record, Turn, is_over, turn,
    },
};

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("another replica leads now; this one starts anew to follow it"))]
    Deposed,
    #[snafu(display(
        "leadership could not be renewed for {} s; this replica starts anew, lest there be two leaders. Is the API server reached?",
        RENEW_DEADLINE.as_secs()
    ))]
    NotRenewed,
}

pub(crate) struct Election {
    api: Api<Lease>,
    name: String,
    me: String,
    started: Instant,
    observed: Option<Observation>,
    metrics: Metrics,
}

impl Election {
    /// `pod` names this replica; each process is somebody else.
    pub(crate) fn new(api: Api<Lease>, name: String, pod: &str, metrics: Metrics) -> Self {
        let process: u64 = rand::random();
        Self {
            api,
            name,
            me: format!("{pod}_{process:016x}"),
            started: Instant::now(),
            observed: None,
            metrics,
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Waits until this process leads; answers the epoch.
    pub(crate) async fn win(&mut self) -> u64 {
        loop {
            match self.attempt(None).await {
                Ok(Some(epoch)) => {
                    info!(epoch, identity = self.me, "leading");
                    self.told(epoch);
                    return epoch;
                }
                Ok(None) => debug!("another replica leads"),
                Err(error) => warn!("leadership cannot be looked at: {}", describe(&error)),
            }
            sleep(RETRY_PERIOD).await;
        }
    }

    fn told(&self, epoch: u64) {
        self.metrics.leading.set(1);
        self.metrics
            .epoch
            .set(i64::try_from(epoch).unwrap_or(i64::MAX));
    }

    /// Keeps the leadership until it is lost, or `stop` is there. `newer` brings epochs of agents that refused ours.
    pub(crate) async fn keep(
        &mut self,
        epoch: &watch::Sender<u64>,
        newer: &mut mpsc::Receiver<Option<u64>>,
        stop: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        tokio::pin!(stop);
        let mut renewed = self.now();
        loop {
            let seen = tokio::select! {
                () = &mut stop => return Ok(()),
                () = sleep(RETRY_PERIOD) => None,
                seen = newer.recv() => seen.flatten(),
            };
            let current = *epoch.borrow();
            let left = RENEW_DEADLINE.saturating_sub(self.now().saturating_sub(renewed));
            match timeout(left, self.renew(current, seen)).await {
                Ok(Ok(Some(now_in))) => {
                    renewed = self.now();
                    if now_in != current {
                        warn!(
                            epoch = now_in,
                            "agents have seen a higher epoch than the Lease had; going on above it"
                        );
                        self.told(now_in);
                        epoch.send_replace(now_in);
                    }
                }
                Ok(Ok(None)) => return Err(Error::Deposed),
                Ok(Err(error)) => warn!("leadership was not renewed: {}", describe(&error)),
                Err(_) => {}
            }
            if is_over(renewed, self.now()) {
                return Err(Error::NotRenewed);
            }
        }
    }

    /// The epoch in force after it; `None`: somebody else leads.
    async fn renew(&mut self, epoch: u64, seen: Option<u64>) -> Result<Option<u64>, kube::Error> {
        let Some(lease) = self.read().await? else {
            // Deleted by hand: the number goes on, for agents know it.
            return self.write(None, epoch + 1).await.map(Some);
        };
        if record(&lease).holder.as_deref() != Some(&self.me) {
            return Ok(None);
        }
        let next = match seen {
            Some(seen) if seen > epoch => seen + 1,
            _ => epoch,
        };
        self.write(Some(lease), next).await.map(Some)
    }

    /// Looks, and takes the leadership where it is free.
    async fn attempt(&mut self, leading: Option<u64>) -> Result<Option<u64>, kube::Error> {
        let lease = self.read().await?;
        let now = self.now();
        self.observed = lease
            .as_ref()
            .map(|lease| Observation::update(self.observed.take(), record(lease), now));
        match turn(&self.me, leading, self.observed.as_ref(), now) {
            Turn::Take { transitions } | Turn::Renew { transitions } => {
                match self.write(lease, transitions).await {
                    Ok(epoch) => Ok(Some(epoch)),
                    Err(kube::Error::Api(status)) if status.code == 409 => Ok(None),
                    Err(error) => Err(error),
                }
            }
            Turn::Wait => Ok(None),
        }
    }

    async fn read(&self) -> Result<Option<Lease>, kube::Error> {
        self.api.get_opt(&self.name).await
    }

    /// Code 409: somebody was faster.
    async fn write(&mut self, old: Option<Lease>, epoch: u64) -> Result<u64, kube::Error> {
        let time = MicroTime(Timestamp::now());
        let spec = LeaseSpec {
            holder_identity: Some(self.me.clone()),
            lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
            lease_transitions: Some(i32::try_from(epoch).unwrap_or(i32::MAX)),
            acquire_time: old
                .as_ref()
                .filter(|old| record(old).holder.as_deref() == Some(&self.me))
                .and_then(|old| old.spec.as_ref()?.acquire_time.clone())
                .or_else(|| Some(time.clone())),
            renew_time: Some(time),
            ..LeaseSpec::default()
        };
        let params = PostParams::default();
        let result = if let Some(old) = old {
            // With its resourceVersion, so that only one of two writers succeeds.
            let new = Lease {
                spec: Some(spec),
                ..old
            };
            self.api.replace(&self.name, &params, &new).await
        } else {
            let new = Lease {
                metadata: ObjectMeta {
                    name: Some(self.name.clone()),
                    ..ObjectMeta::default()
                },
                spec: Some(spec),
            };
            self.api.create(&params, &new).await
        };
        let (written, now) = (record(&result?), self.now());
        self.observed = Some(Observation::update(self.observed.take(), written, now));
        Ok(epoch)
    }

    /// The next replica need not wait. To be called when nothing is done in this leadership any more.
    pub(crate) async fn give_up(&mut self, epoch: u64) {
        let result = async {
            let Some(mut lease) = self.read().await? else {
                return Ok(());
            };
            if record(&lease).holder.as_deref() != Some(&self.me) {
                return Ok(());
            }
            if let Some(spec) = &mut lease.spec {
                spec.holder_identity = None;
                spec.lease_transitions = Some(i32::try_from(epoch).unwrap_or(i32::MAX));
                spec.lease_duration_seconds = Some(1);
            }
            self.api
                .replace(&self.name, &PostParams::default(), &lease)
                .await?;
            Ok::<_, kube::Error>(())
        };
        let result = timeout(RETRY_PERIOD, result).await;
        self.metrics.leading.set(0);
        match result {
            Ok(Ok(())) => info!("gave the leadership up"),
            Ok(Err(error)) => warn!("the leadership was not given up: {}", describe(&error)),
            Err(_) => warn!("the leadership was not given up: the API server does not answer"),
        }
    }
}

fn record(lease: &Lease) -> Record {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec
        .lease_duration_seconds
        .and_then(|n| u64::try_from(n).ok());
    Record {
        holder: spec.holder_identity,
        transitions: spec
            .lease_transitions
            .and_then(|n| u64::try_from(n).ok())
            .unwrap_or(0),
        duration: seconds.map_or(LEASE_DURATION, Duration::from_secs),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
    }
}
