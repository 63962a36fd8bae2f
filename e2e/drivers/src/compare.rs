//! What is wrong with the results of a driver.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
};

use serde_json::Value;

use crate::{Driver, Results};

/// Checks whose results depend on the server and the driver: they are compared between two runs only.
const DEPENDENT: [&str; 2] = ["connect", "parameters"];

/// What every driver must get, for each of the other checks.
static EXPECTED: LazyLock<BTreeMap<String, Value>> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../expected.json")).expect("expected.json should be JSON")
});

/// The names of all checks.
pub fn checks() -> impl Iterator<Item = &'static str> {
    DEPENDENT
        .into_iter()
        .chain(EXPECTED.keys().map(String::as_str))
}

/// A line for each result of `driver` that is missing, failed, not what is expected, or not the same
/// `through` the server under test as it is `direct`.
pub fn problems(driver: Driver, through: &Results, direct: &Results) -> Vec<String> {
    let given: BTreeSet<_> = through.keys().chain(direct.keys()).collect();
    let unknown = given
        .into_iter()
        .filter(|name| !checks().any(|known| known == name.as_str()))
        .map(|name| format!("{driver}, {name}: compare.rs does not know this check"));
    checks()
        .filter_map(|name| problem(driver, name, through.get(name), direct.get(name)))
        .chain(unknown)
        .collect()
}

fn problem(
    driver: Driver,
    name: &str,
    through: Option<&Value>,
    direct: Option<&Value>,
) -> Option<String> {
    let said = |what: &str| Some(format!("{driver}, {name}: {what}"));
    let (Some(through), Some(direct)) = (through, direct) else {
        return said("the program gives no result");
    };
    if through != direct {
        return said(&format!("through: {through}; direct: {direct}"));
    }
    if let Some(message) = through.get("failed") {
        return said(&format!("failed in both runs: {message}"));
    }
    let reason = through.get("unsupported");
    match (reason, driver.unsupported().contains(&name)) {
        (Some(reason), false) => said(&format!("unexpectedly unsupported: {reason}")),
        (None, true) => said(&format!("supported, against driver.rs: {through}")),
        (Some(_), true) => None,
        (None, false) => match EXPECTED.get(name) {
            Some(expected) if expected != through => {
                said(&format!("{through} in both runs; expected: {expected}"))
            }
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn good() -> Results {
        let dependent = DEPENDENT.map(|name| (name.to_owned(), json!({"row": [1]})));
        EXPECTED.clone().into_iter().chain(dependent).collect()
    }

    fn with(name: &str, value: Value) -> Results {
        let mut results = good();
        results.insert(name.to_owned(), value);
        results
    }

    #[test]
    fn good_results_are_no_problem() {
        assert_eq!(
            problems(Driver::Psycopg, &good(), &good()),
            Vec::<String>::new()
        );
    }

    #[test]
    fn each_kind_of_problem_is_named() {
        let one = |driver, through: &Results, direct: &Results| {
            let problems = problems(driver, through, direct);
            assert_eq!(problems.len(), 1, "{problems:?}");
            problems.into_iter().next().unwrap()
        };
        let same = |driver, results: &Results| one(driver, results, results);

        let other = with("connect", json!({"row": [2]}));
        assert!(one(Driver::Psycopg, &other, &good()).contains("through: {\"row\":[2]}; direct"));
        let failed = with("copy", json!({"failed": "EOF"}));
        assert!(same(Driver::Psycopg, &failed).contains("copy: failed in both runs: \"EOF\""));
        let unsupported = with("pool", json!({"unsupported": "no pool"}));
        assert!(same(Driver::Psycopg, &unsupported).contains("unexpectedly unsupported"));
        let wrong = with("connects", json!({"sum": 1}));
        assert!(same(Driver::Psycopg, &wrong).contains("expected: {\"sum\":499500}"));
        assert!(same(Driver::Psycopg, &with("more", json!(1))).contains("does not know"));
        assert!(same(Driver::Pgx, &good()).contains("latin1: supported, against driver.rs"));
        let mut less = good();
        less.remove("copy");
        assert!(one(Driver::Psycopg, &less, &good()).contains("copy: the program gives no result"));
    }
}
