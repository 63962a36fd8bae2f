//! A client that speaks the protocol by hand.

use std::net::SocketAddr;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use postgres_protocol::{
    authentication::sasl::{ChannelBinding, ScramSha256},
    message::frontend,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
};

pub(crate) struct Raw<S = TcpStream> {
    pub(crate) stream: S,
    pub(crate) buffer: BytesMut,
}

impl Raw {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).await.unwrap())
    }
}

/// Tag and body.
pub(crate) type Reply = (u8, Bytes);

impl<S: AsyncRead + AsyncWrite + Unpin> Raw<S> {
    pub(crate) fn over(stream: S) -> Self {
        Self {
            stream,
            buffer: BytesMut::new(),
        }
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// Opens with protocol 3.`minor`.
    pub(crate) async fn startup(&mut self, minor: u32, parameters: &[(&str, &str)]) {
        let packet = startup_packet(minor, parameters);
        self.send(&packet).await;
    }

    /// The next message; `None` at the end.
    pub(crate) async fn reply(&mut self) -> Option<Reply> {
        loop {
            if let Some(reply) = self.take() {
                return Some(reply);
            }
            if self.stream.read_buf(&mut self.buffer).await.unwrap_or(0) == 0 {
                assert!(self.buffer.is_empty(), "half a message: {:?}", self.buffer);
                return None;
            }
        }
    }

    /// Messages up to and with one of `tag`, or up to the end.
    pub(crate) async fn until(&mut self, tag: u8) -> Vec<Reply> {
        let mut replies = Vec::new();
        while let Some(reply) = self.reply().await {
            let found = reply.0 == tag;
            replies.push(reply);
            if found {
                break;
            }
        }
        replies
    }

    /// Everything up to the end.
    pub(crate) async fn rest(&mut self) -> Vec<Reply> {
        self.until(0).await
    }

    /// Everything up to the end, which may be in the middle of a message.
    pub(crate) async fn all(&mut self) -> (Vec<Reply>, bool) {
        let mut bytes = Vec::new();
        let _ = self.stream.read_to_end(&mut bytes).await;
        self.buffer.extend_from_slice(&bytes);
        let mut replies = Vec::new();
        while let Some(reply) = self.take() {
            replies.push(reply);
        }
        (replies, !self.buffer.is_empty())
    }

    /// The next message, if it is there.
    fn take(&mut self) -> Option<Reply> {
        let length = self.buffer.get(1..5)?.get_u32() as usize;
        if self.buffer.len() <= length {
            return None;
        }
        let mut message = self.buffer.split_to(length + 1).freeze();
        let tag = message.get_u8();
        message.advance(4);
        Some((tag, message))
    }

    /// Proves the password, without channel binding, up to the answer to the proof.
    pub(crate) async fn prove(&mut self, password: &str) -> Vec<Reply> {
        let mut scram = ScramSha256::new(password.as_bytes(), ChannelBinding::unsupported());
        let mut message = BytesMut::new();
        frontend::sasl_initial_response("SCRAM-SHA-256", scram.message(), &mut message).unwrap();
        self.send(&message).await;
        let (tag, body) = self.reply().await.unwrap();
        assert_eq!((tag, &body[..4]), (b'R', &[0, 0, 0, 11][..]), "{body:?}");
        scram.update(&body[4..]).unwrap();
        let mut message = BytesMut::new();
        frontend::sasl_response(scram.message(), &mut message).unwrap();
        self.send(&message).await;
        self.until(b'Z').await
    }

    /// Logs in, and returns what came behind the proof.
    pub(crate) async fn log_in(
        &mut self,
        minor: u32,
        parameters: &[(&str, &str)],
        password: &str,
    ) -> Vec<Reply> {
        self.startup(minor, parameters).await;
        assert_eq!(self.until(b'R').await.last().unwrap().1[..4], [0, 0, 0, 10]);
        self.prove(password).await
    }

    pub(crate) async fn query(&mut self, sql: &str) -> Vec<Reply> {
        let mut message = BytesMut::new();
        frontend::query(sql, &mut message).unwrap();
        self.send(&message).await;
        self.until(b'Z').await
    }
}

pub(crate) fn startup_packet(minor: u32, parameters: &[(&str, &str)]) -> BytesMut {
    let mut body = BytesMut::new();
    body.put_u32((3 << 16) | minor);
    for text in parameters.iter().flat_map(|(name, value)| [name, value]) {
        body.put_slice(text.as_bytes());
        body.put_u8(0);
    }
    body.put_u8(0);
    let mut packet = BytesMut::new();
    packet.put_u32(u32::try_from(body.len() + 4).unwrap());
    packet.put_slice(&body);
    packet
}

/// The fields of an error: code and message.
pub(crate) fn error((tag, body): &Reply) -> (String, String) {
    assert_eq!(*tag, b'E', "{body:?}");
    let field = |name: u8| {
        body.split(|byte| *byte == 0)
            .find(|field| field.first() == Some(&name))
            .map(|field| String::from_utf8(field[1..].to_vec()).unwrap())
            .unwrap()
    };
    (field(b'C'), field(b'M'))
}

pub(crate) fn code(reply: &Reply) -> String {
    error(reply).0
}

/// The first column of the first row.
pub(crate) fn value(replies: &[Reply]) -> String {
    let (_, row) = replies.iter().find(|(tag, _)| *tag == b'D').unwrap();
    String::from_utf8(row[6..].to_vec()).unwrap()
}

pub(crate) fn tags(replies: &[Reply]) -> String {
    replies.iter().map(|(tag, _)| char::from(*tag)).collect()
}
