//! Removing directories that others have written to.

use std::{ffi::CStr, io, os::fd::OwnedFd, path::Path};

use rustix::{
    fs::{AtFlags, CWD, Dir, Mode, OFlags, RenameFlags},
    io::Errno,
};

const OPEN: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Removes a directory with all that is in it, or what else has the name; absent is fine. Nothing
/// may write to it meanwhile. Links are removed, never followed. Blocks.
///
/// Directories are moved up before they are emptied, so that neither memory nor descriptors depend
/// on how deep somebody has nested them: the standard library's function recurses, and some ten
/// thousand levels overflow a thread's stack.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let top = match rustix::fs::openat(CWD, path, OPEN, Mode::empty()) {
        Ok(top) => top,
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTDIR | Errno::LOOP) => {
            return absent_is_done(rustix::fs::unlinkat(CWD, path, AtFlags::empty()));
        }
        Err(error) => return Err(error.into()),
    };
    let mut moved = 0_u64;
    loop {
        let mut empty = true;
        for entry in Dir::read_from(&top)? {
            let entry = entry?;
            let name = entry.file_name();
            if is_dots(name) {
                continue;
            }
            empty = false;
            if !remove_file(&top, name)? {
                lift_out(&top, name, &mut moved)?;
                absent_is_done(rustix::fs::unlinkat(&top, name, AtFlags::REMOVEDIR))?;
            }
        }
        if empty {
            break;
        }
    }
    drop(top);
    absent_is_done(rustix::fs::unlinkat(CWD, path, AtFlags::REMOVEDIR))
}

/// Empties a directory in `top`: files go, directories come up beside it.
fn lift_out(top: &OwnedFd, name: &CStr, moved: &mut u64) -> io::Result<()> {
    let directory = rustix::fs::openat(top, name, OPEN, Mode::empty())?;
    loop {
        let mut empty = true;
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let child = entry.file_name();
            if is_dots(child) {
                continue;
            }
            empty = false;
            if remove_file(&directory, child)? {
                continue;
            }
            match rustix::fs::unlinkat(&directory, child, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::NOTEMPTY) => move_up(&directory, child, top, moved)?,
                Err(error) => return Err(error.into()),
            }
        }
        if empty {
            return Ok(());
        }
    }
}

fn move_up(from: &OwnedFd, name: &CStr, top: &OwnedFd, moved: &mut u64) -> io::Result<()> {
    loop {
        *moved += 1;
        let new = format!(".{moved}");
        match rustix::fs::renameat_with(from, name, top, new.as_str(), RenameFlags::NOREPLACE) {
            Ok(()) => return Ok(()),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// `false`: it is a directory.
fn remove_file(directory: &OwnedFd, name: &CStr) -> io::Result<bool> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn absent_is_done(result: Result<(), Errno>) -> io::Result<()> {
    match result {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn is_dots(name: &CStr) -> bool {
    matches!(name.to_bytes(), b"." | b"..")
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    /// Deep enough for the standard library's function to overflow the stack of a test's thread.
    const DEPTH: usize = 20_000;

    fn nest(path: &Path) {
        fs::create_dir(path).unwrap();
        let mut directory = rustix::fs::openat(CWD, path, OPEN, Mode::empty()).unwrap();
        for level in 0..DEPTH {
            rustix::fs::mkdirat(&directory, "d", Mode::RWXU).unwrap();
            if level % 100 == 0 {
                rustix::fs::symlinkat("/", &directory, "link").unwrap();
            }
            directory = rustix::fs::openat(&directory, "d", OPEN, Mode::empty()).unwrap();
        }
    }

    #[test]
    fn depth_does_not_matter() {
        // In memory, as the run directory is: a disk takes minutes.
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("t");
        nest(&path);
        remove_tree(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn links_are_not_followed_and_names_of_our_form_do_no_harm() {
        let directory = tempfile::tempdir().unwrap();
        let (path, kept) = (directory.path().join("t"), directory.path().join("kept"));
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "x").unwrap();
        fs::create_dir_all(path.join("a/b/c/d")).unwrap();
        for name in [".1", ".2", ".3"] {
            fs::create_dir_all(path.join(name).join("x/y")).unwrap();
            fs::write(path.join(name).join("x/file"), "x").unwrap();
        }
        symlink(&kept, path.join("link")).unwrap();
        symlink(&kept, path.join("a/b/link")).unwrap();
        remove_tree(&path).unwrap();
        assert!(!path.exists());
        assert!(kept.join("file").exists());
    }

    #[test]
    fn what_is_no_directory_goes_as_well_and_absent_is_fine() {
        let directory = tempfile::tempdir().unwrap();
        let (path, kept) = (directory.path().join("t"), directory.path().join("kept"));
        fs::create_dir(&kept).unwrap();
        symlink(&kept, &path).unwrap();
        remove_tree(&path).unwrap();
        assert!(fs::symlink_metadata(&path).is_err() && kept.exists());
        remove_tree(&path).unwrap();
    }
}
