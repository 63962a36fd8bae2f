//! The listening socket.

use std::{
    future::Future,
    io::{self, Write},
    net::SocketAddr,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use bytes::BytesMut;
use rustix::net::sockopt;
use snafu::{ResultExt, Snafu};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    connection,
    directory::Directory,
    lanes::Lanes,
    limits::{Limits, Strangers},
    login::Shared,
    messages::Fatal,
    metrics::Metrics,
    tls::TlsIdentity,
};

/// How long to wait when the system has no descriptor or memory for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// After how long without a byte it is asked whether the other machine is still there.
const KEEP_ALIVE: Duration = Duration::from_secs(300);

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("the gateway cannot listen on {address}: {source}; is the port taken?"))]
    Bind {
        address: SocketAddr,
        source: io::Error,
    },

    #[snafu(display("the gateway's threads cannot be started: {source}"))]
    Threads { source: io::Error },
}

#[derive(Debug)]
pub struct Options {
    /// The identity in force; `None`: no TLS. A new value is for new connections.
    pub tls: Option<watch::Receiver<Arc<TlsIdentity>>>,
    /// Whether a session may be opened without TLS. Cancel requests always may, since libpq sends
    /// them so.
    pub plaintext_allowed: bool,
    pub limits: Limits,
    pub metrics: Metrics,
}

/// A socket that listens, and is not served yet.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    lanes: Lanes,
}

impl Server {
    pub async fn bind(address: SocketAddr) -> Result<Self, Error> {
        let bound = async {
            let listener = TcpListener::bind(address).await?;
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) = bound.await.context(BindSnafu { address })?;
        let lanes = Lanes::start().context(ThreadsSnafu)?;
        Ok(Self {
            listener,
            address,
            lanes,
        })
    }

    /// With the port that was chosen, if it was 0.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `shutdown` resolves; then ends all clients with `57P01` and returns, within
    /// [`Limits::goodbye_time`].
    pub async fn serve(
        self,
        directory: Directory,
        options: Options,
        shutdown: impl Future<Output = ()>,
    ) {
        let goodbye_time = options.limits.goodbye_time;
        let strangers = Strangers::new(&options.limits);
        let places = Arc::new(Semaphore::new(options.limits.connections));
        let shared = Arc::new(Shared {
            directory,
            tls: options.tls,
            plaintext_allowed: options.plaintext_allowed,
            limits: options.limits,
            metrics: options.metrics,
        });
        let (stop, stopping) = watch::channel(false);
        let mut connections = JoinSet::new();
        let mut shutdown = pin!(shutdown);
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((socket, peer)) => {
                        prepare(&socket);
                        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                            refuse(socket);
                            continue;
                        };
                        let (Some((lane, share)), Ok(socket)) = (self.lanes.lightest(), socket.into_std())
                        else {
                            tracing::error!("a connection is dropped: there is no thread to serve it");
                            continue;
                        };
                        let (shared, strangers) = (Arc::clone(&shared), strangers.clone());
                        let stopping = stopping.clone();
                        let serve = async move {
                            let _held = (place, share);
                            // From now on this thread waits for it.
                            match TcpStream::from_std(socket) {
                                Ok(socket) => {
                                    connection::serve(shared, strangers, socket, peer.ip(), stopping).await;
                                }
                                Err(error) => tracing::warn!(%error, "a connection is dropped"),
                            }
                        };
                        connections.spawn_on(serve, lane);
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(_) = connections.join_next() => {}
                () = &mut shutdown => break,
            }
        }
        drop(self.listener);
        stop.send_replace(true);
        let all = async { while connections.join_next().await.is_some() {} };
        // Who is left then is dropped.
        let _ = timeout(goodbye_time, all).await;
        drop(connections);
        self.lanes.close().await;
    }
}

/// Answers are sent at once, and a machine that vanished is found out.
fn prepare(socket: &TcpStream) {
    let prepared = socket.set_nodelay(true).and_then(|()| {
        sockopt::set_socket_keepalive(socket, true)?;
        Ok(sockopt::set_tcp_keepidle(socket, KEEP_ALIVE)?)
    });
    if let Err(error) = prepared {
        tracing::debug!(%error, "a connection's options could not be set");
    }
}

/// Says that there are too many, if that can be said without waiting.
fn refuse(socket: TcpStream) {
    let mut message = BytesMut::new();
    Fatal::new("53300", "sorry, too many clients already").put(&mut message);
    let _ = socket
        .into_std()
        .and_then(|mut socket| socket.write_all(&message));
}
