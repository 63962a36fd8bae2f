//! What a superuser of a branch reaches: its own branch, and nothing else.
//!
//! Each attempt is shown to fail, and next to it that it can succeed: for root with the same
//! script, or for the superuser on what is its own.

use std::{
    net::{TcpListener, UdpSocket},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    process::Command,
};

use crate::{
    inmate::{Inmate, run_as_root, superuser_pool},
    node::{Node, Setup, processes},
};

const PSQL: &str = "/usr/lib/postgresql/15/bin/psql -X";
#[cfg(target_arch = "x86_64")]
const PTRACE: u32 = 101;
#[cfg(target_arch = "aarch64")]
const PTRACE: u32 = 117;

/// How it is known that an attempt is one.
enum Control {
    /// Root can do the same.
    Root,
    /// The superuser can do this, and the answer holds this text.
    Own(String, &'static str),
}

struct Attempt {
    script: String,
    /// Part of the error.
    refusal: &'static str,
    control: Control,
}

async fn hold(node: &Node, inmate: &Inmate, attempts: Vec<Attempt>) {
    for attempt in attempts {
        let script = &attempt.script;
        let said = inmate.run(script).await;
        assert!(
            !said.ok && said.text.contains(attempt.refusal),
            "{script}: {said:?}"
        );
        match attempt.control {
            Control::Root => {
                let said = run_as_root(node, script);
                assert!(said.ok, "as root {script}: {said:?}");
            }
            Control::Own(script, text) => {
                let said = inmate.run(&script).await;
                assert!(said.text.contains(text), "{script}: {said:?}");
                assert!(said.ok || !text.is_empty(), "{script}: {said:?}");
            }
        }
    }
}

fn as_root(script: impl Into<String>, refusal: &'static str) -> Attempt {
    Attempt {
        script: script.into(),
        refusal,
        control: Control::Root,
    }
}

fn own(
    script: impl Into<String>,
    refusal: &'static str,
    control: impl Into<String>,
    text: &'static str,
) -> Attempt {
    Attempt {
        script: script.into(),
        refusal,
        control: Control::Own(control.into(), text),
    }
}

const DENIED: &str = "Permission denied";
const NOT_PERMITTED: &str = "Operation not permitted";

async fn start() -> (Node, Inmate, Inmate) {
    let node = Node::start(Setup::new(superuser_pool("items", 2, ""))).await;
    let intruder = Inmate::enter(&node, "items", "intruder").await;
    let victim = Inmate::enter(&node, "items", "victim").await;
    assert_eq!(
        intruder
            .sql("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
            .await,
        Ok("t".into())
    );
    (node, intruder, victim)
}

/// Paths that are not the intruder's, all of which root can read.
fn foreign_files(node: &Node, intruder: &Inmate, victim: &Inmate) -> Vec<String> {
    let root = node.inner_root();
    let root = root.display();
    let run = node.run_dir();
    let run = run.display();
    let found = run_as_root(
        node,
        &format!(
            "ls -d {root}/golden/*/*/PG_VERSION {root}/branches/*/{}/PG_VERSION {root}/branches/*/{}/PG_VERSION {root}/state/*",
            victim.lease.branch, intruder.lease.branch
        ),
    );
    let mut paths: Vec<String> = found.text.lines().map(str::to_owned).collect();
    assert!(
        paths.iter().any(|path| path.ends_with("/journal.db")),
        "{paths:?}"
    );
    assert!(
        paths.iter().any(|path| path.ends_with("/node.key")),
        "{paths:?}"
    );
    paths.extend([
        format!("{}/PG_VERSION", victim.data),
        format!("{}/../{}/PG_VERSION", intruder.data, last(&victim.data)),
        format!("/proc/{}/root{}/PG_VERSION", victim.postmaster, victim.data),
        format!("/proc/{}/root/etc/shadow", victim.postmaster),
        format!("/proc/{}/environ", victim.postmaster),
        format!("/proc/{}/maps", node.agent_pid()),
        format!("{root}/logs/{}.log", victim.lease.branch),
        format!("{root}/logs/{}.log", intruder.lease.branch),
        format!("{run}/b/{}/postgresql.conf", victim.lease.branch),
        format!("{}/pools.yaml", node.manifest_dir().display()),
        "/etc/shadow".to_owned(),
        "/etc/ssl/private/../../hostname".to_owned(),
    ]);
    paths
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_superuser_reads_and_writes_its_own_branch_only() {
    let (mut node, intruder, victim) = start().await;
    let status = node.client.node().await.unwrap();
    assert_eq!(status.isolation.level, "Full", "{:?}", status.isolation);
    assert_eq!(status.isolation.missing, Vec::<String>::new());

    let mut attempts = Vec::new();
    for path in foreign_files(&node, &intruder, &victim) {
        // By the server itself.
        for sql in [
            format!("SELECT length(pg_read_binary_file('{path}'))"),
            format!("COPY said FROM '{path}'"),
            format!("SELECT lo_import('{path}')"),
        ] {
            let refused = intruder.sql(&sql).await.unwrap_err();
            assert!(refused.contains(DENIED), "{sql}: {refused}");
        }
        attempts.push(as_root(format!("cat '{path}' >/dev/null"), DENIED));
    }
    let length = format!(
        "SELECT length(pg_read_binary_file('{}/PG_VERSION'))",
        intruder.data
    );
    assert_eq!(intruder.sql(&length).await, Ok("3".into()));

    let root = node.inner_root();
    let run = node.run_dir();
    for directory in [
        root.join("branches/00"),
        root.join("logs"),
        root.join("mnt"),
        root.join("golden"),
        run.clone(),
        run.join("b"),
        run.join("b").join(&victim.lease.branch),
        run.join("auth"),
        victim.data.clone().into(),
        victim.sockets.clone().into(),
        "/proc".into(),
        "/tmp".into(),
        "/dev/shm".into(),
        "/etc".into(),
        "/".into(),
    ] {
        let directory = directory.display();
        attempts.push(as_root(format!("ls {directory}"), DENIED));
        let sql = format!("SELECT count(*) FROM pg_ls_dir('{directory}')");
        let refused = intruder.sql(&sql).await.unwrap_err();
        assert!(refused.contains(DENIED), "{sql}: {refused}");
    }
    attempts.push(own(
        format!("ls {}", victim.data),
        DENIED,
        format!("ls {}", intruder.data),
        "PG_VERSION",
    ));

    let object = intruder.sql("SELECT lo_from_bytea(0, 'x')").await.unwrap();
    let find = format!(
        "ls -d {}/branches/*/{}",
        root.display(),
        victim.lease.branch
    );
    let victims_branch = run_as_root(&node, &find).text.trim().to_owned();
    for directory in [
        victims_branch.clone(),
        victim.sockets.clone(),
        root.join("logs").display().to_string(),
        run.join("b")
            .join(&intruder.lease.branch)
            .display()
            .to_string(),
        run.display().to_string(),
        "/tmp".to_owned(),
        "/dev/shm".to_owned(),
        "/usr/lib/postgresql/15/lib".to_owned(),
    ] {
        let file = format!("{directory}/intruder-{}", std::process::id());
        for sql in [
            format!("COPY (SELECT 1) TO '{file}'"),
            format!("SELECT lo_export({object}, '{file}')"),
            format!("CREATE TABLESPACE t LOCATION '{directory}'"),
        ] {
            let refused = intruder.sql(&sql).await.unwrap_err();
            assert!(
                refused.contains(DENIED) || refused.contains(NOT_PERMITTED),
                "{sql}: {refused}"
            );
        }
        attempts.push(as_root(format!("touch {file} && rm {file}"), DENIED));
        attempts.push(as_root(format!("mkfifo {file} && rm {file}"), DENIED));
    }
    attempts.push(own(
        format!("touch {}/intruder", victim.data),
        DENIED,
        format!("touch {}/intruder", intruder.data),
        "",
    ));
    attempts.push(own(
        format!("truncate -s 0 {}/PG_VERSION", victim.data),
        DENIED,
        format!("touch {0}/new && truncate -s 0 {0}/new", intruder.data),
        "",
    ));
    let sql = format!("COPY (SELECT 1) TO '{}/new'", intruder.data);
    assert_eq!(intruder.sql(&sql).await, Ok(String::new()));

    // The disk below the filesystem, and ways around the paths.
    let disk = Command::new("losetup")
        .args(["-n", "-O", "NAME", "-j"])
        .arg(node.image())
        .output()
        .unwrap();
    let disk = String::from_utf8(disk.stdout).unwrap().trim().to_owned();
    assert!(disk.starts_with("/dev/loop"), "{disk}");
    attempts.extend([
        as_root(format!("head -c 1 {disk} >/dev/null"), DENIED),
        as_root(
            format!("head -c 1 {} >/dev/null", node.image().display()),
            DENIED,
        ),
        own(
            format!(
                "mknod {}/disk b 7 {}",
                intruder.data,
                &disk["/dev/loop".len()..]
            ),
            NOT_PERMITTED,
            format!("mknod {}/pipe p", intruder.data),
            "",
        ),
        own(
            format!(
                "ln -s {} {1}/link && cat {1}/link/PG_VERSION",
                victim.data, intruder.data
            ),
            DENIED,
            format!(
                "ln -s {0} {0}/loop && cat {0}/loop/PG_VERSION",
                intruder.data
            ),
            "15",
        ),
        as_root("unshare --user --map-root-user --mount true", DENIED),
        as_root("unshare --mount true", NOT_PERMITTED),
        as_root("/usr/sbin/chroot / true", NOT_PERMITTED),
        as_root("setpriv --reuid 0 true", NOT_PERMITTED),
    ]);
    hold(&node, &intruder, attempts).await;

    assert_eq!(
        victim.sql("SELECT count(*) FROM items").await,
        Ok("3".into())
    );
    drop((intruder, victim));
    assert!(node.stop().success());
    node.assert_nothing_left();
}

/// Perl for connecting to a Unix socket.
fn connect_unix(path: &str) -> String {
    format!(
        "perl -MSocket -e 'socket(my $s, AF_UNIX, SOCK_STREAM, 0) or die $!; connect($s, pack_sockaddr_un(\"{path}\")) or die $!'"
    )
}

fn connect_tcp(address: &str, port: u16) -> String {
    format!(
        "perl -MSocket -e 'socket(my $s, AF_INET, SOCK_STREAM, 0) or die $!; connect($s, pack_sockaddr_in({port}, inet_aton(\"{address}\"))) or die $!'"
    )
}

fn send_udp(port: u16) -> String {
    format!(
        "perl -MSocket -e 'socket(my $s, AF_INET, SOCK_DGRAM, 0) or die $!; send($s, \"hello\", 0, pack_sockaddr_in({port}, inet_aton(\"127.0.0.1\"))) or die $!'"
    )
}

const LISTEN_TCP: &str = "perl -MSocket -e 'socket(my $s, AF_INET, SOCK_STREAM, 0) or die $!; bind($s, pack_sockaddr_in(0, INADDR_ANY)) or die $!; listen($s, 1) or die $!'";

#[tokio::test(flavor = "multi_thread")]
async fn a_superuser_connects_to_nothing_of_others() {
    let (mut node, intruder, victim) = start().await;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    let udp_port = datagrams.local_addr().unwrap().port();
    let name = format!("branchpool-test-{}", std::process::id());
    let _abstract =
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let abstract_path = format!("\\0{name}");
    let psql = |host: &str| format!("{PSQL} -h {host} -U app -d app -Atc 'SELECT 1'");

    let endpoint = victim.lease.host.as_str();
    let mut attempts = vec![
        own(
            psql(&victim.sockets),
            DENIED,
            // Its own socket is within reach, and lets the agent's user in only.
            psql(&intruder.sockets),
            "Peer authentication failed",
        ),
        as_root(psql(&victim.sockets), DENIED),
        as_root(psql(endpoint), DENIED),
        as_root(
            connect_unix(&format!("{}/.s.PGSQL.5432", victim.sockets)),
            DENIED,
        ),
        as_root(
            connect_unix(&node.run_dir().join("agent.sock").display().to_string()),
            DENIED,
        ),
        as_root(connect_tcp("127.0.0.1", port), DENIED),
        as_root(send_udp(udp_port), "Network is unreachable"),
        as_root(LISTEN_TCP, DENIED),
        as_root(connect_unix(&abstract_path), "Connection refused"),
        // Signals and memory.
        own(
            format!("kill -9 {}", victim.postmaster),
            NOT_PERMITTED,
            "sleep 100 & kill -9 $!",
            "",
        ),
    ];
    for pid in [
        victim.postmaster,
        node.agent_pid(),
        node.supervisor_pid(),
        std::process::id(),
        1,
    ] {
        attempts.push(as_root(format!("kill -0 {pid}"), NOT_PERMITTED));
        if pid == 1 {
            // Not even root's, in some containers.
            continue;
        }
        attempts.push(as_root(
            format!("head -c 1 /proc/{pid}/environ >/dev/null"),
            DENIED,
        ));
        attempts.push(as_root(format!("exec 3</proc/{pid}/mem"), DENIED));
    }
    let ptrace = |pid: &str| {
        format!(
            "perl -e 'my $p = {pid}; syscall({PTRACE}, 16, $p, 0, 0) == 0 or die \"$!\\n\"; kill 9, $p'"
        )
    };
    attempts.push(own(
        ptrace(&victim.postmaster.to_string()),
        NOT_PERMITTED,
        ptrace("fork() || do { sleep 100; exit }"),
        "",
    ));
    // A second address of this machine, where it has one.
    attempts.push(own(connect_tcp("192.0.2.1", 5432), DENIED, "true", ""));
    hold(&node, &intruder, attempts).await;
    let mut hello = [0; 16];
    assert_eq!(datagrams.recv(&mut hello).unwrap(), 5, "of root");
    datagrams.set_nonblocking(true).unwrap();
    assert!(datagrams.recv(&mut hello).is_err(), "of the intruder");

    for create in ["CREATE EXTENSION dblink", "CREATE EXTENSION postgres_fdw"] {
        intruder.sql(create).await.unwrap();
    }
    let dblink = |host: &str| format!("SELECT dblink_connect('host={host} user=app dbname=app')");
    let refused = intruder.sql(&dblink(&victim.sockets)).await.unwrap_err();
    assert!(refused.contains(DENIED), "{refused}");
    let refused = intruder.sql(&dblink(&intruder.sockets)).await.unwrap_err();
    assert!(refused.contains("Peer authentication failed"), "{refused}");
    let foreign = format!(
        "CREATE SERVER other FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '{}', dbname 'app');
         CREATE USER MAPPING FOR CURRENT_USER SERVER other OPTIONS (user 'app');
         CREATE FOREIGN TABLE others (id integer) SERVER other OPTIONS (table_name 'items')",
        victim.sockets
    );
    intruder.sql(&foreign).await.unwrap();
    let refused = intruder.sql("SELECT * FROM others").await.unwrap_err();
    assert!(refused.contains(DENIED), "{refused}");
    let terminated = format!("SELECT pg_terminate_backend({})", victim.postmaster);
    assert_eq!(intruder.sql(&terminated).await, Ok("f".into()));

    shared_memory(&intruder, &victim).await;
    assert_eq!(
        node.postmaster_of(&victim.lease.branch),
        Some(victim.postmaster)
    );
    assert_eq!(victim.sql("SELECT 1").await, Ok("1".into()));
    drop((intruder, victim));
    assert!(node.stop().success());
    node.assert_nothing_left();
}

/// System V segments, found by their key: the number of a segment means another one in each
/// namespace.
async fn shared_memory(intruder: &Inmate, victim: &Inmate) {
    let made = victim
        .run("perl -e 'my $id = shmget(47110815, 4096, 01666) // die $!; shmwrite($id, \"secret\", 0, 6) or die $!'")
        .await;
    assert!(made.ok, "{made:?}");
    let read = "perl -e 'my $id = shmget(47110815, 0, 0) // die $!; shmread($id, my $text, 0, 6) or die $!; print \"$text\\n\"'";
    let said = intruder.run(read).await;
    assert!(
        !said.ok && said.text.contains("No such file or directory"),
        "{said:?}"
    );
    let said = intruder.run("ipcrm -M 47110815").await;
    assert!(!said.ok, "{said:?}");
    let said = victim.run(read).await;
    assert!(said.ok && said.text.contains("secret"), "{said:?}");
    let said = victim.run("ipcrm -M 47110815").await;
    assert!(said.ok, "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn outbound_connections_are_a_choice_of_the_pool() {
    let open = superuser_pool("open", 1, "  network: {outbound: Allow}\n");
    let mut node = Node::start(Setup::new(format!(
        "{open}---\n{}",
        superuser_pool("closed", 1, "")
    )))
    .await;
    let open = Inmate::enter(&node, "open", "open").await;
    let closed = Inmate::enter(&node, "closed", "closed").await;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let script = connect_tcp("127.0.0.1", listener.local_addr().unwrap().port());
    let said = closed.run(&script).await;
    assert!(!said.ok && said.text.contains(DENIED), "{said:?}");
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err());
    let said = open.run(&script).await;
    assert!(said.ok, "{said:?}");
    listener.accept().unwrap();
    let said = open.run(LISTEN_TCP).await;
    assert!(said.ok, "{said:?}");

    // All else is as for the others.
    let name = format!("branchpool-open-{}", std::process::id());
    let _abstract =
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let attempts = vec![
        as_root(connect_unix(&format!("\\0{name}")), NOT_PERMITTED),
        as_root(
            connect_unix(&node.run_dir().join("agent.sock").display().to_string()),
            DENIED,
        ),
        as_root(format!("cat {}/PG_VERSION", closed.data), DENIED),
        as_root(format!("kill -0 {}", closed.postmaster), NOT_PERMITTED),
    ];
    hold(&node, &open, attempts).await;
    drop((open, closed));
    assert!(node.stop().success());
    node.assert_nothing_left();
    assert!(
        processes().len() > 1,
        "this test sees the machine's processes"
    );
}
