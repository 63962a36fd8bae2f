//! Checks made before anything else, so that what a node lacks is said in one sentence.

pub mod filesystem;
pub(crate) mod mountinfo;
pub mod postgres;
