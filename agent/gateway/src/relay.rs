//! Moving bytes between a client and its session.
//!
//! A direction holds a buffer only while the other side does not take what was read: an idle
//! connection holds none. Buffers are kept by each thread and used again.

use std::{
    cell::RefCell,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::{
    attach::Backend, branch::Client, framing::Framing, metrics::Metrics, stream::ClientStream,
};

/// Size of a buffer, in bytes: some of the 8 KiB that Postgres sends at once.
const BUFFER: usize = 32 << 10;
/// Buffers that a thread keeps.
const KEPT: usize = 8;
/// The `Terminate` message.
const TERMINATE: &[u8] = b"X\0\0\0\x04";

thread_local! {
    static BUFFERS: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

fn take_buffer() -> Box<[u8]> {
    BUFFERS
        .with_borrow_mut(Vec::pop)
        .unwrap_or_else(|| vec![0; BUFFER].into_boxed_slice())
}

fn give_buffer(buffer: Box<[u8]>) {
    BUFFERS.with_borrow_mut(|buffers| {
        if buffers.len() < KEPT && buffer.len() == BUFFER {
            buffers.push(buffer);
        }
    });
}

/// Bytes on their way.
struct Chunk {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

#[derive(Default)]
struct Half {
    chunk: Option<Chunk>,
    /// Written, but perhaps still in the encryption's buffer.
    unflushed: bool,
    read_all: bool,
    done: bool,
}

enum Fault {
    Read(io::Error),
    Write,
}

impl Half {
    /// Begins with bytes that have been read before.
    fn with(bytes: &[u8]) -> Self {
        let chunk = (!bytes.is_empty()).then(|| Chunk {
            buffer: bytes.into(),
            start: 0,
            end: bytes.len(),
        });
        Self {
            chunk,
            ..Self::default()
        }
    }

    /// Moves bytes until there are none, or until they are not taken. Ready at the end of `from`,
    /// with everything written and flushed.
    fn poll_move(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        mut look: impl FnMut(&[u8]),
    ) -> Poll<Result<(), Fault>> {
        loop {
            while let Some(chunk) = &mut self.chunk {
                let bytes = &chunk.buffer[chunk.start..chunk.end];
                match ready!(Pin::new(&mut *to).poll_write(cx, bytes)) {
                    Ok(0) | Err(_) => return Poll::Ready(Err(Fault::Write)),
                    Ok(written) => chunk.start += written,
                }
                self.unflushed = true;
                if chunk.start == chunk.end
                    && let Some(chunk) = self.chunk.take()
                {
                    give_buffer(chunk.buffer);
                }
            }
            if !self.read_all {
                let mut buffer = take_buffer();
                let mut read = ReadBuf::new(&mut buffer);
                let polled = Pin::new(&mut *from).poll_read(cx, &mut read);
                let end = read.filled().len();
                match polled {
                    Poll::Ready(Ok(())) if end > 0 => {
                        look(&buffer[..end]);
                        self.chunk = Some(Chunk {
                            buffer,
                            start: 0,
                            end,
                        });
                        continue;
                    }
                    Poll::Ready(Ok(())) => self.read_all = true,
                    Poll::Ready(Err(error)) => {
                        give_buffer(buffer);
                        return Poll::Ready(Err(Fault::Read(error)));
                    }
                    Poll::Pending => {}
                }
                give_buffer(buffer);
            }
            if self.unflushed {
                if ready!(Pin::new(&mut *to).poll_flush(cx)).is_err() {
                    return Poll::Ready(Err(Fault::Write));
                }
                self.unflushed = false;
            }
            return if self.read_all {
                Poll::Ready(Ok(()))
            } else {
                Poll::Pending
            };
        }
    }
}

/// How moving came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The client is gone, or its end of the line is.
    Client,
    /// The server has closed the session.
    Server,
}

/// A connection whose session is open.
pub(crate) struct Relay {
    client: ClientStream,
    backend: Backend,
    to_server: Half,
    to_client: Half,
    framing: Framing,
    /// After how many bytes of the chunk for the client its last complete message ends.
    boundary: Option<usize>,
    /// The client has sent `Terminate`, or closed its end.
    goodbye: bool,
    /// The server's end was reset: there may be something left to read.
    reset: bool,
    counted: Client,
    metrics: Metrics,
}

impl Relay {
    /// `input`: what the client has sent behind its login.
    pub(crate) fn new(
        client: ClientStream,
        input: &[u8],
        mut backend: Backend,
        counted: Client,
        metrics: Metrics,
    ) -> Self {
        let from_server = std::mem::take(&mut backend.buffer);
        let mut framing = Framing::default();
        let boundary = framing.advance(&from_server);
        Self {
            client,
            backend,
            to_server: Half::with(input),
            to_client: Half::with(&from_server),
            framing,
            boundary,
            goodbye: input.ends_with(TERMINATE),
            reset: false,
            counted,
            metrics,
        }
    }

    /// Moves bytes in both directions.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        if !self.to_server.done {
            match self.poll_to_server(cx) {
                Poll::Ready(Ok(())) => self.to_server.done = true,
                Poll::Ready(Err(Fault::Read(_))) => return Poll::Ready(End::Client),
                // The server may have said why.
                Poll::Ready(Err(Fault::Write)) => self.to_server = Half::finished(),
                Poll::Pending => {}
            }
        }
        loop {
            match ready!(self.poll_to_client(cx)) {
                Err(Fault::Write) => return Poll::Ready(End::Client),
                Err(Fault::Read(error))
                    if error.kind() == io::ErrorKind::ConnectionReset && !self.reset =>
                {
                    self.reset = true;
                }
                Ok(()) | Err(Fault::Read(_)) => return Poll::Ready(End::Server),
            }
        }
    }

    fn poll_to_server(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        let (branch, metrics, goodbye) = (&self.counted.branch, &self.metrics, &mut self.goodbye);
        let look = |bytes: &[u8]| {
            branch.touch();
            metrics.bytes_in.inc_by(bytes.len() as u64);
            *goodbye = bytes.ends_with(TERMINATE);
        };
        let server = &mut self.backend.stream;
        ready!(self.to_server.poll_move(cx, &mut self.client, server, look))?;
        self.goodbye = true;
        ready!(Pin::new(&mut self.backend.stream).poll_shutdown(cx)).map_err(|_| Fault::Write)?;
        Poll::Ready(Ok(()))
    }

    fn poll_to_client(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        let (metrics, framing, boundary) = (&self.metrics, &mut self.framing, &mut self.boundary);
        let look = |bytes: &[u8]| {
            metrics.bytes_out.inc_by(bytes.len() as u64);
            *boundary = framing.advance(bytes);
        };
        let server = &mut self.backend.stream;
        self.to_client.poll_move(cx, server, &mut self.client, look)
    }

    /// Closes the session at once. Returns the client, what it still has to get, and whether
    /// something can be said to it after that.
    pub(crate) fn close(self) -> (ClientStream, BytesMut, bool) {
        drop(self.backend);
        let mut rest = BytesMut::new();
        let mut between_messages = self.framing.is_boundary();
        if let Some(chunk) = self.to_client.chunk {
            let end = match self.boundary {
                Some(boundary) if boundary >= chunk.start => boundary,
                _ => chunk.start,
            };
            between_messages = self
                .boundary
                .is_some_and(|boundary| boundary >= chunk.start);
            rest.extend_from_slice(&chunk.buffer[chunk.start..end]);
        }
        let speak = between_messages && !self.goodbye && !self.framing.ended_with_error();
        (self.client, rest, speak)
    }
}

impl Half {
    fn finished() -> Self {
        Self {
            done: true,
            ..Self::default()
        }
    }
}
