//! One Postgres server: its installation, configuration, start, sessions and stop.

pub mod config;
pub mod control;
pub mod installation;
pub mod parameters;
pub mod pidfile;
pub mod readiness;
pub mod session;
