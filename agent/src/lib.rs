//! The node agent: golden images, pools of prestarted Postgres branches, leases.

pub mod http;
