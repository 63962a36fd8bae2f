//! `GET /v1/watch`: newline-delimited JSON. The first line is a `Snapshot` unless `?since=REVISION`
//! of the same `instance` can be continued; then come changes in order of their revisions.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Lease, NodeStatus, PoolStatus};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchEvent {
    pub revision: u64,
    #[serde(flatten)]
    pub change: Change,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "object")]
pub enum Change {
    /// Everything, as it is at this revision.
    Snapshot {
        node: Box<NodeStatus>,
        pools: Vec<PoolStatus>,
        leases: Vec<Lease>,
    },
    Node(Box<NodeStatus>),
    Pool(Box<PoolStatus>),
    PoolGone {
        uid: String,
    },
    Lease(Arc<Lease>),
    LeaseGone {
        uid: String,
    },
    /// Nothing changed; the connection is alive and this revision was reached.
    Bookmark,
}
