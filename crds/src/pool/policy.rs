//! How branches are made, handed out and taken back.

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::duration::Duration;
use crate::quantity::Quantity;
use crate::rules::{duration_of_at_least, durations_in_order, rule};

const SECOND: u64 = 1_000;
const HOUR: u64 = 3_600 * SECOND;

/// When the source is imported again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Refresh {
    /// Never, or a cron schedule in UTC: minute, hour, day of month, month, day of week, such as "0 4 * * *".
    #[serde(default = "never")]
    #[schemars(length(min = 1, max = 100), extend("x-kubernetes-validations" = [schedule_format()]))]
    pub schedule: String,
    /// Replace: unleased branches of an older generation give way to new ones, step by step. Keep: they are leased before new ones.
    #[serde(default)]
    pub unleased: Unleased,
}

/// `Never`, a nickname, or five fields, each of numbers, ranges, lists and steps.
fn schedule_format() -> Value {
    let field = |number: &str| {
        let part = format!("([*]|{number}(-{number})?)(/[1-9][0-9]?)?");
        format!("{part}(,{part})*")
    };
    let fields = [
        "[0-5]?[0-9]",
        "([01]?[0-9]|2[0-3])",
        "(0?[1-9]|[12][0-9]|3[01])",
        "(0?[1-9]|1[0-2])",
        "[0-7]",
    ]
    .map(field)
    .join(" ");
    rule(
        &format!("self.matches('^(Never|@hourly|@daily|@weekly|@monthly|{fields})$')"),
        "write Never, or a cron schedule in UTC with five fields of numbers (minute, hour, day of month, month, day of week), such as 0 4 * * *",
    )
}

impl Default for Refresh {
    fn default() -> Self {
        Self {
            schedule: never(),
            unleased: Unleased::default(),
        }
    }
}

fn never() -> String {
    "Never".to_owned()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Unleased {
    #[default]
    Replace,
    Keep,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Placement {
    #[default]
    Spread,
    Pack,
}

/// How branches are made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Warming {
    /// Phased: the snapshots of a batch run ahead of its starts, which costs least. Pipelined: each branch goes through by itself.
    #[serde(default)]
    pub mode: WarmingMode,
    /// Snapshots made at a time on a node.
    #[serde(default = "sixteen")]
    #[schemars(range(min = 1, max = 256))]
    pub snapshot_concurrency: u32,
    /// Servers started at a time on a node. Absent: the node's cores + 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub start_concurrency: Option<u32>,
    /// Sessions opened at a time on a node. Absent: the node's cores + 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub preconnect_concurrency: Option<u32>,
    /// When a session is opened for the first client: WhileWarming, OnLease or Never.
    #[serde(default)]
    pub preconnect: Preconnect,
    /// Start-up parameters of that session, such as client_encoding: UTF8, for a client that sends just these to take it over. Absent: those that the pool's last client sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "session_parameters_schema")]
    pub session_parameters: Option<BTreeMap<String, String>>,
    /// A branch that takes longer than this to become ready is given up and made anew.
    #[serde(default = "two_minutes")]
    #[schemars(extend("x-kubernetes-validations" = duration_of_at_least("1s")))]
    pub stale_after: Duration,
}

impl Default for Warming {
    fn default() -> Self {
        Self {
            mode: WarmingMode::default(),
            snapshot_concurrency: sixteen(),
            start_concurrency: None,
            preconnect_concurrency: None,
            preconnect: Preconnect::default(),
            session_parameters: None,
            stale_after: two_minutes(),
        }
    }
}

/// What a session that is opened ahead of its client cannot have, or has already.
const NO_SESSION_PARAMETERS: &str = "user|database|replication|options|role|session_authorization|\
    session_preload_libraries|local_preload_libraries";

fn session_parameters_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 16,
        "additionalProperties": {"type": "string", "maxLength": 256},
        "x-kubernetes-validations": [
            rule(
                "self.all(key, key.matches('^[A-Za-z_][A-Za-z0-9_]{0,62}([.][A-Za-z_][A-Za-z0-9_]{0,62})?$'))",
                "write the names of sessionParameters as clients send them, such as client_encoding or TimeZone",
            ),
            rule(
                &format!("!self.exists(key, key.matches('^({NO_SESSION_PARAMETERS})$'))"),
                "role, database, replication, options and preloaded libraries cannot be set ahead of a client: take them out of sessionParameters",
            ),
            rule(
                "self.all(key, self[key].matches('^[^\\x00-\\x1f\\x7f]*$'))",
                "a parameter's value is one line without control characters: correct the values of sessionParameters",
            ),
        ],
    })
}

fn sixteen() -> u32 {
    16
}

fn two_minutes() -> Duration {
    Duration::literal("2m", 120 * SECOND)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WarmingMode {
    #[default]
    Phased,
    Pipelined,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Preconnect {
    #[default]
    WhileWarming,
    OnLease,
    Never,
}

/// What servers in branches may reach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Network {
    /// Whether servers may open connections outward, for foreign data wrappers or dblink: Deny or Allow.
    #[serde(default)]
    pub outbound: Outbound,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Outbound {
    #[default]
    Deny,
    Allow,
}

/// How long branches are handed out for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = [
    durations_in_order("defaultTTL", "maxTTL"),
    durations_in_order("maxTTL", "maxLifetime"),
]))]
pub struct LeasePolicy {
    /// Term of a lease that names none, counted from the hand-over.
    #[serde(rename = "defaultTTL", default = "one_hour")]
    #[schemars(extend("x-kubernetes-validations" = duration_of_at_least("1s")))]
    pub default_ttl: Duration,
    /// Longest term that a lease or a renewal may ask for.
    #[serde(rename = "maxTTL", default = "one_day")]
    #[schemars(extend("x-kubernetes-validations" = duration_of_at_least("1s")))]
    pub max_ttl: Duration,
    /// Longest time that a lease lasts, renewals included.
    #[serde(default = "one_week")]
    #[schemars(extend("x-kubernetes-validations" = duration_of_at_least("1s")))]
    pub max_lifetime: Duration,
    /// How long a lease waits for a branch, or for its pool to exist, before it fails.
    #[serde(default = "five_minutes")]
    pub admission_wait: Duration,
    /// How long a finished BranchLease is kept for reading before it is deleted.
    #[serde(default = "one_hour")]
    pub retain_finished: Duration,
    /// A server that nobody used for this long is stopped; the next connection starts it again. Absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-kubernetes-validations" = duration_of_at_least("1s")))]
    pub idle_timeout: Option<Duration>,
    /// What a connection is that sends nothing: InUse keeps the server running, Idle lets it be stopped, which ends the connection.
    #[serde(default)]
    pub open_connections: OpenConnections,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OpenConnections {
    #[default]
    InUse,
    Idle,
}

impl Default for LeasePolicy {
    fn default() -> Self {
        Self {
            default_ttl: one_hour(),
            max_ttl: one_day(),
            max_lifetime: one_week(),
            admission_wait: five_minutes(),
            retain_finished: one_hour(),
            idle_timeout: None,
            open_connections: OpenConnections::InUse,
        }
    }
}

fn five_minutes() -> Duration {
    Duration::literal("5m", 300 * SECOND)
}

fn one_hour() -> Duration {
    Duration::literal("1h", HOUR)
}

fn one_day() -> Duration {
    Duration::literal("24h", 24 * HOUR)
}

fn one_week() -> Duration {
    Duration::literal("168h", 168 * HOUR)
}

/// What happens to branches that were given back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Cleanup {
    /// Servers stopped at a time on a node.
    #[serde(default = "four")]
    #[schemars(range(min = 1, max = 256))]
    pub concurrency: u32,
    /// Wait between a release and the stop of the server.
    #[serde(default = "at_once")]
    pub start_delay: Duration,
    /// Immediate: stop without a checkpoint, the data goes anyway. Fast: end sessions and write a checkpoint.
    #[serde(default)]
    pub stop_mode: StopMode,
    /// The wait between stop and physical deletion.
    #[serde(default)]
    pub tombstones: Tombstones,
}

impl Default for Cleanup {
    fn default() -> Self {
        Self {
            concurrency: four(),
            start_delay: at_once(),
            stop_mode: StopMode::default(),
            tombstones: Tombstones::default(),
        }
    }
}

fn four() -> u32 {
    4
}

fn at_once() -> Duration {
    Duration::literal("0s", 0)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum StopMode {
    #[default]
    Immediate,
    Fast,
}

/// Stopped branches that wait for deletion. When space is short they go at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tombstones {
    /// Time that a stopped branch is kept before it is deleted.
    #[serde(default = "thirty_seconds")]
    pub delay: Duration,
    /// Deletions at a time on a node; more slow down leased branches.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 16))]
    pub concurrency: u32,
    /// Most tombstones of the pool on a node; beyond it the oldest go before their delay is over.
    #[serde(default = "max_tombstones")]
    #[schemars(range(min = 0, max = 100_000))]
    pub max_count: u32,
    /// Most bytes held by tombstones of the pool on a node; beyond it the oldest go before their delay is over.
    #[serde(default = "max_tombstone_bytes")]
    pub max_bytes: Quantity,
}

impl Default for Tombstones {
    fn default() -> Self {
        Self {
            delay: thirty_seconds(),
            concurrency: one(),
            max_count: max_tombstones(),
            max_bytes: max_tombstone_bytes(),
        }
    }
}

fn thirty_seconds() -> Duration {
    Duration::literal("30s", 30 * SECOND)
}

fn one() -> u32 {
    1
}

fn max_tombstones() -> u32 {
    500
}

fn max_tombstone_bytes() -> Quantity {
    Quantity::literal("10Gi", 10 << 30)
}
