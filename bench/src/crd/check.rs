//! What has to hold of leases before a sample counts.

use std::collections::BTreeSet;

use kube::{ResourceExt as _, api::DynamicObject};
use snafu::{OptionExt, ResultExt, whatever};
use tokio_postgres::{Config, NoTls};

use super::stage::Stage;
use crate::error::Result;

/// Each lease has a branch of its own, and its Secret opens it.
pub(super) async fn branches(stage: &Stage, leases: &[DynamicObject]) -> Result<()> {
    distinct(leases)?;
    for lease in leases {
        opens(stage, lease).await?;
    }
    let secrets = stage.lease_secrets().await?.len();
    if secrets != leases.len() {
        whatever!("{} leases are there, and {secrets} Secrets", leases.len());
    }
    Ok(())
}

/// No two leases have the same branch.
pub(super) fn distinct(leases: &[DynamicObject]) -> Result<()> {
    let branch = |lease: &DynamicObject| {
        let status = &lease.data["status"];
        Some((
            status["node"].as_str()?.to_owned(),
            status["branch"].as_str()?.to_owned(),
        ))
    };
    let branches: BTreeSet<_> = leases.iter().filter_map(branch).collect();
    if branches.len() != leases.len() {
        whatever!("{} leases have {} branches", leases.len(), branches.len());
    }
    Ok(())
}

/// With the source's rows, and nothing of another lease's.
async fn opens(stage: &Stage, lease: &DynamicObject) -> Result<()> {
    let name = lease.name_any();
    let secret = stage.secrets().get(&name).await;
    let secret = secret.with_whatever_context(|_| format!("{name} has no Secret"))?;
    if secret.labels().get("branchpool.dev/lease-uid") != lease.metadata.uid.as_ref() {
        whatever!("the Secret {name} is another lease's");
    }
    let data = secret.data.unwrap_or_default();
    let entry = |key: &str| {
        let value = data.get(key).map(|value| value.0.clone());
        let text = value.and_then(|value| String::from_utf8(value).ok());
        text.with_whatever_context(|| format!("the Secret {name} has no {key}"))
    };
    let mut config = Config::new();
    config
        .host(entry("PGHOST")?)
        .port(entry("PGPORT")?.parse().whatever_context("no port")?)
        .dbname(entry("PGDATABASE")?)
        .user(entry("PGUSER")?)
        .password(entry("PGPASSWORD")?);
    let opened = config.connect(NoTls).await;
    let (session, connection) =
        opened.with_whatever_context(|_| format!("the Secret {name} opens nothing"))?;
    let connection = tokio::spawn(connection);
    let row = session
        .query_one("SELECT count(*), sum(id)::bigint FROM items", &[])
        .await
        .with_whatever_context(|_| format!("the branch of {name} does not answer"))?;
    let found: (i64, i64) = (row.get(0), row.get(1));
    if found != (100_000, 5_000_050_000) {
        whatever!("the branch of {name} has other rows than its source: {found:?}");
    }
    // Fails where another lease has been.
    session
        .batch_execute("CREATE TABLE holder (lease text)")
        .await
        .with_whatever_context(|_| format!("the branch of {name} was written to"))?;
    drop(session);
    let _ended = connection.await;
    Ok(())
}

/// What the operator wrote for leases, as the audit log has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writes {
    secrets: usize,
    statuses: usize,
}

impl Writes {
    pub(super) fn so_far(stage: &Stage) -> Result<Self> {
        Ok(Self {
            secrets: stage.operators_requests("create", "secrets")?,
            statuses: stage.operators_requests("patch", "branchleases/status")?,
        })
    }

    /// Since then one Secret and one status for each lease.
    pub(super) fn at_most(self, stage: &Stage, leases: usize) -> Result<()> {
        let now = Self::so_far(stage)?;
        let made = (now.secrets - self.secrets, now.statuses - self.statuses);
        if made != (leases, leases) {
            let (secrets, statuses) = made;
            whatever!("{secrets} Secrets and {statuses} statuses were written for {leases} leases");
        }
        Ok(())
    }
}
