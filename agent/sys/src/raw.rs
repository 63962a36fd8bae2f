//! The unsafe code: calls without a safe wrapper in `rustix`, `landlock` or `std`.
#![allow(unsafe_code)]

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    panic::{AssertUnwindSafe, catch_unwind},
};

pub(crate) const NEW_NETWORK: u64 = libc::CLONE_NEWNET as u64;
pub(crate) const NEW_IPC: u64 = libc::CLONE_NEWIPC as u64;
pub(crate) const NEW_USER: u64 = libc::CLONE_NEWUSER as u64;

const PIDFD: u64 = libc::CLONE_PIDFD as u64;
const INTO_CGROUP: u64 = 0x2_0000_0000;
const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;

/// `struct clone_args`, version 2 (with `cgroup`), Linux 5.7.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const _: () = assert!(size_of::<CloneArgs>() == 88);
const _: () = assert!(size_of::<libc::mount_attr>() == 32);
const _: () = assert!(size_of::<libc::signalfd_siginfo>() == 128);

/// A child that was just made.
#[derive(Debug)]
pub(crate) struct Cloned {
    pub(crate) pid: u32,
    pub(crate) pidfd: OwnedFd,
}

/// Runs `child` in a new process with a copy of this one's memory. Whatever `child` does, it never
/// returns into the caller's code. The end is announced by SIGCHLD.
///
/// Refuses in a process with several threads, where a lock of the copied memory could be held by a
/// thread that the copy lacks.
pub(crate) fn fork(
    flags: u64,
    cgroup: Option<BorrowedFd<'_>>,
    child: impl FnOnce(),
) -> io::Result<Cloned> {
    if !is_single_threaded()? {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let exit_signal = libc::SIGCHLD.cast_unsigned().into();
    // SAFETY: one thread only, so no lock is held by anyone else and the child may run any code.
    if let Some(cloned) = unsafe { clone3(flags, cgroup, exit_signal)? } {
        return Ok(cloned);
    }
    let _ = catch_unwind(AssertUnwindSafe(child));
    // SAFETY: ends this process without running the parent's exit handlers twice.
    unsafe { libc::_exit(127) }
}

/// A process that only waits in new namespaces until `release`, the read end of a pipe, is closed on
/// the other side. Its end raises no signal and is not seen by a `waitpid` without `__WALL`.
pub(crate) fn hold(flags: u64, release: BorrowedFd<'_>) -> io::Result<Cloned> {
    let release = release.as_raw_fd();
    // SAFETY: the child makes system calls only, so it is sound with several threads as well.
    match unsafe { clone3(flags, None, 0)? } {
        Some(cloned) => Ok(cloned),
        None => hold_until(release),
    }
}

fn hold_until(release: RawFd) -> ! {
    let mut byte = 0_u8;
    // SAFETY: async-signal-safe calls on our own descriptors and a local byte. Descriptors of the
    // parent must not be pinned, hence the close.
    unsafe {
        if libc::dup2(release, 0) == 0 {
            libc::syscall(libc::SYS_close_range, 1, libc::c_uint::MAX, 0);
            libc::read(0, (&raw mut byte).cast(), 1);
        }
        libc::_exit(0)
    }
}

/// `None` in the child.
///
/// # Safety
/// With several threads the child may only make system calls.
unsafe fn clone3(
    flags: u64,
    cgroup: Option<BorrowedFd<'_>>,
    exit_signal: u64,
) -> io::Result<Option<Cloned>> {
    let mut pidfd: RawFd = -1;
    let mut args = CloneArgs {
        flags: flags | PIDFD,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal,
        ..CloneArgs::default()
    };
    if let Some(cgroup) = cgroup {
        args.flags |= INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd().cast_unsigned().into();
    }
    // SAFETY: `args` has the asserted size; without CLONE_VM the child has its own stack.
    let result = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<CloneArgs>()) };
    match result {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Some(Cloned {
            pid: u32::try_from(pid).expect("should be a process id"),
            // SAFETY: the kernel just put this descriptor there, for us alone, close-on-exec.
            pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) },
        })),
    }
}

fn is_single_threaded() -> io::Result<bool> {
    // One link for each thread, plus `.` and `..`.
    Ok(rustix::fs::stat("/proc/self/task")?.st_nlink == 3)
}

/// All signals at their defaults again, none blocked.
pub(crate) fn reset_signals() {
    for signal in 1..=64 {
        // SAFETY: SIG_DFL is no handler of ours. SIGKILL, SIGSTOP and glibc's own two refuse.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: a set on the stack, initialised by `sigemptyset`.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
    }
}

/// Blocks the signals for this thread and gives a non-blocking descriptor to read them from.
pub(crate) fn signal_fd(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: a set on the stack, initialised by `sigemptyset`.
    let fd = unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
            if libc::sigaddset(&raw mut set, signal) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    owned(fd)
}

/// The signal's number in one record of a signal descriptor.
pub(crate) const SIGNAL_RECORD: usize = size_of::<libc::signalfd_siginfo>();

/// From now on every descriptor above stderr closes at exec.
pub(crate) fn close_rest_on_exec() -> io::Result<()> {
    // SAFETY: sets a flag; no descriptor is closed here.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3,
            libc::c_uint::MAX,
            CLOSE_RANGE_CLOEXEC,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Moves this thread (in a process of one thread: the process) into a mount namespace of its own.
pub(crate) fn unshare_mounts() -> io::Result<()> {
    // SAFETY: NEWNS does not touch the table of descriptors.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }?;
    Ok(())
}

/// Makes a detached mount map ids by a user namespace, without set-user-id, devices and access times.
pub(crate) fn map_ids(mount: BorrowedFd<'_>, user_namespace: BorrowedFd<'_>) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP
            | libc::MOUNT_ATTR_NOSUID
            | libc::MOUNT_ATTR_NODEV
            | libc::MOUNT_ATTR_NOATIME,
        attr_clr: libc::MOUNT_ATTR__ATIME,
        propagation: 0,
        userns_fd: user_namespace.as_raw_fd().cast_unsigned().into(),
    };
    // SAFETY: an empty C string and a structure of the asserted size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call that gave it made it for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
