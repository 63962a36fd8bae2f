//! The chart through the real Helm.

#![allow(clippy::unwrap_used)]

mod golden;
mod grants;
mod helm;
mod pods;
mod refusals;
