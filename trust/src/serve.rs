//! Serving HTTP/1.1, bounded in number and time, and stopping in order.

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use axum::{body::Body, extract::Request, response::Response};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};

use crate::stall::StallLimit;

/// Per listener, so that a flood on one leaves the others usable.
const MAX_CONNECTIONS: usize = 1024;
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_HEADER_BYTES: usize = 32 << 10;
const MAX_HEADERS: usize = 64;
const WRITE_STALL: Duration = Duration::from_mins(1);
/// How long a stop waits for requests under way.
const DRAIN: Duration = Duration::from_secs(5);
/// Accepting fails at once, again and again, while the process is out of descriptors.
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(100);

/// Where connections come from.
pub trait Accept: Send + 'static {
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// The next connection. Safe to drop and call again.
    fn accept(&mut self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept(&mut self) -> io::Result<TcpStream> {
        let (stream, _) = Self::accept(self).await?;
        // Answers are single small writes; waiting to fill a packet only adds delay.
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

impl Accept for UnixListener {
    type Stream = UnixStream;

    async fn accept(&mut self) -> io::Result<UnixStream> {
        Ok(Self::accept(self).await?.0)
    }
}

/// Ready once the sender holds `true`, or is gone.
pub async fn stopped(stopping: &mut watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

/// Has requests answered by `answer`, at most 1,024 connections at a time, until the stop; then lets requests
/// under way finish for at most 5 s. A peer that sends no whole header for 30 s, or reads nothing of an answer
/// for a minute, is cut. How long a body may take to arrive, and an answer to be made, is for `answer` to bound.
pub async fn serve<L, A, F>(listener: L, answer: A, mut stopping: watch::Receiver<bool>)
where
    L: Accept,
    A: Fn(Request) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response> + Send + 'static,
{
    let mut listener = listener;
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = stopped(&mut stopping) => break,
            Some(_) = connections.join_next() => continue,
            accepted = accept_one(&mut listener, &places) => accepted,
        };
        match accepted {
            Ok((stream, place)) => {
                let serving = serve_connection(stream, place, answer.clone(), stopping.clone());
                connections.spawn(serving);
            }
            Err(error) => {
                warn!(%error, "a connection could not be accepted");
                sleep(ACCEPT_BACK_OFF).await;
            }
        }
    }
    // Refused from here on, rather than left waiting for an answer that does not come.
    drop(listener);
    let drained = timeout(DRAIN, async {
        while connections.join_next().await.is_some() {}
    })
    .await;
    if drained.is_err() {
        info!(left = connections.len(), "connections cut at the stop");
    }
    connections.shutdown().await;
}

async fn accept_one<L: Accept>(
    listener: &mut L,
    places: &Arc<Semaphore>,
) -> io::Result<(L::Stream, OwnedSemaphorePermit)> {
    let place = Arc::clone(places)
        .acquire_owned()
        .await
        .map_err(io::Error::other)?;
    Ok((listener.accept().await?, place))
}

async fn serve_connection<S, A, F>(
    stream: S,
    _place: OwnedSemaphorePermit,
    answer: A,
    mut stopping: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    A: Fn(Request) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Response> + Send + 'static,
{
    let stream = TokioIo::new(StallLimit::new(stream, WRITE_STALL));
    let service = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        let answering = answer(request.map(Body::new));
        async move { Ok::<_, Infallible>(answering.await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_READ_TIMEOUT)
        .max_buf_size(MAX_HEADER_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(stream, service);
    tokio::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = stopped(&mut stopping) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        debug!(%error, "a connection ended early");
    }
}
