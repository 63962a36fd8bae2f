//! What is counted of SQL over HTTP.

use std::{sync::atomic::AtomicI64, time::Instant};

use branchpool_agent_api::{Problem, QueueProbe};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::{Family, MetricConstructor},
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

use super::{Failure, Kind, gate};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfOutcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfQueue {
    kind: &'static str,
    state: &'static str,
}

#[derive(Clone, Debug)]
struct Buckets;

impl MetricConstructor<Histogram> for Buckets {
    /// From 1 ms, doubling, 20 of them: up to 524 s, about the most that a request may ask for.
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(0.001, 2.0, 20))
    }
}

/// Cheap to clone; clones share the same numbers.
#[derive(Clone, Debug)]
pub struct Metrics {
    requests: Family<OfOutcome, Counter>,
    queries: Family<OfQueue, Gauge<i64, AtomicI64>>,
    duration: Family<OfKind, Histogram, Buckets>,
    answers: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let made = Self {
            requests: Family::default(),
            queries: Family::default(),
            duration: Family::new_with_constructor(Buckets),
            answers: Counter::default(),
        };
        // All of them are told from the start.
        for outcome in Outcome::ALL {
            made.count(outcome, 0);
        }
        made.set_queues((QueueProbe::default(), QueueProbe::default()));
        for kind in [Kind::Read, Kind::Write] {
            drop(made.duration.get_or_create(&of(kind)));
        }
        made
    }
}

impl Metrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "sql_requests",
            "Requests for SQL over HTTP by outcome: ok, postgres_error, invalid, denied, no_lease, busy, unavailable, timed_out, too_large, ended (its lease or server), abandoned (by its client)",
            self.requests.clone(),
        );
        registry.register(
            "sql_queries",
            "Requests for SQL over HTTP that run or wait for their turn",
            self.queries.clone(),
        );
        registry.register_with_unit(
            "sql",
            "Requests for SQL over HTTP, from the place in the queue to the answer",
            Unit::Seconds,
            self.duration.clone(),
        );
        registry.register_with_unit(
            "sql_answers",
            "Bytes of the answers of SQL over HTTP",
            Unit::Bytes,
            self.answers.clone(),
        );
    }

    /// Of reads and of writes, as they are now.
    pub fn set_queues(&self, (reads, writes): (QueueProbe, QueueProbe)) {
        for (kind, probe) in [(Kind::Read, reads), (Kind::Write, writes)] {
            for (state, count) in [("running", probe.active), ("queued", probe.queued)] {
                let OfKind { kind } = of(kind);
                let gauge = self.queries.get_or_create(&OfQueue { kind, state });
                gauge.set(i64::from(count));
            }
        }
    }

    /// A request that has come in.
    pub fn request(&self) -> Request {
        Request {
            metrics: self.clone(),
            outcome: Outcome::Abandoned,
        }
    }

    pub(super) fn ran(&self, kind: Kind, since: Instant) {
        let seconds = since.elapsed().as_secs_f64();
        self.duration.get_or_create(&of(kind)).observe(seconds);
    }

    fn count(&self, outcome: Outcome, requests: u64) {
        let outcome = outcome.word();
        let counter = self.requests.get_or_create(&OfOutcome { outcome });
        counter.inc_by(requests);
    }
}

fn of(kind: Kind) -> OfKind {
    let kind = match kind {
        Kind::Read => "read",
        Kind::Write => "write",
    };
    OfKind { kind }
}

/// Counts one request when it is dropped: as abandoned, unless it was answered.
#[derive(Debug)]
pub struct Request {
    metrics: Metrics,
    outcome: Outcome,
}

impl Request {
    pub fn answered(mut self, result: Result<&[u8], &Failure>) {
        self.outcome = match result {
            Ok(answer) => {
                let bytes = u64::try_from(answer.len()).unwrap_or(u64::MAX);
                self.metrics.answers.inc_by(bytes);
                Outcome::Ok
            }
            Err(failure) => Outcome::of(failure),
        };
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.metrics.count(self.outcome, 1);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Ok,
    PostgresError,
    Invalid,
    Denied,
    NoLease,
    Busy,
    Unavailable,
    TimedOut,
    TooLarge,
    Ended,
    Abandoned,
}

impl Outcome {
    const ALL: [Self; 11] = [
        Self::Ok,
        Self::PostgresError,
        Self::Invalid,
        Self::Denied,
        Self::NoLease,
        Self::Busy,
        Self::Unavailable,
        Self::TimedOut,
        Self::TooLarge,
        Self::Ended,
        Self::Abandoned,
    ];

    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::PostgresError => "postgres_error",
            Self::Invalid => "invalid",
            Self::Denied => "denied",
            Self::NoLease => "no_lease",
            Self::Busy => "busy",
            Self::Unavailable => "unavailable",
            Self::TimedOut => "timed_out",
            Self::TooLarge => "too_large",
            Self::Ended => "ended",
            Self::Abandoned => "abandoned",
        }
    }

    fn of(failure: &Failure) -> Self {
        match failure {
            Failure::Postgres(_) => Self::PostgresError,
            Failure::Refused(problem) => Self::of_problem(problem),
            Failure::Malformed { .. } | Failure::Copy => Self::Invalid,
            Failure::Denied { .. } => Self::Denied,
            Failure::Unreachable { .. } => Self::Unavailable,
            Failure::TimedOut { .. } => Self::TimedOut,
            Failure::TooLong => Self::TooLarge,
            Failure::Ended | Failure::Lost => Self::Ended,
        }
    }

    fn of_problem(problem: &Problem) -> Self {
        match problem.status {
            404 | 410 => Self::NoLease,
            503 if problem.reason == gate::BUSY => Self::Busy,
            500.. => Self::Unavailable,
            _ => Self::Invalid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(metrics: &Metrics, outcome: Outcome) -> u64 {
        let outcome = outcome.word();
        metrics.requests.get_or_create(&OfOutcome { outcome }).get()
    }

    #[test]
    fn each_request_is_counted_once() {
        let metrics = Metrics::default();
        metrics.request().answered(Ok(b"{}"));
        metrics.request().answered(Err(&Failure::TooLong));
        let busy = Failure::from(Problem::new(503, gate::BUSY, "wait"));
        metrics.request().answered(Err(&busy));
        drop(metrics.request());
        for outcome in Outcome::ALL {
            let seen = [
                Outcome::Ok,
                Outcome::TooLarge,
                Outcome::Busy,
                Outcome::Abandoned,
            ];
            let expected = u64::from(seen.contains(&outcome));
            assert_eq!(count(&metrics, outcome), expected, "{outcome:?}");
        }
        assert_eq!(metrics.answers.get(), 2);
    }
}
