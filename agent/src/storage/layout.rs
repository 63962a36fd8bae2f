//! Where everything lies below the agent's two directories.

use std::{
    fs, io,
    os::unix::{ffi::OsStrExt, fs::PermissionsExt},
    path::{Path, PathBuf},
};

use branchpool_gateway::MAX_SOCKET_PATH;
use snafu::{ResultExt, Snafu, ensure};

use super::ids::{BranchId, EndpointId, PoolUid};

/// Directories that branches are spread over: making a snapshot locks its parent directory
/// for a whole commit.
pub const SHARDS: usize = 16;
/// Port that is part of every socket's name; no server listens on it.
pub const PORT: u16 = 5432;

const SHARD_NAMES: [&str; SHARDS] = [
    "00", "01", "02", "03", "04", "05", "06", "07", "08", "09", "0a", "0b", "0c", "0d", "0e", "0f",
];
const PRIVATE: u32 = 0o700;
/// For directories that servers' users pass through, without seeing who else is there.
const PASSAGE: u32 = 0o711;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display(
        "{} directory {path:?} must be an absolute path without '..'", if *root { "storage" } else { "run" }
    ))]
    NotAbsolute { root: bool, path: PathBuf },
    #[snafu(display(
        "the run directory {run:?} is too long: sockets below it would have paths of {length} \
         bytes, and Unix allows {MAX_SOCKET_PATH}; choose one that is at least {} bytes shorter",
        length - MAX_SOCKET_PATH
    ))]
    SocketPathTooLong { run: PathBuf, length: usize },
    #[snafu(display(
        "cannot make the directory {path:?} with mode {mode:04o}: {source}; check that the \
         filesystem is writable and that the agent runs as root"
    ))]
    CreateDirectory {
        path: PathBuf,
        mode: u32,
        source: io::Error,
    },
}

/// The storage directory (`root`, on Btrfs) and the run directory (`run`, gone after a reboot).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    root: PathBuf,
    run: PathBuf,
}

impl Layout {
    /// Fails when a path is relative, or `run` so long that sockets below it cannot be reached.
    pub fn new(root: impl Into<PathBuf>, run: impl Into<PathBuf>) -> Result<Self, Error> {
        let layout = Self {
            root: root.into(),
            run: run.into(),
        };
        for (path, root) in [(&layout.root, true), (&layout.run, false)] {
            let is_plain = path.is_absolute()
                && !path
                    .components()
                    .any(|part| matches!(part, std::path::Component::ParentDir));
            ensure!(is_plain, NotAbsoluteSnafu { root, path });
        }
        layout.check_socket_paths()?;
        Ok(layout)
    }

    fn check_socket_paths(&self) -> Result<(), Error> {
        let example: EndpointId = "aaaaaaaaaaaaa"
            .parse()
            .expect("thirteen letters should parse");
        let branch: BranchId = "aaaaaaaaaaaaa"
            .parse()
            .expect("thirteen letters should parse");
        let paths = [self.endpoint_socket(&example), self.branch_socket(&branch)];
        let length = paths
            .iter()
            .map(|path| path.as_os_str().as_bytes().len())
            .max();
        let length = length.expect("there should be two paths");
        ensure!(
            length <= MAX_SOCKET_PATH,
            SocketPathTooLongSnafu {
                run: &self.run,
                length
            }
        );
        Ok(())
    }

    /// Makes the directories and sets their modes. `root` itself must exist and stays as it is.
    pub fn create(&self) -> Result<(), Error> {
        for (path, mode) in [
            // Servers without a mount of their own pass through here.
            (self.branches(), PASSAGE),
            (self.golden(), PRIVATE),
            // The tools that fill an image run as the disk user.
            (self.building(), PASSAGE),
            (self.trash(), PRIVATE),
            (self.sources(), PRIVATE),
            (self.logs(), PRIVATE),
            (self.mounts(), PASSAGE),
            (self.state(), PRIVATE),
        ] {
            create_directory(&path, mode)?;
        }
        for (parent, mode) in [(self.branches(), PASSAGE), (self.trash(), PRIVATE)] {
            for shard in SHARD_NAMES {
                create_directory(&parent.join(shard), mode)?;
            }
        }
        self.create_run()
    }

    /// Servers with a mount of their own need no way through the branches' directories, and nobody
    /// else is to find what their superusers may leave there.
    pub fn close_branches(&self) -> Result<(), Error> {
        create_directory(&self.branches(), PRIVATE)
    }

    fn create_run(&self) -> Result<(), Error> {
        if let Some(parent) = self.run.parent() {
            fs::create_dir_all(parent).context(CreateDirectorySnafu {
                path: parent,
                mode: 0o755_u32,
            })?;
        }
        for path in [
            self.run.clone(),
            self.branch_runs(),
            self.run.join("e"),
            self.auth(),
        ] {
            create_directory(&path, PASSAGE)?;
        }
        Ok(())
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn run(&self) -> &Path {
        &self.run
    }

    pub fn branches(&self) -> PathBuf {
        self.root.join("branches")
    }

    /// Directory in which the branch's subvolume lies.
    pub fn branch_shard(&self, id: &BranchId) -> PathBuf {
        self.branches().join(shard(id))
    }

    /// The branch's subvolume, a Postgres data directory.
    pub fn branch(&self, id: &BranchId) -> PathBuf {
        self.branch_shard(id).join(id)
    }

    pub fn golden(&self) -> PathBuf {
        self.root.join("golden")
    }

    pub fn golden_pool(&self, pool: &PoolUid) -> PathBuf {
        self.golden().join(pool.as_str())
    }

    /// The sealed image of a generation.
    pub fn golden_generation(&self, pool: &PoolUid, generation: u64) -> PathBuf {
        self.golden_pool(pool).join(generation.to_string())
    }

    pub fn building(&self) -> PathBuf {
        self.root.join("building")
    }

    /// The image of a generation while it is made.
    pub fn building_generation(&self, pool: &PoolUid, generation: u64) -> PathBuf {
        self.building().join(format!("{pool}-{generation}"))
    }

    pub fn trash(&self) -> PathBuf {
        self.root.join("trash")
    }

    pub fn trash_shard(&self, id: &BranchId) -> PathBuf {
        self.trash().join(shard(id))
    }

    pub fn tombstone(&self, id: &BranchId) -> PathBuf {
        self.trash_shard(id).join(id)
    }

    /// Prepared subvolumes that pools may name as their source.
    pub fn sources(&self) -> PathBuf {
        self.root.join("sources")
    }

    pub fn logs(&self) -> PathBuf {
        self.root.join("logs")
    }

    /// The server log of a branch or of an image's build.
    pub fn log(&self, name: &str) -> PathBuf {
        self.logs().join(format!("{name}.log"))
    }

    pub fn mounts(&self) -> PathBuf {
        self.root.join("mnt")
    }

    /// Where the branch in this slot is mounted for its server.
    pub fn slot_mount(&self, slot: u32) -> PathBuf {
        self.mounts().join(slot.to_string())
    }

    pub fn state(&self) -> PathBuf {
        self.root.join("state")
    }

    pub fn journal(&self) -> PathBuf {
        self.state().join("journal.db")
    }

    pub fn node_key(&self) -> PathBuf {
        self.state().join("node.key")
    }

    /// The gateway's certificate, where it is of our own making.
    pub fn tls(&self) -> PathBuf {
        self.state().join("tls")
    }

    /// The CA's certificate for clients on this node.
    pub fn authority(&self) -> PathBuf {
        self.run.join("ca.crt")
    }

    /// The agent's own API.
    pub fn agent_socket(&self) -> PathBuf {
        self.run.join("agent.sock")
    }

    /// Files that say who may connect, the same for all branches.
    pub fn auth(&self) -> PathBuf {
        self.run.join("auth")
    }

    /// A directory for each pool: what a server may read is allowed by directory.
    pub fn auth_pool(&self, pool: &PoolUid) -> PathBuf {
        self.auth().join(pool.as_str())
    }

    pub fn hba(&self, pool: &PoolUid, generation: u64) -> PathBuf {
        self.auth_pool(pool)
            .join(format!("{generation}.pg_hba.conf"))
    }

    pub fn ident(&self, pool: &PoolUid, generation: u64) -> PathBuf {
        self.auth_pool(pool)
            .join(format!("{generation}.pg_ident.conf"))
    }

    /// Directories of running builds.
    pub fn build_runs(&self) -> PathBuf {
        self.run.join("g")
    }

    pub fn branch_runs(&self) -> PathBuf {
        self.run.join("b")
    }

    /// Configuration of a running branch.
    pub fn branch_run(&self, id: &BranchId) -> PathBuf {
        self.branch_runs().join(id)
    }

    pub fn branch_config(&self, id: &BranchId) -> PathBuf {
        self.branch_run(id).join("postgresql.conf")
    }

    /// Tells the branches that nobody was given yet.
    pub fn unused(&self) -> PathBuf {
        self.run.join("unused")
    }

    pub fn branch_socket_dir(&self, id: &BranchId) -> PathBuf {
        self.branch_run(id).join("s")
    }

    pub fn branch_socket(&self, id: &BranchId) -> PathBuf {
        self.branch_socket_dir(id).join(socket_name())
    }

    /// The link that is a lease's `host`.
    pub fn endpoint(&self, id: &EndpointId) -> PathBuf {
        self.run.join("e").join(id)
    }

    /// What that link holds, relative to its directory.
    pub fn endpoint_target(&self, id: &BranchId) -> PathBuf {
        Path::new("../b").join(id).join("s")
    }

    pub fn endpoint_socket(&self, id: &EndpointId) -> PathBuf {
        self.endpoint(id).join(socket_name())
    }
}

fn socket_name() -> String {
    format!(".s.PGSQL.{PORT}")
}

/// Name of the directory, out of [`shard_names`], that the id belongs into.
pub fn shard(id: &BranchId) -> &'static str {
    let last = id.as_str().as_bytes().last().copied().unwrap_or_default();
    // Letters stand for 0 to 25, the digits 2 to 7 for 26 to 31.
    let value = if last.is_ascii_digit() {
        last - b'2' + 26
    } else {
        last.wrapping_sub(b'a')
    };
    SHARD_NAMES[usize::from(value) % SHARDS]
}

pub fn shard_names() -> [&'static str; SHARDS] {
    SHARD_NAMES
}

fn create_directory(path: &Path, mode: u32) -> Result<(), Error> {
    let create = || -> io::Result<()> {
        match fs::create_dir(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let metadata = fs::symlink_metadata(path)?;
        if !metadata.is_dir() {
            return Err(io::Error::from(io::ErrorKind::NotADirectory));
        }
        if metadata.permissions().mode() & 0o7777 != mode {
            fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        }
        Ok(())
    };
    create().context(CreateDirectorySnafu { path, mode })
}
