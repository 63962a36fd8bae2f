//! The node agent: golden images, pools of prestarted Postgres branches, leases.

mod blocking;
pub mod cli;
pub mod credentials;
pub mod engine;
pub mod gateway;
pub mod golden;
pub mod http;
pub mod journal;
pub mod plan;
pub mod postgres;
pub mod preflight;
pub mod sql;
pub mod standalone;
pub mod storage;
