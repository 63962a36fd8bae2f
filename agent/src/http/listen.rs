//! Opening the addresses that the API is served on.

use std::{
    fs, io,
    net::SocketAddr,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{FileTypeExt, MetadataExt},
            net::UnixStream,
        },
    },
    path::{Path, PathBuf},
};

use branchpool_gateway::MAX_SOCKET_PATH;
use rustix::{
    fs::Mode,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use snafu::{ResultExt, Snafu, ensure};
use tokio::net::{TcpListener, UnixListener};

use super::guard::{Guard, Token, TokenError};

const BACKLOG: i32 = 1024;

/// Where to serve the API.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Unix socket, made with mode 0600; its directory must exist.
    pub socket: Option<PathBuf>,
    pub tcp: Option<SocketAddr>,
    /// Bearer token wanted on TCP. Without one only loopback addresses can be served.
    pub token_file: Option<PathBuf>,
}

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(super)))]
pub enum ListenError {
    #[snafu(display("neither a Unix socket nor a TCP address is given to listen on; give one"))]
    Nowhere,

    #[snafu(display(
        "the socket path {} has {length} bytes, and a Unix socket's may have {MAX_SOCKET_PATH}; choose a shorter one",
        path.display()
    ))]
    PathTooLong { path: PathBuf, length: usize },

    #[snafu(display(
        "another agent listens at {}; stop it, or choose another socket path",
        path.display()
    ))]
    InUse { path: PathBuf },

    #[snafu(display(
        "{} is there and is no socket; remove it, or choose another socket path",
        path.display()
    ))]
    NotASocket { path: PathBuf },

    #[snafu(display(
        "cannot listen at {} ({source}); its directory must exist and be writable",
        path.display()
    ))]
    Unix { path: PathBuf, source: io::Error },

    #[snafu(display(
        "{address} can be reached from other machines, and no token file is given; give one, or listen on 127.0.0.1"
    ))]
    Unprotected { address: SocketAddr },

    #[snafu(display(
        "cannot listen on {address} ({source}); choose a free address of this machine"
    ))]
    Tcp {
        address: SocketAddr,
        source: io::Error,
    },

    #[snafu(transparent)]
    Token { source: TokenError },
}

#[derive(Debug)]
pub(super) enum Listener {
    Unix {
        listener: UnixListener,
        /// Removes the file with the listener.
        _file: SocketFile,
    },
    Tcp(TcpListener),
}

pub(super) async fn open(options: &Options) -> Result<Vec<(Listener, Guard)>, ListenError> {
    let mut listeners = Vec::new();
    if let Some(address) = options.tcp {
        let guard = tcp_guard(address, options.token_file.as_deref())?;
        let listener = TcpListener::bind(address)
            .await
            .context(TcpSnafu { address })?;
        listeners.push((Listener::Tcp(listener), guard));
    }
    if let Some(path) = &options.socket {
        listeners.push((open_socket(path)?, Guard::Open));
    }
    ensure!(!listeners.is_empty(), NowhereSnafu);
    Ok(listeners)
}

fn tcp_guard(address: SocketAddr, token_file: Option<&Path>) -> Result<Guard, ListenError> {
    if let Some(path) = token_file {
        return Ok(Guard::Token(Token::read(path)?));
    }
    ensure!(address.ip().is_loopback(), UnprotectedSnafu { address });
    Ok(Guard::LoopbackHost)
}

fn open_socket(path: &Path) -> Result<Listener, ListenError> {
    let length = path.as_os_str().len();
    ensure!(length <= MAX_SOCKET_PATH, PathTooLongSnafu { path, length });
    remove_stale(path)?;
    let listener = bind(path).context(UnixSnafu { path })?;
    let file = SocketFile::of(path).context(UnixSnafu { path })?;
    Ok(Listener::Unix {
        listener,
        _file: file,
    })
}

/// A socket file that a dead agent left behind; one that is listened on stays.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).context(UnixSnafu { path }),
    };
    ensure!(metadata.file_type().is_socket(), NotASocketSnafu { path });
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).context(UnixSnafu { path })
        }
        Ok(_) => InUseSnafu { path }.fail(),
        Err(source) => Err(source).context(UnixSnafu { path }),
    }
}

/// The mode is set before anyone can connect, which `listen` allows.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let socket: OwnedFd = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR)?;
    rustix::net::listen(&socket, BACKLOG)?;
    UnixListener::from_std(socket.into())
}

/// Removes the socket's file when dropped, unless another socket is there by then.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            identity: identity(path)?,
        })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            // Left behind, it would be found stale at the next start.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}
