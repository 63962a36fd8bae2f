//! What is told about pools: counts, conditions, and why a lease has to wait.

use branchpool_agent_api::{Condition, GoldenPhase, GoldenStatus, PoolStatus};

use super::{GenerationState, Millis, Node, Now, Pool, PoolUid, Refusal};

/// Hint for a retry when only events can tell how long it takes.
const RETRY_SOON: Millis = 200;

impl Node {
    /// Refuses a lease with the reason and the time of a retry.
    pub(super) fn nothing_ready(&self, uid: &PoolUid, now: Now) -> Refusal {
        let Some(pool) = self.pools.get(uid) else {
            return Refusal::PoolUidNotFound { pool: uid.clone() };
        };
        let (why, retry_after) = self.why_nothing_is_ready(pool, now);
        Refusal::NoBranchReady {
            pool: pool.spec.name.clone(),
            why,
            retry_after,
        }
    }

    fn why_nothing_is_ready(&self, pool: &Pool, now: Now) -> (String, Millis) {
        let counts = pool.counts();
        if pool.removed {
            return (
                "the pool was removed, and its leases keep the branches that they have".to_owned(),
                5_000,
            );
        }
        if let Some(gate) = self.gates.first() {
            return (format!("refill is held back: {}", gate.message), 1_000);
        }
        if pool.serving().is_none() {
            return match (&pool.build_failure, pool.building()) {
                (_, Some(_)) => ("its golden image is being built".to_owned(), 1_000),
                (Some(failure), None) => (
                    format!("its golden image could not be built: {}", failure.message),
                    failure.retry_at.saturating_sub(now.mono).max(RETRY_SOON),
                ),
                (None, None) => (
                    "its golden image is about to be built".to_owned(),
                    RETRY_SOON,
                ),
            };
        }
        if let Some(failure) = &pool.last_failure
            && pool.failures > 0
        {
            let wait = pool.retry_at.saturating_sub(now.mono).max(RETRY_SOON);
            return (
                format!("the last branch could not be made: {failure}"),
                wait,
            );
        }
        if pool.spec.target == 0 {
            return (
                "the pool is to hold no ready branches (replicas is 0)".to_owned(),
                5_000,
            );
        }
        if counts.warming() == 0 && counts.existing() >= pool.spec.max_branches {
            let most = pool.spec.max_branches;
            return (
                format!(
                    "all {most} branches that maxBranches allows exist; release a lease or raise it"
                ),
                1_000,
            );
        }
        if counts.warming() == 0 && self.free_slots.is_empty() {
            return (
                "the node has no free slot for another branch; release a lease".to_owned(),
                1_000,
            );
        }
        (
            format!("{} branches are warming", counts.warming()),
            RETRY_SOON,
        )
    }

    /// Ready branches of an older image or older settings.
    pub fn stale_ready(&self, pool: &Pool) -> u32 {
        if !pool.mixed {
            return 0;
        }
        let stale = pool.ready.values().filter(|id| {
            self.branches
                .get(id)
                .is_some_and(|branch| !pool.is_current(branch))
        });
        u32::try_from(stale.count()).unwrap_or(u32::MAX)
    }

    /// Tombstones of a pool: being deleted, and waiting.
    pub fn tombstones(&self, uid: &PoolUid) -> (u32, u32) {
        let (mut deleting, mut waiting) = (0, 0);
        for entry in self.trash.of_pool(uid) {
            if entry.deleting {
                deleting += 1;
            } else {
                waiting += 1;
            }
        }
        (deleting, waiting)
    }

    /// Branches that are wanted and not yet begun.
    pub fn deficit(&self, pool: &Pool) -> u32 {
        let counts = pool.counts();
        let target = if pool.removed { 0 } else { pool.spec.target };
        target.saturating_sub(counts.ready + counts.warming())
    }

    /// A pool as the API shows it; absent when it is gone.
    pub fn pool_status(&self, uid: &PoolUid, now: Now) -> Option<PoolStatus> {
        let pool = self.pools.get(uid)?;
        let counts = pool.counts();
        let (deleting, waiting) = self.tombstones(uid);
        let wall = |mono: Millis| now.wall.saturating_add(mono.saturating_sub(now.mono));
        let held_until = if pool.serving().is_none() {
            pool.build_failure.as_ref().map(|failure| failure.retry_at)
        } else {
            Some(pool.retry_at)
        };
        Some(PoolStatus {
            uid: uid.to_string(),
            name: pool.spec.name.clone(),
            observed_generation: pool.spec.observed_generation,
            desired: if pool.removed { 0 } else { pool.spec.target },
            max_branches: pool.spec.max_branches,
            ready: counts.ready,
            warming: counts.warming(),
            snapshotting: counts.snapshotting + counts.snapshotted,
            starting: counts.starting,
            preconnecting: counts.started + counts.preconnecting,
            leased: counts.leased,
            cleaning: counts.stopping,
            quarantined: counts.quarantined,
            tombstones: deleting + waiting,
            stale: self.stale_ready(pool),
            golden: golden_status(pool),
            conditions: self.pool_conditions(pool, now),
            retry_at: held_until.filter(|time| *time > now.mono).map(wall),
        })
    }

    fn pool_conditions(&self, pool: &Pool, now: Now) -> Vec<Condition> {
        let counts = pool.counts();
        let (why, _) = self.why_nothing_is_ready(pool, now);
        let serving = pool.serving().is_some();
        let source = match (&pool.build_failure, pool.building(), serving) {
            (Some(failure), _, _) => {
                Condition::new("SourceReady", serving, "BuildFailed", &failure.message)
            }
            (None, Some(_), false) => Condition::new(
                "SourceReady",
                false,
                "Building",
                "the golden image is being built",
            ),
            (None, None, false) => Condition::new(
                "SourceReady",
                false,
                "Pending",
                "the golden image is about to be built",
            ),
            (None, _, true) => {
                Condition::new("SourceReady", true, "Sealed", "the golden image is sealed")
            }
        };
        let ready = if pool.removed {
            Condition::new(
                "Ready",
                false,
                "Removed",
                "the pool was removed; what is leased goes on until its end",
            )
        } else if !serving || !pool.proven {
            Condition::new("Ready", false, "NotYetFilled", &why)
        } else if pool.failures > 0 && counts.ready == 0 {
            Condition::new("Ready", false, "WarmingFails", &why)
        } else {
            Condition::new(
                "Ready",
                true,
                "Serving",
                "branches of the pool are handed out",
            )
        };
        let available = if counts.ready > 0 && !self.draining {
            Condition::new(
                "Available",
                true,
                "BranchReady",
                "a lease now is answered at once",
            )
        } else {
            Condition::new("Available", false, "NoBranchReady", &why)
        };
        let progressing = if counts.warming() > 0 || pool.building().is_some() {
            Condition::new(
                "Progressing",
                true,
                "Warming",
                &format!("{} branches are warming", counts.warming()),
            )
        } else {
            Condition::new("Progressing", false, "Settled", "nothing is being made")
        };
        let degraded = if let Some(gate) = self.gates.first() {
            Condition::new("Degraded", true, &gate.reason, &gate.message)
        } else if let Some(failure) = &pool.build_failure {
            Condition::new("Degraded", true, "BuildFailed", &failure.message)
        } else if let (Some(failure), true) = (&pool.last_failure, pool.failures > 0) {
            Condition::new("Degraded", true, "WarmingFails", failure)
        } else if counts.quarantined > 0 {
            Condition::new(
                "Degraded",
                true,
                "Quarantined",
                "failed branches are kept for a look; delete their subvolumes when done",
            )
        } else {
            Condition::new("Degraded", false, "AsExpected", "nothing is amiss")
        };
        vec![ready, source, available, progressing, degraded]
    }
}

fn golden_status(pool: &Pool) -> GoldenStatus {
    let generation = pool.serving().unwrap_or(0);
    let bytes = match pool
        .generations
        .get(&generation)
        .map(|generation| &generation.state)
    {
        Some(GenerationState::Sealed(image)) => image.bytes,
        _ => 0,
    };
    let (phase, message) = match (&pool.build_failure, pool.building(), generation) {
        (_, Some(number), _) => (
            GoldenPhase::Building,
            Some(format!("building generation {number}")),
        ),
        (Some(failure), None, _) => (GoldenPhase::Failed, Some(failure.message.clone())),
        (None, None, 0) => (GoldenPhase::Pending, None),
        (None, None, _) => (GoldenPhase::Sealed, None),
    };
    GoldenStatus {
        phase,
        generation,
        message,
        bytes,
    }
}
