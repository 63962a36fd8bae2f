//! Everything that is counted and timed. `docs/metrics.md` lists what is here.

use std::sync::{
    Arc,
    atomic::{AtomicI64, AtomicU64},
};

use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

use crate::plan::Refusal;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolState {
    namespace: String,
    pool: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

/// Cheap to clone; clones share the same numbers.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    registry: Arc<Registry>,
    branches: Family<PoolState, Gauge<i64, AtomicI64>>,
    failures: Family<Reason, Counter>,
    refusals: Family<Reason, Counter>,
    space: Family<Kind, Gauge<i64, AtomicI64>>,
    gates: Family<Reason, Gauge<i64, AtomicI64>>,
    pub(super) gateway: branchpool_gateway::Metrics,
    sql: crate::sql::Metrics,
    pub(super) leases: Gauge<i64, AtomicI64>,
    pub(super) quarantined: Gauge<i64, AtomicI64>,
    pub(super) journal_pending: Gauge<i64, AtomicI64>,
    pub(super) handed_out: Counter<u64, AtomicU64>,
    pub(super) restarts: Counter<u64, AtomicU64>,
    pub(super) deleted: Counter<u64, AtomicU64>,
    pub(super) handout: Histogram,
    pub(super) snapshot: Histogram,
    pub(super) start: Histogram,
    pub(super) preconnect: Histogram,
    pub(super) stop: Histogram,
    pub(super) build: Histogram,
}

/// From 100 µs, doubling, 18 of them: up to 13 s.
fn timer() -> Histogram {
    Histogram::new(exponential_buckets(0.000_1, 2.0, 18))
}

impl Metrics {
    pub(super) fn new(sql: crate::sql::Metrics) -> Self {
        let mut registry = Registry::with_prefix("branchpool");
        let mut made = Self {
            registry: Arc::new(Registry::default()),
            branches: Family::default(),
            failures: Family::default(),
            refusals: Family::default(),
            space: Family::default(),
            gates: Family::default(),
            gateway: branchpool_gateway::Metrics::default(),
            sql,
            leases: Gauge::default(),
            quarantined: Gauge::default(),
            journal_pending: Gauge::default(),
            handed_out: Counter::default(),
            restarts: Counter::default(),
            deleted: Counter::default(),
            handout: timer(),
            snapshot: timer(),
            start: timer(),
            preconnect: timer(),
            stop: timer(),
            // An import may take hours.
            build: Histogram::new(exponential_buckets(0.1, 2.0, 18)),
        };
        made.register(&mut registry);
        made.registry = Arc::new(registry);
        made
    }

    fn register(&self, registry: &mut Registry) {
        self.gateway.register(registry);
        self.sql.register(registry);
        registry.register(
            "branches",
            "Branches of a pool by state",
            self.branches.clone(),
        );
        registry.register(
            "warming_failures",
            "Branches that could not be made, by reason",
            self.failures.clone(),
        );
        registry.register(
            "lease_refusals",
            "Commands that were refused, by reason",
            self.refusals.clone(),
        );
        registry.register_with_unit(
            "space",
            "Branch filesystem by kind",
            Unit::Bytes,
            self.space.clone(),
        );
        registry.register(
            "gates",
            "1 while refill is held back for the reason",
            self.gates.clone(),
        );
        registry.register("leases", "Leases that are bound", self.leases.clone());
        registry.register(
            "quarantined",
            "Things that are left for people to look at",
            self.quarantined.clone(),
        );
        registry.register(
            "journal_pending",
            "Writes that wait for the journal",
            self.journal_pending.clone(),
        );
        registry.register(
            "leases_handed_out",
            "Leases handed out",
            self.handed_out.clone(),
        );
        registry.register(
            "server_restarts",
            "Leased servers started again on their data",
            self.restarts.clone(),
        );
        registry.register(
            "tombstones_deleted",
            "Tombstones deleted for good",
            self.deleted.clone(),
        );
        for (name, help, timer) in [
            (
                "handout",
                "From the request for a lease to its answer",
                &self.handout,
            ),
            (
                "snapshot",
                "Making a snapshot, its journal entry included",
                &self.snapshot,
            ),
            ("start", "Starting a server until it is ready", &self.start),
            (
                "preconnect",
                "Opening the session that waits for the first client",
                &self.preconnect,
            ),
            (
                "stop",
                "From the stop of a branch to its tombstone",
                &self.stop,
            ),
            ("golden_build", "Building a golden image", &self.build),
        ] {
            registry.register_with_unit(name, help, Unit::Seconds, timer.clone());
        }
    }

    pub(super) fn set_branches(&self, namespace: &str, pool: &str, states: &[(&'static str, u32)]) {
        for (state, count) in states {
            let labels = PoolState {
                namespace: namespace.to_owned(),
                pool: pool.to_owned(),
                state,
            };
            self.branches.get_or_create(&labels).set(i64::from(*count));
        }
    }

    pub(super) fn drop_pool(&self, namespace: &str, pool: &str, states: &[&'static str]) {
        for state in states {
            self.branches.remove(&PoolState {
                namespace: namespace.to_owned(),
                pool: pool.to_owned(),
                state,
            });
        }
    }

    pub(super) fn set_space(&self, kinds: &[(&'static str, u64)]) {
        for (kind, bytes) in kinds {
            let bytes = i64::try_from(*bytes).unwrap_or(i64::MAX);
            self.space.get_or_create(&Kind { kind }).set(bytes);
        }
    }

    pub(super) fn set_gates(&self, shut: impl Iterator<Item = String>) {
        self.gates.clear();
        for reason in shut {
            self.gates.get_or_create(&Reason { reason }).set(1);
        }
    }

    pub(super) fn warming_failed(&self, reason: &str) {
        self.failures
            .get_or_create(&Reason {
                reason: reason.to_owned(),
            })
            .inc();
    }

    pub(super) fn refused(&self, refusal: &Refusal) {
        self.refusals
            .get_or_create(&Reason {
                reason: refusal.reason().to_owned(),
            })
            .inc();
    }

    /// In the `OpenMetrics` text format.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use branchpool_e2e_pages as pages;

    use super::*;
    use crate::plan::LeaseUid;

    const INTRODUCTION: &str = "\
# Metrics

`GET /metrics` answers in the OpenMetrics text format. Generated from `agent/src/engine/metrics.rs` by
`make generate`; `make test` fails when the two differ.

Every series of a reason or state appears with its first value. A histogram has the series `_bucket`,
`_sum` and `_count`.
";

    /// With a value in each family, for empty ones are left out of the text.
    fn with_values() -> Metrics {
        let metrics = Metrics::new(crate::sql::Metrics::default());
        metrics.set_branches("default", "app", &[("ready", 1)]);
        metrics.set_space(&[("free", 1)]);
        metrics.set_gates(["DiskPressure".to_owned()].into_iter());
        metrics.warming_failed("StartFailed");
        metrics.refused(&Refusal::LeaseNotFound {
            uid: LeaseUid("lease".to_owned()),
        });
        metrics
    }

    fn page() -> String {
        pages::metrics(INTRODUCTION, &with_values().text())
    }

    #[test]
    fn the_page_lists_every_metric() {
        pages::check("metrics.md", &page());
    }

    #[test]
    fn every_registration_has_a_row() {
        let parts = [
            include_str!("../../gateway/src/metrics.rs"),
            include_str!("../sql/metrics.rs"),
        ];
        let registered = |part: &str| part.matches("registry.register").count();
        let of_parts: usize = parts.into_iter().map(registered).sum();
        let fields = pages::fields(include_str!("metrics.rs"));
        assert_eq!(pages::rows(&page()), fields + of_parts);
    }
}
