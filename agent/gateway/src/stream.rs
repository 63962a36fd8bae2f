//! A client's connection, plain or encrypted.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::server::TlsStream;

use crate::{scram::Binding, tls::TlsIdentity};

/// Longest message of a client during SASL, in bytes; Postgres has the same.
const MAX_SASL_MESSAGE: usize = 1024;

#[derive(Debug)]
pub(crate) enum ClientStream {
    Plain(TcpStream),
    Tls(Box<TlsStream<Prefixed>>),
}

/// A socket of which some bytes have been read ahead.
#[derive(Debug)]
pub(crate) struct Prefixed {
    prefix: Bytes,
    socket: TcpStream,
}

impl Prefixed {
    pub(crate) fn new(prefix: Bytes, socket: TcpStream) -> Self {
        Self { prefix, socket }
    }
}

impl AsyncRead for Prefixed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.prefix.is_empty() {
            return Pin::new(&mut self.socket).poll_read(cx, buffer);
        }
        let length = self.prefix.len().min(buffer.remaining());
        buffer.put_slice(&self.prefix[..length]);
        self.prefix.advance(length);
        if self.prefix.is_empty() {
            self.prefix = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Prefixed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_read(cx, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// A connection during its login.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) stream: ClientStream,
    /// Read, and not taken yet.
    pub(crate) input: BytesMut,
    /// To be sent by the next flush.
    pub(crate) output: BytesMut,
    identity: Option<Arc<TlsIdentity>>,
}

impl Wire {
    pub(crate) fn plain(socket: TcpStream, input: BytesMut) -> Self {
        Self {
            stream: ClientStream::Plain(socket),
            input,
            output: BytesMut::with_capacity(512),
            identity: None,
        }
    }

    pub(crate) fn encrypted(stream: TlsStream<Prefixed>, identity: Arc<TlsIdentity>) -> Self {
        Self {
            stream: ClientStream::Tls(Box::new(stream)),
            input: BytesMut::with_capacity(512),
            output: BytesMut::with_capacity(512),
            identity: Some(identity),
        }
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        self.identity.is_some()
    }

    pub(crate) fn binding(&self) -> Binding<'_> {
        self.identity
            .as_ref()
            .map(|identity| &identity.endpoint_hash[..])
            .filter(|hash| !hash.is_empty())
    }

    pub(crate) async fn flush(&mut self) -> io::Result<()> {
        self.stream.write_all_buf(&mut self.output).await?;
        self.stream.flush().await
    }

    /// The next packet of a start-up, without its length word; `None` when the length is not
    /// allowed.
    pub(crate) async fn packet(&mut self, limit: usize) -> io::Result<Option<Bytes>> {
        read_packet(&mut self.stream, &mut self.input, limit).await
    }

    /// The next message of a client that is asked for a proof: tag, length and body. `None` when
    /// it is another message or too long.
    pub(crate) async fn proof(&mut self) -> io::Result<Option<Bytes>> {
        read_at_least(&mut self.stream, &mut self.input, 5).await?;
        let length = (&self.input[1..5]).get_u32() as usize;
        if self.input[0] != b'p' || !(4..=MAX_SASL_MESSAGE).contains(&length) {
            return Ok(None);
        }
        read_at_least(&mut self.stream, &mut self.input, length + 1).await?;
        Ok(Some(self.input.split_to(length + 1).freeze()))
    }
}

/// See [`Wire::packet`].
pub(crate) async fn read_packet(
    stream: &mut (impl AsyncRead + Unpin),
    input: &mut BytesMut,
    limit: usize,
) -> io::Result<Option<Bytes>> {
    read_at_least(stream, input, 4).await?;
    let length = (&input[..4]).get_u32() as usize;
    if !(8..=limit).contains(&length) {
        return Ok(None);
    }
    read_at_least(stream, input, length).await?;
    let mut packet = input.split_to(length).freeze();
    packet.advance(4);
    Ok(Some(packet))
}

pub(crate) async fn read_at_least(
    stream: &mut (impl AsyncRead + Unpin),
    input: &mut BytesMut,
    length: usize,
) -> io::Result<()> {
    input.reserve(length.saturating_sub(input.len()));
    while input.len() < length {
        if stream.read_buf(input).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}
