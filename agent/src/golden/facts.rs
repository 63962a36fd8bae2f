//! What is remembered of an image.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    checks,
    error::Result,
    seal::Sealed,
    workshop::{Doing, Workshop, literal},
};
use crate::postgres::config::CARRIED_OVER;

/// A sealed image, for the journal and for the configuration of its branches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Facts {
    pub major: u32,
    /// The pool's, when it was made.
    pub database: String,
    /// The pool's, when it was made.
    pub role: String,
    /// Of the server that made it, such as `15.20 (Debian …)`.
    pub server_version: String,
    /// Of the pool's database.
    pub encoding: String,
    pub collate: String,
    pub ctype: String,
    /// Absent for collations that have no version, such as C and C.UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collation_version: Option<String>,
    /// 0: off.
    pub checksum_version: u32,
    /// Bytes.
    pub wal_segment_size: u64,
    /// Settings for which the image's own values stay in force, by name.
    pub carried_over: BTreeMap<String, String>,
    pub shared_preload_libraries: Vec<String>,
    pub system_identifier: String,
    /// On disk, shared parts included.
    pub bytes: u64,
    /// Lower-case hexadecimal.
    pub subvolume_uuid: String,
    pub created: Timestamp,
}

impl Facts {
    pub(super) fn new(
        workshop: &Workshop<'_>,
        origin: Origin,
        catalog: Catalog,
        sealed: Sealed,
    ) -> Self {
        Self {
            major: workshop.installation.major,
            database: workshop.spec.database.clone(),
            role: workshop.spec.role.clone(),
            server_version: catalog.server_version,
            encoding: catalog.encoding,
            collate: catalog.collate,
            ctype: catalog.ctype,
            collation_version: catalog.collation_version,
            checksum_version: sealed.control.checksum_version,
            wal_segment_size: sealed.control.wal_segment_size,
            carried_over: origin.carried_over,
            shared_preload_libraries: origin.preload_libraries,
            system_identifier: sealed.control.system_identifier,
            bytes: sealed.bytes,
            subvolume_uuid: data_encoding::HEXLOWER.encode(&sealed.uuid),
            created: Timestamp::now(),
        }
    }
}

/// What the configuration files of the data directory said, before they were removed.
#[derive(Clone, Debug, Default)]
pub(super) struct Origin {
    pub(super) carried_over: BTreeMap<String, String>,
    pub(super) preload_libraries: Vec<String>,
}

impl Origin {
    /// Nothing when there is no `postgresql.conf`, as in base backups of Debian's servers.
    pub(super) async fn read(workshop: &Workshop<'_>) -> Result<Self> {
        if !workshop.data_dir.join("postgresql.conf").exists() {
            return Ok(Self::default());
        }
        let mut carried_over = BTreeMap::new();
        for name in CARRIED_OVER {
            carried_over.insert(name.to_owned(), workshop.configured(name).await?);
        }
        let libraries = workshop.configured("shared_preload_libraries").await?;
        Ok(Self {
            carried_over,
            preload_libraries: checks::parse_libraries(&libraries),
        })
    }
}

/// What only a server can tell.
pub(super) struct Catalog {
    server_version: String,
    encoding: String,
    collate: String,
    ctype: String,
    collation_version: Option<String>,
}

pub(super) async fn read_catalog(workshop: &Workshop<'_>) -> Result<Catalog> {
    let version = if workshop.spec.major >= 15 {
        "pg_database_collation_actual_version(oid)"
    } else {
        "NULL"
    };
    let query = format!(
        "SELECT current_setting('server_version'), pg_encoding_to_char(encoding), datcollate, \
         datctype, {version} FROM pg_database WHERE datname = {}",
        literal(&workshop.spec.database)
    );
    let mut session = workshop.session("template1").await?;
    let rows = session.query(&query).await.doing("reading the catalog")?;
    session.terminate().await;
    let mut cells = rows.into_iter().flatten();
    let mut next = || cells.next().flatten();
    Ok(Catalog {
        server_version: next().unwrap_or_default(),
        encoding: next().unwrap_or_default(),
        collate: next().unwrap_or_default(),
        ctype: next().unwrap_or_default(),
        collation_version: next(),
    })
}
