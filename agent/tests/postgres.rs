//! Servers and sessions. Needs root.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod loop_btrfs;
mod supervised;

use std::{
    collections::BTreeMap, fs, os::unix::fs::chown, process::Command, sync::Arc, time::Duration,
};

use branchpool_agent::postgres::{
    config::{Phase, Profile, Tuning},
    parameters::Parameters,
    pidfile::PidFile,
    sandbox::Isolation,
    server::{Error, StopMode},
    session::{self, Session, Startup},
};
use branchpool_supervisor::protocol::{Outcome, User};
use branchpool_sys::process;
use supervised::{Branch, Context, Node, command, disk_user};

tests![
    a_server_starts_behind_all_walls,
    a_server_starts_bare,
    a_server_that_dies_is_quoted,
    a_server_that_never_gets_ready_is_killed,
    an_old_pid_file_that_says_ready_is_not_believed,
    autovacuum_comes_with_the_hand_over,
    a_session_tells_of_its_end,
    errors_carry_their_code,
    only_the_agent_comes_in_without_a_password,
    a_socket_behind_a_long_path_is_reached,
    a_killed_server_leaves_no_shared_memory,
];

const PATIENCE: Duration = Duration::from_secs(10);

fn profile(parameters: &[(&str, &str)]) -> Profile {
    let parameters: BTreeMap<String, String> = parameters
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    Profile {
        tuning: Tuning::Ephemeral,
        parameters: Parameters::new(&parameters).unwrap(),
        carried_over: BTreeMap::new(),
        preload_libraries: Vec::new(),
    }
}

fn own_user() -> User {
    let user = disk_user();
    User {
        uid: user.uid,
        gid: user.gid,
    }
}

/// A branch of a fresh data directory.
fn branch<'a>(node: &'a Node, name: &str) -> Branch<'a> {
    let source = node.source(name);
    node.branch_of(&source.path, name)
}

async fn immediate(server: &branchpool_agent::postgres::server::Server) {
    server.stop(StopMode::Immediate, PATIENCE).await.unwrap();
}

async fn a_server_starts_behind_all_walls(context: Arc<Context>) {
    let node = Node::new(&context, "walls");
    let branch = branch(&node, "walls");
    let server = branch.start(&profile(&[]), "app").await.unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid)).unwrap();
    assert!(
        status.contains("Uid:\t600001\t600001\t600001\t600001"),
        "{status}"
    );
    for namespace in ["ipc", "net"] {
        let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{namespace}")).unwrap();
        assert_ne!(of(&server.pid.to_string()), of("self"));
    }
    let mut session = branch.session("postgres", "postgres").await.unwrap();
    session.execute("CREATE TABLE t AS SELECT 1").await.unwrap();
    // On disk it belongs to the disk user.
    let path = session
        .query_one("SELECT pg_relation_filepath('t')")
        .await
        .unwrap()
        .unwrap();
    let owner =
        std::os::unix::fs::MetadataExt::uid(&fs::metadata(branch.data_dir.join(path)).unwrap());
    assert_eq!(owner, disk_user().uid);
    session.terminate().await;
    immediate(&server).await;
    assert_eq!(branch.group().processes().unwrap(), Vec::<u32>::new());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains("/mnt/1 "), "{mounts}");
}

async fn a_server_starts_bare(context: Arc<Context>) {
    let node = Node::new(&context, "bare");
    let mut branch = branch(&node, "bare");
    branch.isolation = Isolation::NONE;
    branch.user = own_user();
    let server = branch.start(&profile(&[]), "app").await.unwrap();
    immediate(&server).await;
}

async fn a_server_that_dies_is_quoted(context: Arc<Context>) {
    let node = Node::new(&context, "dies");
    let branch = branch(&node, "dies");
    fs::write(&branch.log, "earlier words\n").unwrap();
    let error = branch
        .start(&profile(&[("work_mem", "lots")]), "app")
        .await
        .unwrap_err();
    let Error::Died { outcome, log, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(*outcome, Some(Outcome::Code(1)));
    assert!(
        log.contains("invalid value for parameter \"work_mem\": \"lots\""),
        "{log}"
    );
    assert!(!log.contains("earlier words"), "{log}");
}

async fn a_server_that_never_gets_ready_is_killed(context: Arc<Context>) {
    let node = Node::new(&context, "never");
    let branch = branch(&node, "never");
    // Opening a pipe for reading waits for a writer.
    let pipe = branch.data_dir.join("pg_stat/pgstat.stat");
    command("rm", &["-f", pipe.to_str().unwrap()]);
    command("mkfifo", &[pipe.to_str().unwrap()]);
    chown(&pipe, Some(disk_user().uid), Some(disk_user().gid)).unwrap();
    branch.configure(&profile(&[]), Phase::Warming, "app");
    let error = branch
        .launch(&profile(&[]), Duration::from_secs(2))
        .await
        .unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }), "{error}");
    assert_eq!(branch.group().processes().unwrap(), Vec::<u32>::new());
}

async fn an_old_pid_file_that_says_ready_is_not_believed(context: Arc<Context>) {
    let node = Node::new(&context, "old");
    let branch = branch(&node, "old");
    let server = branch.start(&profile(&[]), "app").await.unwrap();
    server.group.kill(PATIENCE).unwrap();
    let left = PidFile::read(&branch.data_dir).unwrap().unwrap();
    assert!(left.is_ready(server.pid));
    let again = branch.start(&profile(&[]), "app").await.unwrap();
    assert_ne!(again.pid, server.pid);
    // Recovery is done: it answers.
    branch.session("postgres", "postgres").await.unwrap();
    immediate(&again).await;
}

async fn autovacuum_comes_with_the_hand_over(context: Arc<Context>) {
    let node = Node::new(&context, "vacuum");
    let branch = branch(&node, "vacuum");
    let profile = profile(&[("log_autovacuum_min_duration", "0")]);
    let server = branch.start(&profile, "app").await.unwrap();
    let mut session = branch.session("postgres", "postgres").await.unwrap();
    assert_eq!(
        session
            .query_one("SHOW autovacuum")
            .await
            .unwrap()
            .as_deref(),
        Some("off")
    );
    branch.configure(&profile, Phase::HandedOver, "app");
    server.reload().unwrap();
    let launcher =
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'autovacuum launcher'";
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while session.query_one(launcher).await.unwrap().as_deref() != Some("1") {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    immediate(&server).await;
}

async fn a_session_tells_of_its_end(context: Arc<Context>) {
    let node = Node::new(&context, "end");
    let branch = branch(&node, "end");
    let server = branch.start(&profile(&[]), "app").await.unwrap();
    let mut session = branch.session("postgres", "postgres").await.unwrap();
    let mut other = branch.session("postgres", "postgres").await.unwrap();
    assert_eq!(session.parameters()["server_encoding"], "UTF8");
    let pid = session.cancel_key().unwrap().process_id;

    let idle = tokio::time::timeout(Duration::from_millis(100), session.closed()).await;
    assert!(idle.is_err(), "{idle:?}");
    // Neither is a notification an end.
    session
        .execute("SET TIME ZONE 'Asia/Tokyo'; LISTEN news")
        .await
        .unwrap();
    assert_eq!(session.parameters()["TimeZone"], "Asia/Tokyo");
    other.execute("NOTIFY news").await.unwrap();
    let idle = tokio::time::timeout(Duration::from_millis(100), session.closed()).await;
    assert!(idle.is_err(), "{idle:?}");
    other
        .execute(&format!("SELECT pg_terminate_backend({pid})"))
        .await
        .unwrap();
    let end = tokio::time::timeout(PATIENCE, session.closed())
        .await
        .unwrap();
    assert_eq!(end.sqlstate(), Some("57P01"), "{end}");

    process::signal(&server.pidfd, 9).unwrap();
    server.group.kill(PATIENCE).unwrap();
    let end = tokio::time::timeout(PATIENCE, other.closed())
        .await
        .unwrap();
    assert!(
        matches!(end, session::Error::Closed | session::Error::Io { .. }),
        "{end}"
    );
    server.ended().await.unwrap();
    immediate(&server).await;
}

async fn errors_carry_their_code(context: Arc<Context>) {
    let node = Node::new(&context, "code");
    let branch = branch(&node, "code");
    let server = branch.start(&profile(&[]), "app").await.unwrap();
    let mut session = branch.session("postgres", "postgres").await.unwrap();
    let error = session
        .execute("SELECT 1; SELECT * FROM nowhere")
        .await
        .unwrap_err();
    assert_eq!(error.sqlstate(), Some("42P01"));
    // The session goes on.
    assert_eq!(session.query_one("SELECT NULL").await.unwrap(), None);
    assert_eq!(
        session.query_one("SELECT 1 WHERE false").await.unwrap(),
        None
    );
    let error = session
        .execute("COPY pg_class FROM STDIN")
        .await
        .unwrap_err();
    assert!(error.sqlstate().is_some(), "{error}");
    assert_eq!(
        session.query_one("SELECT 7").await.unwrap().as_deref(),
        Some("7")
    );
    let error = branch.session("postgres", "nowhere").await.unwrap_err();
    assert_eq!(error.sqlstate(), Some("3D000"));
    session.terminate().await;
    immediate(&server).await;
}

async fn only_the_agent_comes_in_without_a_password(context: Arc<Context>) {
    let node = Node::new(&context, "auth");
    let branch = branch(&node, "auth");
    let server = branch.start(&profile(&[]), "app").await.unwrap();
    let mut session = branch.session("postgres", "postgres").await.unwrap();
    session
        .execute("CREATE ROLE app LOGIN; CREATE ROLE other LOGIN PASSWORD 'x'")
        .await
        .unwrap();
    branch.session("app", "postgres").await.unwrap();
    let error = branch.session("other", "postgres").await.unwrap_err();
    assert!(
        matches!(error, session::Error::AuthenticationRequired),
        "{error}"
    );
    // The branch's own user: COPY PROGRAM can connect, but not become anybody.
    let program = format!(
        "COPY (SELECT 1) TO PROGRAM 'psql -X -h {} -U postgres -d postgres -c \"SELECT 1\"'",
        branch.socket_dir().display()
    );
    let error = session.execute(&program).await.unwrap_err();
    assert_eq!(error.sqlstate(), Some("38000"), "{error}");
    let log = fs::read_to_string(&branch.log).unwrap();
    assert!(
        log.contains("Peer authentication failed for user \"postgres\""),
        "{log}"
    );
    immediate(&server).await;
}

async fn a_socket_behind_a_long_path_is_reached(context: Arc<Context>) {
    let node = Node::new(&context, "long");
    let branch = branch(&node, "long");
    let server = branch.start(&profile(&[]), "app").await.unwrap();
    let long = node.run.join("x".repeat(150));
    std::os::unix::fs::symlink(branch.socket_dir(), &long).unwrap();
    let startup = Startup {
        user: "postgres".to_owned(),
        database: "postgres".to_owned(),
        parameters: vec![("application_name".to_owned(), "far".to_owned())],
    };
    let session = Session::open(&long, startup).await.unwrap();
    assert_eq!(session.parameters()["application_name"], "far");
    session.terminate().await;
    immediate(&server).await;
}

async fn a_killed_server_leaves_no_shared_memory(context: Arc<Context>) {
    let node = Node::new(&context, "memory");
    let mut branch = branch(&node, "memory");
    branch.isolation = Isolation::NONE;
    branch.user = own_user();
    let server = branch.start(&profile(&[]), "app").await.unwrap();
    let segment = PidFile::read(&branch.data_dir)
        .unwrap()
        .unwrap()
        .shared_memory
        .unwrap();
    let exists = || {
        let output = Command::new("ipcs")
            .args(["-m", "-i", &segment.id.to_string()])
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).contains("owner")
            || String::from_utf8_lossy(&output.stdout).contains("uid=")
    };
    assert!(exists());
    server.group.kill(PATIENCE).unwrap();
    assert!(exists());
    immediate(&server).await;
    assert!(!exists());
}
