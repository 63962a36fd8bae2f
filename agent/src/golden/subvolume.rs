//! The `subvolume` source: a clone of a prepared data directory, checked and cleaned.

use std::{fs, path::Path};

use branchpool_sys::btrfs;
use snafu::{ResultExt, ensure};

use super::{
    Report, checks,
    error::{CheckSnafu, NoDatabaseSnafu, NoSuperuserSnafu, Result},
    facts::Origin,
    files, scrub,
    tool::blocking,
    workshop::{Doing, Workshop, identifier, literal},
};
use crate::postgres::config::Profile;

/// Files in which prepared transactions wait, which a start has to find room for.
const TWO_PHASE: &str = "pg_twophase";

/// Clones the source and checks the clone.
pub(super) async fn create(
    workshop: &Workshop<'_>,
    name: &str,
    report: &Report<'_>,
) -> Result<Origin> {
    report.step(format!("Checking the subvolume {name}"));
    let source = workshop.env.layout.sources().join(name);
    let installation = workshop.installation.clone();
    let path = source.clone();
    // The checks' own errors go through untouched.
    let checked = blocking("examining", &source, move || {
        Ok(checks::source(&path, &installation))
    });
    checked.await?.context(CheckSnafu)?;

    report.step(format!("Cloning the subvolume {name}"));
    let (path, clone) = (source.clone(), workshop.data_dir.clone());
    blocking("taking a snapshot of", &source, move || {
        let (parent, name) = files::split(&clone);
        btrfs::snapshot(
            btrfs::open_dir(&path)?,
            btrfs::open_dir(parent)?,
            name,
            false,
        )
    })
    .await?;
    let survey = survey(workshop).await?;
    checks::clone(&source, &workshop.data_dir, &survey, workshop.installation)
        .await
        .context(CheckSnafu)?;
    take_over(workshop, survey.foreign).await?;

    report.step("Removing what ties the clone to its origin");
    let origin = Origin::read(workshop).await?;
    let libraries = match workshop.spec.parameters.get("shared_preload_libraries") {
        Some(setting) => checks::parse_libraries(setting),
        None => origin.preload_libraries.clone(),
    };
    checks::preload_libraries(&libraries, workshop.installation).context(CheckSnafu)?;
    let (clone, owner) = (workshop.data_dir.clone(), workshop.env.disk_user.clone());
    blocking("cleaning", &workshop.data_dir, move || {
        scrub::files(&clone, &owner)
    })
    .await?;
    Ok(origin)
}

async fn survey(workshop: &Workshop<'_>) -> Result<files::Survey> {
    let (clone, owner) = (workshop.data_dir.clone(), workshop.env.disk_user.clone());
    blocking("examining", &workshop.data_dir, move || {
        files::survey(&clone, &owner)
    })
    .await
}

async fn take_over(workshop: &Workshop<'_>, foreign: bool) -> Result<()> {
    let (clone, owner) = (workshop.data_dir.clone(), workshop.env.disk_user.clone());
    blocking("changing the owner of", &workshop.data_dir, move || {
        if foreign {
            files::give_to(&clone, &owner)?;
        }
        files::make_private(&clone, &owner)
    })
    .await
}

/// Starts a server in which nothing runs by itself, checks what only a server can tell, and
/// removes credentials and outward connections.
pub(super) async fn clean(
    workshop: &Workshop<'_>,
    profile: &Profile,
    report: &Report<'_>,
) -> Result<()> {
    report.step("Starting a quiet server on the clone");
    let transactions = prepared_transactions(&workshop.data_dir);
    // Without worker processes neither subscriptions nor scheduled jobs come to life.
    let quiet = [
        ("max_worker_processes", "0"),
        ("max_logical_replication_workers", "0"),
        ("max_parallel_workers", "0"),
        ("autovacuum", "off"),
        ("max_prepared_transactions", &transactions.to_string()),
    ];
    let server = workshop.start(profile, &quiet).await?;
    check_catalog(workshop).await?;
    report.step("Removing credentials and outward connections");
    scrub::databases(workshop).await?;
    prepare_role(workshop, report).await?;
    workshop.stop(&server).await
}

fn prepared_transactions(data_dir: &Path) -> usize {
    fs::read_dir(data_dir.join(TWO_PHASE)).map_or(0, Iterator::count)
}

async fn check_catalog(workshop: &Workshop<'_>) -> Result<()> {
    let mut session = match workshop.session("template1").await {
        Err(super::Error::Session { source, .. }) if source.sqlstate() == Some("28000") => {
            return NoSuperuserSnafu.fail();
        }
        other => other?,
    };
    let is_superuser = session
        .query_one("SELECT rolsuper FROM pg_roles WHERE rolname = 'postgres'")
        .await
        .doing("looking for the superuser")?;
    ensure!(is_superuser.as_deref() == Some("t"), NoSuperuserSnafu);

    let databases = session
        .query(
            "SELECT datname FROM pg_database WHERE datallowconn AND NOT datistemplate ORDER BY 1",
        )
        .await
        .doing("listing the databases")?;
    let names: Vec<String> = databases.into_iter().flatten().flatten().collect();
    let database = &workshop.spec.database;
    ensure!(
        names.contains(database),
        NoDatabaseSnafu {
            database,
            found: names.join(", ")
        }
    );
    session.terminate().await;
    for name in &names {
        check_collations(workshop, name).await?;
    }
    Ok(())
}

/// Indexes of another collation version may be wrong.
async fn check_collations(workshop: &Workshop<'_>, database: &str) -> Result<()> {
    // Postgres 15 was the first to record a version for the database's own collation.
    const OF_DATABASE: &str = "SELECT 'DATABASE', datname, datcollversion, \
         pg_database_collation_actual_version(oid) FROM pg_database \
         WHERE datname = current_database() \
         AND datcollversion IS NOT NULL AND datcollversion IS DISTINCT FROM pg_database_collation_actual_version(oid)";
    // Only collations that something depends on: a library's whole list changes with it.
    const OF_COLUMNS: &str = "SELECT 'COLLATION', collname, collversion, \
         pg_collation_actual_version(oid) FROM pg_collation c \
         WHERE collversion IS NOT NULL AND collversion IS DISTINCT FROM pg_collation_actual_version(oid) \
         AND EXISTS (SELECT FROM pg_depend d WHERE d.refclassid = 'pg_collation'::regclass \
         AND d.refobjid = c.oid)";
    let mut session = workshop.session(database).await?;
    let queries: &[&str] = if workshop.spec.major >= 15 {
        &[OF_DATABASE, OF_COLUMNS]
    } else {
        &[OF_COLUMNS]
    };
    for query in queries {
        let rows = session.query(query).await.doing(format!(
            "comparing collation versions of the database {database}"
        ))?;
        if let Some(row) = rows.into_iter().next() {
            let mut cells = row.into_iter().map(Option::unwrap_or_default);
            let mut next = || cells.next().unwrap_or_default();
            let kind = if next() == "DATABASE" {
                "DATABASE"
            } else {
                "COLLATION"
            };
            let error = checks::CollationSnafu {
                kind,
                object: next(),
                recorded: next(),
                actual: next(),
            };
            return error.fail().context(CheckSnafu);
        }
    }
    session.terminate().await;
    Ok(())
}

async fn prepare_role(workshop: &Workshop<'_>, report: &Report<'_>) -> Result<()> {
    let role = &workshop.spec.role;
    let mut session = workshop.session("template1").await?;
    let exists = session
        .query_one(&format!(
            "SELECT 1 FROM pg_roles WHERE rolname = {}",
            literal(role)
        ))
        .await
        .doing(format!("looking for the role {role}"))?;
    let name = identifier(role);
    let statement = if exists.is_some() {
        format!("ALTER ROLE {name} LOGIN")
    } else {
        report.step(format!(
            "The role {role} is not in the source and is created without privileges: grant it what it needs in a prepare step"
        ));
        format!("CREATE ROLE {name} LOGIN")
    };
    session
        .execute(&statement)
        .await
        .doing(format!("letting the role {role} log in"))?;
    session.terminate().await;
    Ok(())
}
