//! What a server or tool may reach in the filesystem.

use std::path::{Path, PathBuf};

use branchpool_supervisor::protocol::Landlock;

use super::installation::Installation;

/// Programs, libraries, locales, time zones. `/bin` and `/lib` may be links into `/usr`, or not.
const READ_EXECUTE: [&str; 6] = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives"];

/// Users, name resolution, time zone, defaults of libraries; nothing that is secret.
const READ: [&str; 12] = [
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
    "/etc/localtime",
    "/etc/timezone",
    "/etc/ld.so.cache",
    "/etc/locale.alias",
    "/etc/ssl/openssl.cnf",
    "/etc/ssl/certs",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
];

/// Which walls are put around a server, beyond its own OS user and cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isolation {
    pub ipc_namespace: bool,
    pub network_namespace: bool,
    pub landlock: bool,
    /// Connections outward are allowed.
    pub outbound: bool,
}

impl Isolation {
    pub const FULL: Self = Self {
        ipc_namespace: true,
        network_namespace: true,
        landlock: true,
        outbound: false,
    };
    pub const NONE: Self = Self {
        ipc_namespace: false,
        network_namespace: false,
        landlock: false,
        outbound: false,
    };
}

/// Rules under which the programs of `installation` work. Beyond the system's own files they
/// may read `read` and do anything in `read_write`.
pub fn rules(
    installation: &Installation,
    read: impl IntoIterator<Item = PathBuf>,
    read_write: impl IntoIterator<Item = PathBuf>,
    network: bool,
) -> Landlock {
    let system = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
    let mut rules = Landlock {
        read_execute: system(&READ_EXECUTE),
        read: system(&READ),
        read_write: vec![Path::new("/dev/null").to_owned()],
        network,
    };
    rules.read_execute.extend(installation.extra_paths.clone());
    if let Some(bindir) = installation.psql.parent() {
        rules.read_execute.push(bindir.to_owned());
    }
    rules.read.extend(read);
    rules.read_write.extend(read_write);
    rules
}
