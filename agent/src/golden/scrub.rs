//! Takes from an image what must not be cloned: credentials, and all that reaches outward or
//! acts by itself.

use std::{io, path::Path};

use super::{
    error::Result,
    files,
    workshop::{Doing, Workshop, identifier},
};
use crate::{
    postgres::{installation::OsUser, session::Session},
    storage::tree::remove_tree,
};

/// Files that belong to the source's server, turn a start into a recovery or a standby, or hold
/// settings that the agent replaces, `primary_conninfo` among them.
const FILES: [&str; 12] = [
    "postmaster.pid",
    "postmaster.opts",
    "standby.signal",
    "recovery.signal",
    "promote",
    "recovery.conf",
    "recovery.done",
    "backup_label.old",
    "current_logfiles",
    "postgresql.conf",
    "pg_hba.conf",
    "pg_ident.conf",
];
/// Logs, which quote statements.
const LOGS: [&str; 2] = ["log", "pg_log"];
/// Slots, statistics with the texts of queries, and what servers keep only while they run.
const EMPTIED: [&str; 6] = [
    "pg_replslot",
    "pg_stat",
    "pg_stat_tmp",
    "pg_dynshmem",
    "pg_notify",
    "pg_snapshots",
];
/// What `ALTER SYSTEM` wrote.
const AUTO_CONF: &str = "postgresql.auto.conf";

/// Options of user mappings and foreign servers whose names look like a credential's.
const SECRET_OPTIONS: &str = "'(pass|secret|token|key|credential)'";

/// The part that needs no server. None may run. Blocks.
pub(super) fn files(data_dir: &Path, owner: &OsUser) -> io::Result<()> {
    for name in FILES {
        files::remove(&data_dir.join(name))?;
    }
    for name in LOGS {
        remove_tree(&data_dir.join(name))?;
    }
    for name in EMPTIED {
        files::empty_directory(&data_dir.join(name))?;
    }
    files::replace_by_empty(&data_dir.join(AUTO_CONF), owner)
}

/// The part that needs a server, for all databases.
pub(super) async fn databases(workshop: &Workshop<'_>) -> Result<()> {
    let mut session = workshop.session("template1").await?;
    slots(&mut session).await?;
    passwords(&mut session).await?;
    let databases = session
        .query(
            "SELECT datname, datallowconn FROM pg_database WHERE datname <> 'template0' ORDER BY 1",
        )
        .await
        .doing("listing the databases")?;
    for row in databases {
        let [Some(name), Some(open)] = row.as_slice() else {
            continue;
        };
        let closed = open == "f";
        if closed {
            allow_connections(&mut session, name, true).await?;
        }
        database(workshop, name).await?;
        if closed {
            allow_connections(&mut session, name, false).await?;
        }
    }
    session.terminate().await;
    Ok(())
}

/// Whether the pool's role is a superuser in the image.
pub(super) async fn set_superuser(workshop: &Workshop<'_>, superuser: bool) -> Result<()> {
    let role = &workshop.spec.role;
    let attribute = if superuser {
        "SUPERUSER"
    } else {
        "NOSUPERUSER"
    };
    let mut session = workshop.session("template1").await?;
    session
        .execute(&format!("ALTER ROLE {} {attribute}", identifier(role)))
        .await
        .doing(format!("making the role {role} {attribute}"))?;
    session.terminate().await;
    Ok(())
}

async fn slots(session: &mut Session) -> Result<()> {
    session
        .execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        .await
        .doing("dropping replication slots")
}

async fn passwords(session: &mut Session) -> Result<()> {
    let roles = session
        .query("SELECT rolname FROM pg_authid WHERE rolpassword IS NOT NULL")
        .await
        .doing("listing roles with passwords")?;
    for role in roles.into_iter().flatten().flatten() {
        session
            .execute(&format!("ALTER ROLE {} PASSWORD NULL", identifier(&role)))
            .await
            .doing(format!("removing the password of the role {role}"))?;
    }
    Ok(())
}

async fn allow_connections(session: &mut Session, database: &str, allow: bool) -> Result<()> {
    let name = identifier(database);
    session
        .execute(&format!("ALTER DATABASE {name} ALLOW_CONNECTIONS {allow}"))
        .await
        .doing(format!("opening the database {database}"))
}

async fn database(workshop: &Workshop<'_>, name: &str) -> Result<()> {
    let mut session = workshop.session(name).await?;
    // A database may have been made read-only by default.
    session
        .execute("SET default_transaction_read_only = off; SET search_path = pg_catalog")
        .await
        .doing(format!("opening the database {name}"))?;
    prepared_transactions(&mut session, name).await?;
    subscriptions(&mut session, name).await?;
    scheduled_jobs(&mut session, name).await?;
    foreign_credentials(&mut session, name).await?;
    session.terminate().await;
    Ok(())
}

async fn prepared_transactions(session: &mut Session, database: &str) -> Result<()> {
    let action = || format!("rolling back prepared transactions of the database {database}");
    let transactions = session
        .query("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
        .await
        .doing(action())?;
    // The statement takes only a plain literal, and is alone in its message.
    session
        .execute("SET standard_conforming_strings = on")
        .await
        .doing(action())?;
    for gid in transactions.into_iter().flatten().flatten() {
        let gid = gid.replace('\'', "''");
        session
            .execute(&format!("ROLLBACK PREPARED '{gid}'"))
            .await
            .doing(action())?;
    }
    Ok(())
}

/// A subscription without a slot can be dropped without asking its publisher.
async fn subscriptions(session: &mut Session, database: &str) -> Result<()> {
    let action = || format!("dropping subscriptions of the database {database}");
    let subscriptions = session
        .query(
            "SELECT subname FROM pg_subscription WHERE subdbid = \
             (SELECT oid FROM pg_database WHERE datname = current_database())",
        )
        .await
        .doing(action())?;
    for name in subscriptions.into_iter().flatten().flatten() {
        let name = identifier(&name);
        for statement in [
            format!("ALTER SUBSCRIPTION {name} DISABLE"),
            format!("ALTER SUBSCRIPTION {name} SET (slot_name = NONE)"),
            format!("DROP SUBSCRIPTION {name}"),
        ] {
            session.execute(&statement).await.doing(action())?;
        }
    }
    Ok(())
}

async fn scheduled_jobs(session: &mut Session, database: &str) -> Result<()> {
    let action = || format!("removing scheduled jobs of the database {database}");
    let jobs = session
        .query_one(
            "SELECT 1 FROM pg_extension WHERE extname = 'pg_cron' \
             AND to_regclass('cron.job') IS NOT NULL",
        )
        .await
        .doing(action())?;
    if jobs.is_some() {
        // The table's triggers need the extension's own process.
        session
            .execute(
                "SET session_replication_role = replica; DELETE FROM cron.job; \
                 RESET session_replication_role",
            )
            .await
            .doing(action())?;
    }
    Ok(())
}

/// With them a clone could write to the systems that the source was connected to.
async fn foreign_credentials(session: &mut Session, database: &str) -> Result<()> {
    let action = || format!("removing credentials of foreign servers of the database {database}");
    let mappings = format!(
        "SELECT CASE WHEN umuser = 0 THEN NULL ELSE usename END, srvname, option_name \
         FROM pg_user_mappings, pg_options_to_table(umoptions) \
         WHERE option_name ~* {SECRET_OPTIONS}"
    );
    for row in session.query(&mappings).await.doing(action())? {
        let [user, Some(server), Some(option)] = row.as_slice() else {
            continue;
        };
        let user = user.as_deref().map_or("PUBLIC".to_owned(), identifier);
        session
            .execute(&format!(
                "ALTER USER MAPPING FOR {user} SERVER {} OPTIONS (DROP {})",
                identifier(server),
                identifier(option)
            ))
            .await
            .doing(action())?;
    }
    let servers = format!(
        "SELECT srvname, option_name FROM pg_foreign_server, pg_options_to_table(srvoptions) \
         WHERE option_name ~* {SECRET_OPTIONS}"
    );
    for row in session.query(&servers).await.doing(action())? {
        let [Some(server), Some(option)] = row.as_slice() else {
            continue;
        };
        session
            .execute(&format!(
                "ALTER SERVER {} OPTIONS (DROP {})",
                identifier(server),
                identifier(option)
            ))
            .await
            .doing(action())?;
    }
    Ok(())
}
