//! What a data directory must be to become an image.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use branchpool_sys::btrfs;
use snafu::{ResultExt, Snafu, ensure};

use super::files::{self, Survey};
use crate::postgres::{control::ControlData, installation::Installation};

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(super)))]
pub enum Error {
    #[snafu(display("there is no {}; put a prepared Btrfs subvolume there", path.display()))]
    Missing { path: PathBuf },

    #[snafu(display("{} is not a Btrfs subvolume; make one with \"btrfs subvolume create\" and copy the data directory into it", path.display()))]
    NotSubvolume { path: PathBuf },

    #[snafu(display("{} is not a Postgres data directory: it has no file {file}; name the directory that initdb made, not one above it", path.display()))]
    NotDataDirectory { path: PathBuf, file: &'static str },

    #[snafu(display("{} holds data of Postgres {found}, but the pool asks for {wanted}; change the pool's version, or prepare the source with pg_upgrade", path.display()))]
    WrongMajor {
        path: PathBuf,
        found: String,
        wanted: u32,
    },

    #[snafu(display("{} is in use by the running process {pid}; stop that server, or copy its data into another subvolume", path.display()))]
    InUse { path: PathBuf, pid: u32 },

    #[snafu(display("{} was not shut down cleanly: its state is {state:?}; start Postgres on it and stop it with \"pg_ctl stop -m fast\"", path.display()))]
    NotShutDown { path: PathBuf, state: String },

    #[snafu(display("{} is a base backup that was never started: it has a file {file}; start Postgres on it once and stop it with \"pg_ctl stop -m fast\"", path.display()))]
    Backup { path: PathBuf, file: &'static str },

    #[snafu(display("{} has a tablespace outside of its directory: {link} leads to {}; a snapshot would share it with the source. Move its tables to pg_default", path.display(), target.display()))]
    Tablespace {
        path: PathBuf,
        link: String,
        target: PathBuf,
    },

    #[snafu(display("{} has its WAL elsewhere: pg_wal leads to {}; a snapshot would share it with the source. Replace the link by the directory itself", path.display(), target.display()))]
    WalElsewhere { path: PathBuf, target: PathBuf },

    #[snafu(display("{} has a symbolic link: {link} leads to {}; replace it by what it leads to, or remove it", path.display(), target.display()))]
    Link {
        path: PathBuf,
        link: String,
        target: PathBuf,
    },

    #[snafu(display("{} has {count} subvolumes inside, which a snapshot leaves out; replace them by plain directories", path.display()))]
    NestedSubvolumes { path: PathBuf, count: usize },

    #[snafu(display("the setting shared_preload_libraries names {library:?}, which is not in {}; install its package on this node, or set shared_preload_libraries in the pool's parameters", libdir.display()))]
    LibraryMissing { library: String, libdir: PathBuf },

    #[snafu(display("{object} was made with collation version {recorded}, but this node's libraries have {actual}, so its indexes may be wrong; on the source run REINDEX and ALTER {kind} {object} REFRESH COLLATION VERSION, with the libraries of this node"))]
    Collation {
        kind: &'static str,
        object: String,
        recorded: String,
        actual: String,
    },

    #[snafu(display("{} could not be examined: {source}", path.display()))]
    Examine { path: PathBuf, source: io::Error },

    #[snafu(display("{source}"))]
    Control {
        source: crate::postgres::control::Error,
    },
}

type Result<T, E = Error> = std::result::Result<T, E>;

/// Files without which a directory is not a data directory.
const REQUIRED: [&str; 2] = ["PG_VERSION", "global/pg_control"];
/// Files that make a start recover from a backup.
const BACKUP: [&str; 2] = ["backup_label", "tablespace_map"];

/// Checks that need no copy: is the source a data directory of this major, and unused?
pub(super) fn source(path: &Path, installation: &Installation) -> Result<()> {
    ensure!(path.is_dir(), MissingSnafu { path });
    let directory = btrfs::open_dir(path).context(ExamineSnafu { path })?;
    let is_subvolume = btrfs::is_subvolume(&directory).context(ExamineSnafu { path })?;
    ensure!(is_subvolume, NotSubvolumeSnafu { path });
    for file in REQUIRED {
        let is_file = fs::symlink_metadata(path.join(file)).is_ok_and(|metadata| metadata.is_file());
        ensure!(is_file, NotDataDirectorySnafu { path, file });
    }
    major(path, installation.major)?;
    if let Some(pid) = user_of(path).context(ExamineSnafu { path })? {
        return InUseSnafu { path, pid }.fail();
    }
    let nested = btrfs::children(&directory).context(ExamineSnafu { path })?;
    ensure!(nested.is_empty(), NestedSubvolumesSnafu { path, count: nested.len() });
    Ok(())
}

fn major(path: &Path, wanted: u32) -> Result<()> {
    let found = files::read_small(&path.join("PG_VERSION")).context(ExamineSnafu { path })?;
    let found = found.unwrap_or_default().trim().to_owned();
    ensure!(found == wanted.to_string(), WrongMajorSnafu { path, found, wanted });
    Ok(())
}

/// A process whose working directory is `path`, as that of every Postgres process is its data
/// directory. The pid file proves nothing: it may be stale, and its pid another program's.
fn user_of(path: &Path) -> io::Result<Option<u32>> {
    let wanted = fs::metadata(path)?;
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // Processes come and go, and a kernel thread has no working directory.
        let Ok(cwd) = fs::metadata(entry.path().join("cwd")) else {
            continue;
        };
        if cwd.dev() == wanted.dev() && cwd.ino() == wanted.ino() {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// Checks of a clone that nobody else can change. `source` is its name in messages.
pub(super) async fn clone(
    source: &Path,
    clone: &Path,
    survey: &Survey,
    installation: &Installation,
) -> Result<()> {
    links(source, survey)?;
    for file in BACKUP {
        let exists = fs::symlink_metadata(clone.join(file)).is_ok();
        ensure!(!exists, BackupSnafu { path: source, file });
    }
    let control = ControlData::read(installation, clone)
        .await
        .context(ControlSnafu)?;
    let state = control.state.clone();
    ensure!(control.is_clean(), NotShutDownSnafu { path: source, state });
    Ok(())
}

/// No link at all: those that lead out lead to what the source uses as well, and work as root
/// must never follow one that a script has put there.
pub(super) fn links(path: &Path, survey: &Survey) -> Result<()> {
    let Some((link, target)) = survey.links.first() else {
        return Ok(());
    };
    if link == Path::new("pg_wal") {
        return WalElsewhereSnafu { path, target }.fail();
    }
    let is_tablespace = link.parent() == Some(Path::new("pg_tblspc"));
    let link = link.display().to_string();
    if is_tablespace {
        return TablespaceSnafu { path, link, target }.fail();
    }
    LinkSnafu { path, link, target }.fail()
}

/// Every library in `libraries` must be there, or no server starts.
pub(super) fn preload_libraries(libraries: &[String], installation: &Installation) -> Result<()> {
    let libdir = &installation.libdir;
    for library in libraries {
        let exists = library_paths(library, libdir).iter().any(|path| path.is_file());
        ensure!(exists, LibraryMissingSnafu { library, libdir });
    }
    Ok(())
}

fn library_paths(library: &str, libdir: &Path) -> [PathBuf; 2] {
    let path = match library.strip_prefix("$libdir/") {
        Some(rest) => libdir.join(rest),
        // An absolute path replaces the directory.
        None => libdir.join(library),
    };
    let mut with_suffix = path.clone().into_os_string();
    with_suffix.push(".so");
    [path, with_suffix.into()]
}

/// The items of a setting that is a list of library names.
pub(super) fn parse_libraries(setting: &str) -> Vec<String> {
    setting
        .split(',')
        .map(|item| item.trim().trim_matches('"').to_owned())
        .filter(|item| !item.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_lists() {
        assert_eq!(
            parse_libraries("pg_stat_statements, \"auto_explain\",, $libdir/x"),
            ["pg_stat_statements", "auto_explain", "$libdir/x"]
        );
        assert!(parse_libraries("").is_empty());
    }

    #[test]
    fn a_library_is_found_with_and_without_suffix() {
        let libdir = tempfile::tempdir().unwrap();
        fs::write(libdir.path().join("here.so"), "").unwrap();
        let installation = Installation {
            major: 15,
            version: "15.0".to_owned(),
            bindir: "/nonexistent".into(),
            psql: "/nonexistent/psql".into(),
            libdir: libdir.path().to_owned(),
            extra_paths: Vec::new(),
        };
        let check = |library: &str| preload_libraries(&[library.to_owned()], &installation);
        check("here").unwrap();
        check("here.so").unwrap();
        check("$libdir/here").unwrap();
        let error = check("gone").unwrap_err();
        assert!(matches!(error, Error::LibraryMissing { .. }), "{error}");
    }
}
