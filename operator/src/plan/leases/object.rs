//! A `BranchLease` as plain values.

use branchpool_agent_api::PoolName;
use branchpool_crds::{BranchLease, BranchLeaseStatus, ConnectionSecret, Priority};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};

use super::ObjectRef;
use crate::plan::{Millis, queue::Rank};

#[derive(Clone, Debug, PartialEq)]
pub struct LeaseObject {
    pub id: ObjectRef,
    pub generation: i64,
    /// `resourceVersion`.
    pub version: u64,
    pub created: Millis,
    /// Somebody else's finalizer may still hold it.
    pub deleting: bool,
    pub pool: PoolName,
    pub ttl: Option<Millis>,
    pub priority: Priority,
    pub holder: Option<String>,
    pub renew_time: Option<Millis>,
    pub reset_token: Option<String>,
    /// To be a branch of another lease's branch.
    pub from_lease: bool,
    /// It gets a Secret.
    pub wants_secret: bool,
    pub status: BranchLeaseStatus,
}

pub(super) fn millis(time: &Time) -> Millis {
    Millis::try_from(time.0.as_millisecond()).unwrap_or(0)
}

impl ObjectRef {
    /// `None`: it lacks what API servers give to each object.
    pub fn read(metadata: &ObjectMeta) -> Option<Self> {
        Some(Self {
            namespace: metadata.namespace.clone()?,
            name: metadata.name.clone()?,
            uid: metadata.uid.as_deref()?.into(),
        })
    }
}

/// Its `resourceVersion`, which API servers count up.
pub fn version(metadata: &ObjectMeta) -> u64 {
    let version = metadata.resource_version.as_deref();
    version
        .and_then(|version| version.parse().ok())
        .unwrap_or(0)
}

impl LeaseObject {
    /// `None`: it lacks what API servers give to each object.
    pub fn read(lease: BranchLease) -> Option<Self> {
        let (metadata, spec) = (lease.metadata, lease.spec);
        let id = ObjectRef::read(&metadata)?;
        Some(Self {
            pool: PoolName::new(id.namespace.clone(), spec.pool_ref.name),
            id,
            generation: metadata.generation.unwrap_or(0),
            version: version(&metadata),
            created: metadata.creation_timestamp.as_ref().map_or(0, millis),
            deleting: metadata.deletion_timestamp.is_some(),
            ttl: spec.ttl.map(|ttl| ttl.as_millis()),
            priority: spec.priority,
            holder: spec.holder,
            renew_time: spec.renew_time.as_ref().map(millis),
            reset_token: spec.reset_token,
            from_lease: spec.from.is_some(),
            wants_secret: spec.connection_secret == ConnectionSecret::Create,
            status: lease.status.unwrap_or_default(),
        })
    }

    pub(super) fn rank(&self) -> Rank {
        Rank {
            priority: self.priority,
            created: self.created,
            uid: self.id.uid.clone(),
        }
    }
}
