//! Accepting connections, bounded in number and time, and stopping in order.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{
        Request, StatusCode,
        header::{HeaderValue, WWW_AUTHENTICATE},
    },
    response::{IntoResponse, Response},
};
use branchpool_agent_api::Problem;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tower::ServiceExt;
use tracing::{Instrument, debug, debug_span, info, warn};

use super::{
    ListenError, Options, Service,
    answer::{Refusal, as_problem},
    guard::Guard,
    listen::{self, Listener},
    routes::{self, Context},
    sql,
    stall::StallLimit,
};

/// Per listener, so that a flood on TCP leaves the Unix socket usable.
const MAX_CONNECTIONS: usize = 1024;
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_HEADER_BYTES: usize = 32 << 10;
const MAX_HEADERS: usize = 64;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const WRITE_STALL: Duration = Duration::from_mins(1);
/// How long a stop waits for requests under way.
const DRAIN: Duration = Duration::from_secs(5);
/// Accepting fails at once, again and again, while the process is out of descriptors.
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(100);

/// Bound to its addresses, and not serving yet: connections wait in the backlog.
#[derive(Debug)]
pub struct Server {
    listeners: Vec<(Listener, Guard)>,
}

impl Server {
    pub async fn bind(options: &Options) -> Result<Self, ListenError> {
        let listeners = listen::open(options).await?;
        Ok(Self { listeners })
    }

    /// The TCP address, with the port that the system chose when 0 was asked for.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.listeners
            .iter()
            .find_map(|(listener, _)| match listener {
                Listener::Tcp(listener) => listener.local_addr().ok(),
                Listener::Unix { .. } => None,
            })
    }

    /// Serves until `shutdown` is ready; then ends the watches, lets requests under way finish for
    /// at most 5 s, and removes the socket's file.
    pub async fn serve<S: Service>(self, service: S, shutdown: impl Future<Output = ()> + Send) {
        let (stop, stopping) = watch::channel(false);
        let router = routes::router(Context {
            service,
            stopping: stopping.clone(),
        });
        let mut accepting = JoinSet::new();
        for (listener, guard) in self.listeners {
            let handler = Handler {
                router: router.clone(),
                guard: Arc::new(guard),
            };
            accepting.spawn(accept(listener, handler, stopping.clone()));
        }
        shutdown.await;
        stop.send_replace(true);
        accepting.join_all().await;
    }
}

/// Accepts until the stop, then waits for the connections.
async fn accept(listener: Listener, handler: Handler, mut stopping: watch::Receiver<bool>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = stopped(&mut stopping) => break,
            Some(_) = connections.join_next() => continue,
            accepted = accept_one(&listener, &places) => accepted,
        };
        let stopping = stopping.clone();
        match accepted {
            Ok((Accepted::Tcp(stream), place)) => {
                connections.spawn(serve_connection(stream, place, handler.clone(), stopping))
            }
            Ok((Accepted::Unix(stream), place)) => {
                connections.spawn(serve_connection(stream, place, handler.clone(), stopping))
            }
            Err(error) => {
                warn!(%error, "a connection could not be accepted");
                sleep(ACCEPT_BACK_OFF).await;
                continue;
            }
        };
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

/// Ready once the server stops.
pub(super) async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // An error says that the server is gone, which is a stop as well.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

enum Accepted {
    Tcp(tokio::net::TcpStream),
    Unix(tokio::net::UnixStream),
}

async fn accept_one(
    listener: &Listener,
    places: &Arc<Semaphore>,
) -> io::Result<(Accepted, OwnedSemaphorePermit)> {
    let place = Arc::clone(places)
        .acquire_owned()
        .await
        .map_err(io::Error::other)?;
    let stream = match listener {
        Listener::Unix { listener, .. } => Accepted::Unix(listener.accept().await?.0),
        Listener::Tcp(listener) => {
            let (stream, _) = listener.accept().await?;
            // Answers are single small writes; waiting to fill a packet only adds delay.
            stream.set_nodelay(true)?;
            Accepted::Tcp(stream)
        }
    };
    Ok((stream, place))
}

async fn serve_connection<S>(
    stream: S,
    _place: OwnedSemaphorePermit,
    handler: Handler,
    mut stopping: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let stream = TokioIo::new(StallLimit::new(stream, WRITE_STALL));
    let service = service_fn(|request| {
        let handler = handler.clone();
        async move { Ok::<_, std::convert::Infallible>(handler.handle(request).await) }
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

#[derive(Clone)]
struct Handler {
    router: Router,
    guard: Arc<Guard>,
}

impl Handler {
    async fn handle(self, request: Request<Incoming>) -> Response {
        let span = debug_span!(
            "request",
            method = %request.method(),
            path = request.uri().path(),
            status = tracing::field::Empty,
        );
        async {
            let response = self.answer(request).await;
            let status = response.status().as_u16();
            tracing::Span::current().record("status", status);
            debug!(status, "answered");
            response
        }
        .instrument(span)
        .await
    }

    async fn answer(self, request: Request<Incoming>) -> Response {
        if let Err(problem) = self.guard.check(&request) {
            return refused(problem);
        }
        let path = request.uri().path().to_owned();
        let answer = self.router.oneshot(request.map(Body::new));
        if sql::bounds_itself(&path) {
            let Ok(response) = answer.await;
            return as_problem(&path, response);
        }
        match timeout(REQUEST_TIMEOUT, answer).await {
            Ok(Ok(response)) => as_problem(&path, response),
            Err(_) => refused(
                Problem::new(
                    503,
                    "Timeout",
                    format!(
                        "the agent did not finish this within {} s; ask again, the answer to the same request is the same",
                        REQUEST_TIMEOUT.as_secs()
                    ),
                )
                .with_retry_after_ms(1000),
            ),
        }
    }
}

fn refused(problem: Problem) -> Response {
    let mut response = Refusal(problem).into_response();
    if response.status() == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(
            WWW_AUTHENTICATE,
            HeaderValue::from_static("Bearer realm=\"branchpool\""),
        );
    }
    response
}
