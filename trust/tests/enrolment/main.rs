//! Enrolment over real sockets with real certificates.

#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod agent;
mod authority;
mod handshakes;
mod refusals;
#[path = "../support/mod.rs"]
mod support;
