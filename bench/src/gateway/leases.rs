//! Leases of branches that are reached through the gateway.

use std::path::PathBuf;

use branchpool_agent_api::{LeasePhase, LeaseRequest, PoolName};
use snafu::{OptionExt, ResultExt, whatever};

use crate::{
    agent::{Agent, POOL},
    error::Result,
    gateway::client::Target,
};

#[derive(Debug)]
pub(crate) struct Leased {
    uid: String,
    pub(crate) target: Target,
    /// Directory of the branch's own socket.
    pub(crate) sockets: PathBuf,
}

impl Leased {
    pub(crate) async fn take(agent: &Agent, uid: &str) -> Result<Self> {
        let request = LeaseRequest {
            pool: PoolName::new(PoolName::DEFAULT_NAMESPACE, POOL),
            ttl_seconds: None,
            holder: None,
            epoch: None,
        };
        let lease = agent.client.lease(uid, &request).await;
        let (lease, _new) = lease.whatever_context("a lease was refused")?;
        if lease.phase != LeasePhase::Bound {
            whatever!("lease {uid} is {:?}", lease.phase);
        }
        Ok(Self {
            uid: lease.uid,
            target: Target {
                port: lease.port,
                user: lease.user,
                password: lease.password.whatever_context("a lease has no password")?,
                database: lease.database,
            },
            sockets: PathBuf::from(lease.socket),
        })
    }

    pub(crate) async fn release(self, agent: &Agent) -> Result<()> {
        let lease = agent.client.release(&self.uid, None).await;
        let lease = lease.whatever_context("a lease was not released")?;
        if lease.phase != LeasePhase::Released {
            whatever!("lease {} was released and is {:?}", self.uid, lease.phase);
        }
        let forgotten = agent.client.forget(&self.uid, None).await;
        forgotten.whatever_context("a lease was not forgotten")
    }
}
