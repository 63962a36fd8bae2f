//! A client's sessions on a lease.

use branchpool_agent_api::Lease;
use tokio_postgres::NoTls;

/// A client's session on a lease.
pub(crate) async fn connect(
    lease: &Lease,
) -> Result<tokio_postgres::Client, tokio_postgres::Error> {
    connect_at(&lease.socket, &lease.user, &lease.database).await
}

pub(crate) async fn connect_at(
    host: &str,
    user: &str,
    database: &str,
) -> Result<tokio_postgres::Client, tokio_postgres::Error> {
    let mut config = tokio_postgres::Config::new();
    config.host_path(host).user(user).dbname(database);
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// The first column of all rows, as text, joined by commas.
pub(crate) async fn ask(
    client: &tokio_postgres::Client,
    sql: &str,
) -> Result<String, tokio_postgres::Error> {
    let rows = client.simple_query(sql).await?;
    let values = rows.iter().filter_map(|message| match message {
        tokio_postgres::SimpleQueryMessage::Row(row) => {
            Some(row.get(0).unwrap_or("NULL").to_owned())
        }
        _ => None,
    });
    Ok(values.collect::<Vec<_>>().join(","))
}
