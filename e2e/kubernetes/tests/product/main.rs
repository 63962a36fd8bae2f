//! Branchpool, installed by its chart on two nodes, as users have it. Needs root, or `E2E_KUBECONFIG` for a
//! cluster of your own.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod examples;
mod lease_api;
mod leave;
mod many;
mod rights;
mod stage;
#[path = "../common/trials.rs"]
mod trials;
mod trouble;
mod upgrade;

use std::process::ExitCode;

use stage::Stage;

/// In this order: the last one looks at what all others did.
const TESTS: &[(&str, trials::Test<Stage>)] = trials![
    examples::the_lines_of_the_readme_work,
    examples::jobs_of_the_documentation_work,
    many::a_hundred_leases_over_forty_branches,
    trouble::the_leader_is_killed_while_leases_wait,
    trouble::the_api_server_is_killed_while_leases_wait,
    trouble::what_ends_while_no_operator_runs_is_noticed,
    trouble::an_agent_is_killed_and_its_branches_stay,
    leave::a_cordoned_node_keeps_its_leases,
    leave::a_drained_node_keeps_its_leases,
    leave::a_node_is_cut_off_for_a_minute,
    leave::a_node_leaves_and_comes_back,
    lease_api::the_lease_api_answers_with_a_connection,
    rights::an_expired_lease_is_collected,
    rights::accounts_reach_nothing_else,
    upgrade::the_tests_of_the_chart_pass,
    upgrade::an_upgrade_keeps_what_is_leased,
    upgrade::a_new_installation_finds_what_is_there,
    rights::every_granted_verb_is_used,
];

fn main() -> ExitCode {
    trials::run(TESTS)
}
