//! A lease as the agent knows it.

use std::fmt::Write as _;

use branchpool_agent_api::{Lease, LeasePhase, PoolName};

use super::{LeaseRecord, Millis, Now, PoolUid};
use crate::storage::ids::{BranchId, EndpointId};

/// How holders reach the branches of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Each by its Unix socket, on the node alone.
    Socket,
    Gateway {
        host: String,
        port: u16,
        /// What libpq has to know besides, such as `sslmode`.
        parameters: Vec<(&'static str, String)>,
    },
}

/// One lease. Wall-clock fields are milliseconds since the Unix epoch, for people and the journal;
/// `deadline` is what expiry goes by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseState {
    pub pool: PoolUid,
    pub pool_name: PoolName,
    pub branch: BranchId,
    pub endpoint: EndpointId,
    pub generation: u64,
    pub database: String,
    pub role: String,
    pub holder: Option<String>,
    pub bound_at: u64,
    pub expires_at: u64,
    pub deadline: Millis,
    /// Monotonic time that no renewal goes beyond.
    pub end_of_life: Millis,
    pub phase: LeasePhase,
    pub reason: Option<String>,
    pub message: Option<String>,
    pub reset_token: Option<String>,
    pub restarts: u32,
    /// A leader took it: it is forgotten only when a leader says so, for something else may hang on it.
    pub led: bool,
    /// When a finished lease is forgotten.
    pub forget_at: Option<Millis>,
}

impl LeaseState {
    pub fn is_bound(&self) -> bool {
        self.phase == LeasePhase::Bound
    }

    /// As the journal has it: monotonic times become wall-clock ones.
    pub fn record(&self, now: Now) -> LeaseRecord {
        let wall = |mono: Millis| now.wall.saturating_add(mono.saturating_sub(now.mono));
        LeaseRecord {
            pool: self.pool.clone(),
            pool_name: self.pool_name.clone(),
            branch: self.branch,
            endpoint: self.endpoint,
            generation: self.generation,
            database: self.database.clone(),
            role: self.role.clone(),
            holder: self.holder.clone(),
            bound_at: self.bound_at,
            expires_at: self.expires_at,
            end_of_life_at: wall(self.end_of_life),
            phase: self.phase,
            reason: self.reason.clone(),
            message: self.message.clone(),
            reset_token: self.reset_token.clone(),
            restarts: self.restarts,
            led: self.led,
            forget_at: self.forget_at.map(wall),
        }
    }

    /// From the journal: what is left of each span counts on from now.
    pub fn restore(record: LeaseRecord, now: Now) -> Self {
        let mono = |wall: u64| now.mono.saturating_add(wall.saturating_sub(now.wall));
        Self {
            deadline: mono(record.expires_at),
            end_of_life: mono(record.end_of_life_at),
            forget_at: record.forget_at.map(mono),
            pool: record.pool,
            pool_name: record.pool_name,
            branch: record.branch,
            endpoint: record.endpoint,
            generation: record.generation,
            database: record.database,
            role: record.role,
            holder: record.holder,
            bound_at: record.bound_at,
            expires_at: record.expires_at,
            phase: record.phase,
            reason: record.reason,
            message: record.message,
            reset_token: record.reset_token,
            restarts: record.restarts,
            led: record.led,
        }
    }

    /// As the API shows it, without the password; `socket` is the directory that the endpoint's socket
    /// is reached through.
    pub fn view(&self, uid: &str, socket: &str, reach: &Reach) -> Lease {
        let address = self.address(socket, reach);
        Lease {
            uid: uid.to_owned(),
            pool: self.pool_name.clone(),
            pool_uid: self.pool.to_string(),
            phase: self.phase,
            reason: self.reason.clone(),
            message: self.message.clone(),
            branch: self.branch.to_string(),
            endpoint: self.endpoint.to_string(),
            generation: self.generation,
            uri: address.uri,
            host: address.host,
            port: address.port,
            database: self.database.clone(),
            user: address.user,
            password: None,
            ca: None,
            socket: socket.to_owned(),
            holder: self.holder.clone(),
            bound_at: self.bound_at,
            expires_at: self.expires_at,
            observed_reset_token: self.reset_token.clone(),
            restarts: self.restarts,
            connections: None,
            last_used_at: None,
        }
    }

    fn address(&self, socket: &str, reach: &Reach) -> Address {
        let (role, database) = (&self.role, escape(&self.database));
        match reach {
            Reach::Socket => Address {
                uri: format!(
                    "postgresql://{}@/{database}?host={}",
                    escape(role),
                    escape(socket)
                ),
                host: socket.to_owned(),
                port: 5432,
                user: role.clone(),
            },
            Reach::Gateway {
                host,
                port,
                parameters,
            } => {
                let user = format!("{role}.{}", self.endpoint);
                let at = if host.contains(':') {
                    format!("[{host}]")
                } else {
                    host.clone()
                };
                let query: Vec<String> = parameters
                    .iter()
                    .map(|(name, value)| format!("{name}={}", escape(value)))
                    .collect();
                Address {
                    uri: format!(
                        "postgresql://{}@{at}:{port}/{database}?{}",
                        escape(&user),
                        query.join("&")
                    ),
                    host: host.clone(),
                    port: *port,
                    user,
                }
            }
        }
    }
}

struct Address {
    host: String,
    port: u16,
    user: String,
    uri: String,
}

/// Percent-encodes all but unreserved characters and `/`, as libpq decodes it.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                escaped.push(char::from(byte));
            }
            _ => {
                // Writing into a string does not fail.
                let _ = write!(escaped, "%{byte:02X}");
            }
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_escaped_in_the_address() {
        assert_eq!(super::escape("a b/c@é"), "a%20b/c%40%C3%A9");
    }
}
