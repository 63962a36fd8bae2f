//! Golden images on a real Btrfs filesystem with real servers. Needs root.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod loop_btrfs;
mod sources;
mod supervised;

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use branchpool_agent::{
    golden::{self, CheckError, Error, Facts, GoldenSpec, Progress, Script, Source},
    postgres::{
        config::{Profile, Tuning},
        parameters::Parameters,
        server::StopMode,
    },
};
use branchpool_sys::btrfs;
use sources::{
    a_changed_collation_version_is_refused, a_running_source_is_refused,
    a_source_with_a_stale_pid_file_is_taken, bad_sources_are_refused_each_with_its_own_error,
    preload_libraries_of_the_source_must_exist, secrets_and_outward_connections_are_scrubbed,
    subvolume_source_makes_an_image,
};
use supervised::{Context, Node, column};

tests![
    sql_source_makes_an_image_that_branches_start_from,
    a_failing_script_is_named_with_its_line,
    a_failing_prepare_step_leaves_nothing,
    shell_commands_of_scripts_run_unprivileged,
    the_role_is_a_superuser_only_if_asked_for,
    a_setting_that_postgres_refuses_fails_the_build,
    a_missing_major_is_named,
    a_build_past_its_limit_names_the_step,
    a_dropped_build_leaves_no_server_and_no_run_directory,
    a_link_made_by_a_script_is_refused,
    subvolume_source_makes_an_image,
    secrets_and_outward_connections_are_scrubbed,
    bad_sources_are_refused_each_with_its_own_error,
    a_running_source_is_refused,
    a_source_with_a_stale_pid_file_is_taken,
    preload_libraries_of_the_source_must_exist,
    a_changed_collation_version_is_refused,
    alter_system_cannot_lock_the_agent_out,
];

const SCRIPT: &str = "\
CREATE EXTENSION citext;
CREATE TABLE person (id int PRIMARY KEY, name citext);
COPY person FROM stdin;
1\tada
2\tgrace
\\.
CREATE INDEX ON person (name);
";

fn spec(source: Source) -> GoldenSpec {
    GoldenSpec {
        pool: "pool-1".parse().unwrap(),
        generation: 1,
        source,
        prepare: Vec::new(),
        major: 15,
        database: "app".to_owned(),
        role: "app".to_owned(),
        superuser: false,
        parameters: Parameters::default(),
        tuning: Tuning::Ephemeral,
    }
}

fn script(name: &str, sql: &str) -> Script {
    Script {
        name: name.to_owned(),
        sql: sql.to_owned(),
    }
}

fn sql(text: &str) -> GoldenSpec {
    spec(Source::Sql {
        scripts: vec![script("schema.sql", text)],
    })
}

fn subvolume(name: &str) -> GoldenSpec {
    spec(Source::Subvolume {
        name: name.to_owned(),
    })
}

async fn build(node: &Node, spec: &GoldenSpec) -> Result<Facts, Error> {
    golden::build(&node.env, spec, |_| {}).await
}

fn image(node: &Node) -> PathBuf {
    node.root().join("golden/pool-1/1")
}

fn profile(facts: &Facts) -> Profile {
    Profile {
        tuning: Tuning::Ephemeral,
        parameters: Parameters::default(),
        carried_over: facts.carried_over.clone(),
        preload_libraries: facts.shared_preload_libraries.clone(),
    }
}

/// Runs a query as `user` in a branch of the sealed image.
async fn ask(node: &Node, facts: &Facts, user: &str, database: &str, query: &str) -> Vec<String> {
    let name = format!("{:x}", rand::random::<u32>());
    let branch = node.branch_of(&image(node), &name);
    let server = branch.start(&profile(facts), "app").await.unwrap();
    let mut session = branch.session(user, database).await.unwrap();
    let answer = column(&mut session, query).await;
    drop(session);
    server
        .stop(StopMode::Immediate, Duration::from_secs(10))
        .await
        .unwrap();
    answer
}

async fn sql_source_makes_an_image_that_branches_start_from(context: Arc<Context>) {
    let node = Node::new(&context, "sql");
    let seen = Mutex::new(Vec::new());
    let mut spec = sql(SCRIPT);
    spec.prepare = vec![script(
        "mask",
        "UPDATE person SET name = 'masked' WHERE id = 2",
    )];
    let progress = |progress: Progress| seen.lock().unwrap().push(progress.message);
    let facts = golden::build(&node.env, &spec, progress).await.unwrap();
    node.assert_nothing_left();

    assert_eq!((facts.major, facts.encoding.as_str()), (15, "UTF8"));
    assert_eq!(facts.collate, "C.UTF-8");
    assert_eq!(facts.collation_version, None);
    assert!(facts.server_version.starts_with("15."));
    assert!(facts.bytes > 1 << 20);
    assert_eq!(
        facts.carried_over["default_text_search_config"],
        "pg_catalog.english"
    );
    let json = serde_json::to_string(&facts).unwrap();
    assert_eq!(serde_json::from_str::<Facts>(&json).unwrap(), facts);

    let seen = seen.into_inner().unwrap();
    assert!(
        seen.contains(&"Running the script schema.sql (1 of 1)".to_owned()),
        "{seen:?}"
    );
    assert!(
        seen.contains(&"Running the prepare step mask".to_owned()),
        "{seen:?}"
    );

    let directory = btrfs::open_dir(&image(&node)).unwrap();
    assert!(btrfs::is_read_only(&directory).unwrap());
    drop(directory);
    let refused = fs::write(image(&node).join("x"), "").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    for gone in [
        "postmaster.pid",
        "postmaster.opts",
        "postgresql.conf",
        "pg_stat/pgstat.stat",
    ] {
        assert!(!image(&node).join(gone).exists(), "{gone}");
    }
    let query = "SELECT name FROM person ORDER BY id";
    assert_eq!(
        ask(&node, &facts, "app", "app", query).await,
        ["ada", "masked"]
    );
    let owner = "SELECT tableowner FROM pg_tables WHERE tablename = 'person'";
    assert_eq!(ask(&node, &facts, "app", "app", owner).await, ["app"]);

    let again = build(&node, &spec).await.unwrap_err();
    assert!(matches!(again, Error::GenerationExists { .. }), "{again}");
}

async fn a_failing_script_is_named_with_its_line(context: Arc<Context>) {
    let node = Node::new(&context, "failing");
    let text =
        "CREATE TABLE a (i int);\n\nINSERT INTO missing VALUES (1);\nCREATE TABLE b (i int);\n";
    let error = build(&node, &sql(text)).await.unwrap_err();
    let message = error.to_string();
    assert!(
        message.starts_with(
            "script schema.sql failed: line 3: ERROR:  relation \"missing\" does not exist"
        ),
        "{message}"
    );
    node.assert_nothing_left();
    assert!(!image(&node).exists());
}

async fn a_failing_prepare_step_leaves_nothing(context: Arc<Context>) {
    let node = Node::new(&context, "prepare");
    let mut spec = sql("CREATE TABLE t (i int)");
    spec.prepare = vec![script("first", "SELECT 1"), script("second", "SELECT 1/0")];
    let message = build(&node, &spec).await.unwrap_err().to_string();
    assert!(
        message.starts_with("prepare step second failed: line 1: ERROR:  division by zero"),
        "{message}"
    );
    node.assert_nothing_left();
}

async fn shell_commands_of_scripts_run_unprivileged(context: Arc<Context>) {
    let node = Node::new(&context, "shell");
    let text = "\
\\set uid `id -u`
\\set shadow `cat /etc/shadow 2>&1`
\\set environ `cat /proc/1/environ 2>&1`
\\set written `touch /tmp/branchpool-escape 2>&1`
\\set others `ls /root /home /tmp 2>&1`
CREATE TABLE seen AS SELECT :'uid' AS uid, :'shadow' AS shadow, :'environ' AS environ, :'written' AS written, :'others' AS others;
CREATE TABLE program (line text);
COPY program FROM PROGRAM 'id -u; cat /etc/shadow 2>&1; true';
";
    let facts = build(&node, &sql(text)).await.unwrap();
    let uid = node.env.disk_user.uid.to_string();
    let query = "SELECT unnest(ARRAY[uid, shadow, environ, written, others]) FROM seen";
    let seen = ask(&node, &facts, "app", "app", query).await;
    assert_eq!(seen[0], uid);
    for denied in &seen[1..4] {
        assert!(denied.contains("Permission denied"), "{denied}");
    }
    assert_eq!(
        seen[4].matches("Permission denied").count(),
        3,
        "{}",
        seen[4]
    );
    assert!(!PathBuf::from("/tmp/branchpool-escape").exists());
    let lines = ask(&node, &facts, "app", "app", "SELECT line FROM program").await;
    assert_eq!(lines[0], uid);
    assert!(lines[1].contains("Permission denied"), "{lines:?}");
}

async fn the_role_is_a_superuser_only_if_asked_for(context: Arc<Context>) {
    for superuser in [false, true] {
        let node = Node::new(&context, "superuser");
        let mut spec = sql("CREATE TABLE t (i int)");
        spec.superuser = superuser;
        let facts = build(&node, &spec).await.unwrap();
        let query = "SELECT rolsuper::text FROM pg_roles WHERE rolname = current_user";
        let answer = ask(&node, &facts, "app", "app", query).await;
        assert_eq!(answer, [superuser.to_string()]);
    }
}

async fn a_setting_that_postgres_refuses_fails_the_build(context: Arc<Context>) {
    let node = Node::new(&context, "setting");
    let mut spec = sql("SELECT 1");
    let wanted = BTreeMap::from([("work_mem".to_owned(), "lots".to_owned())]);
    spec.parameters = Parameters::new(&wanted).unwrap();
    let message = build(&node, &spec).await.unwrap_err().to_string();
    assert!(
        message.contains("invalid value for parameter \"work_mem\": \"lots\""),
        "{message}"
    );
    node.assert_nothing_left();
}

async fn a_missing_major_is_named(context: Arc<Context>) {
    let node = Node::new(&context, "major");
    let mut spec = sql("SELECT 1");
    spec.major = 9;
    let message = build(&node, &spec).await.unwrap_err().to_string();
    assert!(message.contains("Postgres 9 is not installed"), "{message}");
    assert!(message.contains("15"), "{message}");
}

async fn a_build_past_its_limit_names_the_step(context: Arc<Context>) {
    let mut node = Node::new(&context, "limit");
    node.env.time_limit = Duration::from_secs(5);
    // Which step that is depends on the machine.
    let last = Mutex::new(String::new());
    let progress = |progress: Progress| *last.lock().unwrap() = progress.message;
    let error = golden::build(&node.env, &sql("SELECT pg_sleep(600)"), progress)
        .await
        .unwrap_err();
    let Error::TimedOut { step, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(*step, *last.lock().unwrap());
    node.assert_nothing_left();
}

async fn a_dropped_build_leaves_no_server_and_no_run_directory(context: Arc<Context>) {
    let node = Node::new(&context, "dropped");
    let (started, running) = tokio::sync::oneshot::channel();
    let started = Mutex::new(Some(started));
    let spec = sql("SELECT pg_sleep(600)");
    let progress = |progress: Progress| {
        if progress.message.starts_with("Running the script") {
            started.lock().unwrap().take().unwrap().send(()).unwrap();
        }
    };
    tokio::select! {
        built = golden::build(&node.env, &spec, progress) => panic!("{built:?}"),
        started = running => started.unwrap(),
    }
    node.env.group.wait_empty(Duration::from_secs(10)).unwrap();
    assert!(node.env.layout.building().join("pool-1-1").exists());
    assert_eq!(
        fs::read_dir(node.env.layout.build_runs()).unwrap().count(),
        0
    );
}

async fn a_link_made_by_a_script_is_refused(context: Arc<Context>) {
    let node = Node::new(&context, "link");
    let text = "\
SELECT current_setting('data_directory') AS dir \\gset
\\setenv DIR :dir
\\! rm $DIR/postgresql.auto.conf; ln -s /etc/passwd $DIR/postgresql.auto.conf
";
    let before = fs::metadata("/etc/passwd").unwrap();
    let error = build(&node, &sql(text)).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Check {
                source: CheckError::Link { .. }
            }
        ),
        "{error}"
    );
    let after = fs::metadata("/etc/passwd").unwrap();
    assert_eq!((before.len(), before.uid()), (after.len(), after.uid()));
    node.assert_nothing_left();
}

async fn alter_system_cannot_lock_the_agent_out(context: Arc<Context>) {
    let node = Node::new(&context, "alter");
    let mut spec = sql("CREATE TABLE t (i int)");
    spec.superuser = true;
    let facts = build(&node, &spec).await.unwrap();
    let branch = node.branch_of(&image(&node), "b");
    let server = branch.start(&profile(&facts), "app").await.unwrap();
    let mut session = branch.session("app", "app").await.unwrap();
    for setting in [
        "hba_file = '/tmp/x'",
        "ident_file = '/tmp/x'",
        "unix_socket_directories = '/tmp'",
        "listen_addresses = '*'",
        "logging_collector = on",
        "archive_mode = on",
        "fsync = on",
    ] {
        session
            .execute(&format!("ALTER SYSTEM SET {setting}"))
            .await
            .unwrap();
    }
    drop(session);
    server
        .stop(StopMode::Fast, Duration::from_secs(10))
        .await
        .unwrap();

    let server = branch.start(&profile(&facts), "app").await.unwrap();
    let mut session = branch.session("app", "app").await.unwrap();
    let query = "SELECT current_setting('hba_file') || current_setting('fsync') || current_setting('archive_mode')";
    let expected = format!("{}offoff", branch.run.join("pg_hba.conf").display());
    assert_eq!(session.query_one(query).await.unwrap(), Some(expected));
    drop(session);
    server
        .stop(StopMode::Immediate, Duration::from_secs(10))
        .await
        .unwrap();
}
