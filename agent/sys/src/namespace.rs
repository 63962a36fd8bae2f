//! Namespaces that outlive the process they were made with, and the supervisor's own mounts.

use std::{
    fs::{self, File},
    io,
    os::fd::OwnedFd,
};

use rustix::{
    mount::{MountPropagationFlags, mount_change},
    pipe::{PipeFlags, pipe_with},
    process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid},
};
use serde::{Deserialize, Serialize};
use snafu::{ResultExt, Snafu};

use crate::raw;

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)))]
pub enum Error {
    #[snafu(display(
        "cannot make a {kind} namespace: run as root with CAP_SYS_ADMIN, and check user.max_{kind}_namespaces"
    ))]
    Create {
        kind: &'static str,
        source: io::Error,
    },
    #[snafu(display("cannot write {path}: mapping ids needs CAP_SETUID and CAP_SETGID"))]
    Map { path: String, source: io::Error },
    #[snafu(display("cannot open {path}: /proc has to be mounted"))]
    Open { path: String, source: io::Error },
    #[snafu(display(
        "cannot make the mounts of this process private: run as root with CAP_SYS_ADMIN"
    ))]
    Mounts { source: io::Error },
}

/// A user and a group by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ids {
    pub uid: u32,
    pub gid: u32,
}

/// A mount namespace of its own for the calling process of one thread. Mounts that others make later
/// still arrive; those made here stay here.
pub fn private_mounts() -> Result<(), Error> {
    raw::unshare_mounts().context(MountsSnafu)?;
    mount_change(
        "/",
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )
    .map_err(io::Error::from)
    .context(MountsSnafu)
}

/// A network namespace without addresses; even its loopback interface is down.
pub fn network() -> Result<OwnedFd, Error> {
    Holder::start("net", raw::NEW_NETWORK)?.open("net")
}

/// Makes an IPC namespace and gives it back at once.
pub(crate) fn try_ipc() -> Result<(), Error> {
    Holder::start("ipc", raw::NEW_IPC).map(drop)
}

/// A user namespace that only serves to map one user and group for a mount.
pub(crate) fn user(on_disk: Ids, inside: Ids) -> Result<OwnedFd, Error> {
    let holder = Holder::start("user", raw::NEW_USER)?;
    holder.map("uid_map", on_disk.uid, inside.uid)?;
    holder.map("gid_map", on_disk.gid, inside.gid)?;
    holder.open("user")
}

/// A process that lives in new namespaces until dropped, or until its maker dies.
struct Holder {
    process: raw::Cloned,
    _release: OwnedFd,
}

impl Holder {
    fn start(kind: &'static str, flags: u64) -> Result<Self, Error> {
        let (wait, release) = pipe_with(PipeFlags::CLOEXEC)
            .map_err(io::Error::from)
            .context(CreateSnafu { kind })?;
        let process =
            raw::hold(flags, std::os::fd::AsFd::as_fd(&wait)).context(CreateSnafu { kind })?;
        Ok(Self {
            process,
            _release: release,
        })
    }

    fn map(&self, file: &str, on_disk: u32, inside: u32) -> Result<(), Error> {
        let path = format!("/proc/{}/{file}", self.process.pid);
        fs::write(&path, format!("{on_disk} {inside} 1\n")).context(MapSnafu { path })
    }

    fn open(&self, kind: &str) -> Result<OwnedFd, Error> {
        let path = format!("/proc/{}/ns/{kind}", self.process.pid);
        Ok(File::open(&path).context(OpenSnafu { path })?.into())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = pidfd_send_signal(&self.process.pidfd, Signal::KILL);
        let all_kinds = WaitIdOptions::from_bits_retain(libc::__WALL.cast_unsigned());
        let _ = waitid(
            WaitId::PidFd(std::os::fd::AsFd::as_fd(&self.process.pidfd)),
            WaitIdOptions::EXITED | all_kinds,
        );
    }
}
