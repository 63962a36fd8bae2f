//! Branchpool, installed by its chart on two nodes, as users have it. Needs root, or `E2E_KUBECONFIG` for a
//! cluster of your own.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod examples;
mod lease_api;
mod many;
mod rights;
mod stage;
mod trouble;
mod upgrade;

use std::{process::ExitCode, sync::Arc};

use branchpool_e2e_kubernetes::{Cluster, Options};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::{runtime::Runtime, sync::Mutex};

use stage::Stage;

struct Context {
    runtime: Runtime,
    stage: Mutex<Stage>,
}

type Test = fn(&Runtime, &mut Stage) -> Result<(), Failed>;

macro_rules! tests {
    ($($module:ident :: $name:ident),* $(,)?) => {
        &[$((stringify!($name), |runtime, stage| runtime.block_on($module::$name(stage)))),*]
    };
}

/// In this order: the last ones look at what all others did, and take it all away.
const TESTS: &[(&str, Test)] = tests![
    examples::the_lines_of_the_readme_work,
    examples::jobs_of_the_documentation_work,
    many::a_hundred_leases_over_forty_branches,
    trouble::the_leader_is_killed_while_leases_wait,
    trouble::what_ends_while_no_operator_runs_is_noticed,
    trouble::an_agent_is_killed_and_its_branches_stay,
    trouble::a_cordoned_node_keeps_its_leases,
    trouble::a_node_is_cut_off_and_comes_back,
    trouble::a_node_leaves_and_comes_back,
    lease_api::the_lease_api_answers_with_a_connection,
    rights::an_expired_lease_is_collected,
    rights::accounts_reach_nothing_else,
    upgrade::an_upgrade_keeps_what_is_leased,
    upgrade::a_new_installation_finds_what_is_there,
    rights::every_granted_verb_is_used,
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let runtime = Runtime::new().unwrap();
    let context = (!arguments.list).then(|| {
        let options = Options {
            images: vec!["operator".to_owned(), "agent".to_owned()],
            ..Options::default()
        };
        let stage = runtime.block_on(async {
            let stage = Stage::new(Cluster::start(options).await.unwrap());
            stage.install().await.unwrap();
            stage
        });
        Arc::new(Context {
            runtime,
            stage: Mutex::new(stage),
        })
    });
    let trials = TESTS
        .iter()
        .map(|(name, test)| {
            let context = context.clone();
            Trial::test(*name, move || {
                let context = context.expect("a test should have a cluster");
                let mut stage = context.stage.blocking_lock();
                let result = test(&context.runtime, &mut stage);
                if result.is_err() {
                    context.runtime.block_on(stage.tell());
                }
                result
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Some(context) = context
        && conclusion.has_failed()
        && let Some(own) = context.stage.blocking_lock().cluster.own_mut()
    {
        own.keep_logs();
    }
    conclusion.exit_code()
}
