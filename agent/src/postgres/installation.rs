//! Which Postgres majors this machine has, and which OS users.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use snafu::{ResultExt, Snafu};

/// Where Debian's packages put one directory per major.
const DEBIAN_ROOT: &str = "/usr/lib/postgresql";

/// Programs a major is made of; `psql` may come from elsewhere.
const REQUIRED: [&str; 3] = ["postgres", "initdb", "pg_controldata"];

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)))]
pub enum Error {
    #[snafu(display("{} lacks the program {program}; install the whole server package of this Postgres", bindir.display()))]
    ProgramMissing { bindir: PathBuf, program: String },

    #[snafu(display("{} could not be run: {source}; check that it is executable and that its libraries are installed", program.display()))]
    RunProgram { program: PathBuf, source: io::Error },

    #[snafu(display("{} --version answered {answer:?}, from which no major version can be read; name the bin directory of a Postgres release", program.display()))]
    UnknownVersion { program: PathBuf, answer: String },

    #[snafu(display("psql was found neither in {} nor on PATH; install the Postgres client package", bindir.display()))]
    PsqlMissing { bindir: PathBuf },

    #[snafu(display("the list of OS users in {path} could not be read: {source}"))]
    ReadUsers {
        path: &'static str,
        source: io::Error,
    },

    #[snafu(display(
        "there is no OS user {name:?} in /etc/passwd; create it, or name another one as the disk user"
    ))]
    NoSuchUser { name: String },

    #[snafu(display(
        "OS user {name:?} is root, and Postgres refuses to run as root; name another one as the disk user"
    ))]
    UserIsRoot { name: String },
}

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The programs of one Postgres major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installation {
    pub major: u32,
    /// Full version such as `15.20`.
    pub version: String,
    pub bindir: PathBuf,
    /// From the same directory, or from PATH.
    pub psql: PathBuf,
    /// Where extensions' shared libraries are (`$libdir`).
    pub libdir: PathBuf,
    /// Directories beyond the system's own that a sandboxed server has to read.
    pub extra_paths: Vec<PathBuf>,
}

impl Installation {
    /// Reads the version of the programs in `bindir`. Runs `postgres --version`.
    pub fn at(bindir: &Path) -> Result<Self> {
        for program in REQUIRED {
            if !bindir.join(program).is_file() {
                return ProgramMissingSnafu { bindir, program }.fail();
            }
        }
        let postgres = bindir.join("postgres");
        let output = Command::new(&postgres)
            .arg("--version")
            .env("LC_ALL", "C")
            .output()
            .context(RunProgramSnafu { program: &postgres })?;
        let answer = String::from_utf8_lossy(&output.stdout);
        let Some((major, version)) = parse_version(&answer) else {
            return UnknownVersionSnafu {
                program: postgres,
                answer: answer.trim(),
            }
            .fail();
        };
        Ok(Self {
            major,
            version,
            psql: find_psql(bindir)?,
            libdir: find_libdir(bindir),
            extra_paths: outside_usr(bindir),
            bindir: bindir.to_owned(),
        })
    }

    pub fn program(&self, name: &str) -> PathBuf {
        self.bindir.join(name)
    }
}

/// Installations in `extra` (bin directories, tried first) and in Debian's places, one per
/// major, the newest major first. A directory of `extra` that is no installation is an error.
/// Blocking.
pub fn find(extra: &[PathBuf]) -> Result<Vec<Installation>> {
    let mut found: Vec<Installation> = Vec::new();
    for bindir in extra {
        let installation = Installation::at(bindir)?;
        if found.iter().all(|known| known.major != installation.major) {
            found.push(installation);
        }
    }
    for bindir in debian_bindirs() {
        // A client package alone makes a directory here too; that is no defect.
        if let Ok(installation) = Installation::at(&bindir)
            && found.iter().all(|known| known.major != installation.major)
        {
            found.push(installation);
        }
    }
    found.sort_by_key(|installation| std::cmp::Reverse(installation.major));
    Ok(found)
}

fn debian_bindirs() -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(DEBIAN_ROOT) else {
        return Vec::new();
    };
    entries
        .flatten()
        .map(|entry| entry.path().join("bin"))
        .filter(|bindir| bindir.is_dir())
        .collect()
}

/// `postgres (PostgreSQL) 15.20 (Debian …)` → `(15, "15.20")`. Betas are `17beta1`.
fn parse_version(answer: &str) -> Option<(u32, String)> {
    let version = answer
        .trim()
        .strip_prefix("postgres (PostgreSQL) ")?
        .split_whitespace()
        .next()?;
    let digits = version
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(version.len());
    let major = version[..digits].parse().ok()?;
    Some((major, version.to_owned()))
}

fn find_psql(bindir: &Path) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(bindir.to_owned())
        .chain(std::env::split_paths(&path))
        .map(|dir| dir.join("psql"))
        .find(|psql| psql.is_file())
        .ok_or_else(|| PsqlMissingSnafu { bindir }.build())
}

/// The library directory is the one with PL/pgSQL in it, which every server has.
fn find_libdir(bindir: &Path) -> PathBuf {
    let prefix = bindir.parent().unwrap_or(bindir);
    let places = ["lib", "lib/postgresql", "lib64", "lib64/pgsql"];
    places
        .iter()
        .map(|place| prefix.join(place))
        .find(|dir| dir.join("plpgsql.so").is_file())
        .unwrap_or_else(|| prefix.join("lib"))
}

fn outside_usr(bindir: &Path) -> Vec<PathBuf> {
    let real = fs::canonicalize(bindir).unwrap_or_else(|_| bindir.to_owned());
    match real.parent() {
        Some(prefix) if !prefix.starts_with("/usr") => vec![prefix.to_owned()],
        _ => Vec::new(),
    }
}

/// An OS user of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OsUser {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
}

/// Looks `name` up in `/etc/passwd`, the only database that servers in a sandbox can read.
pub fn disk_user(name: &str) -> Result<OsUser> {
    let user = lookup(|user| user.name == name)?.ok_or_else(|| NoSuchUserSnafu { name }.build())?;
    if user.uid == 0 {
        return UserIsRootSnafu { name }.fail();
    }
    Ok(user)
}

/// The name of the user that this process runs as, for the servers' ident maps.
pub fn own_user() -> Result<OsUser> {
    let uid = rustix::process::geteuid().as_raw();
    lookup(|user| user.uid == uid)?.ok_or_else(|| {
        NoSuchUserSnafu {
            name: uid.to_string(),
        }
        .build()
    })
}

fn lookup(wanted: impl Fn(&OsUser) -> bool) -> Result<Option<OsUser>> {
    const PASSWD: &str = "/etc/passwd";
    let passwd = fs::read_to_string(PASSWD).context(ReadUsersSnafu { path: PASSWD })?;
    Ok(passwd.lines().filter_map(parse_user).find(wanted))
}

fn parse_user(line: &str) -> Option<OsUser> {
    let mut fields = line.split(':');
    let name = fields.next()?.to_owned();
    let _password = fields.next()?;
    let uid = fields.next()?.parse().ok()?;
    let gid = fields.next()?.parse().ok()?;
    Some(OsUser { name, uid, gid })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_releases_and_betas() {
        assert_eq!(
            parse_version("postgres (PostgreSQL) 15.20 (Debian 15.20-0+deb12u1)\n"),
            Some((15, "15.20".to_owned()))
        );
        assert_eq!(
            parse_version("postgres (PostgreSQL) 17beta1"),
            Some((17, "17beta1".to_owned()))
        );
        assert_eq!(parse_version("psql (PostgreSQL) 15.20"), None);
        assert_eq!(parse_version("postgres (PostgreSQL) devel"), None);
    }

    #[test]
    fn passwd_lines() {
        let user = parse_user("postgres:x:101:104:PostgreSQL,,,:/var/lib/postgresql:/bin/bash");
        assert_eq!(
            user,
            Some(OsUser {
                name: "postgres".to_owned(),
                uid: 101,
                gid: 104
            })
        );
        assert_eq!(parse_user("# comment"), None);
    }

    #[test]
    fn a_directory_without_programs_names_the_first_missing_one() {
        let empty = tempfile::tempdir().unwrap();
        let error = Installation::at(empty.path()).unwrap_err();
        assert!(error.to_string().contains("lacks the program postgres"));
    }

    #[test]
    fn root_is_no_disk_user() {
        assert!(matches!(disk_user("root"), Err(Error::UserIsRoot { .. })));
        assert!(matches!(
            disk_user("no-such-user"),
            Err(Error::NoSuchUser { .. })
        ));
    }
}
