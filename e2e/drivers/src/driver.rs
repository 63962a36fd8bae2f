//! The drivers, and what each of them cannot do.

use std::fmt;

/// A Postgres driver that has a program here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Driver {
    Asyncpg,
    NodePostgres,
    Pgjdbc,
    Pgx,
    Psql,
    Psycopg,
    Sqlalchemy,
    TokioPostgres,
}

impl Driver {
    pub const ALL: [Self; 8] = [
        Self::Asyncpg,
        Self::NodePostgres,
        Self::Pgjdbc,
        Self::Pgx,
        Self::Psql,
        Self::Psycopg,
        Self::Sqlalchemy,
        Self::TokioPostgres,
    ];

    /// The name that its users know it by, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Asyncpg => "asyncpg",
            Self::NodePostgres => "node-postgres",
            Self::Pgjdbc => "pgjdbc",
            Self::Pgx => "pgx",
            Self::Psql => "psql",
            Self::Psycopg => "psycopg",
            Self::Sqlalchemy => "sqlalchemy",
            Self::TokioPostgres => "tokio-postgres",
        }
    }

    /// Whether it can connect to a Unix socket. If not, a [`Proxy`](crate::proxy::Proxy) helps.
    pub const fn knows_unix_sockets(self) -> bool {
        !matches!(self, Self::Pgjdbc)
    }

    /// The checks whose results say "unsupported", with the reason.
    pub const fn unsupported(self) -> &'static [&'static str] {
        match self {
            Self::Asyncpg | Self::Psycopg | Self::Sqlalchemy => &[],
            Self::NodePostgres => &["binary", "latin1"],
            Self::Pgjdbc | Self::Pgx | Self::TokioPostgres => &["latin1"],
            Self::Psql => &["binary", "pool"],
        }
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
