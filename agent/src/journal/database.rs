//! The file: its format, and transactions on it.

use std::{
    collections::BTreeMap,
    fs::OpenOptions,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior, config::DbConfig, params};
use snafu::{OptionExt, ResultExt, ensure};

use super::{DamagedSnafu, Error, FileSnafu, Kind, NewerSnafu, OpenSnafu, Record};

/// "brpl" in ASCII; tells a journal from other `SQLite` files.
const APPLICATION_ID: i64 = 0x6272_706c;
const VERSION: i64 = 1;

#[derive(Debug)]
pub(super) struct Database {
    connection: Connection,
    path: PathBuf,
}

impl Database {
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        // SQLite would make it readable for everyone.
        OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(path)
            .context(FileSnafu {
                action: "open",
                path,
            })?;
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags).context(OpenSnafu { path })?;
        let mut database = Self {
            connection,
            path: path.into(),
        };
        // Closing leaves the WAL as a crash would: what is refused below stays as it was, and the
        // next start on a full disk need not make the file anew, which Btrfs may then refuse.
        database
            .connection
            .set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)
            .context(OpenSnafu { path })?;
        // Exclusive before the first access: the index of the WAL then lives in memory. In a
        // shared mapping a full disk would end the process with SIGBUS.
        database.pragma("locking_mode", "exclusive")?;
        database.check_format()?;
        database.pragma("journal_mode", "wal")?;
        database.pragma("synchronous", "normal")?;
        database.pragma("journal_size_limit", "67108864")?;
        // In pages of 4 KiB. Moving the WAL holds up writes for two fsyncs: seldom is better, as
        // measured, and 32 MiB are read again in no time at a start.
        database.pragma("wal_autocheckpoint", "8000")?;
        database.create_schema()?;
        Ok(database)
    }

    fn pragma(&self, name: &str, value: &str) -> Result<(), Error> {
        self.connection
            .pragma_update_and_check(None, name, value, |_| Ok(()))
            .or_else(|error| match error {
                // Some answer with their new value, others with nothing.
                rusqlite::Error::QueryReturnedNoRows => Ok(()),
                error => Err(self.error(error)),
            })
    }

    fn number(&self, pragma: &str) -> Result<i64, Error> {
        self.connection
            .pragma_query_value(None, pragma, |row| row.get(0))
            .map_err(|error| self.error(error))
    }

    /// Before anything is written.
    fn check_format(&self) -> Result<(), Error> {
        let application = self.number("application_id")?;
        let version = self.number("user_version")?;
        let is_new = application == 0 && version == 0 && self.number("schema_version")? == 0;
        if is_new {
            return Ok(());
        }
        let path = &self.path;
        ensure!(
            application == APPLICATION_ID,
            DamagedSnafu {
                path,
                message: "it belongs to another program"
            }
        );
        ensure!(
            version <= VERSION,
            NewerSnafu {
                path,
                found: version,
                known: VERSION
            }
        );
        let verdict: String = self
            .connection
            .pragma_query_value(None, "quick_check", |row| row.get(0))
            .map_err(|error| self.error(error))?;
        ensure!(
            verdict == "ok",
            DamagedSnafu {
                path,
                message: verdict
            }
        );
        Ok(())
    }

    fn create_schema(&mut self) -> Result<(), Error> {
        if self.number("user_version")? == VERSION {
            return Ok(());
        }
        // One transaction, so that a crash leaves either an empty file or a complete journal.
        let script = format!(
            "BEGIN IMMEDIATE;
             PRAGMA application_id = {APPLICATION_ID};
             PRAGMA user_version = {VERSION};
             CREATE TABLE record (
                 kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL,
                 PRIMARY KEY (kind, key)
             ) STRICT, WITHOUT ROWID;
             COMMIT;"
        );
        self.connection
            .execute_batch(&script)
            .map_err(|error| self.error(error))?;
        // The main file by itself then tells what it is, should its WAL get lost.
        self.connection
            .query_row("PRAGMA wal_checkpoint(FULL)", [], |_| Ok(()))
            .map_err(|error| self.error(error))
    }

    pub(super) fn read(&self) -> Result<BTreeMap<(Kind, String), String>, Error> {
        let rows = || -> rusqlite::Result<Vec<(String, String, String)>> {
            self.connection
                .prepare("SELECT kind, key, value FROM record")?
                .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?
                .collect()
        };
        let mut records = BTreeMap::new();
        for (kind, key, value) in rows().map_err(|error| self.error(error))? {
            let known = Kind::ALL.into_iter().find(|known| known.as_str() == kind);
            let known = known.with_context(|| DamagedSnafu {
                path: &self.path,
                message: format!("unknown kind {kind:?}"),
            })?;
            records.insert((known, key), value);
        }
        Ok(records)
    }

    /// All of it in one transaction, or nothing.
    pub(super) fn apply<'a>(
        &mut self,
        records: impl Iterator<Item = &'a Record>,
    ) -> rusqlite::Result<()> {
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        {
            let mut put = transaction.prepare_cached(
                "INSERT OR REPLACE INTO record (kind, key, value) VALUES (?, ?, ?)",
            )?;
            let mut delete =
                transaction.prepare_cached("DELETE FROM record WHERE kind = ? AND key = ?")?;
            for record in records {
                match record {
                    Record::Put { kind, key, value } => {
                        put.execute(params![kind.as_str(), key, value])?
                    }
                    Record::Delete { kind, key } => delete.execute(params![kind.as_str(), key])?,
                };
            }
        }
        transaction.commit()
    }

    /// For each caller whose records were in a transaction that failed.
    pub(super) fn write_error(&self, error: &rusqlite::Error) -> Error {
        let path = self.path.clone();
        if error.sqlite_error_code() == Some(ErrorCode::DiskFull) {
            Error::DiskFull { path }
        } else {
            Error::Write {
                path,
                message: error.to_string(),
            }
        }
    }

    fn error(&self, source: rusqlite::Error) -> Error {
        let path = self.path.clone();
        match source.sqlite_error_code() {
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => Error::Damaged {
                path,
                message: source.to_string(),
            },
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                Error::Locked { path, pid: None }
            }
            Some(ErrorCode::DiskFull) => Error::DiskFull { path },
            _ => Error::Open { path, source },
        }
    }
}
