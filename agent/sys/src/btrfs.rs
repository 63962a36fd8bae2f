//! Btrfs subvolumes and snapshots through the filesystem's ioctls. Every function blocks.
//!
//! Errors are the kernel's, without context: callers know which branch or image they meant.

use std::{
    ffi::{CString, OsStr},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

mod own;
mod raw;

pub use own::own_bytes;

const MAGIC: i64 = 0x9123_683e;
/// Inode of the empty directory that a snapshot shows where its source had a nested subvolume.
const STUB_INODE: u64 = 2;

const DATA: u64 = 1;
const SYSTEM: u64 = 1 << 1;
const METADATA: u64 = 1 << 2;
const GLOBAL_RESERVE: u64 = 1 << 49;

/// Nested subvolumes that one call deletes at most.
const MAX_NESTED: usize = 100_000;

/// What the filesystem knows about a subvolume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    pub id: u64,
    /// Subvolume that holds it; 0 for the top level.
    pub parent_id: u64,
    /// Transaction that wrote its root last; being the source of a snapshot counts.
    pub generation: u64,
    /// Transaction that changed its content last; snapshots of it do not count.
    pub changed: u64,
    pub uuid: [u8; 16],
    /// Subvolume that this is a snapshot of; all zero for none.
    pub parent_uuid: [u8; 16],
    pub read_only: bool,
}

/// What a directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Subvolume,
    /// What is left in a snapshot where its source had a nested subvolume.
    Stub,
    Directory,
    /// No directory, or not on Btrfs.
    Other,
}

/// Bytes of one type of block group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockGroups {
    pub total: u64,
    pub used: u64,
}

impl BlockGroups {
    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.used)
    }
}

/// Bytes of the filesystem, in the filesystem's own terms (copies of RAID and DUP not counted).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceInfo {
    pub data: BlockGroups,
    /// On a small filesystem with mixed block groups the same as `data`.
    pub metadata: BlockGroups,
    pub system: BlockGroups,
    /// Part of the metadata that the filesystem keeps for itself.
    pub global_reserve: BlockGroups,
    /// Raw bytes of the devices not yet given to any block group.
    pub unallocated: u64,
}

/// Opens a directory for the functions below. Links are not followed at the last component.
pub fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Makes an empty subvolume. `EEXIST` when the name is taken.
pub fn create_subvolume(parent: impl AsFd, name: &OsStr) -> io::Result<()> {
    raw::create(parent.as_fd(), &file_name(name)?)
}

/// Makes a snapshot of the subvolume `source`. `EEXIST` when the name is taken.
pub fn snapshot(
    source: impl AsFd,
    parent: impl AsFd,
    name: &OsStr,
    read_only: bool,
) -> io::Result<()> {
    let flags = if read_only { raw::READ_ONLY } else { 0 };
    raw::snapshot(source.as_fd(), parent.as_fd(), &file_name(name)?, flags)
}

/// Deletes a subvolume. `ENOTEMPTY` when subvolumes are nested in it. Not durable before the next
/// commit, and an open descriptor below it keeps its space.
pub fn delete(parent: impl AsFd, name: &OsStr) -> io::Result<()> {
    raw::destroy(parent.as_fd(), &file_name(name)?)
}

/// Deletes all subvolumes nested in this one, whatever their depth, path or read-only flags,
/// and returns how many there were.
///
/// They are reached by their ids: paths inside are in the hands of whoever wrote there.
pub fn delete_nested(subvolume: impl AsFd) -> io::Result<usize> {
    let root = subvolume.as_fd();
    let mut deleted = 0;
    // Each is looked at once to list what it holds and again when that is gone.
    let mut stack = vec![(raw::subvolume_info(root)?.id, false)];
    let mut seen = 1;
    while let Some((id, emptied)) = stack.pop() {
        let is_root = stack.is_empty();
        if emptied {
            if !is_root {
                absent_is_done(raw::destroy_by_id(root, id))?;
                deleted += 1;
            }
            continue;
        }
        let directory = match raw::open_by_id(root, id) {
            Ok(directory) => directory,
            Err(error) if is_absent(&error) => continue,
            Err(error) => return Err(error),
        };
        stack.push((id, true));
        let children = children(&directory)?;
        if !children.is_empty() {
            set_read_only(&directory, false)?;
        }
        seen += children.len();
        if seen > MAX_NESTED {
            return Err(io::Error::other(format!(
                "more than {MAX_NESTED} nested subvolumes"
            )));
        }
        stack.extend(children.into_iter().map(|child| (child, false)));
    }
    Ok(deleted)
}

/// Ids of the subvolumes that lie directly in this one, at any depth of plain directories.
pub fn children(subvolume: impl AsFd) -> io::Result<Vec<u64>> {
    let mut ids = Vec::new();
    let mut min_id = 0;
    loop {
        let (found, more) = raw::children(subvolume.as_fd(), min_id)?;
        ids.extend(found.iter().map(|child| child.id));
        match found.last() {
            Some(last) if more && ids.len() <= MAX_NESTED => min_id = last.id + 1,
            _ => return Ok(ids),
        }
    }
}

pub fn is_read_only(subvolume: impl AsFd) -> io::Result<bool> {
    Ok(raw::flags(subvolume.as_fd())? & raw::READ_ONLY != 0)
}

/// Sets or clears the read-only flag; no transaction when nothing changes.
pub fn set_read_only(subvolume: impl AsFd, read_only: bool) -> io::Result<()> {
    let flags = raw::flags(subvolume.as_fd())?;
    let wanted = if read_only {
        flags | raw::READ_ONLY
    } else {
        flags & !raw::READ_ONLY
    };
    if wanted == flags {
        Ok(())
    } else {
        raw::set_flags(subvolume.as_fd(), wanted)
    }
}

/// `ENOTTY` when it is not on Btrfs. For a plain directory: the subvolume that it lies in.
pub fn info(subvolume: impl AsFd) -> io::Result<Info> {
    let info = raw::subvolume_info(subvolume.as_fd())?;
    Ok(Info {
        id: info.id,
        parent_id: info.parent_id,
        generation: info.generation,
        changed: info.transactions[0],
        uuid: info.uuid,
        parent_uuid: info.parent_uuid,
        // The flags here are those of the root item, where the bit is another one than in
        // the flags of the calls.
        read_only: is_read_only(subvolume)?,
    })
}

/// Whether it is on a Btrfs filesystem.
pub fn is_btrfs(file: impl AsFd) -> io::Result<bool> {
    Ok(rustix::fs::fstatfs(file)?.f_type == MAGIC)
}

pub fn kind(file: impl AsFd) -> io::Result<Kind> {
    let file = file.as_fd();
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
    let is_directory = rustix::fs::FileType::from_raw_mode(stat.stx_mode.into()).is_dir();
    if !is_directory || !is_btrfs(file)? {
        return Ok(Kind::Other);
    }
    Ok(match stat.stx_ino {
        raw::ROOT_INODE => Kind::Subvolume,
        STUB_INODE => Kind::Stub,
        _ => Kind::Directory,
    })
}

pub fn is_subvolume(file: impl AsFd) -> io::Result<bool> {
    Ok(kind(file)? == Kind::Subvolume)
}

pub fn space_info(filesystem: impl AsFd) -> io::Result<SpaceInfo> {
    let filesystem = filesystem.as_fd();
    let mut space = SpaceInfo::default();
    for slot in raw::spaces(filesystem)? {
        let groups = [
            (DATA, &mut space.data),
            (METADATA, &mut space.metadata),
            (SYSTEM, &mut space.system),
            (GLOBAL_RESERVE, &mut space.global_reserve),
        ];
        for (flag, group) in groups {
            if slot.flags & flag != 0 {
                group.total += slot.total;
                group.used += slot.used;
            }
        }
    }
    for id in 1..=raw::filesystem_info(filesystem)?.max_device_id {
        match raw::device_info(filesystem, id) {
            Ok(device) => space.unallocated += device.total.saturating_sub(device.used),
            // Ids of removed devices stay unused.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(space)
}

/// Commits, waits for it, and wakes the cleaner that reclaims deleted subvolumes.
pub fn sync(filesystem: impl AsFd) -> io::Result<()> {
    raw::sync(filesystem.as_fd())
}

/// Starts a commit, which wakes the cleaner when it is done, and returns the transaction.
pub fn start_sync(filesystem: impl AsFd) -> io::Result<u64> {
    raw::start_sync(filesystem.as_fd())
}

/// Waits until the transaction is on disk.
pub fn wait_sync(filesystem: impl AsFd, transaction: u64) -> io::Result<()> {
    raw::wait_sync(filesystem.as_fd(), transaction)
}

/// Writes all dirty data of the filesystem.
pub fn syncfs(filesystem: impl AsFd) -> io::Result<()> {
    Ok(rustix::fs::syncfs(filesystem)?)
}

fn file_name(name: &OsStr) -> io::Result<CString> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    CString::new(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

fn absent_is_done(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if is_absent(&error) => Ok(()),
        other => other,
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE))
}
