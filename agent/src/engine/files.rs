//! Files and directories that servers read and only the agent writes.

use std::{
    fs, io,
    io::Write,
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

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
