//! `postmaster.pid`: what a server says about itself.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

pub const FILE_NAME: &str = "postmaster.pid";

/// More than a server ever writes, in bytes.
const MAX_SIZE: u64 = 16 * 1024;

/// Contents of the file. Lines from the fourth on arrive in no fixed order, and an old file of
/// a killed server stays behind: only [`PidFile::is_ready`] tells whether a given child serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PidFile {
    pub pid: u32,
    /// Seconds since the epoch.
    pub start_time: Option<u64>,
    pub socket_dir: Option<String>,
    pub shared_memory: Option<SharedMemory>,
    pub status: Option<String>,
}

/// The System V segment that guards the data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedMemory {
    pub key: u64,
    pub id: i32,
}

impl PidFile {
    /// `None` when the first line is not a process id, as in a file that is just being written.
    pub fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines().map(str::trim);
        // A single-user server writes its pid negated.
        let pid = lines.next()?.parse::<i64>().ok()?.unsigned_abs();
        let rest: Vec<&str> = lines.collect();
        let line = |number: usize| {
            rest.get(number - 2)
                .copied()
                .filter(|line| !line.is_empty())
        };
        Some(Self {
            pid: u32::try_from(pid).ok()?,
            start_time: line(3).and_then(|line| line.parse().ok()),
            socket_dir: line(5).map(str::to_owned),
            shared_memory: line(7).and_then(SharedMemory::parse),
            status: line(8).map(str::to_owned),
        })
    }

    /// The file of the data directory, `None` when it is absent, being written, or not a plain
    /// file: a superuser in a branch may put a pipe or a link there.
    pub fn read(data_dir: &Path) -> io::Result<Option<Self>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match rustix::fs::open(data_dir.join(FILE_NAME), flags, Mode::empty()) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if !file.metadata()?.is_file() {
            return Ok(None);
        }
        let mut bytes = Vec::with_capacity(512);
        file.take(MAX_SIZE).read_to_end(&mut bytes)?;
        Ok(Self::parse(&String::from_utf8_lossy(&bytes)))
    }

    /// Whether the server `pid` accepts connections.
    pub fn is_ready(&self, pid: u32) -> bool {
        self.pid == pid && self.status.as_deref() == Some("ready")
    }
}

impl SharedMemory {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        Some(Self {
            key: words.next()?.parse().ok()?,
            id: words.next()?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READY: &str =
        "4242\n/srv/data\n1700000000\n5432\n/run/s\n\n   262147         7\nready   \n";

    #[test]
    fn a_ready_file() {
        let file = PidFile::parse(READY).unwrap();
        assert_eq!(file.pid, 4242);
        assert_eq!(file.start_time, Some(1_700_000_000));
        assert_eq!(file.socket_dir.as_deref(), Some("/run/s"));
        assert_eq!(
            file.shared_memory,
            Some(SharedMemory {
                key: 262_147,
                id: 7
            })
        );
        assert!(file.is_ready(4242));
    }

    #[test]
    fn another_process_is_not_ready() {
        assert!(!PidFile::parse(READY).unwrap().is_ready(4243));
    }

    #[test]
    fn starting_and_partial_files_are_not_ready() {
        let starting = READY.replace("ready   ", "starting");
        assert!(!PidFile::parse(&starting).unwrap().is_ready(4242));
        for cut in 0..READY.len() - "dy   \n".len() {
            let ready = PidFile::parse(&READY[..cut]).is_some_and(|file| file.is_ready(4242));
            assert!(!ready, "ready after {cut} bytes");
        }
    }

    #[test]
    fn links_pipes_and_directories_are_nothing_and_do_not_block() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        std::fs::write(dir.path().join("other"), READY).unwrap();
        std::os::unix::fs::symlink(dir.path().join("other"), &path).unwrap();
        assert_eq!(PidFile::read(dir.path()).unwrap(), None);
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert_eq!(PidFile::read(dir.path()).unwrap(), None);
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(PidFile::read(dir.path()).unwrap(), None);
        std::fs::remove_dir(&path).unwrap();
        std::fs::write(&path, READY).unwrap();
        assert!(PidFile::read(dir.path()).unwrap().unwrap().is_ready(4242));
    }

    #[test]
    fn an_empty_file_is_nothing() {
        assert_eq!(PidFile::parse(""), None);
        assert_eq!(PidFile::parse("x\n"), None);
    }

    #[test]
    fn a_single_user_server_has_a_negative_pid() {
        assert_eq!(PidFile::parse("-7\n/d\n1\n").unwrap().pid, 7);
    }
}
