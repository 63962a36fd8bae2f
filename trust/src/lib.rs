//! Trust between the operator and its agents: a CA that the operator keeps, certificates of short life for
//! both sides, and the replacement of all of them while connections go on.
//!
//! The operator has an [`Authority`]. An agent proves who it is with the token of its Pod, and gets a
//! certificate for the name of its node ([`enrol`]). From then on each side shows a certificate and checks
//! the other's name: the agent serves `<node>.agent.branchpool`, the operator comes as
//! `operator.branchpool`. When anything is replaced is decided in [`plan`].

pub mod authority;
mod bundle;
mod config;
mod csr;
pub mod enrol;
mod fingerprint;
mod identity;
pub mod listener;
mod names;
pub mod operator;
pub mod plan;
pub mod serve;
mod stall;

pub use authority::Authority;
pub use bundle::{Bundle, BundleError};
pub use csr::CsrError;
pub use fingerprint::Fingerprint;
pub use listener::TlsListener;
pub use names::{InvalidNode, OPERATOR_NAME, agent_name};
pub use operator::OperatorIdentity;
