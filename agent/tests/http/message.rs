//! Requests byte by byte, so that a test can send what no client library would.

use std::{fmt::Write, future::Future, time::Duration};

use branchpool_agent_api::Problem;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Longer than anything here takes, so that a hang fails instead of hanging the run.
const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) async fn patiently<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("should not hang")
}

#[derive(Clone, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) method: &'a str,
    pub(crate) path: &'a str,
    pub(crate) headers: Vec<(&'a str, &'a str)>,
    pub(crate) body: Vec<u8>,
}

impl<'a> Request<'a> {
    pub(crate) fn new(method: &'a str, path: &'a str) -> Self {
        Self {
            method,
            path,
            headers: vec![("Host", "localhost")],
            body: Vec::new(),
        }
    }

    pub(crate) fn json(method: &'a str, path: &'a str, body: impl Into<Vec<u8>>) -> Self {
        Self::new(method, path)
            .header("Content-Type", "application/json")
            .body(body)
    }

    pub(crate) fn header(mut self, name: &'a str, value: &'a str) -> Self {
        self.headers.push((name, value));
        self
    }

    pub(crate) fn host(mut self, host: &'a str) -> Self {
        self.headers[0] = ("Host", host);
        self
    }

    pub(crate) fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    pub(crate) fn head(&self) -> String {
        let mut head = format!(
            "{} {} HTTP/1.1\r\nConnection: close\r\n",
            self.method, self.path
        );
        for (name, value) in &self.headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        head
    }

    pub(crate) async fn send(&self, stream: impl AsyncRead + AsyncWrite + Unpin) -> Reply {
        let mut head = self.head();
        if !self.body.is_empty() {
            let _ = write!(head, "Content-Length: {}\r\n", self.body.len());
        }
        exchange(stream, &head, &self.body).await
    }
}

pub(crate) async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    head: &str,
    body: &[u8],
) -> Reply {
    let mut received = Vec::new();
    patiently(async {
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(b"\r\n").await.unwrap();
        // A server that refuses by the head alone may close before the body is through.
        let _ = stream.write_all(body).await;
        let _ = stream.read_to_end(&mut received).await;
    })
    .await;
    Reply::parse(&received)
}

#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: String,
}

impl Reply {
    fn parse(received: &[u8]) -> Self {
        let text = String::from_utf8(received.to_vec()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").expect("a whole head");
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self {
            status,
            head: head.to_owned(),
            body: body.to_owned(),
        }
    }

    pub(crate) fn header(&self, wanted: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case(wanted).then_some(value.trim())
        })
    }

    /// The body as the problem that every refusal must be.
    pub(crate) fn problem(&self) -> Problem {
        assert_eq!(
            self.header("content-type"),
            Some("application/problem+json"),
            "{self:?}"
        );
        let problem: Problem = serde_json::from_str(&self.body).unwrap();
        assert_eq!(problem.status, self.status);
        problem
    }

    pub(crate) fn json<T: serde::de::DeserializeOwned>(&self) -> T {
        assert_eq!(self.header("content-type"), Some("application/json"));
        serde_json::from_str(&self.body).unwrap()
    }
}
