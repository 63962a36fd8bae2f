//! Which means of isolation this machine has, by trying them.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{chain, mount, namespace, sandbox};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Feature {
    /// A user for each branch through mounts that map ids.
    IdMappedMounts,
    IpcNamespace,
    NetworkNamespace,
    /// Landlock's rules about paths.
    LandlockPaths,
    /// Landlock's rules about TCP.
    LandlockTcp,
    /// Landlock's rules about signals and abstract sockets.
    LandlockScopes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    pub feature: Feature,
    /// Why, and what to do about it.
    pub reason: String,
}

/// Tries each feature, mounts with ids mapped on the filesystem of `directory`. Empty: all there.
/// Nothing of it stays behind. Takes some milliseconds.
pub fn missing_isolation(directory: &Path) -> Vec<Missing> {
    let mut missing = Vec::new();
    let mut tried = |feature, result: Result<(), String>| {
        if let Err(reason) = result {
            missing.push(Missing { feature, reason });
        }
    };
    tried(
        Feature::IdMappedMounts,
        mount::try_map(directory).map_err(|error| chain(&error)),
    );
    tried(
        Feature::IpcNamespace,
        namespace::try_ipc().map_err(|error| chain(&error)),
    );
    tried(
        Feature::NetworkNamespace,
        namespace::network()
            .map(drop)
            .map_err(|error| chain(&error)),
    );
    let landlock = sandbox::probe();
    for (feature, since, linux) in [
        (Feature::LandlockPaths, 1, "5.13"),
        (Feature::LandlockTcp, 4, "6.7"),
        (Feature::LandlockScopes, 6, "6.12"),
    ] {
        tried(feature, enough(&landlock, since, linux));
    }
    missing
}

fn enough(landlock: &Result<u32, String>, since: u32, linux: &str) -> Result<(), String> {
    match landlock {
        Ok(abi) if *abi >= since => Ok(()),
        Ok(abi) => Err(format!(
            "Landlock is at version {abi}; {since} comes with Linux {linux}"
        )),
        Err(reason) => Err(reason.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_for_what_cannot_be_mapped() {
        let missing = missing_isolation(Path::new("/proc"));
        let mounts: Vec<_> = missing
            .iter()
            .filter(|missing| missing.feature == Feature::IdMappedMounts)
            .collect();
        assert_eq!(mounts.len(), 1, "{missing:?}");
        assert!(mounts[0].reason.contains("/proc"), "{missing:?}");
    }

    #[test]
    fn the_probe_does_not_restrict_its_caller() {
        let _ = missing_isolation(Path::new("/proc"));
        assert!(std::fs::read_dir("/").is_ok());
    }

    #[test]
    fn versions_are_compared() {
        assert_eq!(enough(&Ok(4), 4, "6.7"), Ok(()));
        assert!(enough(&Ok(3), 4, "6.7").unwrap_err().contains("6.7"));
        assert_eq!(enough(&Err("off".into()), 1, "x"), Err("off".into()));
    }
}
