//! Starts that must fail: each with one sentence that says what to do, and with its exit code.

use std::{
    fs,
    io::{Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::Path,
    process::Command,
};

use rustix::mount::{MountFlags, mount_remount};
use tempfile::TempDir;

use crate::{
    loop_btrfs::LoopBtrfs,
    node::{Node, Setup, pool},
};

const AGENT: &str = env!("CARGO_BIN_EXE_branchpool-agent");

/// A directory with a good manifest, which other users can pass through.
fn place() -> TempDir {
    let place = tempfile::Builder::new().prefix("bpi").tempdir().unwrap();
    fs::set_permissions(place.path(), PermissionsExt::from_mode(0o755)).unwrap();
    fs::write(place.path().join("pool.yaml"), pool("items", 1, 2, "")).unwrap();
    place
}

/// The exit code, and what was said as an error, if it ends within a minute.
fn refusal(command: &[&str]) -> (i32, String) {
    let output = Command::new("timeout")
        .args(["--signal=TERM", "60"])
        .args(command)
        .env("NO_COLOR", "1")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let errors: Vec<&str> = text
        .lines()
        .filter(|line| !line.contains(" INFO ") && !line.contains(" WARN "))
        .collect();
    // Of manifests each mistake has its line.
    let one = errors.len() == 1 || errors.iter().all(|line| line.contains("bad.yaml:"));
    assert!(one && !errors.is_empty(), "{command:?}: {text}");
    (output.status.code().unwrap(), errors.join("\n"))
}

fn refused(arguments: &[&str], code: i32, sentence: &str) {
    let command: Vec<&str> = [AGENT].iter().chain(arguments).copied().collect();
    let (found, error) = refusal(&command);
    assert!(error.contains(sentence), "{arguments:?}: {error}");
    assert_eq!(found, code, "{error}");
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_machine_or_command_line_that_will_not_do_is_refused_in_one_sentence() {
    let place = place();
    let at = |name: &str| place.path().join(name).display().to_string();
    let (manifest, run, data) = (at("pool.yaml"), at("run"), at("data"));
    fs::write(place.path().join("token"), "0123456789abcdef").unwrap();
    let with = |more: &[&str], code: i32, sentence: &str| {
        let mut arguments = vec!["standalone", "-f", &manifest, "--run-dir", &run];
        arguments.extend(more);
        refused(&arguments, code, sentence);
    };
    with(&["--root", "/dev/shm"], 78, "branches need Btrfs; mount");
    with(
        &["--root", &at("nothing")],
        78,
        "does not exist; make or mount it first",
    );
    with(
        &["--root", &manifest],
        78,
        "does not exist; make or mount it first",
    );
    with(
        &["--data-dir", &data, "--size", "1Mi"],
        78,
        "is too small; give at least 268435456 bytes",
    );
    fs::create_dir(place.path().join("taken")).unwrap();
    fs::write(place.path().join("taken/btrfs.img"), "something else").unwrap();
    with(
        &["--data-dir", &at("taken")],
        78,
        "is not a Btrfs image; move it away",
    );
    assert_eq!(
        fs::read(place.path().join("taken/btrfs.img")).unwrap(),
        b"something else"
    );

    let disk = LoopBtrfs::new(1 << 30);
    let root = path(disk.root());
    with(
        &["--root", root, "--postgres-bindir", &at("")],
        69,
        "lacks the program postgres",
    );
    with(
        &["--root", root, "--postgres-user", "no-such-user"],
        67,
        "no-such-user",
    );
    with(&["--root", root, "--postgres-user", "root"], 67, "root");
    with(&["--root", root, "--listen", "0.0.0.0:0"], 78, "token");
    with(
        &[
            "--root",
            root,
            "--listen",
            "192.0.2.1:80",
            "--token-file",
            &at("token"),
        ],
        78,
        "192.0.2.1:80",
    );
    let long = at(&"r".repeat(100));
    refused(
        &[
            "standalone",
            "-f",
            &manifest,
            "--root",
            root,
            "--run-dir",
            &long,
        ],
        78,
        "is too long: sockets below it would have paths of",
    );
    refused(
        &["run", "--root", root, "--run-dir", "relative"],
        78,
        "must be an absolute path",
    );
    // All else is well: the same arguments pass the checks.
    let output = Command::new(AGENT)
        .args(["preflight", "--root", root])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("postgres    15"),
        "{output:?}"
    );

    fs::set_permissions(disk.outside(), PermissionsExt::from_mode(0o700)).unwrap();
    with(&["--root", root], 78, "allow it with: chmod o+x");
    fs::set_permissions(disk.outside(), PermissionsExt::from_mode(0o711)).unwrap();
    mount_remount(disk.root(), MountFlags::RDONLY, "").unwrap();
    with(
        &["--root", root],
        78,
        "is mounted read-only; remount it with: mount -o remount,rw",
    );
}

#[test]
fn without_root_or_without_postgres_nothing_starts() {
    let place = place();
    let disk = LoopBtrfs::new(1 << 30);
    // Where other users can run it.
    let program = place.path().join("agent");
    fs::copy(AGENT, &program).unwrap();
    let program = path(&program);
    let (manifest, run) = (place.path().join("pool.yaml"), place.path().join("run"));
    let standalone = [
        program,
        "standalone",
        "-f",
        path(&manifest),
        "--run-dir",
        path(&run),
        "--root",
        path(disk.root()),
    ];
    let preflight = [program, "preflight", "--root", path(disk.root())];

    let nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ];
    for command in [&preflight[..], &standalone[..]] {
        let command: Vec<&str> = nobody.iter().chain(command).copied().collect();
        let (code, error) = refusal(&command);
        assert!(error.contains("run it as root"), "{command:?}: {error}");
        assert_eq!(code, 77, "{command:?}: {error}");
    }

    // As on a machine without its packages.
    let hide = "mount -t tmpfs none /usr/lib/postgresql && exec \"$0\" \"$@\"";
    let hidden = ["unshare", "--mount", "sh", "-c", hide];
    for command in [&preflight[..], &standalone[..]] {
        let command: Vec<&str> = hidden.iter().chain(command).copied().collect();
        let (code, error) = refusal(&command);
        assert!(
            error.contains("no Postgres server is installed; install one"),
            "{command:?}: {error}"
        );
        assert_eq!(code, 69, "{command:?}: {error}");
    }
}

#[test]
fn manifests_that_cannot_be_taken_are_refused_before_anything_is_made() {
    let place = place();
    let at = |name: &str| place.path().join(name).display().to_string();
    let refuse = |text: &[u8], sentence: &str| {
        let manifest = place.path().join("bad.yaml");
        fs::write(&manifest, text).unwrap();
        refused(
            &[
                "standalone",
                "-f",
                path(&manifest),
                "--run-dir",
                &at("run"),
                "--data-dir",
                &at("data"),
            ],
            78,
            sentence,
        );
    };
    refused(
        &[
            "standalone",
            "-f",
            &at("nothing"),
            "--run-dir",
            &at("run"),
            "--data-dir",
            &at("data"),
        ],
        78,
        "check the path given with -f",
    );
    refuse(b"\xff\xfe", "is not UTF-8 text");
    refuse(b"kind: [", "bad.yaml:");
    let good = pool("items", 1, 2, "");
    let changed = |from: &str, to: &str| {
        assert!(good.contains(from));
        good.replace(from, to).into_bytes()
    };
    for (from, to, sentence) in [
        ("replicas: 1", "replicas: -1", "spec.replicas"),
        ("replicas: 1", "replicas: 3", "maxBranches"),
        ("replicas: 1", "replicas: many", "spec.replicas"),
        (
            "maxBranches: 2",
            "maxBranches: 99999999999",
            "spec.maxBranches",
        ),
        ("replicas: 1", "replica: 1", "spec.replica: unknown field"),
        ("maxBranches: 2", "maxBranches: 0", "maxBranches"),
        ("version: 15", "version: -15", "spec.postgres.version"),
        ("version: 15", "version: 0", "spec.postgres.version"),
        ("kind: BranchPool", "kind: BranchPond", "BranchPond"),
        ("name: items\nspec", "name: Items_\nspec", "metadata.name"),
        (
            "source:\n",
            "source:\n    subvolume: {name: x}\n",
            "spec.source",
        ),
    ] {
        refuse(&changed(from, to), sentence);
    }
    let long = format!("name: {}\nspec", "n".repeat(253));
    refuse(&changed("name: items\nspec", &long), "metadata.name");
    let (head, _) = good.split_once("  source:").unwrap();
    for name in ["n".repeat(256), "../golden".to_owned(), String::new()] {
        let manifest = format!("{head}  source: {{subvolume: {{name: \"{name}\"}}}}\n");
        refuse(manifest.as_bytes(), "spec.source.subvolume.name");
    }
    assert!(!place.path().join("data").exists());
    assert!(!place.path().join("run").exists());
}

/// One request by hand: no client of ours would send it.
fn request(node: &Node, method: &str, target: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(node.run_dir().join("agent.sock")).unwrap();
    let length = body.len();
    let request = format!(
        "{method} {target} HTTP/1.1\r\nHost: node\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    // What is refused for its head alone may be answered, and the connection closed, before the body
    // is through.
    let _refused = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _cut = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_agent_and_senseless_requests_leave_the_first_alone() {
    let mut node = Node::start(Setup::new(pool("items", 1, 2, ""))).await;
    node.wait_full("items").await;
    let at = |name: &str| node.directory().join(name).display().to_string();
    let (manifest, other_run, other_data) = (at("manifests"), at("run2"), at("data2"));
    let (run, data) = (at("run"), at("data"));
    let with = |run: &str, data: &str, code: i32, sentence: &str| {
        let arguments = [
            "standalone",
            "-f",
            &manifest,
            "--gateway",
            "none",
            "--run-dir",
            run,
            "--data-dir",
            data,
        ];
        refused(&arguments, code, sentence);
    };
    with(&other_run, &data, 69, "journal.db");
    with(&run, &data, 78, "another agent listens at");
    with(&run, &other_data, 78, "another agent listens at");

    let long = "n".repeat(253);
    let lease = |pool: &str, more: &str| {
        format!("{{\"pool\": {{\"namespace\": \"default\", \"name\": \"{pool}\"}}{more}}}")
    };
    let pool_of = |name: &str, spec: &str| {
        format!(
            "{{\"namespace\": \"default\", \"name\": \"{name}\", \"generation\": 1, \"spec\": {spec}}}"
        )
    };
    let spec = "{\"replicas\": -1, \"maxBranches\": 0, \"postgres\": {\"version\": 15}, \"source\": {\"sql\": {}}}";
    for (method, target, body, part) in [
        ("PUT", "/v1/leases/a".to_owned(), lease(&long, ""), "pool"),
        (
            "PUT",
            format!("/v1/leases/{long}"),
            lease("items", ""),
            "uid",
        ),
        (
            "PUT",
            "/v1/leases/a".to_owned(),
            lease("items", ", \"ttlSeconds\": 0"),
            "ttlSeconds",
        ),
        (
            "PUT",
            "/v1/leases/a".to_owned(),
            lease("items", ", \"ttlSeconds\": -1"),
            "ttlSeconds",
        ),
        (
            "PUT",
            "/v1/leases/a".to_owned(),
            lease("items", ", \"ttl\": 1"),
            "ttl",
        ),
        (
            "PUT",
            "/v1/pools/p".to_owned(),
            pool_of(&long, spec),
            "name",
        ),
        (
            "PUT",
            "/v1/pools/abcd-1".to_owned(),
            pool_of("other", spec),
            "spec.replicas",
        ),
        (
            "GET",
            format!("/v1/pools/default/{long}"),
            String::new(),
            "name",
        ),
    ] {
        let (status, answer) = request(&node, method, &target, &body);
        assert!((400..500).contains(&status), "{target} {body}: {answer}");
        assert!(
            answer.contains("application/problem+json") && answer.contains(part),
            "{target} {body}: {answer}"
        );
    }
    let pools = node.client.pools().await.unwrap();
    assert_eq!(pools.len(), 1, "{pools:?}");
    let (status, answer) = request(&node, "PUT", "/v1/leases/a", &lease("items", ""));
    assert_eq!(status, 201, "{answer}");
    node.client.release("a", None).await.unwrap();
    node.wait_full("items").await;
    assert!(node.stop().success());
    node.assert_nothing_left();
}
