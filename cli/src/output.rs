//! What is printed: tables with kubectl's look, or the API's objects as JSON or YAML.

use std::{
    fmt::Write as _,
    io::{self, Write as _},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use branchpool_agent_api::{Condition, GoldenPhase, Lease, NodeStatus, PoolStatus};
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use snafu::ResultExt;

use crate::{
    args::Format,
    duration,
    error::{CliError, JsonSnafu, OutputSnafu, YamlSnafu},
};

/// To standard output. A reader that has seen enough, such as `head`, is no failure.
pub(crate) fn print(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context(OutputSnafu),
    }
}

pub(crate) fn formatted<T: Serialize>(format: Format, value: &T) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let json = serde_json::to_string_pretty(value).context(JsonSnafu)?;
            Ok(format!("{json}\n"))
        }
        Format::Yaml => {
            let yaml = serde_saphyr::to_string(value).context(YamlSnafu)?;
            Ok(format!("{}\n", yaml.trim_end()))
        }
    }
}

/// `formatted` if a format was asked for, `human` otherwise.
pub(crate) fn show<T: Serialize>(
    format: Option<Format>,
    value: &T,
    human: impl FnOnce() -> String,
) -> Result<(), CliError> {
    match format {
        Some(format) => print(&formatted(format, value)?),
        None => print(&human()),
    }
}

fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header)
        .add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 3));
    }
    format!("{}\n", table.trim_fmt())
}

pub(crate) fn pools(pools: &[PoolStatus]) -> String {
    if pools.is_empty() {
        return "No pools found.\n".to_owned();
    }
    let header = [
        "NAMESPACE",
        "NAME",
        "READY",
        "WARMING",
        "LEASED",
        "MAX",
        "GOLDEN",
        "STATUS",
    ];
    let rows = pools.iter().map(|pool| {
        [
            pool.name.namespace.clone(),
            pool.name.name.clone(),
            format!("{}/{}", pool.ready, pool.desired),
            pool.warming.to_string(),
            pool.leased.to_string(),
            pool.max_branches.to_string(),
            golden(pool),
            status(&pool.conditions),
        ]
    });
    table(header, rows)
}

fn golden(pool: &PoolStatus) -> String {
    match (pool.golden.phase, pool.golden.generation) {
        (GoldenPhase::Sealed, generation) => generation.to_string(),
        (phase, 0) => format!("{phase:?}"),
        (phase, generation) => format!("{generation} ({phase:?})"),
    }
}

/// `Ready`, or the reason why not.
fn status(conditions: &[Condition]) -> String {
    match conditions
        .iter()
        .find(|condition| condition.kind == "Ready")
    {
        None => "Unknown".to_owned(),
        Some(condition) if condition.status == "True" => "Ready".to_owned(),
        Some(condition) => condition.reason.clone(),
    }
}

/// One pool, with what its conditions say.
pub(crate) fn pool(pool: &PoolStatus) -> String {
    let mut text = pools(std::slice::from_ref(pool));
    if let Some(message) = &pool.golden.message {
        let _ = writeln!(text, "\nGolden image: {message}");
    }
    if !pool.conditions.is_empty() {
        let _ = write!(text, "\n{}", conditions(&pool.conditions));
    }
    text
}

fn conditions(conditions: &[Condition]) -> String {
    let rows = conditions.iter().map(|condition| {
        [
            condition.kind.clone(),
            condition.status.clone(),
            condition.reason.clone(),
            condition.message.clone(),
        ]
    });
    table(["CONDITION", "STATUS", "REASON", "MESSAGE"], rows)
}

pub(crate) fn leases(leases: &[Lease], now: u64) -> String {
    if leases.is_empty() {
        return "No leases found.\n".to_owned();
    }
    let rows = leases.iter().map(|lease| {
        let phase = match &lease.reason {
            Some(reason) => format!("{:?} ({reason})", lease.phase),
            None => format!("{:?}", lease.phase),
        };
        [
            lease.uid.clone(),
            lease.pool.to_string(),
            phase,
            lease.branch.clone(),
            span(lease.bound_at, now),
            span(now, lease.expires_at),
            clients(lease),
            last_used(lease, now),
            lease.holder.clone().unwrap_or_else(|| "<none>".to_owned()),
        ]
    });
    let header = [
        "ID",
        "POOL",
        "PHASE",
        "BRANCH",
        "AGE",
        "EXPIRES-IN",
        "CLIENTS",
        "LAST-USED",
        "HOLDER",
    ];
    table(header, rows)
}

/// Told by a node with a gateway, of bound leases.
fn clients(lease: &Lease) -> String {
    let told = lease.connections.map(|count| count.to_string());
    told.unwrap_or_else(|| "<unknown>".to_owned())
}

fn last_used(lease: &Lease, now: u64) -> String {
    match (lease.connections, lease.last_used_at) {
        (None, _) => "<unknown>".to_owned(),
        (Some(_), None) => "<never>".to_owned(),
        (Some(_), Some(at)) => span(at, now),
    }
}

pub(crate) fn node(node: &NodeStatus) -> String {
    let majors: Vec<_> = node.postgres_majors.iter().map(u32::to_string).collect();
    let isolation = &node.isolation;
    let level = match &*isolation.missing {
        [] => isolation.level.clone(),
        missing => format!("{} ({})", isolation.level, missing.join("; ")),
    };
    let space = node.space;
    let facts = [
        ["Name:", &node.name],
        ["Version:", &node.version],
        ["Ready:", yes_or_no(node.ready)],
        [
            "Snapshots:",
            &format!(
                "{}, {}",
                node.provider,
                if node.can_snapshot {
                    "possible"
                } else {
                    "held back"
                }
            ),
        ],
        [
            "Postgres:",
            &if majors.is_empty() {
                "none found".to_owned()
            } else {
                majors.join(", ")
            },
        ],
        [
            "Branches:",
            &format!("{} of at most {}", node.branches, node.max_branches),
        ],
        ["Leases:", &node.leases.to_string()],
        [
            "Space:",
            &format!(
                "{} used of {}, {} unallocated",
                bytes(space.used),
                bytes(space.total),
                bytes(space.unallocated)
            ),
        ],
        ["Isolation:", &level],
    ];
    let mut text = String::new();
    for [name, value] in facts {
        let _ = writeln!(text, "{name:<12}{value}");
    }
    for gate in &node.gates {
        let _ = writeln!(
            text,
            "{:<12}{}: {}",
            "Held back:", gate.reason, gate.message
        );
    }
    if !node.conditions.is_empty() {
        let _ = write!(text, "\n{}", conditions(&node.conditions));
    }
    if !node.quarantined.is_empty() {
        let rows = node.quarantined.iter().map(|found| {
            [
                found.path.clone(),
                found.reason.clone(),
                found.message.clone(),
            ]
        });
        let _ = write!(
            text,
            "\n{}",
            table(["QUARANTINED", "REASON", "MESSAGE"], rows)
        );
    }
    text
}

fn yes_or_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

/// What a pool is doing, on one line.
pub(crate) fn progress(pool: &PoolStatus) -> String {
    let name = &pool.name;
    let golden = &pool.golden;
    if golden.generation == 0 {
        let doing = match golden.phase {
            GoldenPhase::Failed => "the golden image failed",
            _ => "the golden image is being built",
        };
        return match &golden.message {
            Some(message) => format!("{name}: {doing}: {message}"),
            None => format!("{name}: {doing}"),
        };
    }
    let mut text = format!("{name}: {} of {} ready", pool.ready, pool.desired);
    for (count, doing) in [
        (pool.snapshotting, "snapshotting"),
        (pool.starting, "starting"),
        (pool.preconnecting, "connecting"),
        (pool.leased, "leased"),
    ] {
        if count > 0 {
            let _ = write!(text, ", {count} {doing}");
        }
    }
    text
}

/// Milliseconds since the Unix epoch.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// From one time to another, both in milliseconds; 0 when it is the other way round.
pub(crate) fn span(from: u64, to: u64) -> String {
    duration::show(Duration::from_millis(to.saturating_sub(from)))
}

#[allow(clippy::cast_precision_loss)] // One digit after the point is shown.
fn bytes(count: u64) -> String {
    let mut value = count as f64;
    let mut units = ["B", "KiB", "MiB", "GiB", "TiB"].into_iter();
    let mut unit = units.next().unwrap_or_default();
    for larger in units {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    if unit == "B" {
        format!("{count}B")
    } else {
        format!("{value:.1}{unit}")
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
pub(crate) mod tests;
