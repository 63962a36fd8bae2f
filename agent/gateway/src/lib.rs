//! The node's Postgres endpoint.
//!
//! One port speaks the Postgres protocol with TLS and SCRAM. The user name `<role>.<endpoint>`
//! selects a branch by its endpoint id. The first faithful client of a branch takes over the
//! session that was opened ahead of it ([`takeover`] has the rule), everybody else gets a fresh
//! backend with the client's own start-up packet. Afterwards bytes are moved.
//!
//! The engine that owns the branches feeds this crate and is not known to it:
//!
//! - A lease: [`Branch::new`], [`Branch::offer_session`], [`Directory::insert`], and only then the
//!   answer to whoever asked for the lease.
//! - A reset: [`Directory::insert`] of the new branch under the same endpoint, [`Branch::end`] of
//!   the old one.
//! - A release: [`Directory::remove`], [`Branch::end`], and [`Branch::closed`] before the data
//!   directory is deleted.
//! - A restart or a suspension: [`Branch::set_state`]; [`Branch::wake_requested`] tells that a
//!   suspended branch is wanted.
//!
//! SQL over HTTP, which does not pass through here, is a client as well: [`Branch::admit`] before it
//! opens a session.
//!
//! # What is written by hand, and why
//!
//! Messages from and to a branch's server are read and written by `postgres-protocol`. The side of
//! a *server* is in `pgwire` only, which does not fit: its start-up packet is a sorted map of lossy
//! strings (order, repetitions and bytes are lost that the take-over rule depends on, and a packet
//! without its end is accepted), a SASL response with a wrong length makes it panic, and its SCRAM
//! compares in variable time and has no mock exchange. So the start-up packet, the eight short
//! messages of a login, and SCRAM's state machine are here, over `hmac`, `sha2`, `pbkdf2`,
//! `stringprep` and `subtle`.

mod attach;
mod branch;
mod cancel;
mod connection;
mod directory;
mod framing;
mod lanes;
mod limits;
mod login;
mod messages;
mod metrics;
mod relay;
pub mod scram;
mod server;
mod session;
pub mod startup;
mod stream;
pub mod takeover;
mod tls;

pub use branch::{
    Activity, Branch, Facts, Guest, Link, MAX_SOCKET_PATH, SOCKET_NAME, State, Unavailable, connect,
};
pub use directory::{Directory, ENDPOINT_LENGTH};
pub use limits::Limits;
pub use metrics::Metrics;
pub use scram::Verifier;
pub use server::{Error, Options, Server};
pub use session::{CancelKey, Session};
pub use tls::{ALPN, TlsIdentity};
