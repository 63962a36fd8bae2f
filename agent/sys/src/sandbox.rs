//! Landlock: what a program may still reach.

use std::{
    path::{Path, PathBuf},
    thread,
};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};
use snafu::{ResultExt, Snafu};

/// The newest rules this is written for; a kernel that has fewer enforces those.
const NEWEST: ABI = ABI::V10;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot open {} to keep it reachable", path.display()))]
    Path {
        path: PathBuf,
        source: landlock::PathFdError,
    },
    #[snafu(display("cannot inspect {} to keep it reachable", path.display()))]
    Inspect {
        path: PathBuf,
        source: rustix::io::Errno,
    },
    #[snafu(display("the kernel refused a Landlock rule set"))]
    Rules { source: landlock::RulesetError },
}

/// Paths that stay reachable; all others are not. Signals and abstract sockets stay inside.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// What is missing of these is skipped.
    pub read_execute: &'a [PathBuf],
    /// What is missing of these is skipped.
    pub read: &'a [PathBuf],
    /// All of these have to exist.
    pub read_write: &'a [PathBuf],
    /// TCP connect and bind allowed.
    pub network: bool,
}

/// Restricts the calling thread, and what it starts from then on, for ever. Sets `no_new_privs`.
/// What the kernel does not know is left out: see [`probe`].
pub fn restrict(rules: Rules<'_>) -> Result<(), Error> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let mut ruleset = ruleset(rules.network).context(RulesSnafu)?;
    for path in existing(rules.read_execute) {
        ruleset = allow(ruleset, path, read | AccessFs::Execute)?;
    }
    for path in existing(rules.read) {
        ruleset = allow(ruleset, path, read)?;
    }
    for path in rules.read_write {
        ruleset = allow(ruleset, path, AccessFs::from_all(NEWEST))?;
    }
    ruleset.restrict_self().context(RulesSnafu)?;
    Ok(())
}

fn existing(paths: &[PathBuf]) -> impl Iterator<Item = &PathBuf> {
    paths.iter().filter(|path| path.exists())
}

fn ruleset(network: bool) -> Result<RulesetCreated, landlock::RulesetError> {
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?;
    if !network {
        ruleset = ruleset.handle_access(AccessNet::from_all(NEWEST))?;
    }
    ruleset.create()
}

fn allow(
    ruleset: RulesetCreated,
    path: &Path,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, Error> {
    let fd = PathFd::new(path).context(PathSnafu { path })?;
    let mode = rustix::fs::fstat(&fd)
        .context(InspectSnafu { path })?
        .st_mode;
    let access = if rustix::fs::FileType::from_raw_mode(mode).is_dir() {
        access
    } else {
        access & AccessFs::from_file(NEWEST)
    };
    ruleset
        .add_rule(PathBeneath::new(fd, access))
        .context(RulesSnafu)
}

/// The Landlock ABI that the kernel enforces, found by restricting a thread made for it.
/// 1: paths; 4: and TCP; 6: and signals and abstract sockets. The error says what is wrong.
pub fn probe() -> Result<u32, String> {
    thread::spawn(probe_here)
        .join()
        .unwrap_or_else(|_| Err("the probe panicked".to_owned()))
}

fn probe_here() -> Result<u32, String> {
    let status = ruleset(false)
        .and_then(RulesetCreated::restrict_self)
        .map_err(|error| format!("the kernel refused a Landlock rule set: {error}"))?;
    if status.ruleset == RulesetStatus::NotEnforced {
        return Err(match status.landlock {
            LandlockStatus::NotImplemented => "the kernel is built without Landlock".to_owned(),
            _ => "Landlock is off: add it to the kernel's lsm= parameter".to_owned(),
        });
    }
    if std::fs::read_dir("/").is_ok() {
        return Err("Landlock accepted a rule set but does not enforce it".to_owned());
    }
    match status.landlock {
        LandlockStatus::Available { effective_abi, .. } => Ok(effective_abi as u32),
        _ => Err("Landlock does not say which version it is".to_owned()),
    }
}
