//! The preconnected session, and its frames.

use std::{collections::BTreeMap, fmt, io, time::Duration};

use bytes::{Bytes, BytesMut};
use postgres_protocol::message::{
    backend::{
        ERROR_RESPONSE_TAG, Header, Message, NOTICE_RESPONSE_TAG, PARAMETER_STATUS_TAG,
        READY_FOR_QUERY_TAG,
    },
    frontend,
};
use rustix::{
    io::Errno,
    net::{RecvFlags, recv},
};
use snafu::{ResultExt, Snafu, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

/// Longest message of a server that is held in memory, in bytes, before bytes are only moved.
const MAX_FRAME: usize = 1 << 20;
/// Most notices that are kept for the client.
const MAX_NOTICES: usize = 16;
/// How long a polite goodbye may take.
const TERMINATE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Snafu)]
pub(crate) enum Error {
    #[snafu(display("the server ended the session: {source}"))]
    Io { source: io::Error },

    #[snafu(display("the server ended the session"))]
    Closed,

    #[snafu(display("the server sent a message of {length} bytes where short ones are expected"))]
    TooLong { length: usize },

    #[snafu(display("the server broke the protocol: {detail}"))]
    Protocol { detail: &'static str },
}

/// What a server wants to see in a `CancelRequest`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CancelKey {
    pub process_id: i32,
    pub secret: i32,
}

impl fmt::Debug for CancelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelKey")
            .field("process_id", &self.process_id)
            .finish_non_exhaustive()
    }
}

/// A session of the pool's role in the pool's database that was opened ahead of its client and
/// has run nothing that the client could see.
#[derive(Debug)]
pub struct Session {
    pub stream: UnixStream,
    /// Bytes that were read but belong to no complete message yet.
    pub buffer: BytesMut,
    /// Start-up parameters that it was opened with, besides user and database.
    pub profile: Vec<(String, String)>,
    /// `ParameterStatus`, merged.
    pub parameters: BTreeMap<String, String>,
    pub cancel_key: CancelKey,
    /// Whole `NoticeResponse` messages that nobody has seen yet.
    pub notices: Vec<Bytes>,
    /// Statements, separated by semicolons, that undo what was set for the time in the pool, such
    /// as `RESET idle_session_timeout`. Run at the hand-over, ahead of the client's first query.
    pub at_hand_over: Option<String>,
}

impl Session {
    /// Takes in what the server said while nobody listened. An error means that the session is
    /// dead. Does not wait.
    pub(crate) fn catch_up(&mut self) -> Result<(), Error> {
        let mut ended = false;
        let mut chunk = [0; 1024];
        loop {
            // Asked of the kernel: the runtime may not have heard of the server's end yet.
            match recv(&self.stream, &mut chunk, RecvFlags::DONTWAIT) {
                Ok((0, _)) => ended = true,
                Ok((read, _)) => {
                    self.buffer.extend_from_slice(&chunk[..read]);
                    let length = self.buffer.len();
                    ensure!(length <= MAX_FRAME, TooLongSnafu { length });
                    continue;
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error)).context(IoSnafu),
            }
            break;
        }
        while let Some(frame) = take_frame(&mut self.buffer)? {
            self.note(frame)?;
        }
        ensure!(!ended, ClosedSnafu);
        Ok(())
    }

    fn note(&mut self, frame: Frame) -> Result<(), Error> {
        match frame.tag {
            PARAMETER_STATUS_TAG => {
                let (name, value) = frame.parameter_status()?;
                self.parameters.insert(name, value);
            }
            NOTICE_RESPONSE_TAG if self.notices.len() < MAX_NOTICES => {
                self.notices.push(frame.bytes);
            }
            ERROR_RESPONSE_TAG => return ClosedSnafu.fail(),
            _ => {}
        }
        Ok(())
    }

    /// Says goodbye and waits, for a bounded time, until the backend is gone from all shared state.
    pub async fn terminate(mut self) {
        let mut message = BytesMut::new();
        frontend::terminate(&mut message);
        let goodbye = async {
            self.stream.write_all(&message).await?;
            while self.stream.read_buf(&mut self.buffer).await? > 0 {
                self.buffer.clear();
            }
            Ok::<_, io::Error>(())
        };
        if !matches!(
            tokio::time::timeout(TERMINATE_TIMEOUT, goodbye).await,
            Ok(Ok(()))
        ) {
            tracing::warn!(
                process_id = self.cancel_key.process_id,
                "an unused session did not end when asked to"
            );
        }
    }
}

/// A message of a server as it is on the wire.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) tag: u8,
    /// Tag and length included.
    pub(crate) bytes: Bytes,
}

impl Frame {
    pub(crate) fn body(&self) -> &[u8] {
        self.bytes.get(5..).unwrap_or_default()
    }

    pub(crate) fn parse(&self) -> Result<Message, Error> {
        let detail = "a message cannot be read";
        let mut bytes = BytesMut::from(&self.bytes[..]);
        match Message::parse(&mut bytes).context(IoSnafu)? {
            Some(message) => Ok(message),
            None => ProtocolSnafu { detail }.fail(),
        }
    }

    fn parameter_status(&self) -> Result<(String, String), Error> {
        let detail = "a setting cannot be read";
        let Message::ParameterStatus(body) = self.parse()? else {
            return ProtocolSnafu { detail }.fail();
        };
        Ok((
            body.name().context(IoSnafu)?.to_owned(),
            body.value().context(IoSnafu)?.to_owned(),
        ))
    }

    pub(crate) fn is_ready_for_query(&self) -> bool {
        self.tag == READY_FOR_QUERY_TAG
    }
}

/// Takes the first message from the front when it is complete.
pub(crate) fn take_frame(buffer: &mut BytesMut) -> Result<Option<Frame>, Error> {
    let Some(header) = Header::parse(buffer).context(IoSnafu)? else {
        return Ok(None);
    };
    // At least 4: the parser has seen to it.
    let length = usize::try_from(header.len()).unwrap_or(usize::MAX);
    ensure!(length <= MAX_FRAME, TooLongSnafu { length });
    if buffer.len() < length + 1 {
        return Ok(None);
    }
    Ok(Some(Frame {
        tag: header.tag(),
        bytes: buffer.split_to(length + 1).freeze(),
    }))
}

/// Waits for the next message.
pub(crate) async fn next_frame(
    stream: &mut UnixStream,
    buffer: &mut BytesMut,
) -> Result<Frame, Error> {
    loop {
        if let Some(frame) = take_frame(buffer)? {
            return Ok(frame);
        }
        let read = stream.read_buf(buffer).await.context(IoSnafu)?;
        ensure!(read > 0, ClosedSnafu);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A session and the server's end of it.
    fn session() -> (Session, UnixStream) {
        let (stream, server) = UnixStream::pair().unwrap();
        let session = Session {
            stream,
            buffer: BytesMut::new(),
            profile: Vec::new(),
            parameters: [("TimeZone".to_owned(), "UTC".to_owned())].into(),
            cancel_key: CancelKey {
                process_id: 7,
                secret: 8,
            },
            notices: Vec::new(),
            at_hand_over: None,
        };
        (session, server)
    }

    const ZONE: &[u8] = b"S\0\0\0\x18TimeZone\0Asia/Tokyo\0";
    const NOTICE: &[u8] = b"N\0\0\0\x05\0";
    const ERROR: &[u8] = b"E\0\0\0\x05\0";

    #[tokio::test]
    async fn what_came_while_nobody_listened_is_merged() {
        let (mut session, mut server) = session();
        session.catch_up().unwrap();
        let half = &NOTICE[..3];
        server
            .write_all(&[ZONE, NOTICE, NOTICE, half].concat())
            .await
            .unwrap();
        session.catch_up().unwrap();
        assert_eq!(session.parameters["TimeZone"], "Asia/Tokyo");
        assert_eq!(session.notices, [NOTICE, NOTICE]);
        assert_eq!(session.buffer, half);
    }

    #[tokio::test]
    async fn a_session_that_ended_is_dead() {
        let (mut session, server) = session();
        drop(server);
        assert!(matches!(session.catch_up(), Err(Error::Closed)));
    }

    #[tokio::test]
    async fn a_session_that_was_told_why_it_ends_is_dead() {
        let (mut session, mut server) = session();
        server.write_all(ERROR).await.unwrap();
        assert!(matches!(session.catch_up(), Err(Error::Closed)));
    }

    #[tokio::test]
    async fn notices_are_bounded() {
        let (mut session, mut server) = session();
        server.write_all(&NOTICE.repeat(100)).await.unwrap();
        session.catch_up().unwrap();
        assert_eq!(session.notices.len(), MAX_NOTICES);
        server.write_all(b"N\x7f\xff\xff\xff").await.unwrap();
        assert!(matches!(session.catch_up(), Err(Error::TooLong { .. })));
    }
}
