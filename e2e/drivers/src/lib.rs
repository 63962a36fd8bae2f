//! The driver matrix: the drivers that people use, each with a program of one common suite of
//! checks, run against any Postgres server, and a comparison of what two runs have got.
//!
//! A program reads a [`Config`] as JSON from its standard input and prints one JSON object: the name
//! of each check with its result, free of times, processes and addresses. The first connection that
//! it opens is the one on which it does the checks from `connect` to `discard_all`, so on a branch
//! that nobody has used these meet the session that was opened beforehand.

pub mod compare;
mod config;
mod driver;
pub mod proxy;
pub mod toolbox;

pub use config::{Config, Password};
pub use driver::Driver;
pub use toolbox::{Results, Toolbox};
