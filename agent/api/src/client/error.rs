//! What can go wrong between a client and the agent.

use std::io;

use hyper::StatusCode;
use snafu::Snafu;

use super::Target;
use crate::Problem;

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(super)))]
pub enum ClientError {
    /// The agent answered, and refused.
    #[snafu(display("{problem}"))]
    Refused {
        #[snafu(source(from(Problem, Box::new)))]
        problem: Box<Problem>,
    },

    #[snafu(display(
        "no agent answers at {target} ({source}); start one with `branchpool-agent standalone`, or name the address of another"
    ))]
    Connect { target: Target, source: io::Error },

    #[snafu(display(
        "may not open {target} ({source}); it is its owner's only: run this as that user, usually root"
    ))]
    Forbidden { target: Target, source: io::Error },

    #[snafu(display(
        "the certificates do not fit between this client and {target} ({source}); one of them may be about to be renewed"
    ))]
    Handshake { target: Target, source: io::Error },

    #[snafu(display(
        "the agent at {target} did not answer within {seconds} s; see its log for what holds it up"
    ))]
    Timeout { target: Target, seconds: u64 },

    #[snafu(display(
        "the connection to the agent at {target} broke ({}); it may be restarting, try again",
        innermost(source)
    ))]
    Broken {
        target: Target,
        source: hyper::Error,
    },

    #[snafu(display(
        "the answer of {target} is longer than {limit} bytes; is a Branchpool agent there?"
    ))]
    TooLong { target: Target, limit: usize },

    #[snafu(display(
        "{target} answered {status} with a body that is not the agent's; is a Branchpool agent there?"
    ))]
    Unexpected { target: Target, status: StatusCode },

    #[snafu(display(
        "the answer of {target} could not be read ({source}); are client and agent of the same version?"
    ))]
    Decode {
        target: Target,
        source: serde_json::Error,
    },

    #[snafu(display("the request could not be written as JSON: {source}"))]
    Encode { source: serde_json::Error },

    #[snafu(display(
        "the bearer token holds characters that no HTTP header carries; check the file it is from"
    ))]
    Token,

    #[snafu(display("the request is not valid HTTP: {source}"))]
    Request { source: hyper::http::Error },
}

impl ClientError {
    /// The agent's refusal, if it is one.
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Refused { problem } => Some(problem),
            _ => None,
        }
    }

    /// The refusal's reason equals `reason`.
    pub fn is(&self, reason: &str) -> bool {
        self.problem().is_some_and(|found| found.reason == reason)
    }

    /// The agent was not reached or went away: the same call may work in a moment.
    pub fn is_transport(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. }
                | Self::Handshake { .. }
                | Self::Timeout { .. }
                | Self::Broken { .. }
        )
    }
}

/// What hyper's errors are about, such as an alert of TLS, is in their source alone.
fn innermost(error: &hyper::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
