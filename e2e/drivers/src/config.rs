//! Where a program connects to, and as whom.

use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

/// A server and a role. With a `ca` the connection is TLS and the server's name is checked
/// (`sslmode=verify-full`); without one it is plain.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub struct Config {
    /// A host's name or address, or the directory of a Unix socket.
    pub host: String,
    pub port: u16,
    pub user: String,
    pub password: Option<Password>,
    pub database: String,
    /// File with the certificate authority, PEM.
    pub ca: Option<PathBuf>,
    /// Names of the checks to run; empty means all.
    #[serde(default)]
    pub only: Vec<String>,
}

/// A password, which is never shown.
#[derive(Clone, Deserialize, Serialize)]
#[serde(transparent)]
pub struct Password(pub String);

impl fmt::Debug for Password {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Password(…)")
    }
}

impl Config {
    /// The Unix socket, if `host` is the directory of one.
    pub fn socket(&self) -> Option<PathBuf> {
        let name = format!(".s.PGSQL.{}", self.port);
        self.host
            .starts_with('/')
            .then(|| Path::new(&self.host).join(name))
    }

    /// The same, at another address.
    #[must_use]
    pub fn at(&self, address: SocketAddr) -> Self {
        Self {
            host: address.ip().to_string(),
            port: address.port(),
            ..self.clone()
        }
    }

    /// The connection string of libpq's form with TLS, as a lease carries it. Every character of
    /// user, password and database must be one that needs no escape in a URL.
    pub fn url(&self) -> String {
        let Self {
            host,
            port,
            user,
            database,
            ..
        } = self;
        let password = self
            .password
            .as_ref()
            .map(|Password(password)| format!(":{password}"))
            .unwrap_or_default();
        let tls = self
            .ca
            .as_ref()
            .map(|ca| format!("?sslmode=verify-full&sslrootcert={}", ca.display()))
            .unwrap_or_default();
        format!("postgresql://{user}{password}@{host}:{port}/{database}{tls}")
    }
}
