//! The HTTP server against a service held in memory: what it refuses, how it stops, what a watch
//! shows. The engine has tests of its own.

#![allow(clippy::unwrap_used)]

mod addresses;
mod client;
mod message;
mod operator;
mod raw;
mod service;
mod strictness;
#[path = "../../../trust/tests/support/mod.rs"]
mod trust;
mod watch;
