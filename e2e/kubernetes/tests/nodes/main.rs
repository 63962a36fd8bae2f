//! Whole nodes: that Pods run on each, find each other, and make Btrfs snapshots. Needs root, or
//! `E2E_KUBECONFIG` for a cluster of your own.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod pods;

use std::{process::ExitCode, sync::Arc};

use branchpool_e2e_kubernetes::{Cluster, Options};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::{runtime::Runtime, sync::Mutex};

struct Context {
    runtime: Runtime,
    cluster: Mutex<Cluster>,
}

type Test = fn(&Runtime, &mut Cluster) -> Result<(), Failed>;

const TESTS: [(&str, Test); 6] = [
    ("every_node_runs_a_pod", |runtime, cluster| {
        runtime.block_on(pods::every_node_runs_a_pod(cluster))
    }),
    ("services_are_found_and_reached", |runtime, cluster| {
        runtime.block_on(pods::services_are_found_and_reached(cluster))
    }),
    ("a_host_port_is_reached_from_outside", |runtime, cluster| {
        runtime.block_on(pods::a_host_port_is_reached_from_outside(cluster))
    }),
    ("a_pod_makes_a_snapshot_on_its_node", |runtime, cluster| {
        runtime.block_on(pods::a_pod_makes_a_snapshot_on_its_node(cluster))
    }),
    ("an_extension_is_one_package_on_top", |runtime, cluster| {
        runtime.block_on(pods::an_extension_is_one_package_on_top(cluster))
    }),
    ("a_node_is_cut_off_and_comes_back", |runtime, cluster| {
        runtime.block_on(pods::a_node_is_cut_off_and_comes_back(cluster))
    }),
];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let is_listing = arguments.list;
    let runtime = Runtime::new().unwrap();
    let context = (!is_listing).then(|| {
        let options = Options {
            images: vec!["agent".to_owned(), "extension".to_owned()],
            ..Options::default()
        };
        let cluster = runtime.block_on(Cluster::start(options)).unwrap();
        Arc::new(Context {
            runtime,
            cluster: Mutex::new(cluster),
        })
    });
    let trials = TESTS
        .iter()
        .map(|(name, test)| {
            let context = context.clone();
            Trial::test(*name, move || {
                let context = context.expect("a test should have a cluster");
                let mut cluster = context.cluster.blocking_lock();
                test(&context.runtime, &mut cluster)
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if let Some(context) = context
        && conclusion.has_failed()
        && let Some(own) = context.cluster.blocking_lock().own_mut()
    {
        own.keep_logs();
    }
    conclusion.exit_code()
}
