//! What is counted.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct State {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Direction {
    direction: &'static str,
}

/// Cheap to clone; clones share the same numbers.
#[derive(Clone, Debug)]
pub struct Metrics {
    connections: Family<State, Gauge>,
    bytes: Family<Direction, Counter>,
    pub(crate) handovers: Counter,
    pub(crate) fresh_backends: Counter,
    pub(crate) authentication_failures: Counter,
    pub(crate) wake: Histogram,
    pub(crate) bytes_in: Counter,
    pub(crate) bytes_out: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let bytes = Family::<Direction, Counter>::default();
        let of = |direction| bytes.get_or_create_owned(&Direction { direction });
        let made = Self {
            bytes_in: of("in"),
            bytes_out: of("out"),
            bytes,
            connections: Family::default(),
            handovers: Counter::default(),
            fresh_backends: Counter::default(),
            authentication_failures: Counter::default(),
            // From 1 ms, doubling, 16 of them: up to 33 s.
            wake: Histogram::new(exponential_buckets(0.001, 2.0, 16)),
        };
        // All of them are told from the start.
        for phase in [Phase::Startup, Phase::Waking, Phase::Open] {
            made.in_phase(phase);
        }
        made
    }
}

impl Metrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "gateway_connections",
            "Client connections by state: startup, waking, open",
            self.connections.clone(),
        );
        registry.register(
            "gateway_handovers",
            "Preconnected sessions that a client took over",
            self.handovers.clone(),
        );
        registry.register(
            "gateway_fresh_backends",
            "Sessions that were opened for a client",
            self.fresh_backends.clone(),
        );
        registry.register(
            "gateway_authentication_failures",
            "Logins refused for an unknown user or a wrong password",
            self.authentication_failures.clone(),
        );
        registry.register_with_unit(
            "gateway",
            "Bytes moved for clients that are logged in: in from them, out to them",
            Unit::Bytes,
            self.bytes.clone(),
        );
        registry.register_with_unit(
            "gateway_wake",
            "How long a client waited for a suspended branch",
            Unit::Seconds,
            self.wake.clone(),
        );
    }

    pub(crate) fn connection(&self) -> Counted {
        let gauge = self.in_phase(Phase::Startup);
        gauge.inc();
        Counted {
            metrics: self.clone(),
            gauge,
        }
    }

    fn in_phase(&self, phase: Phase) -> Gauge {
        let state = match phase {
            Phase::Startup => "startup",
            Phase::Waking => "waking",
            Phase::Open => "open",
        };
        self.connections.get_or_create_owned(&State { state })
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Phase {
    Startup,
    Waking,
    Open,
}

/// Counts one connection until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted {
    metrics: Metrics,
    gauge: Gauge,
}

impl Counted {
    pub(crate) fn enter(&mut self, phase: Phase) {
        self.gauge.dec();
        self.gauge = self.metrics.in_phase(phase);
        self.gauge.inc();
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}
