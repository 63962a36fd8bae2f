//! Connections, and what the server says on them by itself.

use std::{collections::BTreeMap, fs, sync::Arc};

use branchpool_e2e_drivers::{Config, Password};
use futures_util::stream::{self, StreamExt};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, Client, Row, config::SslMode, types::ToSql};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::Result;

/// More than any check lets the server say.
const MESSAGES: usize = 64;
const PARAMETERS: [&str; 15] = [
    "DateStyle",
    "IntervalStyle",
    "TimeZone",
    "application_name",
    "client_encoding",
    "default_transaction_read_only",
    "in_hot_standby",
    "integer_datetimes",
    "is_superuser",
    "scram_iterations",
    "search_path",
    "server_encoding",
    "server_version",
    "session_authorization",
    "standard_conforming_strings",
];

pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) parameters: BTreeMap<&'static str, String>,
    pub(crate) messages: mpsc::Receiver<AsyncMessage>,
}

/// Checks the chain and the host's name.
pub(crate) fn tls(config: &Config) -> Result<MakeRustlsConnect> {
    let mut roots = RootCertStore::empty();
    if let Some(ca) = &config.ca {
        for certificate in CertificateDer::pem_slice_iter(&fs::read(ca)?) {
            roots.add(certificate?)?;
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(MakeRustlsConnect::new(config))
}

pub(crate) fn parameters(config: &Config) -> tokio_postgres::Config {
    let mut parameters = tokio_postgres::Config::new();
    parameters
        .host(&config.host)
        .port(config.port)
        .user(&config.user)
        .dbname(&config.database)
        .ssl_mode(if config.ca.is_some() {
            SslMode::Require
        } else {
            SslMode::Disable
        });
    if let Some(Password(password)) = &config.password {
        parameters.password(password);
    }
    parameters
}

impl Session {
    pub(crate) async fn open(
        parameters: &tokio_postgres::Config,
        tls: &MakeRustlsConnect,
    ) -> Result<Self> {
        let (client, mut connection) = parameters.connect(tls.clone()).await?;
        let parameters = PARAMETERS
            .into_iter()
            .filter_map(|name| Some((name, connection.parameter(name)?.to_owned())))
            .collect();
        let (sender, messages) = mpsc::channel(MESSAGES);
        tokio::spawn(async move {
            let mut said = stream::poll_fn(|context| connection.poll_message(context));
            while let Some(Ok(message)) = said.next().await {
                // Nobody may be listening.
                let _ = sender.try_send(message);
            }
        });
        Ok(Self {
            client,
            parameters,
            messages,
        })
    }

    pub(crate) async fn row(&self, query: &str, parameters: &[&(dyn ToSql + Sync)]) -> Result<Row> {
        Ok(self.client.query_one(query, parameters).await?)
    }

    /// The columns of the only row, all of them text.
    pub(crate) async fn texts(&self, query: &str) -> Result<Vec<Option<String>>> {
        let row = self.row(query, &[]).await?;
        (0..row.len()).map(|i| Ok(row.try_get(i)?)).collect()
    }

    /// Name and value from rows of two texts.
    pub(crate) async fn pairs(&self, query: &str) -> Result<BTreeMap<String, String>> {
        let rows = self.client.query(query, &[]).await?;
        rows.iter()
            .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
            .collect()
    }

    pub(crate) async fn execute(&self, statements: &str) -> Result<()> {
        Ok(self.client.batch_execute(statements).await?)
    }
}

/// The next message of the server for which `wanted` gives something.
pub(crate) async fn said<T>(
    messages: &mut mpsc::Receiver<AsyncMessage>,
    wanted: impl Fn(AsyncMessage) -> Option<T>,
) -> Result<T> {
    loop {
        let message = messages.recv().await.ok_or("the connection is closed")?;
        if let Some(found) = wanted(message) {
            return Ok(found);
        }
    }
}

/// The SQLSTATE of an error that is expected.
pub(crate) fn code<T>(result: std::result::Result<T, tokio_postgres::Error>) -> Result<Value> {
    match result {
        Ok(_) => Err("expected an error of the server".into()),
        Err(error) => match error.code() {
            Some(code) => Ok(code.code().into()),
            None => Err(error.into()),
        },
    }
}
