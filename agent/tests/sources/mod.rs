//! Images from prepared subvolumes: checks and scrubbing.

use std::{
    fs,
    os::unix::fs::{MetadataExt, symlink},
    process::Command,
    sync::Arc,
};

use branchpool_agent::golden::{CheckError, Error};
use branchpool_sys::btrfs;

use crate::{
    ask, build, image, subvolume,
    supervised::{Context, Node, command},
};

pub(crate) async fn subvolume_source_makes_an_image(context: Arc<Context>) {
    let node = Node::new(&context, "subvolume");
    let source = node
        .source("prod")
        .filled("SET ROLE app; CREATE TABLE t AS SELECT generate_series(1, 1000) AS i");
    // As after a copy by root.
    command("chown", &["-R", "0:0", source.path.to_str().unwrap()]);
    let facts = build(&node, &subvolume("prod")).await.unwrap();
    node.assert_nothing_left();
    let directory = btrfs::open_dir(&image(&node)).unwrap();
    assert!(btrfs::is_read_only(&directory).unwrap());
    drop(directory);
    assert_eq!(
        ask(&node, &facts, "app", "app", "SELECT count(*) FROM t").await,
        ["1000"]
    );
    assert_eq!(
        fs::metadata(source.path.join("PG_VERSION")).unwrap().uid(),
        0
    );

    let mut other = subvolume("prod");
    other.generation = 2;
    "nothere".clone_into(&mut other.database);
    let message = build(&node, &other).await.unwrap_err().to_string();
    assert!(
        message.contains("no database \"nothere\"; it has app, postgres"),
        "{message}"
    );
    node.assert_nothing_left();
}

pub(crate) async fn secrets_and_outward_connections_are_scrubbed(context: Arc<Context>) {
    let node = Node::new(&context, "scrub");
    let source = node.source("prod").filled(
        "CREATE ROLE other LOGIN PASSWORD 'production'
         ;;CREATE EXTENSION postgres_fdw
         ;;CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host 'db.example')
         ;;CREATE USER MAPPING FOR other SERVER far OPTIONS (user 'u', password 'production')
         ;;CREATE USER MAPPING FOR PUBLIC SERVER far OPTIONS (user 'u', password 'production')
         ;;CREATE TABLE t (i int)
         ;;CREATE SUBSCRIPTION sub CONNECTION 'host=db.example password=production' PUBLICATION p WITH (connect = false, slot_name = 'sub')
         ;;SELECT pg_create_logical_replication_slot('logical', 'pgoutput')
         ;;SELECT pg_create_physical_replication_slot('physical')
         ;;BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'it''s'
         ;;CREATE DATABASE closed
         ;;ALTER DATABASE closed ALLOW_CONNECTIONS false
         ;;ALTER SYSTEM SET archive_command = 'production'
         ;;ALTER SYSTEM SET primary_conninfo = 'password=production'",
    );
    fs::create_dir(source.path.join("log")).unwrap();
    fs::write(source.path.join("log/x.log"), "production").unwrap();
    let facts = build(&node, &subvolume("prod")).await.unwrap();

    let count = async |query: &str| ask(&node, &facts, "postgres", "app", query).await;
    let zero = ["0".to_owned()];
    assert_eq!(
        count("SELECT count(*) FROM pg_authid WHERE rolpassword IS NOT NULL").await,
        zero
    );
    assert_eq!(
        count("SELECT count(*) FROM pg_replication_slots").await,
        zero
    );
    assert_eq!(count("SELECT count(*) FROM pg_subscription").await, zero);
    assert_eq!(count("SELECT count(*) FROM pg_prepared_xacts").await, zero);
    assert_eq!(count("SELECT count(*) FROM t").await, zero);
    let options = "SELECT DISTINCT array_to_string(umoptions, ',') FROM pg_user_mapping";
    assert_eq!(count(options).await, ["user=u"]);
    assert_eq!(count("SELECT count(*) FROM pg_user_mapping").await, ["2"]);
    let closed = "SELECT datallowconn::text FROM pg_database WHERE datname = 'closed'";
    assert_eq!(count(closed).await, ["false"]);
    let auto = fs::read_to_string(image(&node).join("postgresql.auto.conf")).unwrap();
    assert_eq!(auto, "");
    assert!(!image(&node).join("log").exists());
    assert_eq!(
        fs::read_dir(image(&node).join("pg_replslot"))
            .unwrap()
            .count(),
        0
    );
}

pub(crate) async fn bad_sources_are_refused_each_with_its_own_error(context: Arc<Context>) {
    let node = Node::new(&context, "bad");
    let refused = async |name: &str| match build(&node, &subvolume(name)).await {
        Err(Error::Check { source }) => {
            node.assert_nothing_left();
            source
        }
        other => panic!("{other:?}"),
    };
    macro_rules! refuse {
        ($name:expr, $pattern:pat) => {
            let error = refused($name).await;
            assert!(matches!(error, $pattern), "{}: {error}", $name);
        };
    }

    refuse!("absent", CheckError::Missing { .. });
    fs::create_dir(node.env.layout.sources().join("plain")).unwrap();
    refuse!("plain", CheckError::NotSubvolume { .. });
    let empty = node.env.layout.sources().join("empty");
    command("btrfs", &["subvolume", "create", empty.to_str().unwrap()]);
    refuse!("empty", CheckError::NotDataDirectory { .. });

    let clean = node.source("clean");
    // A variant of the clean source.
    let variant = |name: &str| {
        let path = node.env.layout.sources().join(name);
        let paths = [clean.path.to_str().unwrap(), path.to_str().unwrap()];
        command("btrfs", &["subvolume", "snapshot", paths[0], paths[1]]);
        path
    };
    fs::write(variant("major").join("PG_VERSION"), "14\n").unwrap();
    refuse!("major", CheckError::WrongMajor { .. });

    fs::create_dir(node.root().join("elsewhere")).unwrap();
    symlink(
        node.root().join("elsewhere"),
        variant("tablespace").join("pg_tblspc/16384"),
    )
    .unwrap();
    refuse!("tablespace", CheckError::Tablespace { .. });

    let wal = variant("wal");
    let elsewhere = node.root().join("wal-elsewhere");
    let inside = wal.join("pg_wal");
    command(
        "mv",
        &[inside.to_str().unwrap(), elsewhere.to_str().unwrap()],
    );
    symlink(node.root().join("wal-elsewhere"), wal.join("pg_wal")).unwrap();
    refuse!("wal", CheckError::WalElsewhere { .. });

    symlink("/etc/passwd", variant("certificate").join("server.crt")).unwrap();
    refuse!("certificate", CheckError::Link { .. });

    let nested = variant("nested").join("base/nested");
    command("btrfs", &["subvolume", "create", nested.to_str().unwrap()]);
    refuse!("nested", CheckError::NestedSubvolumes { count: 1, .. });

    fs::write(variant("backup").join("backup_label"), "START WAL LOCATION").unwrap();
    refuse!("backup", CheckError::Backup { .. });

    let dirty = node.source("dirty");
    dirty.start();
    dirty.stop("immediate");
    refuse!("dirty", CheckError::NotShutDown { .. });

    for name in ["../sources/clean", "/etc", "", ".", "..", "a/b"] {
        let error = build(&node, &subvolume(name)).await.unwrap_err();
        assert!(
            matches!(
                error,
                Error::Spec {
                    field: "source.subvolume",
                    ..
                }
            ),
            "{name:?}: {error}"
        );
    }
}

pub(crate) async fn a_running_source_is_refused(context: Arc<Context>) {
    let node = Node::new(&context, "running");
    let source = node.source("running");
    source.start();
    let error = build(&node, &subvolume("running")).await.unwrap_err();
    source.stop("fast");
    assert!(
        matches!(
            error,
            Error::Check {
                source: CheckError::InUse { .. }
            }
        ),
        "{error}"
    );
    node.assert_nothing_left();
}

pub(crate) async fn a_source_with_a_stale_pid_file_is_taken(context: Arc<Context>) {
    let node = Node::new(&context, "stale");
    let source = node
        .source("stale")
        .filled("CREATE TABLE t AS SELECT 1 AS i");
    // A living process of the same user, which is no Postgres.
    let mut sleeper = Command::new("setpriv")
        .args(["--reuid=postgres", "--regid=postgres", "--clear-groups"])
        .args(["sleep", "600"])
        .current_dir("/")
        .spawn()
        .unwrap();
    let text = format!(
        "{}\n{}\n1\n5432\n/tmp\n\n0 0\nready   \n",
        sleeper.id(),
        source.path.display()
    );
    fs::write(source.path.join("postmaster.pid"), text).unwrap();
    let built = build(&node, &subvolume("stale")).await;
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    let facts = built.unwrap();
    assert_eq!(
        ask(&node, &facts, "postgres", "app", "SELECT i FROM t").await,
        ["1"]
    );
}

pub(crate) async fn preload_libraries_of_the_source_must_exist(context: Arc<Context>) {
    let node = Node::new(&context, "preload");
    let source = node.source("preload").filled("SELECT 1");
    let conf = source.path.join("postgresql.conf");
    let text = fs::read_to_string(&conf).unwrap();
    let with = |libraries: &str| {
        fs::write(
            &conf,
            format!("{text}\nshared_preload_libraries = '{libraries}'\n"),
        )
    };
    with("pg_stat_statements, no_such_library").unwrap();
    let error = build(&node, &subvolume("preload")).await.unwrap_err();
    let Error::Check {
        source: CheckError::LibraryMissing { library, .. },
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(library, "no_such_library");
    node.assert_nothing_left();

    with("pg_stat_statements").unwrap();
    let facts = build(&node, &subvolume("preload")).await.unwrap();
    assert_eq!(facts.shared_preload_libraries, ["pg_stat_statements"]);
    let query = "SHOW shared_preload_libraries";
    assert_eq!(
        ask(&node, &facts, "postgres", "app", query).await,
        ["pg_stat_statements"]
    );
}

pub(crate) async fn a_changed_collation_version_is_refused(context: Arc<Context>) {
    let node = Node::new(&context, "collation");
    node.source("old")
        .filled("UPDATE pg_database SET datcollversion = '2.19' WHERE datname = 'app'");
    let error = build(&node, &subvolume("old")).await.unwrap_err();
    let Error::Check {
        source: CheckError::Collation {
            object, recorded, ..
        },
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!((object.as_str(), recorded.as_str()), ("app", "2.19"));
    node.assert_nothing_left();
}
