//! Real clients, a gateway, and a real Postgres. Needs root, which the servers trust.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod ending;
mod fixture;
mod handover;
mod limits;
mod login;
mod protocol;
mod raw;
mod roles;
mod traffic;
