//! The agent's HTTP API: strict input, problem details for every refusal, a watch stream.
//!
//! ```text
//! GET    /healthz  /readyz  /metrics
//! GET    /v1/node                        NodeStatus
//! GET    /v1/pools                       PoolList
//! GET    /v1/pools/{namespace}/{name}    PoolStatus
//! PUT    /v1/pools/{uid}                 DesiredPool → PoolStatus
//! DELETE /v1/pools/{uid}[?epoch=N]       204
//! GET    /v1/leases                      LeaseList
//! GET    /v1/leases/{uid}                Lease
//! PUT    /v1/leases/{uid}                LeaseRequest → Lease, 201 when made, 200 when known
//! DELETE /v1/leases/{uid}[?epoch=N]      Lease; releases
//! POST   /v1/leases/{uid}/renew          RenewRequest (may be absent) → Lease
//! POST   /v1/leases/{uid}/reset          ResetRequest → Lease
//! POST   /v1/leases/{uid}/forget[?epoch=N]  204
//! POST   /v1/leases/{uid}/sql            SqlRequest → SqlResult
//! POST   /sql                            as Neon's driver speaks it
//! GET    /v1/watch[?instance=ID&since=REVISION]  WatchEvent, one a line
//! ```

mod answer;
mod guard;
mod input;
mod listen;
mod routes;
mod server;
pub mod service;
mod sql;
pub mod watchlog;

pub use listen::{ListenError, Options, Tcp};
pub use server::Server;
pub use service::Service;
pub use watchlog::{Subscription, WatchLog};
