//! Wire types of the node agent's HTTP API (`/v1`), and its client. Nothing else lives here.
//!
//! Every request type refuses unknown fields. Times on the wire are milliseconds since the Unix
//! epoch (`…At`), spans are whole seconds (`…Seconds`) or milliseconds (`…Ms`).

pub mod lease;
pub mod node;
pub mod pool;
pub mod problem;
pub mod watch;

pub use lease::{Lease, LeasePhase, LeaseRequest, PoolName, RenewRequest, ResetRequest};
pub use node::{Condition, Gate, Isolation, NodeStatus, PoolProbe, Quarantined, QueueProbe, Space};
pub use pool::{GoldenPhase, GoldenStatus, PoolStatus};
pub use problem::{FieldError, Problem};
pub use watch::{Change, WatchEvent};
