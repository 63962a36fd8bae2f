//! Files in the state directory, each replaced as a whole: a kill or a power cut at any moment leaves
//! the old or the new one, and at most an unfinished file that the next write takes over.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use snafu::{ResultExt, Snafu};

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot make the directory {}: {source}", path.display()))]
    Make { path: PathBuf, source: io::Error },
    #[snafu(display("cannot read {}: {source}", path.display()))]
    Read { path: PathBuf, source: io::Error },
    #[snafu(display("cannot write {}: {source}; is there space left?", path.display()))]
    Write { path: PathBuf, source: io::Error },
}

/// Who may read a file.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reach {
    Everyone,
    Owner,
}

impl Reach {
    fn mode(self) -> u32 {
        match self {
            Self::Everyone => 0o644,
            Self::Owner => 0o600,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Store {
    directory: PathBuf,
}

impl Store {
    /// Makes the directory when it is missing. Only one process at a time may write in it.
    pub(crate) fn open(directory: &Path) -> Result<Self, Error> {
        fs::create_dir_all(directory).context(MakeSnafu { path: directory })?;
        Ok(Self {
            directory: directory.to_owned(),
        })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub(crate) fn read(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        let path = self.path(name);
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(source).context(ReadSnafu { path }),
        }
    }

    pub(crate) fn write(&self, name: &str, reach: Reach, bytes: &[u8]) -> Result<(), Error> {
        let path = self.path(name);
        self.replace(&path, name, reach, bytes)
            .context(WriteSnafu { path })
    }

    fn replace(&self, path: &Path, name: &str, reach: Reach, bytes: &[u8]) -> io::Result<()> {
        let unfinished = self.path(&format!(".{name}.new"));
        match fs::remove_file(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Nobody else may open a key before its mode is set.
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&unfinished)?;
        file.set_permissions(Permissions::from_mode(reach.mode()))?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&unfinished, path)?;
        File::open(&self.directory)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_file_is_taken_over() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path()).unwrap();
        fs::write(directory.path().join(".key.new"), "half").unwrap();
        assert_eq!(store.read("key").unwrap(), None);
        store.write("key", Reach::Owner, b"whole").unwrap();
        store.write("ca", Reach::Everyone, b"public").unwrap();
        assert_eq!(store.read("key").unwrap().as_deref(), Some(&b"whole"[..]));
        let mode = |name| fs::metadata(store.path(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("key"), mode("ca")), (0o600, 0o644));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
