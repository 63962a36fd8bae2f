//! A TCP listener whose connections have shaken hands.

use std::{collections::VecDeque, io, net::SocketAddr, sync::Arc, time::Duration};

use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::{AbortHandle, JoinSet},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tracing::debug;

use crate::serve::Accept;

/// Connections that have proved nothing yet. The next one takes the place of the oldest, so that silent ones
/// keep nobody out.
const MAX_HANDSHAKES: usize = 256;
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// Takes the configuration of the moment for each connection; before there is one, connections wait in the
/// backlog.
#[derive(Debug)]
pub struct TlsListener {
    tcp: TcpListener,
    config: watch::Receiver<Option<Arc<ServerConfig>>>,
    handshakes: JoinSet<Option<TlsStream<TcpStream>>>,
    /// Oldest first; some may have ended.
    in_order: VecDeque<AbortHandle>,
}

impl TlsListener {
    pub fn new(tcp: TcpListener, config: watch::Receiver<Option<Arc<ServerConfig>>>) -> Self {
        Self {
            tcp,
            config,
            handshakes: JoinSet::new(),
            in_order: VecDeque::new(),
        }
    }

    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    fn shake_hands(&mut self, stream: TcpStream, config: Arc<ServerConfig>) {
        self.in_order.retain(|handshake| !handshake.is_finished());
        if self.in_order.len() >= MAX_HANDSHAKES
            && let Some(oldest) = self.in_order.pop_front()
        {
            oldest.abort();
        }
        let handshake = self.handshakes.spawn(async move {
            let accepting = TlsAcceptor::from(config).accept(stream);
            match timeout(HANDSHAKE_TIME, accepting).await {
                Ok(Ok(stream)) => return Some(stream),
                Ok(Err(error)) => debug!(%error, "a connection was refused"),
                Err(_) => debug!("a connection did not shake hands in time"),
            }
            None
        });
        self.in_order.push_back(handshake);
    }
}

impl Accept for TlsListener {
    type Stream = TlsStream<TcpStream>;

    /// Safe to drop and call again.
    async fn accept(&mut self) -> io::Result<Self::Stream> {
        loop {
            tokio::select! {
                Some(ended) = self.handshakes.join_next() => {
                    if let Ok(Some(stream)) = ended {
                        return Ok(stream);
                    }
                }
                accepted = accept_with(&self.tcp, &mut self.config) => {
                    let (stream, config) = accepted?;
                    self.shake_hands(stream, config);
                }
            }
        }
    }
}

async fn accept_with(
    tcp: &TcpListener,
    config: &mut watch::Receiver<Option<Arc<ServerConfig>>>,
) -> io::Result<(TcpStream, Arc<ServerConfig>)> {
    // An error says that nobody will ever set one.
    let there = config.wait_for(Option::is_some).await.is_ok();
    if !there {
        std::future::pending::<()>().await;
    }
    let (stream, _) = tcp.accept().await?;
    // Messages are single small writes; waiting to fill a packet only adds delay.
    stream.set_nodelay(true)?;
    let config = config.borrow().clone();
    let config = config.ok_or_else(|| io::Error::other("the certificate was withdrawn"))?;
    Ok((stream, config))
}
