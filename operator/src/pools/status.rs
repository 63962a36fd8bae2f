//! Pools' statuses: written when they change, at most once a second each.

use branchpool_crds::BranchPool;
use kube::{Api, runtime::events::EventType};
use tracing::info;

use super::{
    Controller, Notice,
    sources::Trouble,
    state::{PoolFacts, WRITE_EVERY},
};
use crate::{
    cluster::describe,
    index::Index,
    plan::{
        Millis, NodeName, Uid,
        leases::WriteError,
        placement::Standing,
        pools::{Part, View, status},
    },
};

impl Controller {
    /// Answers when to look again.
    pub(super) fn write_pool(
        &mut self,
        uid: &Uid,
        index: &Index,
        standings: &[(NodeName, Standing)],
        trouble: Option<&Trouble>,
        now: Millis,
    ) -> Millis {
        let Some(pool) = self.pools.get(uid) else {
            return u64::MAX;
        };
        // What the first look sees of agents that are about to be heard is not worth telling.
        if pool.writing || !self.settled || trouble == Some(&Trouble::Unknown) {
            return u64::MAX;
        }
        if now < pool.write_not_before {
            return pool.write_not_before;
        }
        let parts: Vec<Part<'_>> = standings
            .iter()
            .map(|(node, standing)| Part {
                node: node.clone(),
                standing: *standing,
                pool: index
                    .agents
                    .get(node)
                    .and_then(|agent| agent.pools.get(uid.as_str())),
                refusal: self.refusal_of(node, uid),
            })
            .collect();
        let view = View {
            uid: uid.as_str(),
            generation: pool.generation,
            demand: pool.demand(),
            source_trouble: match trouble {
                Some(Trouble::Reason(reason, message)) => Some((reason, message)),
                _ => None,
            },
            fleet_trouble: self.no_agents.why(),
            parts: &parts,
        };
        let Some(new) = status(&view, &pool.status, now) else {
            return u64::MAX;
        };
        self.tell_people(pool, &new);
        let (id, cluster, notices) = (pool.id.clone(), self.cluster.clone(), self.notices.clone());
        if let Some(pool) = self.pools.get_mut(uid) {
            pool.writing = true;
            pool.write_not_before = now + WRITE_EVERY;
        }
        tokio::spawn(async move {
            let api: Api<BranchPool> = Api::namespaced(cluster.client(), &id.namespace);
            let written = cluster
                .patch_status("pool_status", &api, &id.name, id.uid.as_str(), &new)
                .await;
            let result = written
                .map(|_| ())
                .map_err(|error| WriteError::Later(describe(&error)));
            let notice = Notice::PoolWritten(id.uid, Box::new(new), result);
            let _stopped = notices.send(notice).await;
        });
        now + WRITE_EVERY
    }

    /// An Event where a pool begins to be in trouble.
    fn tell_people(&self, pool: &PoolFacts, new: &branchpool_crds::BranchPoolStatus) {
        let find = |status: &branchpool_crds::BranchPoolStatus| {
            let mut conditions = status.conditions.iter();
            conditions
                .find(|condition| condition.type_ == "Degraded")
                .cloned()
        };
        let (before, now) = (find(&pool.status), find(new));
        let Some(now) = now.filter(|now| now.status == "True") else {
            return;
        };
        if before.is_some_and(|before| before.status == "True" && before.reason == now.reason) {
            return;
        }
        info!(
            pool = pool.id.name,
            namespace = pool.id.namespace,
            reason = now.reason,
            "{}",
            now.message
        );
        self.record
            .pool(&pool.id, EventType::Warning, &now.reason, &now.message);
    }
}
