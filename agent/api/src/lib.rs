//! Wire types of the node agent's HTTP API (`/v1`), and its client. Nothing else lives here.
//!
//! Every request type refuses unknown fields. Times on the wire are milliseconds since the Unix
//! epoch (`…At`), spans are whole seconds (`…Seconds`) or milliseconds (`…Ms`).

pub mod check;
pub mod client;
pub mod lease;
pub mod node;
pub mod pool;
pub mod problem;
pub mod sql;
pub mod watch;

pub use client::{Client, ClientError, Target};
pub use lease::{Lease, LeaseList, LeasePhase, LeaseRequest, PoolName, RenewRequest, ResetRequest};
pub use node::{
    Condition, Gate, Isolation, LeaseProbe, NodeStatus, PoolProbe, Quarantined, QueueProbe, Space,
    TrustStatus,
};
pub use pool::{DesiredPool, GoldenPhase, GoldenStatus, PoolList, PoolStatus};
pub use problem::{FieldError, Problem};
pub use sql::{SqlColumn, SqlError, SqlRequest, SqlResult};
pub use watch::{Change, WatchEvent};
