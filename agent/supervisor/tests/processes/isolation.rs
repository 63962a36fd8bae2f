//! A real server in full isolation on a real Btrfs, and what can be reached from where it runs.

use std::{
    fs::{self, File},
    net::TcpListener,
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
    process::Command,
};

use branchpool_supervisor::{
    client::Child,
    protocol::{IdMount, Landlock, Outcome, Spawn, User},
};
use branchpool_sys::probe::missing_isolation;
use libtest_mimic::Trial;

use crate::support::{Agent, PATIENCE, Scene, body, eventually, output_of, plain, trial};

const POSTGRES: &str = "/usr/lib/postgresql/15/bin";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("isolation/all_means_are_found_on_btrfs"),
        trial("isolation/a_server_runs_as_the_user_of_its_slot"),
        trial("isolation/a_mount_is_replaced_and_undone"),
        trial("isolation/a_sandbox_keeps_its_inmates"),
        trial("isolation/each_layer_alone_keeps_the_network_away"),
    ]
}

pub(crate) fn agent(name: &str, scene: Scene) -> Agent {
    match name {
        "all_means_are_found_on_btrfs" => body(probe(scene)),
        "a_server_runs_as_the_user_of_its_slot" => body(server(scene)),
        "a_mount_is_replaced_and_undone" => body(mounts(scene)),
        "a_sandbox_keeps_its_inmates" => body(sandbox(scene)),
        "each_layer_alone_keeps_the_network_away" => body(network(scene)),
        _ => panic!("no agent {name}"),
    }
}

/// A Btrfs of its own in a file. The mount is in the supervisor's private namespace, so it goes with
/// the last process of the test, whatever happens.
pub(crate) struct Disk {
    pub(crate) root: PathBuf,
    pub(crate) owner: User,
}

impl Disk {
    pub(crate) fn new(scene: &Scene) -> Self {
        let (image, root) = (scene.directory.join("disk"), scene.directory.join("root"));
        File::create(&image).unwrap().set_len(1 << 30).unwrap();
        run(Command::new("mkfs.btrfs").arg("--quiet").arg(&image));
        fs::create_dir(&root).unwrap();
        run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(&image)
            .arg(&root));
        let passwd = fs::read_to_string("/etc/passwd").unwrap();
        let fields: Vec<_> = passwd
            .lines()
            .find(|line| line.starts_with("postgres:"))
            .unwrap()
            .split(':')
            .collect();
        let id = |at: usize| fields[at].parse().unwrap();
        Self {
            root,
            owner: User {
                uid: id(2),
                gid: id(3),
            },
        }
    }

    /// An empty subvolume of the disk user.
    pub(crate) fn subvolume(&self, name: &str) -> PathBuf {
        let path = self.root.join(name);
        run(Command::new("btrfs")
            .args(["-q", "subvolume", "create"])
            .arg(&path));
        chown(&path, Some(self.owner.uid), Some(self.owner.gid)).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).unwrap();
        path
    }

    /// A directory for a mount or for sockets.
    pub(crate) fn directory(&self, name: &str, owner: User) -> PathBuf {
        let path = self.root.join(name);
        fs::create_dir(&path).unwrap();
        chown(&path, Some(owner.uid), Some(owner.gid)).unwrap();
        path
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
}

pub(crate) const SLOT: User = User {
    uid: 900_001,
    gid: 900_001,
};
const OTHER_SLOT: User = User {
    uid: 900_002,
    gid: 900_002,
};

/// Everything that fences a branch in.
pub(crate) fn fenced(
    scene: &Scene,
    disk: &Disk,
    data: &Path,
    mount: &Path,
    slot: User,
    group: &str,
) -> Spawn {
    let paths = |paths: &[&str]| paths.iter().map(PathBuf::from).collect();
    let mut read_write: Vec<PathBuf> = paths(&["/dev/null", "/dev/zero", "/dev/urandom"]);
    read_write.push(mount.to_owned());
    Spawn {
        user: Some(slot),
        cwd: mount.to_owned(),
        cgroup: scene.groups.group(group).unwrap().membership(),
        mount: Some(IdMount {
            source: data.to_owned(),
            target: mount.to_owned(),
            on_disk: disk.owner,
            inside: slot,
        }),
        ipc_namespace: true,
        network_namespace: true,
        landlock: Some(Landlock {
            read_execute: paths(&["/usr", "/lib", "/lib64", "/lib32"]),
            read: paths(&[
                "/etc/passwd",
                "/etc/group",
                "/etc/nsswitch.conf",
                "/etc/ld.so.cache",
                "/etc/localtime",
                "/etc/ssl/openssl.cnf",
            ]),
            read_write,
            network: false,
        }),
        oom_score_adj: 500,
        ..plain("", &[])
    }
}

async fn probe(scene: Scene) {
    let disk = Disk::new(&scene);
    assert_eq!(missing_isolation(&disk.root), []);
}

async fn server(scene: Scene) {
    let disk = Disk::new(&scene);
    let data = disk.subvolume("data");
    let mount = disk.directory("mnt", SLOT);
    let sockets = disk.directory("sockets", SLOT);
    init(&scene, &disk, &data).await;

    let mut spawn = fenced(&scene, &disk, &data, &mount, SLOT, "slot-1");
    spawn.program = Path::new(POSTGRES).join("postgres");
    spawn.args = [
        "-D",
        mount.to_str().unwrap(),
        "-clisten_addresses=",
        &format!("-cunix_socket_directories={}", sockets.display()),
        "-cdynamic_shared_memory_type=sysv",
    ]
    .map(str::to_owned)
    .to_vec();
    spawn
        .landlock
        .as_mut()
        .unwrap()
        .read_write
        .push(sockets.clone());
    let log = File::create(scene.directory.join("log")).unwrap();
    let stdio = [None, Some(log.as_fd()), Some(log.as_fd())];
    let mut child = scene.supervisor.spawn(spawn, stdio).await.unwrap();
    eventually("the server is ready", || {
        let text = fs::read_to_string(data.join("postmaster.pid")).unwrap_or_default();
        text.lines()
            .nth(7)
            .is_some_and(|line| line.trim() == "ready")
    });

    let sql = "CREATE TABLE t AS SELECT generate_series(1, 1000) n; CHECKPOINT; \
        SELECT count(*) FROM t; \
        SELECT current_setting('data_directory'); \
        COPY (SELECT 1) TO PROGRAM 'id -u; grep ^NoNewPrivs: /proc/self/status || echo no /proc; cat > id.out; id -u > id.out'";
    let output = Command::new("psql")
        .args(["-XAtq", "-U", "postgres", "-d", "postgres", "-h"])
        .arg(&sockets)
        .args(["-c", sql])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(
        text.starts_with(&format!("1000\n{}\n", mount.display())),
        "{text}"
    );

    // The server's processes have the slot's ids and none of root's, and it is in its group.
    let status = fs::read_to_string(format!("/proc/{}/status", child.pid)).unwrap();
    for line in [
        "Uid:\t900001\t900001\t900001\t900001",
        "Gid:\t900001\t900001\t900001\t900001",
        "Groups:\t ",
        "CapPrm:\t0000000000000000",
        "NoNewPrivs:\t1",
        "SigBlk:\t0000000000000000",
    ] {
        assert!(
            status.lines().any(|l| l == line),
            "{line} is not in {status}"
        );
    }
    let of_child = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", child.pid)).unwrap();
    assert_eq!(of_child("oom_score_adj").trim(), "500");
    assert_eq!(of_child("coredump_filter").trim(), "00000031");
    let link = |pid: &str, kind: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
    for kind in ["ipc", "net"] {
        assert_ne!(link(&child.pid.to_string(), kind), link("self", kind));
    }
    assert_eq!(link(&child.pid.to_string(), "mnt"), link("self", "mnt"));
    let group = scene.groups.group("slot-1").unwrap();
    assert!(group.processes().unwrap().contains(&child.pid));

    // On disk all is the disk user's, in the mount the slot's.
    assert_eq!(owners(&data), [(disk.owner.uid, disk.owner.gid)]);
    assert_eq!(owners(&mount), [(SLOT.uid, SLOT.gid)]);
    assert_eq!(fs::read_to_string(data.join("id.out")).unwrap(), "900001\n");

    stop(&mut child).await;
    group.wait_empty(PATIENCE).unwrap();
    scene.supervisor.unmount(&mount).await.unwrap();
}

async fn stop(child: &mut Child) {
    assert!(
        child
            .signal(rustix::process::Signal::QUIT.as_raw())
            .unwrap()
    );
    // An immediate stop ends with 0 or, from 16 on, 2.
    assert!(matches!(child.wait().await.unwrap(), Outcome::Code(0..=2)));
}

async fn init(scene: &Scene, disk: &Disk, data: &Path) {
    let mut spawn = plain("", &[]);
    spawn.user = Some(disk.owner);
    spawn.cgroup = scene.groups.group("tools").unwrap().membership();
    let script = format!(
        "{POSTGRES}/initdb -U postgres -A trust --no-sync -D {}",
        data.display()
    );
    let (outcome, text) = output_of(scene, spawn, &script).await;
    assert_eq!(outcome, Outcome::Code(0), "{text}");
}

/// The different owners of a directory and what is below it.
fn owners(directory: &Path) -> Vec<(u32, u32)> {
    let mut found = vec![];
    let mut pending = vec![directory.to_owned()];
    while let Some(path) = pending.pop() {
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            continue;
        };
        found.push((metadata.uid(), metadata.gid()));
        if metadata.is_dir() {
            pending.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
        }
    }
    assert!(found.len() > 1);
    found.sort_unstable();
    found.dedup();
    found
}

async fn mounts(scene: Scene) {
    let disk = Disk::new(&scene);
    let (first, second) = (disk.subvolume("first"), disk.subvolume("second"));
    let mount = disk.directory("mnt", SLOT);
    let user = |data: &Path, slot| fenced(&scene, &disk, data, &mount, slot, "slot-1");
    let script = "touch file; stat -c '%u %g' file; echo $(cat name) $(pwd)";
    for (data, slot) in [(&first, SLOT), (&second, SLOT), (&first, OTHER_SLOT)] {
        let name = data.file_name().unwrap().to_str().unwrap();
        fs::write(data.join("name"), name).unwrap();
        chown(data.join("name"), Some(disk.owner.uid), None).unwrap();
        let (outcome, text) = output_of(&scene, user(data, slot), script).await;
        let expected = format!("{} {}\n{name} {}\n", slot.uid, slot.gid, mount.display());
        assert_eq!((outcome, text), (Outcome::Code(0), expected));
        assert_eq!(
            fs::metadata(data.join("file")).unwrap().uid(),
            disk.owner.uid
        );
    }
    // A file of somebody else stays out of reach.
    fs::write(first.join("root"), "").unwrap();
    let (_, text) = output_of(&scene, user(&first, SLOT), "echo x > root; stat -c %u root").await;
    assert!(
        text.contains("root: ") && text.ends_with("65534\n"),
        "{text}"
    );

    let mounted = || {
        fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .contains(mount.to_str().unwrap())
    };
    assert!(mounted());
    scene.supervisor.unmount(&mount).await.unwrap();
    assert!(!mounted());
    assert_eq!(fs::read_dir(&mount).unwrap().count(), 0);
    scene.supervisor.unmount(&mount).await.unwrap();
    scene
        .supervisor
        .unmount(&scene.directory.join("nothing"))
        .await
        .unwrap();
}

async fn sandbox(scene: Scene) {
    let disk = Disk::new(&scene);
    let (data, other) = (disk.subvolume("data"), disk.subvolume("other"));
    let (mount, other_mount) = (
        disk.directory("mnt", SLOT),
        disk.directory("other-mnt", SLOT),
    );
    fs::write(other.join("secret"), "secret").unwrap();
    chown(
        other.join("secret"),
        Some(disk.owner.uid),
        Some(disk.owner.gid),
    )
    .unwrap();

    // A neighbour of the same user, so that only the sandbox is between them.
    let mut neighbour = fenced(&scene, &disk, &other, &other_mount, SLOT, "slot-2");
    neighbour.program = "/bin/sleep".into();
    neighbour.args = vec!["1000".to_owned()];
    let mut neighbour = scene.supervisor.spawn(neighbour, [None; 3]).await.unwrap();

    let denied = [
        "cat /etc/shadow".to_owned(),
        "cat /etc/hostname".to_owned(),
        "ls /".to_owned(),
        "ls /proc".to_owned(),
        "ls /tmp".to_owned(),
        format!("cat {}/secret", other_mount.display()),
        format!("cat {}/secret", other.display()),
        format!("ls {}", disk.root.display()),
        format!("touch {}/file", other_mount.display()),
        format!("cat /proc/{}/environ", neighbour.pid),
        format!("kill -9 {}", neighbour.pid),
        format!("kill -9 {}", std::process::id()),
        "kill -9 1".to_owned(),
        "echo > /dev/tcp/127.0.0.1/1".to_owned(),
        "su -c true".to_owned(),
    ];
    for script in denied {
        let inside = fenced(&scene, &disk, &data, &mount, SLOT, "slot-1");
        let (outcome, text) = output_of(&scene, inside, &format!("{script} && echo done")).await;
        assert!(
            matches!(outcome, Outcome::Code(1..)),
            "{script}: {outcome:?} {text}"
        );
        assert!(
            !text.contains("done") && !text.contains("secret\n"),
            "{script}: {text}"
        );
    }
    // The same without the sandbox reaches all that the user may: the tests above can fail.
    for script in [
        "cat /etc/hostname",
        "ls /proc",
        "ls /tmp",
        &format!("cat {}/secret", other_mount.display()),
    ] {
        let mut inside = fenced(&scene, &disk, &data, &mount, SLOT, "slot-1");
        inside.landlock = None;
        let (outcome, text) = output_of(&scene, inside, script).await;
        assert_eq!(outcome, Outcome::Code(0), "{script}: {text}");
    }
    // Inside it can do its work, and signal its own.
    let inside = fenced(&scene, &disk, &data, &mount, SLOT, "slot-1");
    let script = "mkdir d && echo x > d/f && mv d/f g && cat g && (sleep 1000 & kill -9 $! && wait $!; echo $?)";
    let (outcome, text) = output_of(&scene, inside, script).await;
    assert_eq!(outcome, Outcome::Code(0), "{text}");
    assert!(text.starts_with("x\n") && text.ends_with("137\n"), "{text}");

    let mut free = fenced(&scene, &disk, &data, &mount, SLOT, "slot-1");
    free.landlock = None;
    let (outcome, _) = output_of(&scene, free, &format!("kill -9 {}", neighbour.pid)).await;
    assert_eq!(outcome, Outcome::Code(0));
    assert_eq!(neighbour.wait().await.unwrap(), Outcome::Signal(9));
}

async fn network(scene: Scene) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let script = format!(
        "echo > /dev/tcp/127.0.0.1/{}",
        listener.local_addr().unwrap().port()
    );
    let everything = |network| Landlock {
        read_execute: vec!["/".into()],
        read: vec![],
        read_write: vec!["/dev".into()],
        network,
    };
    for (landlock, namespace, reason) in [
        (None, false, None),
        (Some(everything(true)), false, None),
        (Some(everything(false)), false, Some("Permission denied")),
        (None, true, Some("Network is unreachable")),
    ] {
        let mut spawn = plain("", &[]);
        spawn.landlock = landlock;
        spawn.network_namespace = namespace;
        let (outcome, text) = output_of(&scene, spawn, &script).await;
        match reason {
            None => assert_eq!(outcome, Outcome::Code(0), "{text}"),
            Some(reason) => assert!(text.contains(reason), "{outcome:?} {text}"),
        }
    }
}
