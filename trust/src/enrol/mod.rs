//! How an agent gets its certificate: `POST /v1/enrol` with the token of its Pod.

mod call;
pub mod client;
pub mod server;

use serde::{Deserialize, Serialize};

pub use call::{Address, CallError};
pub use client::{Enrolment, Options, Status};
pub use server::{PodToken, Refusal, Reviewed, Reviewer, router};

pub const PATH: &str = "/v1/enrol";

/// Body of the request; the token is its bearer token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EnrolRequest {
    /// PKCS #10 in PEM. Only its key is taken.
    pub csr: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnrolAnswer {
    /// In PEM, for `<node>.agent.branchpool`.
    pub certificate: String,
    /// The node that the token's Pod is on.
    pub node: String,
}
