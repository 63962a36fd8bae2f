//! One JSON message per datagram of a `SOCK_SEQPACKET` socket, with descriptors beside it.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    cmsg_space,
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};
use serde::{Serialize, de::DeserializeOwned};
use snafu::{ResultExt, Snafu, ensure};

/// Bytes of a message.
pub(crate) const MESSAGE_MAX: usize = 64 * 1024;
/// Descriptors beside a message: stdin, stdout, stderr.
const FDS_MAX: usize = 3;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot write a message between agent and supervisor"))]
    Encode { source: serde_json::Error },
    #[snafu(display(
        "cannot read a message between agent and supervisor: are they of the same version?"
    ))]
    Decode { source: serde_json::Error },
    #[snafu(display(
        "a message between agent and supervisor is longer than {MESSAGE_MAX} bytes: use fewer or shorter arguments"
    ))]
    TooLong,
    #[snafu(display(
        "descriptors beside a message between agent and supervisor got lost: raise the limit on open files"
    ))]
    LostDescriptors,
    #[snafu(display("cannot send between agent and supervisor"))]
    Send { source: io::Error },
    #[snafu(display("cannot receive between agent and supervisor"))]
    Receive { source: io::Error },
}

impl Error {
    pub(crate) fn would_block(&self) -> bool {
        let (Self::Send { source } | Self::Receive { source }) = self else {
            return false;
        };
        source.kind() == io::ErrorKind::WouldBlock
    }
}

pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>, Error> {
    let bytes = serde_json::to_vec(message).context(EncodeSnafu)?;
    ensure!(bytes.len() <= MESSAGE_MAX, TooLongSnafu);
    Ok(bytes)
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(bytes).context(DecodeSnafu)
}

/// Sends without waiting.
pub(crate) fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(fds));
        ensure!(fits, LostDescriptorsSnafu);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    retry(|| sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, flags)).context(SendSnafu)?;
    Ok(())
}

/// Receives without waiting into `buffer`, which has [`MESSAGE_MAX`] bytes: the message's length and
/// descriptors. `None`: the other side is gone.
pub(crate) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
) -> Result<Option<(usize, Vec<OwnedFd>)>, Error> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = retry(|| {
        let mut buffers = [IoSliceMut::new(buffer)];
        recvmsg(&socket, &mut buffers, &mut control, flags)
    });
    let received = match received {
        // The other side closed with messages of ours unread.
        Err(error) if error.raw_os_error() == Some(Errno::CONNRESET.raw_os_error()) => {
            return Ok(None);
        }
        other => other.context(ReceiveSnafu)?,
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    // No message of ours is empty.
    if received.bytes == 0 {
        return Ok(None);
    }
    ensure!(!received.flags.contains(ReturnFlags::TRUNC), TooLongSnafu);
    ensure!(
        !received.flags.contains(ReturnFlags::CTRUNC),
        LostDescriptorsSnafu
    );
    Ok(Some((received.bytes, fds)))
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}
