use branchpool_agent_api::{Condition as Told, GoldenStatus};
use branchpool_crds::Placement;

use super::*;
use crate::plan::leases::sample;

fn serving(ready: u32, leased: u32) -> PoolStatus {
    PoolStatus {
        conditions: vec![Told::new("Ready", true, "Serving", "serving")],
        ..sample::pool(ready, leased)
    }
}

fn part<'a>(node: &str, standing: Standing, pool: Option<&'a PoolStatus>) -> Part<'a> {
    Part {
        node: node.into(),
        standing,
        pool,
        refusal: None,
    }
}

fn view<'a>(parts: &'a [Part<'a>]) -> View<'a> {
    View {
        uid: "pool",
        generation: 1,
        demand: Demand {
            replicas: 8,
            max_branches: 40,
            placement: Placement::Spread,
        },
        source_trouble: None,
        fleet_trouble: None,
        parts,
    }
}

fn told(status: &BranchPoolStatus) -> Vec<String> {
    let line = |condition: &Condition| {
        let (kind, status, reason) = (&condition.type_, &condition.status, &condition.reason);
        format!("{kind}={status}/{reason}")
    };
    status.conditions.iter().map(line).collect()
}

#[test]
fn counts_add_up_and_nothing_new_is_no_write() {
    let (a, b) = (serving(4, 1), serving(4, 2));
    let parts = [
        part("a", Standing::Eligible, Some(&a)),
        part("b", Standing::Eligible, Some(&b)),
    ];
    let first = status(&view(&parts), &BranchPoolStatus::default(), 1_000).unwrap();
    assert_eq!((first.ready, first.leased, first.nodes), (8, 3, 2));
    assert_eq!(first.observed_generation, 1);
    assert_eq!(
        told(&first),
        [
            "Ready=True/Serving",
            "SourceReady=True/Sealed",
            "Available=True/BranchReady",
            "Progressing=False/Settled",
            "Degraded=False/AsExpected",
        ]
    );
    assert_eq!(status(&view(&parts), &first, 99_000), None);
}

#[test]
fn ready_does_not_flap_when_the_last_branch_is_leased() {
    let empty = serving(0, 8);
    let parts = [part("a", Standing::Eligible, Some(&empty))];
    let status = status(&view(&parts), &BranchPoolStatus::default(), 0).unwrap();
    assert_eq!(told(&status)[0], "Ready=True/Serving");
    assert_eq!(told(&status)[2], "Available=False/NoBranchReady");
}

/// The conditions as words, and the message of `kind`.
fn lines(view: &View<'_>, kind: &str) -> (Vec<String>, String) {
    let status = status(view, &BranchPoolStatus::default(), 0).unwrap();
    let found = status.conditions.iter().find(|found| found.type_ == kind);
    (told(&status), found.unwrap().message.clone())
}

#[test]
fn each_trouble_has_its_reason() {
    let good = serving(4, 0);
    let why = "script items: syntax error";
    let failed = PoolStatus {
        golden: GoldenStatus {
            phase: GoldenPhase::Failed,
            generation: 0,
            message: Some(why.into()),
            bytes: 0,
        },
        conditions: vec![Told::new("SourceReady", false, "BuildFailed", why)],
        ..sample::pool(0, 0)
    };
    let (lonely, _) = lines(&view(&[]), "Ready");
    assert_eq!(lonely[0], "Ready=False/NoAgents");
    assert_eq!(lonely[4], "Degraded=True/NoAgents");
    let (unfit, _) = lines(&view(&[part("a", Standing::Unfit, None)]), "Ready");
    assert_eq!(unfit[0], "Ready=False/NoEligibleNodes");
    let (broken, message) = lines(
        &view(&[part("a", Standing::Eligible, Some(&failed))]),
        "Ready",
    );
    assert_eq!(broken[0], "Ready=False/BuildFailed");
    assert_eq!(message, "script items: syntax error (node a)");
    let (silent, message) = lines(
        &view(&[
            part("a", Standing::Eligible, Some(&good)),
            part("b", Standing::Silent, Some(&good)),
        ]),
        "Degraded",
    );
    assert_eq!(silent[4], "Degraded=True/NodesUnreachable");
    assert!(message.starts_with("the agents of b do not answer"));
    let mut refused = part("a", Standing::Eligible, None);
    refused.refusal = Some("spec.postgres.version: Postgres 99 is not installed");
    let (refused, _) = lines(&view(&[refused]), "SourceReady");
    assert_eq!(refused[1], "SourceReady=False/Refused");
    let parts = [part("a", Standing::Eligible, Some(&good))];
    let (missing, _) = lines(
        &View {
            source_trouble: Some(("ConfigMapNotFound", "there is no ConfigMap schema")),
            ..view(&parts)
        },
        "SourceReady",
    );
    assert_eq!(missing[1], "SourceReady=False/ConfigMapNotFound");
    let (short, _) = lines(&view(&parts), "Degraded");
    assert_eq!(short[4], "Degraded=True/NotEnoughRoom");
}

#[test]
fn the_generation_is_observed_when_every_node_has_it() {
    let (new, old) = (
        PoolStatus {
            observed_generation: 2,
            ..serving(4, 0)
        },
        serving(4, 0),
    );
    let both = [
        part("a", Standing::Eligible, Some(&new)),
        part("b", Standing::Eligible, Some(&old)),
    ];
    let one = [part("a", Standing::Eligible, Some(&new))];
    let before = BranchPoolStatus {
        observed_generation: 1,
        ..BranchPoolStatus::default()
    };
    for (parts, observed) in [(&both[..], 1), (&one[..], 2)] {
        let newer = View {
            generation: 2,
            ..view(parts)
        };
        let status = status(&newer, &before, 0).unwrap();
        assert_eq!(status.observed_generation, observed);
    }
}
