//! Files and directories that servers read and only the agent writes.

use std::{
    fs, io,
    io::Write,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::storage::Layout;

/// Makes a directory with this mode, whatever the umask. One that exists stays as it is.
pub(super) fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    match fs::create_dir(path) {
        Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(mode)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Gives a file, readable by all, another text. By rename: whoever reads it meanwhile sees the old
/// text or the new one.
pub(super) fn replace(path: &Path, text: &str) -> io::Result<()> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    if fs::read(path).is_ok_and(|old| old == text.as_bytes()) {
        return Ok(());
    }
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let new = path.with_extension(format!("{serial}.new"));
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(text.as_bytes())?;
    file.set_permissions(fs::Permissions::from_mode(0o644))?;
    fs::rename(&new, path)
}

/// Absent already is as good.
pub(super) fn absent(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// What the journal gets when the disk is full: without it no lease could be released, and nothing
/// would ever free space.
const RESERVE: u64 = 32 << 20;

/// Sets the reserve aside, unless it is there.
pub(super) fn keep_reserve(layout: &Layout) -> io::Result<()> {
    let path = reserve(layout);
    if path.exists() {
        return Ok(());
    }
    let file = fs::File::create(&path)?;
    let kept = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, RESERVE);
    if kept.is_err() {
        absent(fs::remove_file(&path))?;
    }
    Ok(kept?)
}

/// Gives the reserve to whoever writes next.
pub(super) fn give_reserve(layout: &Layout) -> io::Result<()> {
    match fs::remove_file(reserve(layout)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        // Its space comes back with a commit.
        Ok(()) => branchpool_sys::btrfs::syncfs(branchpool_sys::btrfs::open_dir(layout.root())?),
    }
}

fn reserve(layout: &Layout) -> PathBuf {
    layout.state().join("reserve")
}
