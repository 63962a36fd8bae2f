//! Ports of the loopback address for programs that cannot choose one by themselves.

use std::{
    io,
    net::{Ipv4Addr, TcpListener, TcpStream},
};

/// A port that the kernel gives to nobody else for a minute: it waits for stray packets of the
/// connection that is made and closed here. A server, which sets `SO_REUSEADDR`, may listen on it.
pub(crate) fn reserve() -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let client = TcpStream::connect(address)?;
    let (server, _) = listener.accept()?;
    // The side that closes first is the one that waits.
    drop(server);
    drop(client);
    Ok(address.port())
}
