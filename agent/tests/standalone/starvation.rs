//! A branch that takes all it can get: its limits hold, and others do not notice.

use std::{
    fs,
    time::{Duration, Instant},
};

use crate::{
    inmate::{Inmate, superuser_pool},
    node::{Node, Setup, ask, connect, processes, wait_gone},
};

const RESOURCES: &str = "  resources: {memory: 256Mi}\n";

/// Processes of an OS user.
fn processes_of(uid: u32) -> Vec<u32> {
    let owned = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.contains(&format!("\nUid:\t{uid}\t"))
    };
    processes().into_iter().filter(owned).collect()
}

fn uid_of(pid: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("Uid:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// The neighbour answers on an old session and a new one, and the agent hands out and takes back.
async fn others_go_on(node: &Node, neighbour: &Inmate, round: &str) {
    for _ in 0..20 {
        assert_eq!(
            neighbour.sql("SELECT count(*) FROM items").await,
            Ok("3".into())
        );
    }
    let client = connect(&neighbour.lease).await.unwrap();
    ask(
        &client,
        "INSERT INTO items VALUES (99, 'x'); DELETE FROM items WHERE id = 99",
    )
    .await
    .unwrap();
    let uid = format!("other-{round}");
    let lease = node.lease_patiently("items", &uid).await;
    let client = connect(&lease).await.unwrap();
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "3"
    );
    node.client.release(&uid, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_branch_and_a_fork_bomb_stay_within_their_limits() {
    let mut setup = Setup::new(superuser_pool("items", 2, RESOURCES));
    // Not those of a node that another test runs: processes are counted by their user.
    setup.args = vec!["--uid-base".into(), "1600000000".into()];
    let mut node = Node::start(setup).await;
    let greedy = Inmate::enter(&node, "items", "greedy").await;
    let neighbour = Inmate::enter(&node, "items", "neighbour").await;
    let uid = uid_of(greedy.postmaster);
    assert_ne!(uid, uid_of(neighbour.postmaster));

    // More than there are processors.
    for _ in 0..8 {
        greedy.run_aside("while :; do :; done").await;
    }
    assert!(processes_of(uid).len() >= 8);
    others_go_on(&node, &neighbour, "busy").await;

    let fork = "perl -e 'for my $n (1..2000) { my $p = fork; if (!defined $p) { print \"$n $!\\n\"; exit 1 } if (!$p) { close STDOUT; close STDERR; sleep 600; exit } }'";
    let said = greedy.run(fork).await;
    assert!(
        !said.ok && said.text.contains("Resource temporarily unavailable"),
        "{said:?}"
    );
    let most = 2 * 50 + 64;
    let held = processes_of(uid).len();
    assert!((most / 2..=most).contains(&held), "{held} processes");
    others_go_on(&node, &neighbour, "full").await;

    // One that forks as fast as it can, for as long as it lives.
    let said = greedy.sql("SELECT 1").await;
    assert_eq!(said, Ok("1".into()), "its open session goes on");
    node.client.release("greedy", None).await.unwrap();
    gone(uid, &greedy).await;
    let bomb = Inmate::enter(&node, "items", "bomb").await;
    let uid = uid_of(bomb.postmaster);
    bomb.run_aside("exec bash -c 'f() { f | f & }; f; while :; do f; done'")
        .await;
    others_go_on(&node, &neighbour, "bomb").await;
    assert!(processes_of(uid).len() <= most);
    node.client.release("bomb", None).await.unwrap();
    gone(uid, &bomb).await;

    node.wait_full("items").await;
    drop((greedy, bomb, neighbour));
    assert!(node.stop().success());
    node.assert_nothing_left();
}

/// Everything of the branch has been ended; its slot may serve another one already.
async fn gone(uid: u32, inmate: &Inmate) {
    wait_gone(inmate.postmaster);
    let deadline = Instant::now() + Duration::from_secs(20);
    let strange = || {
        let running = processes_of(uid).into_iter();
        running
            .filter(|pid| {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                ["sh", "bash", "perl"].contains(&name.trim())
            })
            .count()
    };
    while strange() > 0 {
        assert!(Instant::now() < deadline, "{} are left", strange());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_out_of_memory_hurts_itself_only() {
    let mut node = Node::start(Setup::new(superuser_pool("items", 2, RESOURCES))).await;
    let greedy = Inmate::enter(&node, "items", "greedy").await;
    let neighbour = Inmate::enter(&node, "items", "neighbour").await;
    let agent = node.agent_pid();
    greedy
        .sql("INSERT INTO items VALUES (4, 'four'); CHECKPOINT")
        .await
        .unwrap();

    let allocate = |mebibytes: u32| {
        format!("perl -e 'my $x = \"x\" x ({mebibytes} << 20); print length($x), \"\\n\"'")
    };
    let said = greedy.run(&allocate(64)).await;
    assert!(said.ok && said.text.contains("67108864"), "{said:?}");
    // The kernel kills one of its processes: the program, or a server's, which starts anew.
    let sql = format!("COPY said FROM PROGRAM $x${}$x$", allocate(1024));
    let refused = greedy.sql(&sql).await.unwrap_err();
    assert!(!refused.contains("1073741824"), "{refused}");
    others_go_on(&node, &neighbour, "memory").await;

    // Its postmaster goes as well, by its own hand.
    let client = connect_patiently(&node, "greedy").await;
    let kill = "COPY (SELECT 1) TO PROGRAM 'cat >/dev/null; kill -9 $(head -n 1 postmaster.pid)'";
    let _cut_off = ask(&client, kill).await;
    wait_gone(greedy.postmaster);
    let lease = restarted(&node, "greedy", 1).await;
    assert_eq!(lease.host, greedy.lease.host);
    let client = connect_patiently(&node, "greedy").await;
    assert_eq!(
        ask(&client, "SELECT count(*) FROM items").await.unwrap(),
        "4"
    );
    assert_eq!(node.agent_pid(), agent);
    assert_eq!(
        node.postmaster_of(&neighbour.lease.branch),
        Some(neighbour.postmaster)
    );
    drop((greedy, neighbour));
    assert!(node.stop().success());
    node.assert_nothing_left();
}

/// Waits until a lease's server has been started again so many times.
pub(crate) async fn restarted(node: &Node, uid: &str, times: u32) -> branchpool_agent_api::Lease {
    node.wait_lease(uid, |lease| {
        lease.restarts >= times && lease.reason.is_none()
    })
    .await
}

/// A new session, as soon as the server takes some.
pub(crate) async fn connect_patiently(node: &Node, uid: &str) -> tokio_postgres::Client {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let lease = node.client.get_lease(uid).await.unwrap();
        match connect(&lease).await {
            Ok(client) => return client,
            Err(error) => assert!(Instant::now() < deadline, "{error}: {lease:?}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
