//! The least that any gateway does: bytes are copied between TCP connections and a server's socket, by
//! an event loop on each processor, in a process of its own as the agent is. Nothing is looked at.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use rustix::{
    buffer::spare_capacity,
    event::epoll::{self, CreateFlags, EventData, EventFlags},
    io::Errno,
};
use snafu::ResultExt;

use crate::error::Result;

/// What Postgres sends at once, in bytes.
const BUFFER: usize = 8 << 10;
const EVENTS: usize = 64;

#[derive(Debug)]
struct Pair {
    client: TcpStream,
    server: UnixStream,
}

#[derive(Debug)]
struct Lane {
    epoll: OwnedFd,
    arriving: Mutex<Arriving>,
}

/// Pairs that the lane's thread has not taken over yet. The number of a pair is its place among all
/// that ever came.
#[derive(Debug, Default)]
struct Arriving {
    count: u64,
    pairs: Vec<Option<Pair>>,
}

/// Serves until it is killed.
pub(crate) fn serve(port: u16, socket: &Path) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    let listener = listener.with_whatever_context(|_| format!("cannot listen on {port}"))?;
    let mut lanes = Vec::new();
    for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
        let lane = Arc::new(Lane {
            epoll: epoll::create(CreateFlags::CLOEXEC).whatever_context("no epoll")?,
            arriving: Mutex::default(),
        });
        lanes.push(Arc::clone(&lane));
        thread::spawn(move || {
            if let Err(error) = lane.run() {
                eprintln!("copy: {error}");
                std::process::exit(1);
            }
        });
    }
    for (client, lane) in listener.incoming().zip(lanes.iter().cycle()) {
        let client = client.whatever_context("cannot accept")?;
        client
            .set_nodelay(true)
            .whatever_context("no TCP_NODELAY")?;
        let server = UnixStream::connect(socket)
            .with_whatever_context(|_| format!("nobody at {}", socket.display()))?;
        lane.add(Pair { client, server })
            .whatever_context("cannot wait for a socket")?;
    }
    Ok(())
}

impl Lane {
    fn add(&self, pair: Pair) -> rustix::io::Result<()> {
        let mut arriving = self.arriving.lock().unwrap_or_else(PoisonError::into_inner);
        let number = arriving.count;
        for (side, socket) in [pair.client.as_fd(), pair.server.as_fd()]
            .into_iter()
            .enumerate()
        {
            let data = EventData::new_u64(2 * number + side as u64);
            epoll::add(&self.epoll, socket, data, EventFlags::IN)?;
        }
        arriving.count += 1;
        arriving.pairs.push(Some(pair));
        Ok(())
    }

    fn run(&self) -> rustix::io::Result<()> {
        let mut pairs: Vec<Option<Pair>> = Vec::new();
        let mut events = Vec::with_capacity(EVENTS);
        let mut buffer = vec![0; BUFFER];
        loop {
            match epoll::wait(&self.epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
            for event in events.drain(..) {
                let data = event.data.u64();
                let number = usize::try_from(data / 2).unwrap_or(usize::MAX);
                if number >= pairs.len() {
                    let mut arriving = self.arriving.lock().unwrap_or_else(PoisonError::into_inner);
                    pairs.append(&mut arriving.pairs);
                }
                if let Some(slot) = pairs.get_mut(number)
                    && let Some(Pair { client, server }) = slot
                {
                    let open = if data % 2 == 0 {
                        copy(client, server, &mut buffer)
                    } else {
                        copy(server, client, &mut buffer)
                    };
                    if !open.unwrap_or(false) {
                        *slot = None;
                    }
                }
            }
        }
    }
}

/// Copies what is there; false at the end.
fn copy(from: &mut impl Read, to: &mut impl Write, buffer: &mut [u8]) -> std::io::Result<bool> {
    let read = loop {
        match from.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => break read?,
        }
    };
    to.write_all(&buffer[..read])?;
    Ok(read > 0)
}
