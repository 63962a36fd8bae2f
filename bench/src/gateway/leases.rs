//! Leases of branches that are reached through the gateway.

use std::{path::PathBuf, time::Duration};

use branchpool_agent_api::{LeasePhase, LeaseRequest, PoolName};
use snafu::{OptionExt, ResultExt, whatever};

use crate::{
    agent::{Agent, POOL},
    error::Result,
    gateway::client::Target,
};

#[derive(Debug)]
pub(crate) struct Leased {
    pub(crate) uid: String,
    pub(crate) target: Target,
    /// Directory of the branch's own socket.
    pub(crate) sockets: PathBuf,
}

impl Leased {
    pub(crate) async fn take(agent: &Agent, uid: &str) -> Result<Self> {
        Self::take_for(agent, uid, None).await
    }

    /// For so many seconds, or the pool's default time.
    pub(crate) async fn take_for(agent: &Agent, uid: &str, seconds: Option<u64>) -> Result<Self> {
        let request = LeaseRequest {
            pool: PoolName::new(PoolName::DEFAULT_NAMESPACE, POOL),
            ttl_seconds: seconds,
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

    /// Waits until its time is over, and gives the address that it had.
    pub(crate) async fn expire(self, agent: &Agent) -> Result<Target> {
        loop {
            let lease = agent.client.get_lease(&self.uid).await;
            let lease = lease.whatever_context("a lease is not known any more")?;
            if lease.phase == LeasePhase::Expired {
                return Ok(self.target);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
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
