//! What the HTTP server asks of the engine.

use std::future::Future;

use branchpool_agent_api::{
    DesiredPool, Lease, LeaseRequest, NodeStatus, PoolStatus, Problem, RenewRequest, ResetRequest,
};

use super::Subscription;
use crate::sql::{Entered, Sql, SqlTarget};

/// The engine, as the HTTP server sees it. Requests arrive with their fields checked against
/// [`branchpool_agent_api::check`].
///
/// A returned future may be dropped at any await, because the client went away or its time was up:
/// what was begun must then be finished or undone by the engine itself.
pub trait Service: Clone + Send + Sync + 'static {
    /// The lease, and whether this call made it.
    fn lease(
        &self,
        uid: String,
        request: LeaseRequest,
    ) -> impl Future<Output = Result<(Lease, bool), Problem>> + Send;

    fn renew(
        &self,
        uid: String,
        request: RenewRequest,
    ) -> impl Future<Output = Result<Lease, Problem>> + Send;

    fn reset(
        &self,
        uid: String,
        request: ResetRequest,
    ) -> impl Future<Output = Result<Lease, Problem>> + Send;

    /// Releasing a finished lease again answers as the first time.
    fn release(
        &self,
        uid: String,
        epoch: Option<u64>,
    ) -> impl Future<Output = Result<Lease, Problem>> + Send;

    /// Drops the record of a finished lease.
    fn forget(
        &self,
        uid: String,
        epoch: Option<u64>,
    ) -> impl Future<Output = Result<(), Problem>> + Send;

    fn get_lease(&self, uid: &str) -> Option<Lease>;

    fn leases(&self) -> Vec<Lease>;

    fn pools(&self) -> Vec<PoolStatus>;

    fn node(&self) -> NodeStatus;

    /// Runs what is sent to leases.
    fn sql(&self) -> &Sql;

    /// Where the queries of a lease go; refused unless it is bound.
    fn sql_target(&self, uid: &str) -> Result<SqlTarget, Problem>;

    /// As [`Service::sql_target`], when the query's turn has come: the query is a client of the branch
    /// from then on, and wakes its server.
    fn sql_enter(&self, uid: &str) -> impl Future<Output = Result<Entered, Problem>> + Send;

    /// The lease that a user and a password of the gateway are for. A wrong password, an unknown user
    /// and an ended lease take the same time.
    fn sql_login(&self, user: &str, password: &str) -> Option<String>;

    fn apply_pool(
        &self,
        uid: String,
        desired: DesiredPool,
    ) -> impl Future<Output = Result<PoolStatus, Problem>> + Send;

    fn remove_pool(
        &self,
        uid: String,
        epoch: Option<u64>,
    ) -> impl Future<Output = Result<(), Problem>> + Send;

    /// [`super::WatchLog::subscribe`] of the engine's log; `since` is instance and revision.
    fn subscribe(&self, since: Option<(String, u64)>) -> Result<Subscription, Problem>;

    /// All metrics in the `OpenMetrics` text format.
    fn metrics(&self) -> String;

    /// `Err` with one sentence that says why leases cannot be had now.
    fn readiness(&self) -> Result<(), String>;
}
