//! Generations of a pool's golden image: which to build, which serves, which may go.

use serde::{Deserialize, Serialize};

use super::{Action, Entry, GenerationRecord, Millis, Node, Now, PoolUid, backoff, node::Effects};
use crate::storage::ids::BranchId;

/// What is known of a sealed image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    pub bytes: u64,
    /// What its branches are connected to; the pool's may be another by now.
    pub database: String,
    pub role: String,
    /// What the builder found out; the core does not look into it.
    pub facts: serde_json::Value,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GenerationState {
    Building,
    Sealed(Image),
    /// Being moved into the trash.
    Dropping,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    pub number: u64,
    pub image_key: String,
    pub state: GenerationState,
}

/// The last build that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildFailure {
    pub image_key: String,
    pub message: String,
    pub failures: u32,
    pub retry_at: Millis,
}

impl Node {
    pub(super) fn image(&self, pool: &PoolUid, generation: u64) -> Option<&Image> {
        match &self.pools.get(pool)?.generations.get(&generation)?.state {
            GenerationState::Sealed(image) => Some(image),
            GenerationState::Building | GenerationState::Dropping => None,
        }
    }

    /// Starts the build that the desired state asks for, and drops what nothing needs.
    pub(super) fn plan_golden(&mut self, now: Now, effects: &mut Effects) {
        let uids: Vec<PoolUid> = self.pools.keys().cloned().collect();
        for uid in uids {
            self.start_build(&uid, now, effects);
            self.drop_old_generations(&uid, effects);
        }
    }

    fn start_build(&mut self, uid: &PoolUid, now: Now, effects: &mut Effects) {
        if self.draining {
            return;
        }
        let Some(pool) = self.pools.get_mut(uid) else {
            return;
        };
        if let Some(failure) = &pool.build_failure
            && failure.image_key != pool.spec.image_key
        {
            // Nobody wants that image any more.
            pool.build_failure = None;
            effects.pool_changed(uid);
        }
        if pool.removed
            || pool
                .newest()
                .is_some_and(|newest| newest.image_key == pool.spec.image_key)
        {
            return;
        }
        if let Some(building) = pool.building() {
            // Superseded: the builder answers with a failure, and then this runs again.
            if !pool.build_cancelled {
                pool.build_cancelled = true;
                effects.act(Action::CancelBuild {
                    pool: uid.clone(),
                    generation: building,
                });
            }
            return;
        }
        if pool.build_failure.as_ref().is_some_and(|failure| {
            failure.image_key == pool.spec.image_key && failure.retry_at > now.mono
        }) {
            return;
        }
        let number = pool.last_generation + 1;
        pool.last_generation = number;
        pool.build_cancelled = false;
        let image_key = pool.spec.image_key.clone();
        pool.generations.insert(
            number,
            Generation {
                number,
                image_key: image_key.clone(),
                state: GenerationState::Building,
            },
        );
        effects.pool_changed(uid);
        effects.act(Action::Build {
            pool: uid.clone(),
            generation: number,
            entry: Entry::Generation(
                uid.clone(),
                number,
                GenerationRecord {
                    image_key,
                    image: None,
                },
            ),
        });
    }

    pub(super) fn built(
        &mut self,
        uid: &PoolUid,
        number: u64,
        result: Result<Image, String>,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(pool) = self.pools.get_mut(uid) else {
            return;
        };
        effects.pool_changed(uid);
        let cancelled = std::mem::take(&mut pool.build_cancelled);
        match result {
            Ok(image) => {
                let Some(generation) = pool.generations.get_mut(&number) else {
                    return;
                };
                generation.state = GenerationState::Sealed(image.clone());
                let record = GenerationRecord {
                    image_key: generation.image_key.clone(),
                    image: Some(image),
                };
                pool.build_failure = None;
                pool.failures = 0;
                pool.retry_at = 0;
                pool.mixed = true;
                pool.proven = false;
                effects.journal(Entry::Generation(uid.clone(), number, record));
            }
            Err(message) => {
                let Some(generation) = pool.generations.remove(&number) else {
                    return;
                };
                effects.journal(Entry::GenerationGone(uid.clone(), number));
                if cancelled {
                    return;
                }
                let failures = match &pool.build_failure {
                    Some(last) if last.image_key == generation.image_key => last.failures + 1,
                    _ => 1,
                };
                pool.build_failure = Some(BuildFailure {
                    image_key: generation.image_key,
                    message,
                    failures,
                    retry_at: now.mono + backoff::GOLDEN.after(failures),
                });
            }
        }
    }

    /// A sealed generation goes when a newer one serves (or the pool was removed) and no branch of
    /// it is left.
    fn drop_old_generations(&mut self, uid: &PoolUid, effects: &mut Effects) {
        let Some(pool) = self.pools.get_mut(uid) else {
            return;
        };
        let keep = if pool.removed { None } else { pool.serving() };
        let in_use = self.branches.values().filter(|branch| branch.pool == *uid);
        let in_use: std::collections::BTreeSet<u64> =
            in_use.map(|branch| branch.generation).collect();
        let mut unused: Vec<u64> = Vec::new();
        for (number, generation) in &mut pool.generations {
            let sealed = matches!(generation.state, GenerationState::Sealed(_));
            if sealed && Some(*number) != keep && !in_use.contains(number) {
                generation.state = GenerationState::Dropping;
                unused.push(*number);
            }
        }
        if pool.removed
            && let Some(building) = pool.building()
            && !pool.build_cancelled
        {
            pool.build_cancelled = true;
            effects.act(Action::CancelBuild {
                pool: uid.clone(),
                generation: building,
            });
        }
        for generation in unused {
            let id = self.fresh_id();
            effects.act(Action::DropGolden {
                pool: uid.clone(),
                generation,
                id,
            });
        }
    }

    pub(super) fn golden_dropped(
        &mut self,
        uid: &PoolUid,
        number: u64,
        id: BranchId,
        result: Result<(), String>,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(pool) = self.pools.get_mut(uid) else {
            return;
        };
        match result {
            Ok(()) => {
                self.trash.add(id, None, 0, now.mono);
                pool.generations.remove(&number);
                effects.journal(Entry::GenerationGone(uid.clone(), number));
            }
            // It stays on disk and is dropped when the agent starts next; nothing waits for it.
            Err(message) => effects.warn(format!(
                "golden image {number} of pool {uid} could not be moved to the trash: {message}"
            )),
        }
        effects.pool_changed(uid);
    }
}
