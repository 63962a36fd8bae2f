//! A way to a Unix socket for drivers that speak TCP only.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream, UnixStream},
    task::{JoinHandle, JoinSet},
};

/// Passes the bytes of each TCP connection to a port of the loopback address on to a Unix socket, and
/// back. To the server at the socket the peer is this process. Ends, with all connections, when it is
/// dropped.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port.
    pub async fn start(socket: &Path) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(serve(listener, socket.to_owned()));
        Ok(Self { address, task })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(listener: TcpListener, socket: PathBuf) {
    let mut connections = JoinSet::new();
    // An error here would be that of a client which has gone already.
    while let Ok((client, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        connections.spawn(forward(client, socket.clone()));
    }
}

/// An end of either side, orderly or not, is the end of both: the driver sees it as the server's.
async fn forward(mut client: TcpStream, socket: PathBuf) -> io::Result<()> {
    client.set_nodelay(true)?;
    let mut server = UnixStream::connect(socket).await?;
    copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}
