//! Figures, their table, and the file with the raw samples and where they come from.

use std::{
    fmt::{self, Write as _},
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use serde::Serialize;
use serde_json::json;
use snafu::ResultExt;

use crate::{error::Result, machine::Machine, options::Options};

pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Processes that want to run, of the last minute.
pub(crate) fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split(' ').next().and_then(|load| load.parse().ok());
    first.unwrap_or(f64::NAN)
}

fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values
}

pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let values = sorted(values);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        even if even % 2 == 0 => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

/// Paired ratios of the variant to the floor.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Ratio {
    median: f64,
    min: f64,
    max: f64,
}

impl Ratio {
    /// Of one figure of each pair's latencies.
    pub(crate) fn of_latencies<S: Timed>(
        variant: &[S],
        floor: &[S],
        figure: fn(Latencies) -> f64,
    ) -> Self {
        let each = |sample: &S| figure(sample.latencies());
        Self::of(variant.iter().map(each), floor.iter().map(each))
    }

    pub(crate) fn of(
        variant: impl IntoIterator<Item = f64>,
        floor: impl IntoIterator<Item = f64>,
    ) -> Self {
        let ratios = sorted(
            variant
                .into_iter()
                .zip(floor)
                .map(|(one, other)| one / other),
        );
        Self {
            median: median(ratios.iter().copied()),
            min: ratios.first().copied().unwrap_or(f64::NAN),
            max: ratios.last().copied().unwrap_or(f64::NAN),
        }
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{:.2} [{:.2}-{:.2}]",
            self.median, self.min, self.max
        )
    }
}

/// A sample that holds the latencies of many, in milliseconds.
pub(crate) trait Timed {
    fn latencies_ms(&self) -> &[f64];

    fn latencies(&self) -> Latencies {
        Latencies::of(self.latencies_ms().iter().copied())
    }
}

/// Of raw samples, by nearest rank.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Latencies {
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Latencies {
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let values = sorted(values);
        let rank = |percent: usize| {
            let rank = (values.len() * percent).div_ceil(100).max(1) - 1;
            values.get(rank).copied().unwrap_or(f64::NAN)
        };
        Self {
            p50: rank(50),
            p95: rank(95),
            p99: rank(99),
            max: rank(100),
        }
    }

    pub(crate) fn of_all(samples: &[impl Timed]) -> Self {
        Self::of(samples.iter().flat_map(Timed::latencies_ms).copied())
    }
}

/// A table of text.
#[derive(Debug)]
pub(crate) struct Table {
    title: String,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(title: &str, head: &[impl AsRef<str>]) -> Self {
        let head = head.iter().map(|cell| cell.as_ref().to_owned()).collect();
        Self {
            title: title.to_owned(),
            rows: vec![head],
        }
    }

    pub(crate) fn row(&mut self, cells: &[String]) {
        self.rows.push(cells.to_vec());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        writeln!(formatter, "{}", self.title)?;
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate().take(columns) {
                write!(line, "{cell:<width$}  ", width = width(column))?;
            }
            writeln!(formatter, "  {}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Writes the file whole or not at all.
pub(crate) fn write(
    name: &str,
    machine: &Machine,
    options: &Options,
    checks: &[&str],
    samples: &impl Serialize,
) -> Result<PathBuf> {
    let report = json!({
        "name": name,
        "date": jiff::Timestamp::now().to_string(),
        "provenance": provenance(machine, options),
        "knobs": options,
        "checks_passed": checks,
        "samples": samples,
    });
    fs::create_dir_all(&options.output).whatever_context("cannot make the results' directory")?;
    let path = options.output.join(format!("{name}.json"));
    let file = tempfile::NamedTempFile::new_in(&options.output)
        .whatever_context("cannot write the results")?;
    serde_json::to_writer_pretty(&file, &report).whatever_context("cannot write the results")?;
    file.persist(&path)
        .whatever_context("cannot write the results")?;
    Ok(path)
}

fn provenance(machine: &Machine, options: &Options) -> serde_json::Value {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let models: Vec<&str> = cpus
        .lines()
        .filter_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map(|(_, model)| model)
        .collect();
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let program = format!("/usr/lib/postgresql/{}/bin/postgres", options.major);
    json!({
        "commit": output("git", &["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]),
        "profile": if cfg!(debug_assertions) { "debug" } else { "release" },
        "kernel": rustix::system::uname().release().to_string_lossy(),
        "cpu": models.first(),
        "cpus": models.len(),
        "memory": memory.lines().next(),
        "filesystem": mount_of(machine.root()),
        "postgres": output(&program, &["--version"]),
        "load_at_the_end": load(),
    })
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Kind and mount options.
fn mount_of(root: &Path) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let point = root.to_string_lossy();
    let line = mounts
        .lines()
        .find(|line| line.split(' ').nth(4) == Some(&point))?;
    let (own, rest) = line.split_once(" - ")?;
    let mut rest = rest.split(' ');
    let (kind, options) = (rest.next()?, rest.nth(1)?);
    Some(format!(
        "{kind} in a file, {}, {options}",
        own.split(' ').nth(5)?
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let latencies = Latencies::of((1..=100).rev().map(f64::from));
        let text = |latencies| serde_json::to_string(&latencies).unwrap();
        let expected = r#"{"p50":50.0,"p95":95.0,"p99":99.0,"max":100.0}"#;
        assert_eq!(text(latencies), expected);
        let one = Latencies::of([7.0]);
        assert_eq!(text(one), r#"{"p50":7.0,"p95":7.0,"p99":7.0,"max":7.0}"#);
    }

    #[test]
    fn ratios_are_of_pairs() {
        let ratio = Ratio::of([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]);
        assert_eq!(ratio.to_string(), "2.00 [1.00-3.00]");
        assert_eq!(median([1.0, 4.0]).to_string(), "2.5");
    }
}
