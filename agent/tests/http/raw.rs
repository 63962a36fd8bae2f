//! A server in this process, for requests byte by byte.

use std::{net::SocketAddr, path::PathBuf};

use branchpool_agent::http::{Options, Server, Tcp};
use tempfile::TempDir;
use tokio::{
    net::{TcpStream, UnixStream},
    sync::oneshot,
    task::JoinHandle,
};

use crate::message::exchange;
pub(crate) use crate::message::{Reply, Request, patiently};
use crate::service::InMemory;

/// A port of this machine, without a token.
pub(crate) fn local() -> Tcp {
    Tcp::plain("127.0.0.1:0".parse().unwrap())
}

/// A server with its directory; stopped in order by [`Running::stop`].
pub(crate) struct Running {
    pub(crate) service: InMemory,
    pub(crate) socket: PathBuf,
    pub(crate) tcp: Option<SocketAddr>,
    pub(crate) health: Option<SocketAddr>,
    stop: oneshot::Sender<()>,
    serving: JoinHandle<()>,
    _directory: TempDir,
}

impl Running {
    pub(crate) async fn on_socket() -> Self {
        Self::start(|_| {}).await
    }

    pub(crate) async fn start(adjust: impl FnOnce(&mut Options)) -> Self {
        Self::serve(InMemory::new(), adjust).await
    }

    pub(crate) async fn serve(service: InMemory, adjust: impl FnOnce(&mut Options)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("agent.sock");
        let mut options = Options {
            socket: Some(socket.clone()),
            ..Options::default()
        };
        adjust(&mut options);
        let server = Server::bind(&options).await.unwrap();
        let tcp = server.tcp_address();
        let health = server.health_address();
        let (stop, stopped) = oneshot::channel();
        let serving = tokio::spawn(server.serve(service.clone(), async {
            let _ = stopped.await;
        }));
        Self {
            service,
            socket,
            tcp,
            health,
            stop,
            serving,
            _directory: directory,
        }
    }

    pub(crate) async fn stop(self) {
        self.stop.send(()).unwrap();
        patiently(self.serving).await.unwrap();
        assert!(!self.socket.exists(), "the socket's file should be removed");
    }

    pub(crate) async fn send(&self, request: &Request<'_>) -> Reply {
        let stream = UnixStream::connect(&self.socket).await.unwrap();
        request.send(stream).await
    }

    /// Sends `tail` after the head as it is, without announcing its length.
    pub(crate) async fn send_with_tail(&self, request: &Request<'_>, tail: &[u8]) -> Reply {
        let stream = UnixStream::connect(&self.socket).await.unwrap();
        exchange(stream, &request.head(), tail).await
    }

    pub(crate) async fn send_tcp(&self, request: &Request<'_>) -> Reply {
        let stream = TcpStream::connect(self.tcp.unwrap()).await.unwrap();
        request.send(stream).await
    }
}
