//! A whole node, from its command line to its end.

#![allow(clippy::unwrap_used)]

mod adoption;
mod burst;
mod image;
mod inspect;
mod node;
