//! A server on the agent's HTTP stack that answers every lease with the same bytes, in a process of
//! its own as the agent is.

use std::{convert::Infallible, fs, io::Write as _, path::PathBuf, time::Duration};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Request, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::put,
};
use bytes::Bytes;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use snafu::ResultExt;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
};
use tower::ServiceExt as _;

use crate::error::Result;

/// Serves until its parent goes away. Says the TCP address in its first line.
pub(crate) async fn serve(socket: PathBuf, answer: PathBuf) -> Result<()> {
    let answer = Bytes::from(fs::read(answer).whatever_context("no answer to give")?);
    let router = Router::new()
        .route("/v1/leases/{uid}", put(constant))
        .with_state(answer);
    let unix = UnixListener::bind(&socket).whatever_context("cannot listen")?;
    let tcp = TcpListener::bind("127.0.0.1:0")
        .await
        .whatever_context("cannot listen")?;
    let address = tcp.local_addr().whatever_context("no address")?;
    println!("{address}");
    std::io::stdout()
        .flush()
        .whatever_context("nobody listens")?;
    loop {
        tokio::select! {
            accepted = unix.accept() => {
                let (stream, _) = accepted.whatever_context("cannot accept")?;
                tokio::spawn(connection(stream, router.clone()));
            }
            accepted = tcp.accept() => {
                let (stream, _) = accepted.whatever_context("cannot accept")?;
                stream.set_nodelay(true).whatever_context("cannot set TCP_NODELAY")?;
                tokio::spawn(connection(stream, router.clone()));
            }
        }
    }
}

async fn constant(State(answer): State<Bytes>, _body: Bytes) -> Response {
    (
        StatusCode::CREATED,
        [(CONTENT_TYPE, "application/json")],
        answer,
    )
        .into_response()
}

async fn connection<S>(stream: S, router: Router)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let service = service_fn(|request: Request<Incoming>| {
        let router = router.clone();
        async move {
            let response = router.oneshot(request.map(Body::new)).await;
            Ok::<_, Infallible>(response.into_response())
        }
    });
    // The client sees an early end for itself.
    let _ended = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(30))
        .max_buf_size(32 << 10)
        .max_headers(64)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}
