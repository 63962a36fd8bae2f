//! Whether this machine can run Postgres servers.

use std::path::PathBuf;

use snafu::{ResultExt, Snafu, ensure};

use crate::postgres::installation::{self, Installation, OsUser};

/// `EX_UNAVAILABLE` of sysexits.h: the supervisor does not try again.
const EXIT_UNAVAILABLE: u8 = 69;
/// `EX_NOUSER`.
const EXIT_NO_USER: u8 = 67;
/// Oldest major that the settings and queries here are for.
pub const MIN_MAJOR: u32 = 14;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display(
        "no Postgres server is installed; install one, such as Debian's package postgresql, or name its bin directory"
    ))]
    NoneFound,

    #[snafu(display(
        "the only Postgres here is {found}, and branches need {MIN_MAJOR} or newer; install a newer one"
    ))]
    TooOld { found: u32 },

    #[snafu(display("{source}"))]
    Installation { source: installation::Error },

    #[snafu(display("{source}"))]
    User { source: installation::Error },
}

impl Error {
    /// For the process, out of sysexits.h.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::User { .. } => EXIT_NO_USER,
            _ => EXIT_UNAVAILABLE,
        }
    }
}

/// What servers are started with.
#[derive(Clone, Debug)]
pub struct Found {
    /// The newest major first; never empty.
    pub installations: Vec<Installation>,
    pub disk_user: OsUser,
    /// The OS user of this process.
    pub agent_user: OsUser,
}

/// Finds installations (`bindirs` first, then Debian's places) and the users. Blocks.
pub fn check(bindirs: &[PathBuf], disk_user: &str) -> Result<Found, Error> {
    let all = installation::find(bindirs).context(InstallationSnafu)?;
    Ok(Found {
        installations: usable(all)?,
        disk_user: installation::disk_user(disk_user).context(UserSnafu)?,
        agent_user: installation::own_user().context(UserSnafu)?,
    })
}

fn usable(mut installations: Vec<Installation>) -> Result<Vec<Installation>, Error> {
    let newest = installations
        .iter()
        .map(|installation| installation.major)
        .max();
    let Some(newest) = newest else {
        return NoneFoundSnafu.fail();
    };
    ensure!(newest >= MIN_MAJOR, TooOldSnafu { found: newest });
    installations.retain(|installation| installation.major >= MIN_MAJOR);
    Ok(installations)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn installation(major: u32) -> Installation {
        Installation {
            major,
            version: format!("{major}.1"),
            bindir: "/nonexistent".into(),
            psql: "/nonexistent/psql".into(),
            libdir: "/nonexistent".into(),
            extra_paths: Vec::new(),
        }
    }

    #[test]
    fn nothing_and_too_old_are_told_apart() {
        let error = usable(Vec::new()).unwrap_err();
        assert!(error.to_string().contains("package postgresql"), "{error}");
        let error = usable(vec![installation(9)]).unwrap_err();
        assert!(matches!(error, Error::TooOld { found: 9 }));
        assert_eq!(error.exit_code(), 69);
        let majors: Vec<u32> = usable(vec![installation(17), installation(13)])
            .unwrap()
            .iter()
            .map(|installation| installation.major)
            .collect();
        assert_eq!(majors, [17]);
    }

    #[test]
    fn a_wrong_directory_and_a_wrong_user_are_told() {
        let error = check(&["/nonexistent".into()], "postgres").unwrap_err();
        assert!(
            error.to_string().contains("lacks the program postgres"),
            "{error}"
        );
        let error = check(&[], "no-such-user").unwrap_err();
        assert_eq!(error.exit_code(), 67, "{error}");
    }
}
