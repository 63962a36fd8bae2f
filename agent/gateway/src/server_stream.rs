//! The connection to a branch's server while bytes are moved.
//!
//! A runtime's own stream waits for both directions at once. On a Unix socket that means to be woken
//! each time when the server has read something, since it could take more then: once more for every
//! message of the client. So only reading is waited for, and writing as long as it does not go on.

use std::{
    io::{self, Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, unix::AsyncFd};

#[derive(Debug)]
pub(crate) struct ServerStream {
    stream: AsyncFd<UnixStream>,
    /// The same connection, while the server does not take what is sent.
    blocked: Option<AsyncFd<UnixStream>>,
}

impl ServerStream {
    /// From now on the thread that calls this waits for it.
    pub(crate) fn new(stream: tokio::net::UnixStream) -> io::Result<Self> {
        Ok(Self {
            stream: wait_for(stream.into_std()?, Interest::READABLE)?,
            blocked: None,
        })
    }
}

#[expect(
    deprecated,
    reason = "unsound only for a type that lies about its descriptor, which the standard library's does not"
)]
fn wait_for(stream: UnixStream, interest: Interest) -> io::Result<AsyncFd<UnixStream>> {
    AsyncFd::with_interest(stream, interest)
}

impl AsyncRead for ServerStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let stream = &self.get_mut().stream;
        loop {
            let mut ready = ready!(stream.poll_read_ready(cx))?;
            let space = buffer.initialize_unfilled();
            match stream.get_ref().read(space) {
                Ok(read) => {
                    // There was no more, and what comes is told of: the next read would be in vain.
                    if 0 < read && read < space.len() {
                        ready.clear_ready();
                    }
                    buffer.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for ServerStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let Self { stream, blocked } = self.get_mut();
        loop {
            let ready = match blocked {
                Some(blocked) => Some(ready!(blocked.poll_write_ready(cx))?),
                None => None,
            };
            match stream.get_ref().write(bytes) {
                Ok(written) => {
                    drop(ready);
                    *blocked = None;
                    return Poll::Ready(Ok(written));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if let Some(mut ready) = ready {
                        ready.clear_ready();
                    } else {
                        let again = stream.get_ref().try_clone()?;
                        *blocked = Some(wait_for(again, Interest::WRITABLE)?);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.stream.get_ref().shutdown(Shutdown::Write))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn pair() -> (ServerStream, tokio::net::UnixStream) {
        let (stream, server) = tokio::net::UnixStream::pair().unwrap();
        (ServerStream::new(stream).unwrap(), server)
    }

    #[tokio::test]
    async fn nothing_is_lost_when_the_server_takes_its_time() {
        let (mut stream, mut server) = pair();
        // Several times what the kernel keeps for a socket.
        let sent: Vec<u8> = (0..4_000_000_u32).map(|n| (n % 251) as u8).collect();
        let expected = sent.clone();
        let writer = tokio::spawn(async move {
            stream.write_all(&sent).await.unwrap();
            assert!(stream.blocked.is_none());
            stream.shutdown().await.unwrap();
            stream
        });
        let mut got = Vec::new();
        server.read_to_end(&mut got).await.unwrap();
        assert!(got == expected);
        drop(server);
        let mut stream = writer.await.unwrap();
        assert_eq!(stream.read(&mut [0; 8]).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn what_comes_is_read_however_it_is_cut() {
        let (mut stream, mut server) = pair();
        let writer = tokio::spawn(async move {
            for n in 0..200_usize {
                server.write_all(&vec![n as u8; 1 + n * 37]).await.unwrap();
                tokio::task::yield_now().await;
            }
        });
        let mut got = 0;
        let mut buffer = [0; 1024];
        loop {
            match stream.read(&mut buffer).await.unwrap() {
                0 => break,
                read => got += read,
            }
        }
        writer.await.unwrap();
        assert_eq!(got, (0..200).map(|n| 1 + n * 37).sum::<usize>());
    }
}
