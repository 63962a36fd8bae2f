//! The operator against a real API server, with real agents.

#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]
#![allow(clippy::too_many_lines, reason = "a test tells one story")]

mod collector;
mod crashes;
mod fixture;
mod leases;
mod pools;
mod rotation;
mod terms;
mod trust;
