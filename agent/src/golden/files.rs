//! Work on a data directory that no process uses.

use std::{
    ffi::OsStr,
    fs::{self, OpenOptions},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown, lchown},
    path::{Path, PathBuf},
};

use crate::{postgres::installation::OsUser, storage::tree::remove_tree};

/// What a walk through a directory found.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// Relative paths of symbolic links, with where they lead.
    pub(super) links: Vec<(PathBuf, PathBuf)>,
    /// Whether something belongs to another user than the wanted one.
    pub(super) foreign: bool,
    /// On disk, in bytes.
    pub(super) bytes: u64,
}

/// Most links that a survey lists. A data directory has none.
const MAX_LINKS: usize = 4096;

/// Walks through `root` without following links.
pub(super) fn survey(root: &Path, owner: &OsUser) -> io::Result<Survey> {
    let mut survey = Survey::default();
    walk(root, |path, metadata| {
        survey.foreign |= metadata.uid() != owner.uid || metadata.gid() != owner.gid;
        survey.bytes += metadata.blocks() * 512;
        if metadata.file_type().is_symlink() {
            if survey.links.len() == MAX_LINKS {
                return Err(io::Error::other("it has thousands of symbolic links"));
            }
            let relative = path.strip_prefix(root).unwrap_or(path).to_owned();
            survey.links.push((relative, fs::read_link(path)?));
        }
        Ok(())
    })?;
    Ok(survey)
}

/// Gives everything to `owner`, with the directory's mode as Postgres wants it.
pub(super) fn give_to(root: &Path, owner: &OsUser) -> io::Result<()> {
    walk(root, |path, metadata| {
        if metadata.uid() != owner.uid || metadata.gid() != owner.gid {
            lchown(path, Some(owner.uid), Some(owner.gid))?;
        }
        Ok(())
    })
}

/// Postgres refuses a data directory that others may read.
pub(super) fn make_private(root: &Path, owner: &OsUser) -> io::Result<()> {
    chown(root, Some(owner.uid), Some(owner.gid))?;
    fs::set_permissions(root, fs::Permissions::from_mode(0o700))
}

fn walk(
    root: &Path,
    mut visit: impl FnMut(&Path, &fs::Metadata) -> io::Result<()>,
) -> io::Result<()> {
    let mut directories = vec![root.to_owned()];
    visit(root, &fs::symlink_metadata(root)?)?;
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            let metadata = fs::symlink_metadata(&path)?;
            visit(&path, &metadata)?;
            if metadata.is_dir() {
                directories.push(path);
            }
        }
    }
    Ok(())
}

/// Reads a small plain file; `None` if there is none.
pub(super) fn read_small(path: &Path) -> io::Result<Option<String>> {
    const MAX: u64 = 64 * 1024;
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() && metadata.len() <= MAX => {
            fs::read(path).map(|bytes| Some(String::from_utf8_lossy(&bytes).into_owned()))
        }
        Ok(_) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes a file or link; absent is fine.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Empties a directory; absent, or no directory, is fine.
pub(super) fn empty_directory(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => {}
        _ => return Ok(()),
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// An empty file in place of whatever is there, without following links.
pub(super) fn replace_by_empty(path: &Path, owner: &OsUser) -> io::Result<()> {
    remove(path)?;
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    lchown(path, Some(owner.uid), Some(owner.gid))
}

/// Parent and last component of a path that the agent composed itself.
pub(super) fn split(path: &Path) -> (&Path, &OsStr) {
    let parent = path
        .parent()
        .expect("a path of the layout should have a parent");
    let name = path
        .file_name()
        .expect("a path of the layout should have a name");
    (parent, name)
}
