//! The supervisor as process 1 of a container.

use std::{
    fs,
    time::{Duration, Instant},
};

use rustix::process::Signal;

use crate::{
    inspect::start_time,
    node::{Node, Setup, ask, cgroups, command_of, connect, pool, send},
};

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn sleeper(node: &Node, seconds: &str) -> Option<u32> {
    let mut children = node.children().into_iter();
    children.find(|pid| command_of(*pid) == format!("sleep\0{seconds}\0"))
}

#[tokio::test(flavor = "multi_thread")]
async fn process_1_restarts_the_agent_reaps_orphans_and_takes_all_along_at_its_end() {
    let mut setup = Setup::new(
        pool("items", 2, 6, "  cleanup: {tombstones: {delay: 0s}}\n")
            .replace("    version: 15", "    version: 15\n    superuser: true"),
    );
    setup.wrapper = vec![
        "unshare",
        "--pid",
        "--fork",
        "--mount",
        "--mount-proc",
        "--kill-child",
    ];
    let mut node = Node::start(setup).await;
    let status = fs::read_to_string(format!("/proc/{}/status", node.supervisor_pid())).unwrap();
    let ids = status
        .lines()
        .find(|line| line.starts_with("NSpid:"))
        .unwrap();
    assert_eq!(ids.split_whitespace().last(), Some("1"), "{ids}");

    node.wait_full("items").await;
    let lease = node.lease("items", "held").await.unwrap();
    let client = connect(&lease).await.unwrap();
    let postmaster = node.postmaster_of(&lease.branch).unwrap();
    let started = start_time(postmaster);

    node.kill_agent();
    node.wait_serving().await;
    assert_eq!(node.client.get_lease("held").await.unwrap(), lease);
    assert_eq!(start_time(postmaster), started);
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "3"
    );

    // A child of a child of a backend, whose parents are gone, becomes the supervisor's.
    let orphan = |seconds: &str| {
        format!(
            "COPY (SELECT 1) TO PROGRAM '(sleep {seconds} >/dev/null 2>&1 </dev/null &) && cat >/dev/null'"
        )
    };
    ask(&client, &orphan("1001")).await.unwrap();
    let pid = wait_for("no orphan came", || sleeper(&node, "1001"));
    send(pid, Signal::KILL);
    wait_for("a zombie stays", || {
        (!node.children().contains(&pid)).then_some(())
    });

    // One that lives on ends with its branch.
    ask(&client, &orphan("1002")).await.unwrap();
    let pid = wait_for("no orphan came", || sleeper(&node, "1002"));
    drop(client);
    node.client.release("held", None).await.unwrap();
    wait_for("the orphan outlives its branch", || {
        (!node.children().contains(&pid)).then_some(())
    });
    node.wait_full("items").await;

    let groups = cgroups(&node);
    assert!(!groups.is_empty());
    assert!(node.stop().success(), "{}", node.log());
    node.assert_nothing_left();
    assert!(groups.iter().all(|group| !group.exists()), "{groups:?}");
}
