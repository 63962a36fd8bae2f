//! `pg_controldata`: what a stopped data directory says about itself.

use std::{io, path::Path};

use snafu::{OptionExt, ResultExt, Snafu};
use tokio::process::Command;

use super::installation::Installation;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("{program} could not be run: {source}"))]
    Run { program: String, source: io::Error },

    #[snafu(display(
        "pg_controldata refused {directory}: {message}; is it a data directory of Postgres {major}?"
    ))]
    Refused {
        directory: String,
        major: u32,
        message: String,
    },

    #[snafu(display(
        "pg_controldata of Postgres {major} said nothing about {field:?}; this version is not supported"
    ))]
    FieldMissing { field: &'static str, major: u32 },
}

/// State and identity of a data directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlData {
    /// `shut down` after a clean stop; else `in production`, `in archive recovery`, ….
    pub state: String,
    pub system_identifier: String,
    pub catalog_version: String,
    /// 0: data checksums are off.
    pub checksum_version: u32,
    /// Bytes.
    pub wal_segment_size: u64,
}

impl ControlData {
    /// Runs `pg_controldata` of `installation` on `data_dir`.
    pub async fn read(installation: &Installation, data_dir: &Path) -> Result<Self, Error> {
        let program = installation.program("pg_controldata");
        let output = Command::new(&program)
            .arg("-D")
            .arg(data_dir)
            .env_clear()
            .env("LC_ALL", "C")
            .kill_on_drop(true)
            .output()
            .await
            .context(RunSnafu {
                program: program.display().to_string(),
            })?;
        if !output.status.success() {
            return RefusedSnafu {
                directory: data_dir.display().to_string(),
                major: installation.major,
                message: String::from_utf8_lossy(&output.stderr)
                    .lines()
                    .next()
                    .unwrap_or("no message")
                    .to_owned(),
            }
            .fail();
        }
        Self::parse(&String::from_utf8_lossy(&output.stdout), installation.major)
    }

    fn parse(text: &str, major: u32) -> Result<Self, Error> {
        let field = |field: &'static str| {
            text.lines()
                .filter_map(|line| line.split_once(':'))
                .find(|(name, _)| *name == field)
                .map(|(_, value)| value.trim().to_owned())
                .context(FieldMissingSnafu { field, major })
        };
        let number = |name: &'static str| {
            field(name)?
                .parse::<u64>()
                .ok()
                .context(FieldMissingSnafu { field: name, major })
        };
        Ok(Self {
            state: field("Database cluster state")?,
            system_identifier: field("Database system identifier")?,
            catalog_version: field("Catalog version number")?,
            checksum_version: u32::try_from(number("Data page checksum version")?)
                .unwrap_or(u32::MAX),
            wal_segment_size: number("Bytes per WAL segment")?,
        })
    }

    /// Whether a start needs no recovery. `shut down in recovery` is the state of a standby,
    /// which still has to replay.
    pub fn is_clean(&self) -> bool {
        self.state == "shut down"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
pg_control version number:            1300
Catalog version number:               202209061
Database system identifier:           7423545243466743210
Database cluster state:               shut down
Bytes per WAL segment:                16777216
Data page checksum version:           0
";

    #[test]
    fn fields() {
        let control = ControlData::parse(TEXT, 15).unwrap();
        assert!(control.is_clean());
        assert_eq!(control.system_identifier, "7423545243466743210");
        assert_eq!(control.wal_segment_size, 16 << 20);
        assert_eq!(control.checksum_version, 0);
    }

    #[test]
    fn other_states_are_not_clean() {
        for state in ["in production", "shut down in recovery", "shutting down"] {
            let control = ControlData::parse(&TEXT.replace("shut down", state), 15).unwrap();
            assert!(!control.is_clean(), "{state}");
        }
    }

    #[test]
    fn a_missing_field_is_named() {
        let text = TEXT.replace("Catalog version number", "Katalogversion");
        let error = ControlData::parse(&text, 15).unwrap_err();
        assert!(error.to_string().contains("Catalog version number"));
    }
}
