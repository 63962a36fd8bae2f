//! Whole nodes: that Pods run on each, find each other, and make Btrfs snapshots. Needs root, or
//! `E2E_KUBECONFIG` for a cluster of your own.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod pods;
#[path = "../common/trials.rs"]
mod trials;

use std::process::ExitCode;

use branchpool_e2e_kubernetes::Cluster;
use libtest_mimic::Failed;

impl trials::Stage for Cluster {
    const IMAGES: &'static [&'static str] = &["agent", "extension"];

    async fn begin(cluster: Cluster) -> Result<Self, Failed> {
        Ok(cluster)
    }

    fn cluster(&mut self) -> &mut Cluster {
        self
    }

    async fn clear(&mut self) {
        pods::remove_all(self).await;
    }
}

const TESTS: &[(&str, trials::Test<Cluster>)] = trials![
    pods::every_node_runs_a_pod,
    pods::services_are_found_and_reached,
    pods::a_host_port_is_reached_from_outside,
    pods::a_pod_makes_a_snapshot_on_its_node,
    pods::an_extension_is_one_package_on_top,
    pods::a_node_is_cut_off_and_comes_back,
];

fn main() -> ExitCode {
    trials::run(TESTS)
}
