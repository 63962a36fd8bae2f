//! What has to hold of a sample before it counts.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use snafu::{OptionExt, ResultExt, whatever};
use tokio_postgres::{NoTls, SimpleQueryMessage};

use crate::{agent::DATABASE, error::Result};

/// Each of the directories holds the socket of a server of its own, which has the source's rows.
pub(crate) async fn distinct_servers(directories: &[PathBuf], wanted: u32) -> Result<()> {
    let mut seen = BTreeSet::new();
    for directory in directories {
        let answer = ask(
            directory,
            "SELECT current_setting('unix_socket_directories') || ' ' || pg_postmaster_start_time() || ' ' || current_setting('data_directory'), count(*), sum(id) FROM items",
        )
        .await?;
        let [server, count, sum] = answer.as_slice() else {
            whatever!("{} answers {answer:?}", directory.display())
        };
        if (count.as_str(), sum.as_str()) != ("100000", "5000050000") {
            whatever!("{} has {count} items, of sum {sum}", directory.display());
        }
        seen.insert(server.clone());
    }
    if seen.len() != wanted as usize || directories.len() != seen.len() {
        whatever!(
            "{wanted} servers were wanted, {} sockets are there, and {} servers answer",
            directories.len(),
            seen.len()
        );
    }
    Ok(())
}

/// The first row of an answer.
pub(crate) async fn ask(directory: &Path, sql: &str) -> Result<Vec<String>> {
    let messages = run(directory, sql).await?;
    let row = messages.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    let row = row.with_whatever_context(|| format!("no row at {}", directory.display()))?;
    let values = (0..row.len()).map(|column| row.get(column).unwrap_or("NULL").to_owned());
    Ok(values.collect())
}

/// Runs statements that have no answer.
pub(crate) async fn execute(directory: &Path, sql: &str) -> Result<()> {
    run(directory, sql).await.map(drop)
}

async fn run(directory: &Path, sql: &str) -> Result<Vec<SimpleQueryMessage>> {
    let mut config = tokio_postgres::Config::new();
    // The servers' directories are shown to superusers only.
    config
        .host_path(directory)
        .user("postgres")
        .dbname(DATABASE);
    let (client, connection) = config
        .connect(NoTls)
        .await
        .with_whatever_context(|_| format!("no session at {}", directory.display()))?;
    let connection = tokio::spawn(connection);
    let messages = client
        .simple_query(sql)
        .await
        .with_whatever_context(|_| format!("no answer at {}", directory.display()))?;
    drop(client);
    let _ended = connection.await;
    Ok(messages)
}

/// No branch is left in any of the directories below.
pub(crate) fn shards_are_empty(directory: &Path) -> Result<()> {
    let entries = |path: &Path| {
        fs::read_dir(path)
            .map(|entries| {
                entries
                    .flatten()
                    .map(|entry| entry.path())
                    .collect::<Vec<_>>()
            })
            .with_whatever_context(|_| format!("cannot read {}", path.display()))
    };
    for shard in entries(directory)? {
        let left = entries(&shard)?;
        if !left.is_empty() {
            whatever!("left behind: {left:?}");
        }
    }
    Ok(())
}
