//! From an accepted socket to a client that has proved its password.

use std::{io, sync::Arc};

use bytes::{Bytes, BytesMut};
use snafu::Snafu;
use tokio::{net::TcpStream, sync::watch};
use tokio_rustls::TlsAcceptor;

use crate::{
    branch::Branch,
    directory::{Directory, split_user},
    limits::Limits,
    messages::{
        Fatal, put_authentication_ok, put_negotiation, put_sasl, put_sasl_continue, put_sasl_final,
    },
    metrics::Metrics,
    scram::{self, Challenge, Verifier},
    startup::{self, Packet, Startup},
    stream::{Prefixed, Wire, read_at_least, read_packet},
    tls::{ALPN, TlsIdentity},
};

/// First byte of a TLS handshake; no start-up packet is so long that it begins like this.
const TLS_HANDSHAKE: u8 = 0x16;
/// A role that is let in by who asks, not by a password: never through the gateway, unless it is
/// the pool's own.
const PEER_ROLE: &str = "postgres";

/// What all connections share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) directory: Directory,
    pub(crate) tls: Option<watch::Receiver<Arc<TlsIdentity>>>,
    pub(crate) plaintext_allowed: bool,
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
}

/// Why a login goes no further.
#[derive(Debug, Snafu)]
pub(crate) enum Stop {
    #[snafu(display("the client is gone: {source}"), context(false))]
    Gone { source: io::Error },

    #[snafu(display("refused: {fatal:?}"))]
    Refused { fatal: Box<Fatal> },

    /// The client knows all that there is to know.
    #[snafu(display("the login has ended"))]
    Told,
}

impl From<Fatal> for Stop {
    fn from(fatal: Fatal) -> Self {
        let fatal = Box::new(fatal);
        Self::Refused { fatal }
    }
}

/// What a new connection turned out to be.
#[derive(Debug)]
pub(crate) enum Opening {
    Session(Wire, Startup),
    /// Needs no answer.
    Cancel(startup::Cancel),
    Refused(Wire, Fatal),
}

/// Encryption, and the packet that says what the client wants. An error closes without a word.
pub(crate) async fn negotiate(shared: &Shared, mut socket: TcpStream) -> io::Result<Opening> {
    let mut input = BytesMut::with_capacity(512);
    let (mut asked_tls, mut asked_gss) = (false, false);
    read_at_least(&mut socket, &mut input, 1).await?;
    if input[0] == TLS_HANDSHAKE
        && let Some(identity) = current(shared)
    {
        let wire = encrypt(socket, input.freeze(), identity, true).await?;
        return read_startup(shared, wire).await;
    }
    loop {
        let Some(packet) =
            read_packet(&mut socket, &mut input, shared.limits.startup_packet).await?
        else {
            return Ok(refuse_length(Wire::plain(socket, input)));
        };
        match Packet::parse(packet) {
            Ok(Packet::Tls) if !asked_tls => {
                asked_tls = true;
                let identity = current(shared);
                // What comes before the answer was not sent by who holds the other end of the
                // encrypted channel (CVE-2021-23214).
                if !input.is_empty() {
                    let message = "received unencrypted data after SSL request";
                    return Ok(Opening::Refused(
                        Wire::plain(socket, input),
                        Fatal::protocol(message),
                    ));
                }
                answer(&mut socket, if identity.is_some() { b"S" } else { b"N" }).await?;
                if let Some(identity) = identity {
                    let wire = encrypt(socket, Bytes::new(), identity, false).await?;
                    return read_startup(shared, wire).await;
                }
            }
            Ok(Packet::Gss) if !asked_gss => {
                asked_gss = true;
                answer(&mut socket, b"N").await?;
            }
            parsed => return Ok(opening(shared, Wire::plain(socket, input), parsed)),
        }
    }
}

async fn answer(socket: &mut TcpStream, answer: &[u8]) -> io::Result<()> {
    tokio::io::AsyncWriteExt::write_all(socket, answer).await
}

fn current(shared: &Shared) -> Option<Arc<TlsIdentity>> {
    let identity = shared.tls.as_ref()?.borrow();
    Some(Arc::clone(&identity))
}

/// A client that begins with TLS has to name the protocol, so that one that was made to talk to
/// a server of another kind finds out.
async fn encrypt(
    socket: TcpStream,
    read_ahead: Bytes,
    identity: Arc<TlsIdentity>,
    direct: bool,
) -> io::Result<Wire> {
    let acceptor = TlsAcceptor::from(Arc::clone(&identity.config));
    let stream = acceptor.accept(Prefixed::new(read_ahead, socket)).await?;
    if direct && stream.get_ref().1.alpn_protocol() != Some(ALPN) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(Wire::encrypted(stream, identity))
}

async fn read_startup(shared: &Shared, mut wire: Wire) -> io::Result<Opening> {
    Ok(match wire.packet(shared.limits.startup_packet).await? {
        Some(packet) => opening(shared, wire, Packet::parse(packet)),
        None => refuse_length(wire),
    })
}

fn refuse_length(wire: Wire) -> Opening {
    let message = "invalid length of startup packet";
    Opening::Refused(wire, Fatal::protocol(message))
}

fn opening(shared: &Shared, wire: Wire, packet: Result<Packet, startup::Error>) -> Opening {
    let fatal = match packet {
        // libpq cancels without encryption, whatever its connection has.
        Ok(Packet::Cancel(cancel)) => return Opening::Cancel(cancel),
        Ok(Packet::Startup(startup)) if wire.is_encrypted() || shared.plaintext_allowed => {
            return Opening::Session(wire, startup);
        }
        Ok(Packet::Startup(_)) => {
            Fatal::new("28000", "connections without TLS are not allowed here")
                .hint("Connect with sslmode=require or verify-full.")
        }
        Ok(Packet::Tls | Packet::Gss) => Fatal::protocol("encryption is asked for a second time"),
        Err(error) => {
            let code = match error {
                startup::Error::Version { .. } => "0A000",
                startup::Error::NoUser => "28000",
                startup::Error::Malformed { .. } | startup::Error::NotUtf8 { .. } => "08P01",
            };
            Fatal::new(code, error.to_string())
        }
    };
    Opening::Refused(wire, fatal)
}

/// Where a user name leads.
#[derive(Debug)]
pub(crate) enum Route {
    /// The pool's role: the password is checked here.
    Pool(Arc<Branch>),
    /// Another role: the password is checked by the branch.
    Other(Arc<Branch>, String),
    /// Nowhere, which only shows when the proof is refused. Whether it could have been a pool's
    /// role: what is offered depends on it.
    Unknown { like_pool: bool },
}

pub(crate) fn route(directory: &Directory, user: &str) -> Route {
    let Some((role, endpoint)) = split_user(user) else {
        return Route::Unknown { like_pool: true };
    };
    let like_pool = directory.is_pool_role(role);
    match directory.get(endpoint) {
        Some(branch) if branch.state() == crate::State::Ended => Route::Unknown { like_pool },
        Some(branch) if branch.facts().role == role => Route::Pool(branch),
        Some(branch) if role != PEER_ROLE => Route::Other(branch, role.to_owned()),
        _ => Route::Unknown { like_pool },
    }
}

/// Has the password proved. What the client is to be told of its success waits in the output.
pub(crate) async fn authenticate(
    shared: &Shared,
    wire: &mut Wire,
    startup: &Startup,
    route: &Route,
) -> Result<(), Stop> {
    let user = &startup.user;
    // Made for a known user, too: the same work for all.
    let mock = Verifier::mock(shared.directory.salt_of_user(user));
    let (verifier, binds) = match route {
        Route::Pool(branch) => (branch.verifier(), true),
        Route::Unknown { like_pool } => (mock, *like_pool),
        Route::Other(..) => (mock, false),
    };
    put_negotiation_if_needed(wire, startup);
    let binding = wire.binding().filter(|_| binds).map(<[u8]>::to_vec);
    let binding = binding.as_deref();
    put_sasl(&mut wire.output, scram::mechanisms(binding));
    wire.flush().await?;

    let message = wire.proof().await?.ok_or_else(not_a_proof)?;
    let (mechanism, first) = scram::initial_response(&message[5..]).ok_or_else(not_a_proof)?;
    let nonce = scram::nonce();
    let refused = |error| refuse(shared, user, &error);
    let challenge = Challenge::new(mechanism, first, verifier, binding, &nonce).map_err(refused)?;
    put_sasl_continue(&mut wire.output, challenge.message());
    wire.flush().await?;

    let message = wire.proof().await?.ok_or_else(not_a_proof)?;
    let proof = challenge.finish(&message[5..]).map_err(refused)?;
    put_sasl_final(&mut wire.output, &proof);
    put_authentication_ok(&mut wire.output);
    Ok(())
}

pub(crate) fn put_negotiation_if_needed(wire: &mut Wire, startup: &Startup) {
    if startup.needs_negotiation() {
        put_negotiation(&mut wire.output, startup);
    }
}

pub(crate) fn not_a_proof() -> Fatal {
    Fatal::protocol("expected SASL response")
}

fn refuse(shared: &Shared, user: &str, error: &scram::Error) -> Fatal {
    shared.metrics.authentication_failures.inc();
    match error {
        scram::Error::Denied => Fatal::denied(user),
        scram::Error::Malformed { .. } | scram::Error::UnknownMechanism => {
            Fatal::protocol(error.to_string())
        }
        scram::Error::BindingNegotiation | scram::Error::BindingMismatch => {
            Fatal::new("28000", error.to_string())
        }
    }
}
