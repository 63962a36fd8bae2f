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
    sync::Arc,
};

use branchpool_gateway::MAX_SOCKET_PATH;
use branchpool_trust::{TlsListener, serve::Accept};
use rustix::{
    fs::Mode,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use rustls::ServerConfig;
use snafu::{ResultExt, Snafu, ensure};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::watch,
};

use super::guard::{Guard, Token, TokenError};

const BACKLOG: i32 = 1024;

/// Where to serve the API.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Unix socket, made with mode 0600; its directory must exist.
    pub socket: Option<PathBuf>,
    pub tcp: Option<Tcp>,
    /// Plain HTTP for `/healthz`, `/readyz` and `/metrics` alone.
    pub health: Option<SocketAddr>,
}

/// The API on TCP.
#[derive(Clone, Debug)]
pub enum Tcp {
    Plain {
        address: SocketAddr,
        /// Bearer token that is wanted. Without one only loopback addresses can be served.
        token_file: Option<PathBuf>,
    },
    /// TLS whose configuration says which clients are let in.
    Tls {
        address: SocketAddr,
        /// Of the moment; connections wait while there is none.
        config: watch::Receiver<Option<Arc<ServerConfig>>>,
    },
}

impl Tcp {
    /// Without a token.
    pub fn plain(address: SocketAddr) -> Self {
        Self::Plain {
            address,
            token_file: None,
        }
    }
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
    Unix(UnixSocket),
    Tcp(TcpListener),
    Tls(TlsListener),
}

#[derive(Debug)]
pub(super) struct UnixSocket {
    listener: UnixListener,
    /// Removes the file with the listener.
    _file: SocketFile,
}

impl Accept for UnixSocket {
    type Stream = tokio::net::UnixStream;

    async fn accept(&mut self) -> io::Result<Self::Stream> {
        Accept::accept(&mut self.listener).await
    }
}

/// What is open. Addresses are as the system chose them where port 0 was asked for.
#[derive(Debug, Default)]
pub(super) struct Opened {
    pub(super) listeners: Vec<(Listener, Guard)>,
    pub(super) tcp: Option<SocketAddr>,
    pub(super) health: Option<SocketAddr>,
}

pub(super) async fn open(options: &Options) -> Result<Opened, ListenError> {
    let mut opened = Opened::default();
    match &options.tcp {
        None => {}
        Some(Tcp::Plain {
            address,
            token_file,
        }) => {
            let guard = tcp_guard(*address, token_file.as_deref())?;
            let (listener, at) = bind_tcp(*address).await?;
            opened.tcp = Some(at);
            opened.listeners.push((Listener::Tcp(listener), guard));
        }
        Some(Tcp::Tls { address, config }) => {
            let (listener, at) = bind_tcp(*address).await?;
            opened.tcp = Some(at);
            let listener = TlsListener::new(listener, config.clone());
            opened
                .listeners
                .push((Listener::Tls(listener), Guard::Open));
        }
    }
    if let Some(address) = options.health {
        let (listener, at) = bind_tcp(address).await?;
        opened.health = Some(at);
        opened
            .listeners
            .push((Listener::Tcp(listener), Guard::Health));
    }
    if let Some(path) = &options.socket {
        let socket = Listener::Unix(open_socket(path)?);
        opened.listeners.push((socket, Guard::Open));
    }
    ensure!(!opened.listeners.is_empty(), NowhereSnafu);
    Ok(opened)
}

async fn bind_tcp(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ListenError> {
    let listener = TcpListener::bind(address)
        .await
        .context(TcpSnafu { address })?;
    let at = listener.local_addr().context(TcpSnafu { address })?;
    Ok((listener, at))
}

fn tcp_guard(address: SocketAddr, token_file: Option<&Path>) -> Result<Guard, ListenError> {
    if let Some(path) = token_file {
        return Ok(Guard::Token(Token::read(path)?));
    }
    ensure!(address.ip().is_loopback(), UnprotectedSnafu { address });
    Ok(Guard::LoopbackHost)
}

fn open_socket(path: &Path) -> Result<UnixSocket, ListenError> {
    let length = path.as_os_str().len();
    ensure!(length <= MAX_SOCKET_PATH, PathTooLongSnafu { path, length });
    remove_stale(path)?;
    let listener = bind(path).context(UnixSnafu { path })?;
    let file = SocketFile::of(path).context(UnixSnafu { path })?;
    Ok(UnixSocket {
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
