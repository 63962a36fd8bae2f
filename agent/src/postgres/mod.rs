//! One Postgres server: its installation, configuration, start, sessions and stop.

pub mod config;
pub mod control;
pub mod installation;
pub mod parameters;
pub mod pidfile;
pub mod readiness;
pub mod session;
pub mod sandbox;
pub mod server;

/// An error with all its causes on one line, for those whose own text leaves causes out.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}
