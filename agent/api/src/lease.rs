//! Leases: one branch held by one holder for a bounded time.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::check;

/// A pool as people name it. Written `namespace/name`; standalone pools without a namespace are in
/// `default`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolName {
    pub namespace: String,
    pub name: String,
}

impl PoolName {
    /// The namespace of pools that are named without one.
    pub const DEFAULT_NAMESPACE: &str = "default";

    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for PoolName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.namespace, self.name)
    }
}

impl FromStr for PoolName {
    type Err = String;

    /// `namespace/name`, or `name` in the default namespace; each part a DNS label.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (namespace, name) = text
            .split_once('/')
            .unwrap_or((Self::DEFAULT_NAMESPACE, text));
        for (part, what) in [(namespace, "namespace"), (name, "pool name")] {
            check::dns_label(part).map_err(|why| format!("{what} {part:?}: {why}"))?;
        }
        Ok(Self::new(namespace, name))
    }
}

/// Body of `PUT /v1/leases/{uid}`. The same `uid` gets the same answer, however often it is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LeaseRequest {
    pub pool: PoolName,
    /// Seconds from the hand-over; absent: the pool's `lease.defaultTTL`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// Free text that says who holds the lease, at most 256 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// The leader's epoch; a lower one than the agent has seen is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
}

/// Body of `POST /v1/leases/{uid}/renew`: the term starts anew now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RenewRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
}

/// Body of `POST /v1/leases/{uid}/reset`: a fresh branch behind the same address. A token that was
/// already answered changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResetRequest {
    /// 1 to 253 characters, chosen by the caller.
    pub token: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeasePhase {
    /// The branch is the holder's.
    Bound,
    /// Given back by its holder.
    Released,
    /// Its time ran out.
    Expired,
    /// The branch is gone through no wish of the holder; `reason` says why.
    Lost,
}

/// A lease as every answer shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    pub uid: String,
    pub pool: PoolName,
    pub pool_uid: String,
    pub phase: LeasePhase,
    /// CamelCase word, present when the phase is not plainly `Bound`: `Restarting`, `NodeRebooted`, …
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// One sentence for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Id of the branch behind the lease now; a reset changes it.
    pub branch: String,
    /// The part of the address that stays the same for the lease's whole life.
    pub endpoint: String,
    /// Golden image generation that the branch was made from.
    pub generation: u64,
    /// Of the node's gateway; on a node without one the directory of the Unix socket, as `host` for
    /// libpq.
    pub host: String,
    pub port: u16,
    pub database: String,
    /// `<role>.<endpoint>` for the gateway, the role alone for a Unix socket.
    pub user: String,
    /// Only in answers about this one lease while it is bound, and only for the gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// Certificates in PEM that clients of the gateway are to trust; absent: those of their system.
    /// Only in answers that tell the password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<String>,
    /// `postgresql://…` with everything that a driver needs, the password where that is told.
    pub uri: String,
    /// Directory of the branch's Unix socket, for those on the node whom the server lets in there.
    pub socket: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    pub bound_at: u64,
    pub expires_at: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_reset_token: Option<String>,
    /// How often the server behind the lease was restarted on the same data.
    pub restarts: u32,
    /// Clients that are connected, those of SQL over HTTP included. Only for bound leases of a node
    /// with a gateway, and not in the watch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u32>,
    /// When a client last logged in or sent anything, wherever `connections` is told. Absent: not
    /// since the agent's start or the lease's last reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used_at: Option<u64>,
}

impl Lease {
    /// With the password, which is of letters and digits, in its field and in the URI.
    #[must_use]
    pub fn with_password(mut self, password: String) -> Self {
        if let Some((user, rest)) = self.uri.split_once('@') {
            self.uri = format!("{user}:{password}@{rest}");
        }
        self.password = Some(password);
        self
    }
}

/// Answer of `GET /v1/leases`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseList {
    pub leases: Vec<Lease>,
}
