//! The journal against crashes, full disks, other agents and foreign files. Needs root.

#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::fs::{FileExt, PermissionsExt},
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use branchpool_agent::journal::{Contents, Error, Journal, Kind, QUEUE, Record, boot_id};
use serde_json::json;

mod loop_btrfs;
use loop_btrfs::LoopBtrfs;

fn put(kind: Kind, key: &str, value: &str) -> Record {
    Record::put(kind, key, &json!({ "value": value })).unwrap()
}

fn open(path: &Path) -> (Journal, Contents) {
    Journal::open(path).unwrap()
}

/// Moves the WAL into the main file.
fn checkpoint(path: &Path) {
    let connection = rusqlite::Connection::open(path).unwrap();
    let busy: i64 = connection
        .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0))
        .unwrap();
    assert_eq!(busy, 0);
}

#[tokio::test]
async fn records_come_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.db");
    let (journal, contents) = open(&path);
    assert!(contents.is_empty());
    for kind in Kind::ALL {
        let records = vec![
            put(kind, "a", "first"),
            put(kind, "b", "é\0\""),
            put(kind, "c", ""),
        ];
        journal.write(records.into()).await.unwrap();
    }
    let change = vec![
        put(Kind::Lease, "a", "second"),
        Record::delete(Kind::Lease, "c"),
    ];
    journal.write(change.into()).await.unwrap();
    journal
        .write([Record::delete(Kind::Lease, "never there")].into())
        .await
        .unwrap();
    journal.write(Vec::new().into()).await.unwrap();
    assert_eq!(journal.pending(), 0);
    journal.close().await;
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );

    let (journal, contents) = open(&path);
    assert_eq!(contents.len(), 14);
    let leases: Vec<_> = contents.of(Kind::Lease).collect();
    assert_eq!(
        leases,
        [
            ("a", r#"{"value":"second"}"#),
            ("b", r#"{"value":"é\u0000\""}"#)
        ]
    );
    assert_eq!(
        contents.get(Kind::Branch, "a"),
        Some(r#"{"value":"first"}"#)
    );
    assert_eq!(contents.get(Kind::Branch, "d"), None);
    let decoded: BTreeMap<_, _> = contents
        .decode::<BTreeMap<String, String>>(Kind::Meta)
        .map(|(key, value)| (key, value.unwrap()["value"].clone()))
        .collect();
    assert_eq!(decoded["c"], "");
    let (_, error) = contents.decode::<u64>(Kind::Pool).next().unwrap();
    assert!(error.unwrap_err().to_string().contains("pool record \"a\""));
    journal.close().await;
}

#[tokio::test]
async fn order_of_calls_is_the_order_of_writes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.db");
    let (journal, _) = open(&path);
    let mut writes = Vec::new();
    for round in 0..1000 {
        writes.push(journal.write([put(Kind::Branch, "x", &round.to_string())].into()));
        writes.push(journal.write([Record::delete(Kind::Branch, "x")].into()));
    }
    let last = journal.write([put(Kind::Branch, "x", "last")].into());
    // Never polled, and nevertheless written.
    drop(writes);
    last.await.unwrap();
    journal.close().await;
    let (journal, contents) = open(&path);
    assert_eq!(
        contents.of(Kind::Branch).collect::<Vec<_>>(),
        [("x", r#"{"value":"last"}"#)]
    );
    journal.close().await;
}

#[tokio::test]
async fn more_writers_than_the_queue_holds_are_all_served() {
    let directory = tempfile::tempdir().unwrap();
    let (journal, _) = open(&directory.path().join("journal.db"));
    let writers: Vec<_> = (0..QUEUE + 5000)
        .map(|number| {
            tokio::spawn(journal.write([put(Kind::Lease, &number.to_string(), "x")].into()))
        })
        .collect();
    for writer in writers {
        writer.await.unwrap().unwrap();
    }
    assert_eq!(journal.pending(), 0);
    journal.close().await;
    let (journal, contents) = open(&directory.path().join("journal.db"));
    assert_eq!(contents.len(), QUEUE + 5000);
    journal.close().await;
}

#[tokio::test]
async fn closing_writes_what_is_queued_and_refuses_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.db");
    let (journal, _) = open(&path);
    let queued: Vec<_> = (0..500)
        .map(|number| journal.write([put(Kind::Lease, &number.to_string(), "x")].into()))
        .collect();
    let other = journal.clone();
    journal.close().await;
    for write in queued {
        write.await.unwrap();
    }
    let error = other
        .write([put(Kind::Lease, "late", "x")].into())
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Closed), "{error}");
    assert_eq!(other.pending(), 0);
    other.close().await;
    let (journal, contents) = open(&path);
    assert_eq!(contents.len(), 500);
    journal.close().await;
}

#[tokio::test]
async fn a_second_agent_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.db");
    let (journal, _) = open(&path);
    let error = Journal::open(&path).unwrap_err();
    let holder = std::process::id();
    assert!(
        matches!(&error, Error::Locked { pid: Some(pid), .. } if *pid == holder),
        "{error}"
    );
    assert!(error.to_string().contains("journal.db.lock"), "{error}");
    journal
        .write([put(Kind::Lease, "a", "x")].into())
        .await
        .unwrap();
    journal.close().await;
    let (journal, contents) = open(&path);
    assert_eq!(contents.len(), 1);
    journal.close().await;
}

#[tokio::test]
async fn what_is_no_journal_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.db");
    let refused = |content: &[u8]| {
        fs::write(&path, content).unwrap();
        let error = Journal::open(&path).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error}");
        assert!(
            error.to_string().contains("Restore it from a backup"),
            "{error}"
        );
        assert_eq!(fs::read(&path).unwrap(), content);
    };
    refused(&[b'x'; 10_000]);
    refused(b"short");

    let foreign = directory.path().join("foreign.db");
    let connection = rusqlite::Connection::open(&foreign).unwrap();
    connection.execute_batch("CREATE TABLE other (x)").unwrap();
    drop(connection);
    refused(&fs::read(&foreign).unwrap());

    let good = directory.path().join("good.db");
    let (journal, _) = open(&good);
    let records = (0..500)
        .map(|n| put(Kind::Lease, &n.to_string(), &"x".repeat(300)))
        .collect();
    journal.write(records).await.unwrap();
    journal.close().await;
    checkpoint(&good);
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(&good)
        .unwrap();
    for page in 2..6 {
        file.write_all_at(&[0xff; 4096], page * 4096).unwrap();
    }
    refused(&fs::read(&good).unwrap());
}

#[tokio::test]
async fn a_newer_format_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.db");
    let (journal, _) = open(&path);
    journal.close().await;
    checkpoint(&path);
    let connection = rusqlite::Connection::open(&path).unwrap();
    connection.pragma_update(None, "user_version", 2).unwrap();
    drop(connection);
    let before = fs::read(&path).unwrap();
    let error = Journal::open(&path).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Newer {
                found: 2,
                known: 1,
                ..
            }
        ),
        "{error}"
    );
    assert!(
        error.to_string().contains("start the newer agent"),
        "{error}"
    );
    assert_eq!(fs::read(&path).unwrap(), before);
}

#[tokio::test]
async fn acknowledged_records_survive_kill_9() {
    const WRITERS: usize = 20;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("journal.db");
    let mut acknowledged = BTreeSet::new();
    // The third round writes past the size at which the WAL is moved into the main file.
    for (round, lines) in [1, 150, 5000, 40].into_iter().enumerate() {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "helper_write_until_killed",
                "--ignored",
                "--nocapture",
            ])
            .env("BRANCHPOOL_TEST_JOURNAL", &path)
            .env("BRANCHPOOL_TEST_ROUND", round.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut read = 0;
        let mut line = String::new();
        let mut killed = false;
        // What was printed before the end counts as well, but for a torn last line.
        while output.read_line(&mut line).unwrap() > 0 {
            if let Some(key) = line
                .strip_suffix('\n')
                .and_then(|line| line.strip_prefix("ack "))
            {
                acknowledged.insert(key.to_owned());
                read += 1;
            }
            line.clear();
            if read >= lines && !killed {
                child.kill().unwrap();
                killed = true;
            }
        }
        assert!(killed, "the child ended by itself: {:?}", child.wait());
        child.wait().unwrap();

        let (journal, contents) = open(&path);
        let present: BTreeSet<_> = contents
            .of(Kind::Lease)
            .map(|(key, _)| key.to_owned())
            .collect();
        let lost: Vec<_> = acknowledged.difference(&present).collect();
        assert!(lost.is_empty(), "lost {lost:?} in round {round}");
        // Each write was of two records: all or none.
        let twins: BTreeSet<_> = contents
            .of(Kind::Branch)
            .map(|(key, _)| key.to_owned())
            .collect();
        assert_eq!(present, twins);
        // No more than what was under way was written without an answer.
        assert!(present.len() <= acknowledged.len() + WRITERS * (round + 1));
        journal.close().await;
    }
}

/// Run by the test above.
#[tokio::test]
#[ignore = "part of another test"]
async fn helper_write_until_killed() {
    let path = std::env::var_os("BRANCHPOOL_TEST_JOURNAL").unwrap();
    let round = std::env::var("BRANCHPOOL_TEST_ROUND").unwrap();
    let (journal, _) = open(Path::new(&path));
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..20 {
        let (journal, round) = (journal.clone(), round.clone());
        writers.spawn(async move {
            for number in 0_u64.. {
                let key = format!("{round}-{writer}-{number}");
                let value = "x".repeat(300);
                let records = vec![put(Kind::Lease, &key, &value), put(Kind::Branch, &key, "")];
                journal.write(records.into()).await.unwrap();
                // One write call, so that a line is torn by nothing but the end.
                if std::io::stdout()
                    .write_all(format!("ack {key}\n").as_bytes())
                    .is_err()
                {
                    return;
                }
            }
        });
    }
    writers.join_all().await;
}

#[tokio::test]
async fn a_full_disk_is_reported_and_overcome() {
    let btrfs = LoopBtrfs::new(256 << 20);
    let path = btrfs.root().join("journal.db");
    let (journal, _) = open(&path);
    journal
        .write([put(Kind::Lease, "before", "x")].into())
        .await
        .unwrap();

    let filler = btrfs.root().join("filler");
    let mut file = fs::File::create(&filler).unwrap();
    for size in [8192, 512] {
        while file.write_all(&vec![7; size]).is_ok() {}
    }
    assert_eq!(file.sync_all().err().map(|error| error.kind()), None);
    drop(file);

    let value = "x".repeat(64 << 10);
    let mut written = BTreeSet::from(["before".to_owned()]);
    let mut refused = None;
    for number in 0..10_000 {
        let key = number.to_string();
        let records = vec![
            put(Kind::Lease, &key, &value),
            put(Kind::Lease, &format!("{key}b"), ""),
        ];
        match journal.write(records.into()).await {
            Ok(()) => written.extend([key.clone(), format!("{key}b")]),
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    let error = refused.expect("the journal should not fit on a full disk");
    assert!(matches!(error, Error::DiskFull { .. }), "{error}");
    assert_eq!(journal.pending(), 0);

    fs::remove_file(&filler).unwrap();
    branchpool_sys::btrfs::sync(branchpool_sys::btrfs::open_dir(btrfs.root()).unwrap()).unwrap();
    journal
        .write([put(Kind::Lease, "after", &value)].into())
        .await
        .unwrap();
    written.insert("after".to_owned());
    journal.close().await;

    let (journal, contents) = open(&path);
    let present: BTreeSet<_> = contents
        .of(Kind::Lease)
        .map(|(key, _)| key.to_owned())
        .collect();
    assert_eq!(present, written);
    journal.close().await;
}

#[test]
fn boot_id_stays_until_a_reboot() {
    let id = boot_id().unwrap();
    assert_eq!(id.len(), 36);
    assert_eq!(boot_id().unwrap(), id);
}

/// Prints numbers; asserts none. Run with `--ignored --nocapture`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn measure_group_commit() {
    const WRITERS: u32 = 100;
    const EACH: u32 = 2000;
    let btrfs = LoopBtrfs::new(1 << 30);
    let (journal, _) = open(&btrfs.root().join("journal.db"));
    let begin = Instant::now();
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let journal = journal.clone();
        writers.spawn(async move {
            let mut times = Vec::new();
            // As leases come and go: what is put is soon deleted, so the journal stays small.
            for number in 0..EACH {
                let key = format!("{}-{writer}", number / 2);
                let record = match number % 2 {
                    0 => put(Kind::Lease, &key, &"x".repeat(280)),
                    _ => Record::delete(Kind::Lease, key),
                };
                let begin = Instant::now();
                journal.write([record].into()).await.unwrap();
                times.push(begin.elapsed());
            }
            times
        });
    }
    let mut times: Vec<_> = writers.join_all().await.into_iter().flatten().collect();
    let rate = f64::from(WRITERS * EACH) / begin.elapsed().as_secs_f64();
    times.sort();
    let [p50, p95, p99, max] =
        [500, 950, 990, 1000].map(|share| times[(times.len() - 1) * share / 1000]);
    println!("{rate:.0} writes/s, p50 {p50:?}, p95 {p95:?}, p99 {p99:?}, max {max:?}");
    journal.close().await;
}
