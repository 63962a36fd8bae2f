//! A whole node, from its command line to its end.

#![allow(clippy::unwrap_used)]

mod burst;
mod inmate;
mod isolation;
mod node;
mod starvation;
mod takeover;
