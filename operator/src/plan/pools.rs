//! What a pool's nodes are told, and what its status says of them.

use std::{collections::BTreeMap, fmt::Write as _};

use branchpool_agent_api::{GoldenPhase, PoolStatus};
use branchpool_crds::{BranchPoolStatus, SourcePhase, SourceStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::{
    Millis, NodeName,
    nodes::with_times,
    placement::{Demand, Standing},
};

/// Characters of a condition's message; agents' own may be longer.
const MESSAGE_LIMIT: usize = 1_024;

/// One node, to one pool.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    pub node: NodeName,
    pub standing: Standing,
    /// What its agent last said of the pool.
    pub pool: Option<&'a PoolStatus>,
    /// Its agent's refusal of what it was told.
    pub refusal: Option<&'a str>,
}

/// A pool as it stands.
#[derive(Clone, Debug)]
pub struct View<'a> {
    pub uid: &'a str,
    pub generation: i64,
    pub demand: Demand,
    /// Why its source cannot even be sent to nodes: reason and sentence.
    pub source_trouble: Option<(&'a str, &'a str)>,
    /// Why there is no agent at all, where that is known.
    pub fleet_trouble: Option<(&'a str, &'a str)>,
    pub parts: &'a [Part<'a>],
}

struct Totals {
    ready: u32,
    /// Of nodes that can be asked now.
    at_hand: u32,
    warming: u32,
    leased: u32,
    cleaning: u32,
    tombstones: u32,
    stale: u32,
    desired: u32,
    nodes: u32,
    generation: u64,
    bytes: u64,
}

/// The status to write, if it differs from the one there is.
pub fn status(view: &View<'_>, before: &BranchPoolStatus, now: Millis) -> Option<BranchPoolStatus> {
    let totals = totals(view);
    let observed = observed_generation(view, before);
    let mut conditions = conditions(view, &totals);
    for condition in &mut conditions {
        condition.observed_generation = Some(observed);
    }
    with_times(&mut conditions, &before.conditions, now);
    let status = BranchPoolStatus {
        observed_generation: observed,
        replicas: totals.ready + totals.warming,
        ready: totals.ready,
        warming: totals.warming,
        leased: totals.leased,
        cleaning: totals.cleaning,
        tombstones: totals.tombstones,
        stale: totals.stale,
        desired: totals.desired,
        nodes: totals.nodes,
        generation: i64::try_from(totals.generation).unwrap_or(i64::MAX),
        source: Some(source_status(view, &totals)),
        selector: Some(format!("branchpool.dev/pool-uid={}", view.uid)),
        conditions,
    };
    (status != *before).then_some(status)
}

fn totals(view: &View<'_>) -> Totals {
    let mut totals = Totals {
        ready: 0,
        at_hand: 0,
        warming: 0,
        leased: 0,
        cleaning: 0,
        tombstones: 0,
        stale: 0,
        desired: 0,
        nodes: 0,
        generation: 0,
        bytes: 0,
    };
    for part in view.parts {
        let Some(pool) = part.pool else { continue };
        totals.ready += pool.ready;
        if part.reachable() {
            totals.at_hand += pool.ready;
        }
        totals.warming += pool.warming;
        totals.leased += pool.leased;
        totals.cleaning += pool.cleaning;
        totals.tombstones += pool.tombstones;
        totals.stale += pool.stale;
        totals.desired += pool.desired;
        let holds = pool.ready + pool.warming + pool.leased + pool.cleaning > 0;
        totals.nodes += u32::from(holds);
        totals.generation = totals.generation.max(pool.golden.generation);
        totals.bytes = totals.bytes.max(pool.golden.bytes);
    }
    totals
}

impl Part<'_> {
    fn reachable(&self) -> bool {
        matches!(self.standing, Standing::Eligible | Standing::Pressed)
    }
}

/// That of the spec which every node in use has taken in, or refused.
fn observed_generation(view: &View<'_>, before: &BranchPoolStatus) -> i64 {
    if view.source_trouble.is_some() {
        return view.generation;
    }
    let in_use: Vec<_> = view.parts.iter().filter(|part| part.reachable()).collect();
    let answered = in_use.iter().all(|part| {
        let observed = part.pool.map(|pool| pool.observed_generation);
        part.refusal.is_some()
            || observed.is_none_or(|at| i64::try_from(at).is_ok_and(|at| at >= view.generation))
    });
    if answered && !in_use.is_empty() {
        view.generation
    } else {
        before.observed_generation
    }
}

fn condition(kind: &str, holds: bool, reason: &str, message: impl AsRef<str>) -> Condition {
    Condition {
        type_: kind.to_owned(),
        status: if holds { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message: message.as_ref().chars().take(MESSAGE_LIMIT).collect(),
        observed_generation: None,
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
    }
}

fn conditions(view: &View<'_>, totals: &Totals) -> Vec<Condition> {
    let source = source_ready(view);
    let nowhere = nowhere(view);
    let ready = match (&nowhere, is_proven(view)) {
        (Some((reason, message)), _) => condition("Ready", false, reason, message),
        (None, true) => condition(
            "Ready",
            true,
            "Serving",
            "branches of the pool are handed out",
        ),
        (None, false) if source.status == "False" => {
            condition("Ready", false, &source.reason, &source.message)
        }
        (None, false) => {
            let why = agents_say(view, "Ready", "False")
                .unwrap_or_else(|| "the first branches are being made".to_owned());
            condition("Ready", false, "NotYetFilled", why)
        }
    };
    let available = if totals.at_hand > 0 {
        condition(
            "Available",
            true,
            "BranchReady",
            "a lease now is answered at once",
        )
    } else {
        let why = nowhere
            .map(|(_, message)| message)
            .or_else(|| agents_say(view, "Available", "False"))
            .unwrap_or_else(|| "no branch is ready".to_owned());
        condition("Available", false, "NoBranchReady", why)
    };
    vec![
        ready,
        source,
        available,
        progressing(view, totals),
        degraded(view, totals),
    ]
}

/// Some branch of the pool was ready once and nothing speaks against another, or none is wanted.
fn is_proven(view: &View<'_>) -> bool {
    let mut pools = view.parts.iter().filter_map(|part| part.pool);
    let sealed = |pool: &PoolStatus| pool.golden.generation > 0;
    if view.demand.replicas == 0 {
        return pools.any(sealed);
    }
    pools.any(|pool| says(pool, "Ready", "True"))
}

fn says(pool: &PoolStatus, kind: &str, status: &str) -> bool {
    let mut conditions = pool.conditions.iter();
    conditions.any(|condition| condition.kind == kind && condition.status == status)
}

/// Each node's message of a condition, the same one once.
fn agents_say(view: &View<'_>, kind: &str, status: &str) -> Option<String> {
    let mut nodes_by_message: BTreeMap<&str, Vec<&NodeName>> = BTreeMap::new();
    for part in view.parts.iter().filter(|part| part.reachable()) {
        let conditions = part.pool.map_or(&[][..], |pool| &pool.conditions);
        let told = conditions
            .iter()
            .find(|condition| condition.kind == kind && condition.status == status);
        if let Some(told) = told {
            nodes_by_message
                .entry(&told.message)
                .or_default()
                .push(&part.node);
        }
    }
    by_node(&nodes_by_message)
}

fn by_node(nodes_by_message: &BTreeMap<&str, Vec<&NodeName>>) -> Option<String> {
    let mut text = String::new();
    for (message, nodes) in nodes_by_message {
        let names: Vec<&str> = nodes.iter().map(|node| node.as_str()).collect();
        let separator = if text.is_empty() { "" } else { "; " };
        // Writing into a string does not fail.
        let _ = write!(text, "{separator}{message} (node {})", names.join(", "));
    }
    (!text.is_empty()).then_some(text)
}

/// Why no node can hold the pool.
fn nowhere(view: &View<'_>) -> Option<(&'static str, String)> {
    if view.parts.iter().any(Part::reachable) {
        return None;
    }
    if let Some((reason, message)) = view.fleet_trouble {
        let reason = if reason == "PodSecurity" {
            "PodSecurity"
        } else {
            "NoAgents"
        };
        return Some((reason, message.to_owned()));
    }
    let silent = view
        .parts
        .iter()
        .any(|part| part.standing == Standing::Silent);
    let resting = view
        .parts
        .iter()
        .any(|part| part.standing == Standing::Resting);
    Some(if view.parts.is_empty() {
        (
            "NoAgents",
            "no node agent is there: see the DaemonSet of the agents, and the nodes that it selects".to_owned(),
        )
    } else if silent {
        (
            "NodesUnreachable",
            "no agent answers: see the BranchNodes and the Pods of the agents".to_owned(),
        )
    } else if resting {
        (
            "NodesNotReady",
            "all nodes for this pool are cordoned, stopping or unreachable: see kubectl get nodes,branchnodes".to_owned(),
        )
    } else {
        (
            "NoEligibleNodes",
            "no node has the labels of spec.nodeSelector and the Postgres of spec.postgres.version: change either, or the nodes".to_owned(),
        )
    })
}

fn source_ready(view: &View<'_>) -> Condition {
    if let Some((reason, message)) = view.source_trouble {
        return condition("SourceReady", false, reason, message);
    }
    if let Some(why) = refusals(view) {
        return condition("SourceReady", false, "Refused", why);
    }
    if let Some(why) = agents_say(view, "SourceReady", "False") {
        let failed = view.parts.iter().filter_map(|part| part.pool);
        let failed = failed.filter(|pool| pool.golden.phase == GoldenPhase::Failed);
        let reason = if failed.count() > 0 {
            "BuildFailed"
        } else {
            "Building"
        };
        return condition("SourceReady", false, reason, why);
    }
    let sealed = view.parts.iter().filter_map(|part| part.pool);
    if sealed
        .map(|pool| pool.golden.generation)
        .any(|generation| generation > 0)
    {
        condition("SourceReady", true, "Sealed", "the golden image is sealed")
    } else {
        condition(
            "SourceReady",
            false,
            "Pending",
            "the golden image is about to be built",
        )
    }
}

fn refusals(view: &View<'_>) -> Option<String> {
    let mut nodes_by_message: BTreeMap<&str, Vec<&NodeName>> = BTreeMap::new();
    for part in view.parts {
        if let Some(refusal) = part.refusal {
            nodes_by_message
                .entry(refusal)
                .or_default()
                .push(&part.node);
        }
    }
    by_node(&nodes_by_message)
}

fn progressing(view: &View<'_>, totals: &Totals) -> Condition {
    let building = view
        .parts
        .iter()
        .filter_map(|part| part.pool)
        .any(|pool| pool.golden.phase == GoldenPhase::Building);
    if building {
        condition(
            "Progressing",
            true,
            "Building",
            "a golden image is being built",
        )
    } else if totals.warming > 0 {
        condition("Progressing", true, "Warming", "branches are being made")
    } else {
        condition("Progressing", false, "Settled", "nothing is being made")
    }
}

fn degraded(view: &View<'_>, totals: &Totals) -> Condition {
    if let Some((reason, message)) = nowhere(view) {
        return condition("Degraded", true, reason, message);
    }
    if let Some((reason, message)) = view.source_trouble {
        return condition("Degraded", true, reason, message);
    }
    if let Some(why) = refusals(view) {
        return condition("Degraded", true, "Refused", why);
    }
    let silent = view
        .parts
        .iter()
        .filter(|part| part.standing == Standing::Silent);
    let silent: Vec<&str> = silent.map(|part| part.node.as_str()).collect();
    if !silent.is_empty() {
        let message = format!(
            "the agents of {} do not answer: see their BranchNodes and Pods",
            silent.join(", ")
        );
        return condition("Degraded", true, "NodesUnreachable", message);
    }
    if let Some(why) = agents_say(view, "Degraded", "True") {
        return condition("Degraded", true, "NodesReport", why);
    }
    let told = view
        .parts
        .iter()
        .filter(|part| part.reachable())
        .all(|part| {
            let generation = part.pool.map(|pool| pool.observed_generation);
            generation.is_some_and(|at| i64::try_from(at) == Ok(view.generation))
        });
    if told && totals.desired < view.demand.replicas {
        let message = format!(
            "the nodes have room for {} of {} replicas: add nodes, raise the agents' --max-branches, or lower replicas",
            totals.desired, view.demand.replicas
        );
        return condition("Degraded", true, "NotEnoughRoom", message);
    }
    condition("Degraded", false, "AsExpected", "nothing is amiss")
}

fn source_status(view: &View<'_>, totals: &Totals) -> SourceStatus {
    let pools = || view.parts.iter().filter_map(|part| part.pool);
    let any = |phase: GoldenPhase| pools().any(|pool| pool.golden.phase == phase);
    let trouble = view.source_trouble.map(|(_, message)| message.to_owned());
    let trouble = trouble.or_else(|| refusals(view));
    let phase = if trouble.is_some() || any(GoldenPhase::Failed) {
        SourcePhase::Failed
    } else if any(GoldenPhase::Building) {
        SourcePhase::Importing
    } else if totals.generation > 0 {
        SourcePhase::Sealed
    } else {
        SourcePhase::Pending
    };
    let message = trouble.or_else(|| match phase {
        SourcePhase::Sealed => None,
        _ => pools().find_map(|pool| pool.golden.message.clone()),
    });
    SourceStatus {
        phase,
        progress_percent: None,
        bytes: i64::try_from(totals.bytes).unwrap_or(i64::MAX),
        last_refresh_time: None,
        message: message.map(|text| text.chars().take(MESSAGE_LIMIT).collect()),
    }
}

#[cfg(test)]
mod tests;
