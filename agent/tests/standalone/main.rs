//! A whole node, from its command line to its end.

#![allow(clippy::unwrap_used)]

mod adoption;
mod burst;
mod chaos;
mod container;
mod image;
mod inspect;
mod node;
mod reboot;
mod stop;
