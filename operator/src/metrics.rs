//! Everything that is counted and timed. `docs/operator-metrics.md` lists what is here.

use std::sync::{Arc, atomic::AtomicI64};

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

use crate::plan::leases::Counts;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Pool {
    namespace: String,
    pool: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Phase {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Write {
    kind: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Call {
    call: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Node {
    node: String,
}

type Gauges<L> = Family<L, Gauge<i64, AtomicI64>>;

/// Cheap to clone; clones share the same numbers.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    queued: Gauges<Pool>,
    leases: Gauges<Phase>,
    writes: Family<Write, Counter>,
    calls: Family<Call, Counter>,
    agents: Gauges<Node>,
    heard: Gauges<Node>,
    write_seconds: Histogram,
    pub(crate) leading: Gauge<i64, AtomicI64>,
    pub(crate) epoch: Gauge<i64, AtomicI64>,
    pub(crate) older_schemas: Gauge<i64, AtomicI64>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut made = Self {
            registry: Arc::new(Registry::default()),
            queued: Family::default(),
            leases: Family::default(),
            writes: Family::default(),
            calls: Family::default(),
            agents: Family::default(),
            heard: Family::default(),
            write_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 16)),
            leading: Gauge::default(),
            epoch: Gauge::default(),
            older_schemas: Gauge::default(),
        };
        let mut registry = Registry::with_prefix("branchpool_operator");
        made.register(&mut registry);
        made.registry = Arc::new(registry);
        made
    }
}

impl Metrics {
    fn register(&self, registry: &mut Registry) {
        registry.register(
            "queue_length",
            "Leases of a pool that wait for a branch",
            self.queued.clone(),
        );
        registry.register("leases", "BranchLeases by phase", self.leases.clone());
        registry.register(
            "api_writes",
            "Writes to the API server, by kind and outcome",
            self.writes.clone(),
        );
        registry.register(
            "agent_calls",
            "Calls to agents about leases and pools, by outcome",
            self.calls.clone(),
        );
        registry.register(
            "agent_connected",
            "1 while the agent's watch is connected",
            self.agents.clone(),
        );
        registry.register_with_unit(
            "agent_heard_timestamp",
            "When the agent's watch last said anything, since the Unix epoch",
            Unit::Seconds,
            self.heard.clone(),
        );
        registry.register(
            "leading",
            "1 on the replica that leads",
            self.leading.clone(),
        );
        registry.register("epoch", "Epoch of the leader", self.epoch.clone());
        registry.register(
            "older_schemas",
            "Custom resources that the cluster serves with an older schema",
            self.older_schemas.clone(),
        );
        registry.register_with_unit(
            "api_write",
            "A write to the API server, without its wait for a turn",
            Unit::Seconds,
            self.write_seconds.clone(),
        );
    }

    pub(crate) fn api_write(&self, kind: &'static str, ok: bool, seconds: f64) {
        let outcome = outcome(ok);
        self.writes.get_or_create(&Write { kind, outcome }).inc();
        self.write_seconds.observe(seconds);
    }

    pub(crate) fn agent_call(&self, call: &'static str, ok: bool) {
        let outcome = outcome(ok);
        self.calls.get_or_create(&Call { call, outcome }).inc();
    }

    pub(crate) fn agent(&self, node: &str, connected: bool, heard_at: Option<u64>) {
        let node = Node {
            node: node.to_owned(),
        };
        self.agents.get_or_create(&node).set(i64::from(connected));
        if let Some(at) = heard_at {
            let seconds = i64::try_from(at / 1_000).unwrap_or(i64::MAX);
            self.heard.get_or_create(&node).set(seconds);
        }
    }

    pub(crate) fn agent_gone(&self, node: &str) {
        let node = Node {
            node: node.to_owned(),
        };
        self.agents.remove(&node);
        self.heard.remove(&node);
    }

    pub(crate) fn set_counts(&self, counts: &Counts) {
        self.queued.clear();
        for (pool, length) in &counts.queued {
            let labels = Pool {
                namespace: pool.namespace.clone(),
                pool: pool.name.clone(),
            };
            self.queued.get_or_create(&labels).set(i64::from(*length));
        }
        for (phase, count) in [
            ("pending", counts.pending),
            ("bound", counts.bound),
            ("finished", counts.finished),
        ] {
            self.leases
                .get_or_create(&Phase { phase })
                .set(i64::from(count));
        }
    }

    /// In the `OpenMetrics` text format.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

fn outcome(ok: bool) -> &'static str {
    if ok { "ok" } else { "failed" }
}

#[cfg(test)]
mod tests {
    use branchpool_agent_api::PoolName;
    use branchpool_e2e_pages as pages;

    use super::*;

    const INTRODUCTION: &str = "\
# Metrics of the operator

`GET /metrics` on `--metrics-listen` answers in the OpenMetrics text format. Generated from
`operator/src/metrics.rs` by `make generate`; `make test` fails when the two differ.
";

    /// With a value in each family, for empty ones are left out of the text.
    fn with_values() -> Metrics {
        let metrics = Metrics::default();
        metrics.api_write("lease_status", true, 0.1);
        metrics.agent_call("lease", true);
        metrics.agent("node-1", true, Some(1_000));
        let mut counts = Counts::default();
        counts.queued.insert(PoolName::new("shop", "app"), 1);
        metrics.set_counts(&counts);
        metrics
    }

    #[test]
    fn the_page_lists_every_metric() {
        let page = pages::metrics(INTRODUCTION, &with_values().text());
        pages::check("operator-metrics.md", &page);
        assert_eq!(
            pages::rows(&page),
            pages::fields(include_str!("metrics.rs"))
        );
    }
}
