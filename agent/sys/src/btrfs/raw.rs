//! The ioctls themselves: kernel structures and one safe function for each request.

#![allow(unsafe_code)]

use std::{
    ffi::{CStr, c_int},
    io,
    mem::{offset_of, size_of, zeroed},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use rustix::ioctl::{Getter, NoArg, Opcode, Setter, Updater, ioctl, opcode};

const MAGIC: u8 = 0x94;

/// The root directory of every subvolume has this inode number.
pub(super) const ROOT_INODE: u64 = 256;
pub(super) const READ_ONLY: u64 = 1 << 1;
const SPECIFIED_BY_ID: u64 = 1 << 4;

/// Three types times nine RAID profiles and the global reserve: more than there can be.
const SPACE_SLOTS: usize = 32;
/// A tree's node is not larger than 64 KiB, so that each of its items fits with its header.
const SEARCH_BYTES: usize = 64 << 10;
/// Type of a file handle that holds an inode and its tree.
const HANDLE_WITHOUT_PARENT: c_int = 0x4d;

#[repr(C)]
pub(super) struct Named {
    pub(super) fd: i64,
    pub(super) name: [u8; 4088],
}

#[repr(C)]
pub(super) struct NamedV2 {
    pub(super) fd: i64,
    pub(super) transid: u64,
    pub(super) flags: u64,
    pub(super) unused: [u64; 4],
    pub(super) name: [u8; 4040],
}

#[repr(C)]
pub(super) struct Timestamp {
    pub(super) seconds: u64,
    pub(super) nanoseconds: u32,
}

#[repr(C)]
pub(super) struct SubvolumeInfo {
    pub(super) id: u64,
    pub(super) name: [u8; 256],
    pub(super) parent_id: u64,
    pub(super) directory_inode: u64,
    pub(super) generation: u64,
    pub(super) flags: u64,
    pub(super) uuid: [u8; 16],
    pub(super) parent_uuid: [u8; 16],
    pub(super) received_uuid: [u8; 16],
    /// Of the latest change, of the creation, and two for send and receive.
    pub(super) transactions: [u64; 4],
    pub(super) times: [Timestamp; 4],
    pub(super) reserved: [u64; 8],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RootRef {
    pub(super) id: u64,
    pub(super) directory_inode: u64,
}

#[repr(C)]
pub(super) struct RootRefs {
    pub(super) min_id: u64,
    pub(super) refs: [RootRef; 255],
    pub(super) count: u8,
    pub(super) padding: [u8; 7],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SpaceSlot {
    pub(super) flags: u64,
    pub(super) total: u64,
    pub(super) used: u64,
}

#[repr(C)]
struct SpaceHeader {
    slots: u64,
    total: u64,
}

#[repr(C)]
struct Spaces {
    header: SpaceHeader,
    slots: [SpaceSlot; SPACE_SLOTS],
}

#[repr(C)]
pub(super) struct FilesystemInfo {
    pub(super) max_device_id: u64,
    pub(super) devices: u64,
    pub(super) id: [u8; 16],
    pub(super) rest: [u8; 992],
}

#[repr(C)]
pub(super) struct DeviceInfo {
    pub(super) id: u64,
    pub(super) uuid: [u8; 16],
    pub(super) used: u64,
    pub(super) total: u64,
    pub(super) unused: [u64; 379],
    pub(super) path: [u8; 1024],
}

#[repr(C)]
pub(super) struct SearchKey {
    /// 0: the subvolume of the descriptor.
    pub(super) tree: u64,
    pub(super) min_inode: u64,
    pub(super) max_inode: u64,
    pub(super) min_offset: u64,
    pub(super) max_offset: u64,
    /// Of the tree's nodes, not of the items in them.
    pub(super) min_transaction: u64,
    pub(super) max_transaction: u64,
    pub(super) min_type: u32,
    pub(super) max_type: u32,
    /// At most wanted, then found.
    pub(super) items: u32,
    pub(super) unused: [u32; 9],
}

#[repr(C)]
struct SearchHead {
    key: SearchKey,
    bytes: u64,
}

#[repr(C)]
pub(super) struct Search {
    head: SearchHead,
    buffer: [u8; SEARCH_BYTES],
}

#[repr(C)]
struct Handle {
    bytes: u32,
    kind: c_int,
    // inode, tree and inode generation (0: any), packed
    data: [u8; 20],
}

const _: () = {
    assert!(size_of::<Named>() == 4096);
    assert!(size_of::<NamedV2>() == 4096);
    assert!(offset_of!(NamedV2, name) == 56);
    assert!(size_of::<SubvolumeInfo>() == 504);
    assert!(size_of::<RootRefs>() == 4096);
    assert!(size_of::<SpaceHeader>() == 16 && size_of::<SpaceSlot>() == 24);
    assert!(size_of::<FilesystemInfo>() == 1024);
    assert!(size_of::<DeviceInfo>() == 4096);
    assert!(size_of::<SearchKey>() == 104 && size_of::<SearchHead>() == 112);
    assert!(offset_of!(SearchKey, items) == 64);
    assert!(offset_of!(Search, buffer) == 112);
    assert!(offset_of!(Handle, data) == 8);
};

const SYNC: Opcode = opcode::none(MAGIC, 8);
const SNAP_DESTROY: Opcode = opcode::write::<Named>(MAGIC, 15);
const TREE_SEARCH_V2: Opcode = opcode::read_write::<SearchHead>(MAGIC, 17);
const SPACE_INFO: Opcode = opcode::read_write::<SpaceHeader>(MAGIC, 20);
const WAIT_SYNC: Opcode = opcode::write::<u64>(MAGIC, 22);
const SNAP_CREATE_V2: Opcode = opcode::write::<NamedV2>(MAGIC, 23);
const START_SYNC: Opcode = opcode::read::<u64>(MAGIC, 24);
const SUBVOL_CREATE_V2: Opcode = opcode::write::<NamedV2>(MAGIC, 24);
const SUBVOL_GETFLAGS: Opcode = opcode::read::<u64>(MAGIC, 25);
const SUBVOL_SETFLAGS: Opcode = opcode::write::<u64>(MAGIC, 26);
const DEV_INFO: Opcode = opcode::read_write::<DeviceInfo>(MAGIC, 30);
const FS_INFO: Opcode = opcode::read::<FilesystemInfo>(MAGIC, 31);
const GET_SUBVOL_INFO: Opcode = opcode::read::<SubvolumeInfo>(MAGIC, 60);
const GET_SUBVOL_ROOTREF: Opcode = opcode::read_write::<RootRefs>(MAGIC, 61);
const SNAP_DESTROY_V2: Opcode = opcode::write::<NamedV2>(MAGIC, 63);

/// Every structure here consists of integers only, for which zero is a value.
trait Zeroed: Sized {
    fn zero() -> Self {
        // SAFETY: see the trait; it is implemented below and nowhere else.
        unsafe { zeroed() }
    }
}
impl Zeroed for Named {}
impl Zeroed for NamedV2 {}
impl Zeroed for SubvolumeInfo {}
impl Zeroed for RootRefs {}
impl Zeroed for Spaces {}
impl Zeroed for Search {}
impl Zeroed for FilesystemInfo {}
impl Zeroed for DeviceInfo {}

// For each call below: the opcode is the kernel's for the structure passed (its size is part of
// the opcode and asserted above), and the kernel writes inside that structure only.

fn copy_name(name: &CStr, into: &mut [u8]) -> io::Result<()> {
    let bytes = name.to_bytes_with_nul();
    // A name that the filesystem could not hold anyway; 255 is its limit.
    if bytes.len() > 256 {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    into[..bytes.len()].copy_from_slice(bytes);
    Ok(())
}

pub(super) fn create(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let mut args = NamedV2::zero();
    copy_name(name, &mut args.name)?;
    // SAFETY: see above.
    unsafe { ioctl(parent, Updater::<SUBVOL_CREATE_V2, _>::new(&mut args))? };
    Ok(())
}

pub(super) fn snapshot(
    source: BorrowedFd<'_>,
    parent: BorrowedFd<'_>,
    name: &CStr,
    flags: u64,
) -> io::Result<()> {
    let mut args = NamedV2::zero();
    args.fd = i64::from(source.as_raw_fd());
    args.flags = flags;
    copy_name(name, &mut args.name)?;
    // SAFETY: see above.
    unsafe { ioctl(parent, Updater::<SNAP_CREATE_V2, _>::new(&mut args))? };
    Ok(())
}

pub(super) fn destroy(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let mut args = Named::zero();
    copy_name(name, &mut args.name)?;
    // SAFETY: see above.
    unsafe { ioctl(parent, Updater::<SNAP_DESTROY, _>::new(&mut args))? };
    Ok(())
}

pub(super) fn destroy_by_id(filesystem: BorrowedFd<'_>, id: u64) -> io::Result<()> {
    let mut args = NamedV2::zero();
    args.flags = SPECIFIED_BY_ID;
    // The id shares its place with the name.
    args.name[..8].copy_from_slice(&id.to_ne_bytes());
    // SAFETY: see above.
    unsafe { ioctl(filesystem, Updater::<SNAP_DESTROY_V2, _>::new(&mut args))? };
    Ok(())
}

pub(super) fn flags(subvolume: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: see above.
    Ok(unsafe { ioctl(subvolume, Getter::<SUBVOL_GETFLAGS, u64>::new())? })
}

pub(super) fn set_flags(subvolume: BorrowedFd<'_>, flags: u64) -> io::Result<()> {
    // SAFETY: see above.
    unsafe { ioctl(subvolume, Setter::<SUBVOL_SETFLAGS, u64>::new(flags))? };
    Ok(())
}

pub(super) fn subvolume_info(subvolume: BorrowedFd<'_>) -> io::Result<SubvolumeInfo> {
    let mut info = SubvolumeInfo::zero();
    // SAFETY: see above.
    unsafe { ioctl(subvolume, Updater::<GET_SUBVOL_INFO, _>::new(&mut info))? };
    Ok(info)
}

/// Subvolumes directly below this one with an id of at least `min_id`; `true`: there are more.
pub(super) fn children(subvolume: BorrowedFd<'_>, min_id: u64) -> io::Result<(Vec<RootRef>, bool)> {
    let mut args = RootRefs::zero();
    args.min_id = min_id;
    // SAFETY: see above.
    let result = unsafe { ioctl(subvolume, Updater::<GET_SUBVOL_ROOTREF, _>::new(&mut args)) };
    let more = match result {
        Ok(()) => false,
        Err(rustix::io::Errno::OVERFLOW) => true,
        Err(error) => return Err(error.into()),
    };
    Ok((args.refs[..usize::from(args.count)].to_vec(), more))
}

/// Opens the root directory of any subvolume of the filesystem, whatever its path.
pub(super) fn open_by_id(filesystem: BorrowedFd<'_>, id: u64) -> io::Result<OwnedFd> {
    let mut handle = Handle {
        bytes: 20,
        kind: HANDLE_WITHOUT_PARENT,
        data: [0; 20],
    };
    handle.data[..8].copy_from_slice(&ROOT_INODE.to_ne_bytes());
    handle.data[8..16].copy_from_slice(&id.to_ne_bytes());
    // SAFETY: `Handle` is laid out as `struct file_handle` with its `bytes` of data behind it,
    // and a descriptor that the call returns belongs to nobody else.
    unsafe {
        let fd = libc::open_by_handle_at(
            filesystem.as_raw_fd(),
            (&raw mut handle).cast(),
            libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC,
        );
        if fd < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }
}

impl Search {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self::zero())
    }

    /// Items within the key's range, in the order of their keys, and the bytes that hold them,
    /// each behind its header. None: there are no more.
    pub(super) fn find(
        &mut self,
        filesystem: BorrowedFd<'_>,
        key: SearchKey,
    ) -> io::Result<(u32, &[u8])> {
        self.head.key = key;
        self.head.bytes = SEARCH_BYTES as u64;
        // SAFETY: see above; the kernel fills no more of the buffer than `bytes` says.
        unsafe { ioctl(filesystem, Updater::<TREE_SEARCH_V2, _>::new(self))? };
        Ok((self.head.key.items, &self.buffer))
    }
}

pub(super) fn spaces(filesystem: BorrowedFd<'_>) -> io::Result<Vec<SpaceSlot>> {
    let mut args = Spaces::zero();
    args.header.slots = SPACE_SLOTS as u64;
    // SAFETY: see above; the kernel fills no more slots than `slots` says.
    unsafe { ioctl(filesystem, Updater::<SPACE_INFO, _>::new(&mut args))? };
    let count = usize::try_from(args.header.total)
        .unwrap_or(SPACE_SLOTS)
        .min(SPACE_SLOTS);
    Ok(args.slots[..count].to_vec())
}

pub(super) fn filesystem_info(filesystem: BorrowedFd<'_>) -> io::Result<FilesystemInfo> {
    let mut info = FilesystemInfo::zero();
    // SAFETY: see above.
    unsafe { ioctl(filesystem, Updater::<FS_INFO, _>::new(&mut info))? };
    Ok(info)
}

pub(super) fn device_info(filesystem: BorrowedFd<'_>, id: u64) -> io::Result<DeviceInfo> {
    let mut info = DeviceInfo::zero();
    info.id = id;
    // SAFETY: see above.
    unsafe { ioctl(filesystem, Updater::<DEV_INFO, _>::new(&mut info))? };
    Ok(info)
}

pub(super) fn sync(filesystem: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: see above.
    unsafe { ioctl(filesystem, NoArg::<SYNC>::new())? };
    Ok(())
}

pub(super) fn start_sync(filesystem: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: see above.
    Ok(unsafe { ioctl(filesystem, Getter::<START_SYNC, u64>::new())? })
}

pub(super) fn wait_sync(filesystem: BorrowedFd<'_>, transaction: u64) -> io::Result<()> {
    // SAFETY: see above.
    unsafe { ioctl(filesystem, Setter::<WAIT_SYNC, u64>::new(transaction))? };
    Ok(())
}
