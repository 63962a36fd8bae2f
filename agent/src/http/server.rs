//! The API on its addresses: who may ask, what is answered in time, and stopping in order.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::Request,
    http::{
        StatusCode,
        header::{HeaderValue, WWW_AUTHENTICATE},
    },
    response::{IntoResponse, Response},
};
use branchpool_agent_api::Problem;
use branchpool_trust::serve::serve;
use tokio::{sync::watch, task::JoinSet, time::timeout};
use tower::ServiceExt;
use tracing::{Instrument, debug, debug_span};

use super::{
    ListenError, Options, Service,
    answer::{Refusal, as_problem},
    guard::Guard,
    listen::{self, Listener, Opened},
    routes::{self, Context},
    sql,
};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Bound to its addresses, and not serving yet: connections wait in the backlog.
#[derive(Debug)]
pub struct Server {
    opened: Opened,
}

impl Server {
    pub async fn bind(options: &Options) -> Result<Self, ListenError> {
        let opened = listen::open(options).await?;
        Ok(Self { opened })
    }

    /// The API's TCP address, with the port that the system chose when 0 was asked for.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.opened.tcp
    }

    /// As [`Server::tcp_address`], of what is served for health.
    pub fn health_address(&self) -> Option<SocketAddr> {
        self.opened.health
    }

    /// Serves until `shutdown` is ready; then ends the watches, lets requests under way finish for
    /// at most 5 s, and removes the socket's file.
    pub async fn serve<S: Service>(self, service: S, shutdown: impl Future<Output = ()> + Send) {
        let (stop, stopping) = watch::channel(false);
        let router = routes::router(Context {
            service,
            stopping: stopping.clone(),
        });
        let mut serving = JoinSet::new();
        for (listener, guard) in self.opened.listeners {
            let handler = Handler {
                router: router.clone(),
                guard: Arc::new(guard),
            };
            let answer = move |request| handler.clone().handle(request);
            let stopping = stopping.clone();
            match listener {
                Listener::Unix(socket) => serving.spawn(serve(socket, answer, stopping)),
                Listener::Tcp(listener) => serving.spawn(serve(listener, answer, stopping)),
                Listener::Tls(listener) => serving.spawn(serve(listener, answer, stopping)),
            };
        }
        shutdown.await;
        stop.send_replace(true);
        serving.join_all().await;
    }
}

#[derive(Clone)]
struct Handler {
    router: Router,
    guard: Arc<Guard>,
}

impl Handler {
    async fn handle(self, request: Request) -> Response {
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

    async fn answer(self, request: Request) -> Response {
        if let Err(problem) = self.guard.check(&request) {
            return refused(problem);
        }
        let path = request.uri().path().to_owned();
        let answer = self.router.oneshot(request);
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
