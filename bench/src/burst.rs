//! A burst of requests over connections that are open already: raw HTTP/1.1, to cost the clients
//! little, for they share the machine with what they measure.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use snafu::{OptionExt, ResultExt, whatever};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpStream, UnixStream},
    sync::Barrier,
    task::JoinSet,
};

use crate::error::Result;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

pub(crate) struct Connection(Box<dyn Stream>);

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) latency: Duration,
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

impl Connection {
    pub(crate) async fn unix(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).await;
        let stream =
            stream.with_whatever_context(|_| format!("cannot connect to {}", path.display()))?;
        Ok(Self(Box::new(stream)))
    }

    pub(crate) async fn tcp(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).await;
        let stream = stream.with_whatever_context(|_| format!("cannot connect to {address}"))?;
        stream
            .set_nodelay(true)
            .whatever_context("cannot set TCP_NODELAY")?;
        Ok(Self(Box::new(stream)))
    }

    pub(crate) async fn ask(&mut self, request: &[u8]) -> Result<Answer> {
        let started = Instant::now();
        self.0
            .write_all(request)
            .await
            .whatever_context("cannot send a request")?;
        let mut bytes = Vec::with_capacity(2048);
        let (status, body) = loop {
            let read = self
                .0
                .read_buf(&mut bytes)
                .await
                .whatever_context("no answer")?;
            if read == 0 {
                whatever!("the server hung up");
            }
            if let Some((status, body, length)) = head(&bytes)?
                && bytes.len() >= body + length
            {
                break (status, body);
            }
        };
        let latency = started.elapsed();
        let body = bytes.split_off(body);
        Ok(Answer {
            latency,
            status,
            body,
        })
    }
}

/// Status, where the body starts, and its length; none while the head is not complete.
fn head(bytes: &[u8]) -> Result<Option<(u16, usize, usize)>> {
    let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
        return Ok(None);
    };
    let head = String::from_utf8_lossy(&bytes[..end]);
    let status = head.get(9..12).and_then(|status| status.parse().ok());
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.trim().parse().ok())?
    });
    let status = status.whatever_context("an answer without a status")?;
    let length = length.whatever_context("an answer without a length")?;
    Ok(Some((status, end + 4, length)))
}

/// A request with a JSON body.
pub(crate) fn put(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "PUT {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Makes a connection one that is kept alive: it has had an answer, whatever that says.
pub(crate) async fn prime(connection: &mut Connection) -> Result<()> {
    connection
        .ask(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .await?;
    Ok(())
}

/// Sends one request over each connection, all at once.
pub(crate) async fn run(
    connections: &mut Vec<Connection>,
    requests: Vec<Vec<u8>>,
) -> Result<Vec<Answer>> {
    let barrier = Arc::new(Barrier::new(requests.len()));
    let mut tasks = JoinSet::new();
    for (mut connection, request) in connections.drain(..).zip(requests) {
        let barrier = Arc::clone(&barrier);
        tasks.spawn(async move {
            barrier.wait().await;
            let answer = connection.ask(&request).await;
            (connection, answer)
        });
    }
    let mut answers = Vec::new();
    while let Some(ended) = tasks.join_next().await {
        let (connection, answer) = ended.whatever_context("a client ended abnormally")?;
        connections.push(connection);
        answers.push(answer?);
    }
    Ok(answers)
}
