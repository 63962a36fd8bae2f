//! Connections, one request at a time on each, and bounded answers.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    client::conn::http1::{self, SendRequest},
    header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue},
};
use hyper_util::rt::TokioIo;
use snafu::{IntoError, ResultExt};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    time::timeout,
};
use tokio_rustls::TlsConnector;

use super::{
    ClientError, Target,
    error::{
        BrokenSnafu, ConnectSnafu, ForbiddenSnafu, HandshakeSnafu, RequestSnafu, TimeoutSnafu,
        TokenSnafu, TooLongSnafu, UnexpectedSnafu,
    },
};
use crate::problem::{PROBLEM_MEDIA_TYPE, Problem};

/// A little longer than the agent's own limit, whose answer says more.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(35);
/// All leases of a large node fit several times.
pub(super) const MAX_ANSWER_BYTES: usize = 32 << 20;
const MAX_IDLE_CONNECTIONS: usize = 128;

pub(super) type Sender = SendRequest<Full<Bytes>>;

#[derive(Clone, Debug)]
pub(super) struct Transport {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    target: Target,
    host: String,
    authorization: Option<HeaderValue>,
    idle: Mutex<Vec<Sender>>,
}

/// A 2xx answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) body: Bytes,
}

pub(super) fn bearer(token: &str) -> Result<HeaderValue, ClientError> {
    let mut header = HeaderValue::try_from(format!("Bearer {token}"))
        .ok()
        .ok_or_else(|| TokenSnafu.build())?;
    header.set_sensitive(true);
    Ok(header)
}

impl Transport {
    pub(super) fn new(target: Target, authorization: Option<HeaderValue>) -> Self {
        let host = match &target {
            Target::Unix(_) => "localhost".to_owned(),
            Target::Tcp(authority) => authority.clone(),
            Target::Tls(tls) => tls.address().to_owned(),
        };
        Self {
            inner: Arc::new(Inner {
                target,
                host,
                authorization,
                idle: Mutex::default(),
            }),
        }
    }

    pub(super) fn target(&self) -> &Target {
        &self.inner.target
    }

    /// Sends, reads the whole answer, and keeps the connection for the next request.
    pub(super) async fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<Bytes>,
    ) -> Result<Answer, ClientError> {
        self.in_time(async {
            let (sender, response) = self.exchange(&method, path, body.as_ref()).await?;
            let status = response.status();
            let is_problem = is_problem(&response);
            let body = self.read(response).await?;
            self.keep(sender);
            if status.is_success() {
                return Ok(Answer { status, body });
            }
            Err(self.refusal(status, is_problem, &body))
        })
        .await
    }

    /// The body of a 2xx answer to a GET, still arriving, on a connection of its own.
    pub(super) async fn open_stream(&self, path: &str) -> Result<(Sender, Incoming), ClientError> {
        self.in_time(async {
            let mut sender = self.connect().await?;
            let request = self.build(&Method::GET, path, None)?;
            let response = sender
                .send_request(request)
                .await
                .with_context(|_| self.broken())?;
            let status = response.status();
            if status.is_success() {
                return Ok((sender, response.into_body()));
            }
            let is_problem = is_problem(&response);
            let body = self.read(response).await?;
            Err(self.refusal(status, is_problem, &body))
        })
        .await
    }

    async fn in_time<T>(
        &self,
        call: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        match timeout(REQUEST_TIMEOUT, call).await {
            Ok(result) => result,
            Err(_) => TimeoutSnafu {
                target: self.target().clone(),
                seconds: REQUEST_TIMEOUT.as_secs(),
            }
            .fail(),
        }
    }

    /// The agent may have closed a kept connection meanwhile, so a failure on one is no answer:
    /// only a fresh connection's failure is.
    async fn exchange(
        &self,
        method: &Method,
        path: &str,
        body: Option<&Bytes>,
    ) -> Result<(Sender, Response<Incoming>), ClientError> {
        while let Some(mut sender) = self.take_idle() {
            if sender.ready().await.is_err() {
                continue;
            }
            let request = self.build(method, path, body)?;
            if let Ok(response) = sender.send_request(request).await {
                return Ok((sender, response));
            }
            break;
        }
        let mut sender = self.connect().await?;
        let request = self.build(method, path, body)?;
        let response = sender
            .send_request(request)
            .await
            .with_context(|_| self.broken())?;
        Ok((sender, response))
    }

    fn build(
        &self,
        method: &Method,
        path: &str,
        body: Option<&Bytes>,
    ) -> Result<Request<Full<Bytes>>, ClientError> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, &self.inner.host);
        if let Some(authorization) = &self.inner.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        request
            .body(Full::new(body.cloned().unwrap_or_default()))
            .context(RequestSnafu)
    }

    async fn read(&self, response: Response<Incoming>) -> Result<Bytes, ClientError> {
        let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES);
        let error = match body.collect().await {
            Ok(collected) => return Ok(collected.to_bytes()),
            Err(error) => error,
        };
        match error.downcast::<hyper::Error>() {
            Ok(source) => Err(self.broken().into_error(*source)),
            Err(other) => {
                debug_assert!(other.is::<LengthLimitError>());
                TooLongSnafu {
                    target: self.target().clone(),
                    limit: MAX_ANSWER_BYTES,
                }
                .fail()
            }
        }
    }

    fn refusal(&self, status: StatusCode, is_problem: bool, body: &[u8]) -> ClientError {
        let problem = is_problem.then(|| serde_json::from_slice::<Problem>(body));
        match problem {
            Some(Ok(problem)) => ClientError::Refused {
                problem: Box::new(problem),
            },
            Some(Err(_)) | None => UnexpectedSnafu {
                target: self.target().clone(),
                status,
            }
            .build(),
        }
    }

    async fn connect(&self) -> Result<Sender, ClientError> {
        match self.target() {
            Target::Unix(path) => {
                let stream = UnixStream::connect(path)
                    .await
                    .map_err(|error| self.unreachable(error))?;
                self.handshake(stream).await
            }
            Target::Tcp(authority) => {
                let stream = self.connect_tcp(authority).await?;
                self.handshake(stream).await
            }
            Target::Tls(tls) => {
                let stream = self.connect_tcp(tls.address()).await?;
                let stream = TlsConnector::from(tls.config())
                    .connect(tls.name(), stream)
                    .await
                    .context(HandshakeSnafu {
                        target: self.target().clone(),
                    })?;
                self.handshake(stream).await
            }
        }
    }

    async fn connect_tcp(&self, address: &str) -> Result<TcpStream, ClientError> {
        let stream = TcpStream::connect(address)
            .await
            .map_err(|error| self.unreachable(error))?;
        // Requests are single small writes; waiting to fill a packet only adds delay.
        stream
            .set_nodelay(true)
            .map_err(|error| self.unreachable(error))?;
        Ok(stream)
    }

    async fn handshake<S>(&self, stream: S) -> Result<Sender, ClientError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .with_context(|_| self.broken())?;
        // Ends when the sender is dropped or the agent closes; its error reaches the sender too.
        tokio::spawn(connection);
        Ok(sender)
    }

    fn unreachable(&self, error: io::Error) -> ClientError {
        let target = self.target().clone();
        match error.kind() {
            io::ErrorKind::PermissionDenied => ForbiddenSnafu { target }.into_error(error),
            _ => ConnectSnafu { target }.into_error(error),
        }
    }

    fn broken(&self) -> BrokenSnafu<Target> {
        BrokenSnafu {
            target: self.target().clone(),
        }
    }

    fn take_idle(&self) -> Option<Sender> {
        self.idle().pop()
    }

    fn keep(&self, sender: Sender) {
        let mut idle = self.idle();
        if idle.len() < MAX_IDLE_CONNECTIONS && !sender.is_closed() {
            idle.push(sender);
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Sender>> {
        self.inner
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_problem(response: &Response<Incoming>) -> bool {
    response
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.starts_with(PROBLEM_MEDIA_TYPE))
}
