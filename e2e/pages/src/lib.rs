//! A program's page of metrics, for a test of the program: it writes the page with `make generate`, and
//! fails otherwise when the page is another one.

#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

use std::{collections::BTreeSet, env, fmt::Write as _, fs, path::Path};

const HEAD: &str = "\n| Metric | Kind | Labels | What |\n|---|---|---|---|\n";

/// `text` has a value in each family, for empty ones are left out of it.
pub fn metrics(introduction: &str, text: &str) -> String {
    let mut page = format!("{introduction}{HEAD}");
    let mut help = "";
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = rest.split_once(' ').unwrap().1.trim_end_matches('.');
        }
        let Some((name, kind)) = line
            .strip_prefix("# TYPE ")
            .and_then(|rest| rest.split_once(' '))
        else {
            continue;
        };
        let suffix = if kind == "counter" { "_total" } else { "" };
        let labels: Vec<String> = labels(text, name)
            .into_iter()
            .map(|label| format!("`{label}`"))
            .collect();
        let labels = labels.join(", ");
        writeln!(page, "| `{name}{suffix}` | {kind} | {labels} | {help} |").unwrap();
    }
    page
}

/// How many metrics a page lists.
pub fn rows(page: &str) -> usize {
    page.lines().filter(|line| line.starts_with("| `")).count()
}

/// How many metrics the fields of `struct Metrics` hold, in the source of a module.
pub fn fields(source: &str) -> usize {
    let rest = source.split("struct Metrics {").nth(1).unwrap();
    let fields = rest.split_once("\n}").unwrap().0.lines();
    let fields = fields.filter(|line| line.contains(": "));
    let is_metric = |line: &&str| !line.contains("registry") && !line.contains("::Metrics");
    fields.filter(is_metric).count()
}

/// `name` below `docs`.
pub fn check(name: &str, page: &str) {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
    let path = Path::new(directory).join(name);
    if env::var_os("BRANCHPOOL_GENERATE").is_some() {
        fs::write(&path, page).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        found, page,
        "docs/{name} is out of date: run `make generate` and commit the result"
    );
}

/// Names of the labels on the samples of a metric.
fn labels(text: &str, name: &str) -> BTreeSet<String> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let own = samples.filter_map(|line| line.strip_prefix(name)?.split_once('{'));
    own.flat_map(|(_, rest)| rest.split(','))
        .filter_map(|label| Some(label.split_once('=')?.0.to_owned()))
        .filter(|label| label != "le")
        .collect()
}
