//! What went wrong between this program and the API server.

use std::time::Duration;

use kube::core::Status;
use snafu::Snafu;

use crate::duration;

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(super)))]
pub(crate) enum ClusterError {
    #[snafu(display(
        "no cluster is configured: {message}. Point KUBECONFIG or --kubeconfig to a file, or talk to a standalone \
         agent with --server unix:/run/branchpool/agent.sock"
    ))]
    Config { message: String },

    #[snafu(display("cannot {action}: {message}"))]
    Api { action: String, message: String },

    #[snafu(display(
        "cannot {action}: the API server does not answer ({message}); see: kubectl cluster-info"
    ))]
    Unreachable { action: String, message: String },

    #[snafu(display(
        "cannot {action}: the cluster does not know the objects of Branchpool as {version}; install or upgrade its \
         chart, see docs/install.md"
    ))]
    NoDefinitions {
        action: String,
        version: &'static str,
    },

    #[snafu(display(
        "there is no lease {name} in namespace {namespace}; list them with: kubectl branch ls -A"
    ))]
    NoLease { namespace: String, name: String },

    #[snafu(display("there is no pool {name} in namespace {namespace}; {known}"))]
    NoPool {
        namespace: String,
        name: String,
        known: String,
    },

    #[snafu(display("lease {name} was deleted while it was waited for"))]
    Gone { name: String },

    #[snafu(display("lease {name} is {phase} already ({why}); a lease ends once, take another"))]
    Finished {
        name: String,
        phase: String,
        why: String,
    },

    #[snafu(display(
        "lease {name} has no branch yet ({why}); wait for it with: kubectl wait --for=condition=Ready branchlease/{name}"
    ))]
    NotBound { name: String, why: String },

    #[snafu(display("no branch of pool {pool} within {}: {why}; wait longer with --wait", duration::show(*waited)))]
    NotReady {
        pool: String,
        waited: Duration,
        why: String,
    },

    #[snafu(display(
        "the operator has not answered within {}; is it running? See: kubectl get pods -A -l app.kubernetes.io/name=branchpool",
        duration::show(*waited)
    ))]
    NoAnswer { waited: Duration },

    #[snafu(display(
        "lease {name} was made with connectionSecret: None, so its credentials are with who made it"
    ))]
    NoSecret { name: String },

    #[snafu(display("Secret {name} has no usable entry {key}; was it made by Branchpool?"))]
    SecretEntry { name: String, key: &'static str },

    #[snafu(display("cannot write the certificate of the CA to a temporary file: {source}"))]
    CaFile { source: std::io::Error },

    #[snafu(display(
        "no node can hold branches; see the conditions above, and: kubectl describe branchnodes"
    ))]
    NoNodeReady,
}

impl ClusterError {
    /// Whether the same call may succeed a moment later.
    pub(super) fn may_pass(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }
}

/// An error of a call in words: what kube prints repeats itself and holds the whole answer.
pub(super) fn failed(action: impl Into<String>) -> impl FnOnce(kube::Error) -> ClusterError {
    let action = action.into();
    move |error| match error {
        kube::Error::Api(status) if is_unknown_kind(&status) => NoDefinitionsSnafu {
            action,
            version: branchpool_crds::VERSION,
        }
        .build(),
        kube::Error::Api(status) => ApiSnafu {
            action,
            message: status.message,
        }
        .build(),
        error @ (kube::Error::Service(_)
        | kube::Error::HyperError(_)
        | kube::Error::ReadEvents(_)) => UnreachableSnafu {
            action,
            message: innermost(&error),
        }
        .build(),
        other => ApiSnafu {
            action,
            message: other.to_string(),
        }
        .build(),
    }
}

pub(super) fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404 && !is_unknown_kind(status))
}

pub(super) fn is_forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 403)
}

/// The answer to a path that the server does not serve names no object.
fn is_unknown_kind(status: &Status) -> bool {
    let names_object = status
        .details
        .as_ref()
        .is_some_and(|details| !details.name.is_empty());
    status.code == 404 && !names_object
}

/// Such as "Connection refused", without the wrappers around it.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
