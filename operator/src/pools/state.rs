//! Pools and nodes as the controller keeps them.

use std::collections::BTreeMap;

use branchpool_agent_api::PoolName;
use branchpool_crds::{BranchPool, BranchPoolSpec, BranchPoolStatus};
use k8s_openapi::api::core::v1::Node;

use crate::plan::{
    Millis, NodeName, SECOND, Uid,
    leases::{ObjectRef, PoolTerms, WriteError},
    placement::Demand,
};

/// The least time between two writes of a pool's status.
pub(super) const WRITE_EVERY: Millis = SECOND;

#[derive(Debug)]
pub(crate) struct PoolFacts {
    pub(super) id: ObjectRef,
    pub(super) generation: i64,
    pub(super) spec: BranchPoolSpec,
    pub(super) deleting: bool,
    /// As last written or read.
    pub(super) status: BranchPoolStatus,
    pub(super) writing: bool,
    pub(super) write_not_before: Millis,
}

impl PoolFacts {
    pub(super) fn read(pool: BranchPool) -> Option<Self> {
        let metadata = pool.metadata;
        Some(Self {
            id: ObjectRef::read(&metadata)?,
            generation: metadata.generation.unwrap_or(0),
            spec: pool.spec,
            deleting: metadata.deletion_timestamp.is_some(),
            status: pool.status.unwrap_or_default(),
            writing: false,
            write_not_before: 0,
        })
    }

    /// The spec as it is now. The status is ours, and what the watch shows of it may be older.
    pub(super) fn update(&mut self, new: Self) {
        self.generation = new.generation;
        self.spec = new.spec;
        self.deleting = new.deleting;
    }

    pub(super) fn written(&mut self, status: BranchPoolStatus, result: &Result<(), WriteError>) {
        self.writing = false;
        if result.is_ok() {
            self.status = status;
        }
    }

    pub(super) fn name(&self) -> PoolName {
        PoolName::new(self.id.namespace.clone(), self.id.name.clone())
    }

    pub(super) fn demand(&self) -> Demand {
        Demand {
            replicas: self.spec.replicas,
            max_branches: self.spec.max_branches,
            placement: self.spec.placement,
        }
    }
}

pub(super) fn terms(pool: &PoolFacts) -> PoolTerms {
    let lease = &pool.spec.lease;
    PoolTerms {
        name: pool.name(),
        placement: pool.spec.placement,
        default_ttl: lease.default_ttl.as_millis(),
        max_ttl: lease.max_ttl.as_millis(),
        admission_wait: lease.admission_wait.as_millis(),
        retain_finished: lease.retain_finished.as_millis(),
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeFacts {
    pub(super) uid: Uid,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) cordoned: bool,
}

impl NodeFacts {
    pub(super) fn read(node: Node) -> Option<(NodeName, Self)> {
        let metadata = node.metadata;
        let facts = Self {
            uid: metadata.uid?.into(),
            labels: metadata.labels.unwrap_or_default(),
            cordoned: node.spec.and_then(|spec| spec.unschedulable) == Some(true)
                || metadata.deletion_timestamp.is_some(),
        };
        Some((metadata.name?.into(), facts))
    }

    pub(super) fn has_labels(&self, wanted: &BTreeMap<String, String>) -> bool {
        wanted
            .iter()
            .all(|(key, value)| self.labels.get(key) == Some(value))
    }
}
