//! Desired state: pools that come, change and go.

use super::{
    Answer, Entry, Node, Now, Pool, PoolRecord, PoolSpec, PoolUid, Refusal, Token, node::Effects,
};

impl Node {
    pub(super) fn apply(
        &mut self,
        token: Token,
        spec: PoolSpec,
        body: serde_json::Value,
        now: Now,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        let same_name = self
            .pools
            .iter()
            .find(|(uid, pool)| **uid != spec.uid && !pool.removed && pool.spec.name == spec.name);
        if let Some((by, _)) = same_name {
            return Err(Refusal::NameTaken {
                pool: spec.name,
                by: by.clone(),
            });
        }
        let uid = spec.uid.clone();
        let current = self
            .pools
            .get(&uid)
            .map_or(0, |pool| pool.spec.observed_generation);
        if spec.observed_generation < current {
            return Err(Refusal::StaleGeneration {
                pool: spec.name,
                given: spec.observed_generation,
                current,
            });
        }
        let record = PoolRecord {
            spec: spec.clone(),
            body: body.clone(),
            removed: false,
        };
        match self.pools.get_mut(&uid) {
            None => drop(self.pools.insert(uid.clone(), Pool::new(spec, body))),
            Some(pool) => {
                if pool.spec.settings_key != spec.settings_key {
                    pool.mixed = true;
                }
                if pool.spec.image_key != spec.image_key
                    || pool.spec.settings_key != spec.settings_key
                {
                    // What failed may have been mended.
                    pool.failures = 0;
                    pool.retry_at = 0;
                }
                pool.spec = spec;
                pool.body = body;
                pool.removed = false;
            }
        }
        self.recount_idle(&uid);
        effects.pool_changed(&uid);
        effects.journal(Entry::Pool(uid.clone(), Box::new(record)));
        // As it is now: what is published may be older or newer when the journal has it.
        if let Some(status) = self.pool_status(&uid, now) {
            effects.commit(Some((token, Answer::Pool(Box::new(status)))));
        }
        Ok(())
    }

    pub(super) fn remove(
        &mut self,
        token: Token,
        uid: &PoolUid,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        let Some(pool) = self.pools.get_mut(uid) else {
            return Err(Refusal::PoolUidNotFound { pool: uid.clone() });
        };
        pool.removed = true;
        let record = PoolRecord {
            spec: pool.spec.clone(),
            body: pool.body.clone(),
            removed: true,
        };
        effects.pool_changed(uid);
        effects.journal(Entry::Pool(uid.clone(), Box::new(record)));
        effects.commit(Some((token, Answer::Removed)));
        Ok(())
    }

    /// A removed pool is forgotten when nothing of it is left.
    pub(super) fn drop_finished_pools(&mut self, effects: &mut Effects) {
        let in_use = |uid: &PoolUid| self.branches.values().any(|branch| branch.pool == *uid);
        let finished: Vec<PoolUid> = self
            .pools
            .iter()
            .filter(|(uid, pool)| pool.removed && pool.generations.is_empty() && !in_use(uid))
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in finished {
            self.pools.remove(&uid);
            effects.pool_changed(&uid);
            effects.journal(Entry::PoolGone(uid));
        }
    }
}
