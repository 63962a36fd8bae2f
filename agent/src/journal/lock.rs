//! One agent per storage directory.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use rustix::{fs::FlockOperation, io::Errno};
use snafu::ResultExt;

use super::{Error, FileSnafu};

/// Held by the open file, so it ends with the process however that ends.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing would not do while a child process, between fork and exec, has a copy.
        let _closing_does_it_later = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

impl Lock {
    pub(super) fn acquire(journal: &Path) -> Result<Self, Error> {
        let mut path = journal.as_os_str().to_owned();
        path.push(".lock");
        let path = Path::new(&path);
        let context = FileSnafu {
            action: "lock",
            path: journal,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .context(context)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut text = String::new();
                // Only to say who; a lock without a readable name is a lock all the same.
                let _length = (&file).take(32).read_to_string(&mut text);
                return Err(Error::Locked {
                    path: path.into(),
                    pid: text.trim().parse().ok(),
                });
            }
            Err(error) => return Err(io::Error::from(error)).context(context),
        }
        // On a full disk the name of the holder may be missing; the lock holds nevertheless.
        let _named = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        Ok(Self { file })
    }
}
