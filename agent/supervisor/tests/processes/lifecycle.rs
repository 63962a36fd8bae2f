//! Starts and ends: of programs, of the agent, of the supervisor.

use std::{
    env,
    fs::{self, File},
    os::fd::AsFd,
    pin::pin,
    process::{Command, ExitCode},
    task::{Context, Waker},
    time::Duration,
};

use branchpool_supervisor::{
    client::{Error, signal_pidfd, wait_pidfd},
    protocol::{IdMount, Landlock, Outcome, Spawn, User},
};
use branchpool_sys::process;
use libtest_mimic::Trial;
use rustix::process::{Pid, Signal, getpid, getppid, kill_process};
use tokio::signal::unix::{SignalKind, signal};

use crate::support::{Agent, PATIENCE, Scene, Stage, body, eventually, output_of, plain, trial};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("lifecycle/ends_are_told"),
        trial("lifecycle/descriptors_reach_their_places"),
        trial("lifecycle/a_failed_start_names_its_step"),
        trial("lifecycle/a_request_that_is_too_long_is_refused"),
        trial("lifecycle/many_starts_at_once"),
        trial("lifecycle/a_start_nobody_waits_for_is_undone"),
        trial("lifecycle/orphans_are_reaped"),
        trial("lifecycle/programs_outlive_a_crash_of_the_agent"),
        alone("lifecycle/a_termination_signal_is_passed_on", || {
            ends("patient", &[Signal::TERM], 42);
        }),
        alone("lifecycle/a_third_signal_ends_a_stubborn_agent", || {
            ends("stubborn", &[Signal::TERM, Signal::INT, Signal::HUP], 137);
        }),
        alone("lifecycle/an_agent_may_end_the_supervisor", || {
            ends("finished", &[], 65);
        }),
        alone("lifecycle/the_supervisor_can_be_pid_1", is_pid_1),
        alone(
            "lifecycle/the_agent_learns_that_the_supervisor_is_gone",
            supervisor_dies,
        ),
    ]
}

/// A test that looks at the supervisor from outside.
fn alone(name: &str, test: fn()) -> Trial {
    Trial::test(name, move || {
        test();
        Ok(())
    })
}

pub(crate) fn agent(name: &str, scene: Scene) -> Agent {
    match name {
        "ends_are_told" => body(ends_are_told(scene)),
        "descriptors_reach_their_places" => body(descriptors(scene)),
        "a_failed_start_names_its_step" => body(failures(scene)),
        "a_request_that_is_too_long_is_refused" => body(too_long(scene)),
        "many_starts_at_once" => body(many(scene)),
        "a_start_nobody_waits_for_is_undone" => body(dropped(scene)),
        "orphans_are_reaped" => body(orphans(scene)),
        "programs_outlive_a_crash_of_the_agent" => body(crash(scene)),
        "patient" => Box::pin(patient(scene)),
        "stubborn" => Box::pin(stubborn(scene)),
        "finished" => Box::pin(async { ExitCode::from(65) }),
        "bereaved" => Box::pin(bereaved(scene)),
        _ => panic!("no agent {name}"),
    }
}

async fn ends_are_told(scene: Scene) {
    let run = |script| {
        scene
            .supervisor
            .spawn(plain("/bin/sh", &["-c", script]), [None; 3])
    };
    let mut child = run("exit 7").await.unwrap();
    assert_eq!(child.wait().await.unwrap(), Outcome::Code(7));
    assert_eq!(child.wait().await.unwrap(), Outcome::Code(7));
    assert!(!child.signal(15).unwrap());

    let mut child = run("kill -9 $$").await.unwrap();
    assert_eq!(child.wait().await.unwrap(), Outcome::Signal(9));

    let mut child = run("exec sleep 1000").await.unwrap();
    assert!(child.signal(15).unwrap());
    assert_eq!(child.wait().await.unwrap(), Outcome::Signal(15));
}

async fn descriptors(scene: Scene) {
    let path = |name| scene.directory.join(name);
    fs::write(path("in"), "from stdin\n").unwrap();
    let (input, errors) = (
        File::open(path("in")).unwrap(),
        File::create(path("err")).unwrap(),
    );
    let script = "cat; cat >&2; echo \"$$ to stderr $X\" >&2; pwd >&2; ls /proc/self/fd >&2";
    let mut spawn = plain("/bin/sh", &["-c", script]);
    spawn.env.push(("X".to_owned(), "x".to_owned()));
    spawn.cwd.clone_from(&scene.directory);
    let stdio = [Some(input.as_fd()), None, Some(errors.as_fd())];
    let mut child = scene.supervisor.spawn(spawn, stdio).await.unwrap();
    assert_eq!(child.wait().await.unwrap(), Outcome::Code(0));
    // Nothing but stdio and the directory that ls reads.
    let expected = format!(
        "{} to stderr x\n{}\n0\n1\n2\n3\n",
        child.pid,
        scene.directory.display()
    );
    assert_eq!(fs::read_to_string(path("err")).unwrap(), expected);
}

async fn failures(scene: Scene) {
    let nothing = || scene.directory.join("nothing");
    let change = |change: fn(&mut Spawn, std::path::PathBuf)| {
        let mut spawn = plain("/bin/true", &[]);
        change(&mut spawn, nothing());
        spawn
    };
    let cases = [
        (change(|spawn, path| spawn.program = path), "execute it"),
        (
            change(|spawn, path| spawn.cwd = path),
            "change directory to",
        ),
        (change(|spawn, path| spawn.cgroup.v1.push(path)), "join"),
        (
            change(|spawn, path| spawn.cgroup.unified = Some(path)),
            "cannot open cgroup",
        ),
        (
            change(|spawn, path| {
                spawn.landlock = Some(Landlock {
                    read_execute: vec!["/usr".into()],
                    read: vec![],
                    read_write: vec![path],
                    network: true,
                });
            }),
            "restrict by Landlock: cannot open",
        ),
        (
            change(|spawn, path| {
                let ids = User { uid: 1, gid: 1 };
                spawn.mount = Some(IdMount {
                    source: path.clone(),
                    target: path,
                    on_disk: ids,
                    inside: ids,
                });
            }),
            "cannot copy the mount of",
        ),
        (
            change(|spawn, _| spawn.program = "/etc/passwd".into()),
            "Permission denied",
        ),
    ];
    for (spawn, step) in cases {
        let error = scene.supervisor.spawn(spawn, [None; 3]).await.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        assert!(
            error.to_string().contains(step),
            "{error} instead of {step}"
        );
    }
    let mut child = scene
        .supervisor
        .spawn(plain("/bin/true", &[]), [None; 3])
        .await
        .unwrap();
    assert_eq!(child.wait().await.unwrap(), Outcome::Code(0));
}

async fn too_long(scene: Scene) {
    let spawn = plain("/bin/true", &[&"x".repeat(70_000)]);
    let error = scene.supervisor.spawn(spawn, [None; 3]).await.unwrap_err();
    assert!(matches!(error, Error::Ask { .. }), "{error:?}");
    let fits = plain("/bin/true", &[&"x".repeat(60_000)]);
    scene.supervisor.spawn(fits, [None; 3]).await.unwrap();
}

async fn many(scene: Scene) {
    // More than the supervisor works on at a time.
    let tasks: Vec<_> = (0..600)
        .map(|n| {
            let supervisor = scene.supervisor.clone();
            tokio::spawn(async move {
                let code = n % 200;
                let script = format!("exit {code}");
                let spawn = plain("/bin/sh", &["-c", &script]);
                let mut child = supervisor.spawn(spawn, [None; 3]).await.unwrap();
                assert_eq!(child.wait().await.unwrap(), Outcome::Code(code));
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

async fn dropped(scene: Scene) {
    let group = scene.groups.group("dropped").unwrap();
    // After this the connection is known to be writable, so that one poll sends a request.
    let before = scene.supervisor.spawn(plain("/bin/true", &[]), [None; 3]);
    before.await.unwrap();
    let mut spawn = plain("/bin/sleep", &["1000"]);
    spawn.cgroup = group.membership();
    {
        let mut start = pin!(scene.supervisor.spawn(spawn, [None; 3]));
        let polled = start.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
    }
    // Requests are carried out in order, so the one before has been started when this one has.
    let after = scene.supervisor.spawn(plain("/bin/true", &[]), [None; 3]);
    after.await.unwrap();
    let emptied = tokio::task::spawn_blocking(move || group.wait_empty(PATIENCE));
    emptied.await.unwrap().unwrap();
}

async fn orphans(scene: Scene) {
    // The background job outlives its parent by not ending before the pipe's other end is closed.
    let script = "sleep 0.05 & echo $!";
    let (outcome, pid) = output_of(&scene, plain("", &[]), script).await;
    assert_eq!(outcome, Outcome::Code(0));
    let path = format!("/proc/{}", pid.trim());
    eventually("the orphan is gone", || !fs::exists(&path).unwrap());
}

async fn crash(scene: Scene) {
    let group = scene.groups.group("survivor").unwrap();
    let record = scene.directory.join("pid");
    let Ok(pid) = fs::read_to_string(&record) else {
        let mut spawn = plain("/bin/sleep", &["1000"]);
        spawn.cgroup = group.membership();
        let child = scene.supervisor.spawn(spawn, [None; 3]).await.unwrap();
        fs::write(record, child.pid.to_string()).unwrap();
        kill_process(getpid(), Signal::KILL).unwrap();
        unreachable!("killed itself");
    };
    let pid: u32 = pid.parse().unwrap();
    assert_eq!(group.processes().unwrap(), [pid]);
    let pidfd = process::open(pid).unwrap();
    let ended = wait_pidfd(&pidfd);
    assert!(!process::wait(&pidfd, Some(Duration::ZERO)).unwrap());
    assert!(signal_pidfd(&pidfd, 15).unwrap());
    ended.await.unwrap();
    // The same descriptor can be waited for again.
    wait_pidfd(&pidfd).await.unwrap();
    group.wait_empty(PATIENCE).unwrap();
    // The new agent is served as the old one was.
    let mut child = scene
        .supervisor
        .spawn(plain("/bin/true", &[]), [None; 3])
        .await
        .unwrap();
    assert_eq!(child.wait().await.unwrap(), Outcome::Code(0));
}

/// Sends signals to a supervisor whose agent is ready, and expects an exit code.
fn ends(agent: &str, signals: &[Signal], code: i32) {
    let stage = Stage::new(format!("lifecycle/{agent}"));
    let mut supervisor = stage.start();
    if !signals.is_empty() {
        let ready = stage.directory.path().join("ready");
        eventually("the agent is ready", || ready.exists());
    }
    let pid = Pid::from_child(&supervisor);
    for signal in signals {
        kill_process(pid, *signal).unwrap();
    }
    let status = supervisor.wait().unwrap();
    assert_eq!(status.code(), Some(code), "{status}");
}

/// As in a container, where it is the init process.
fn is_pid_1() {
    let stage = Stage::new("lifecycle/patient".to_owned());
    let mut container = Command::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", "--kill-child"])
        .arg(env::current_exe().unwrap())
        .args(["supervise", "lifecycle/patient"])
        .arg(stage.directory.path())
        .spawn()
        .unwrap();
    let ready = stage.directory.path().join("ready");
    eventually("the agent is ready", || ready.exists());
    let children = format!("/proc/{0}/task/{0}/children", container.id());
    let supervisor = fs::read_to_string(children).unwrap();
    let supervisor = Pid::from_raw(supervisor.trim().parse().unwrap()).unwrap();
    kill_process(supervisor, Signal::TERM).unwrap();
    let status = container.wait().unwrap();
    assert_eq!(status.code(), Some(42), "{status}");
}

async fn patient(scene: Scene) -> ExitCode {
    let mut terminate = signal(SignalKind::terminate()).unwrap();
    fs::write(scene.directory.join("ready"), "").unwrap();
    terminate.recv().await;
    ExitCode::from(42)
}

async fn stubborn(scene: Scene) -> ExitCode {
    let kinds = [
        SignalKind::terminate(),
        SignalKind::interrupt(),
        SignalKind::hangup(),
    ];
    let _deaf = kinds.map(|kind| signal(kind).unwrap());
    fs::write(scene.directory.join("ready"), "").unwrap();
    std::future::pending().await
}

fn supervisor_dies() {
    let stage = Stage::new("lifecycle/bereaved".to_owned());
    let status = stage.start().wait().unwrap();
    assert!(status.code().is_none(), "{status}");
    let noticed = stage.directory.path().join("noticed");
    eventually("the agent has noticed", || noticed.exists());
}

async fn bereaved(scene: Scene) -> ExitCode {
    let group = scene.groups.group("bereaved").unwrap();
    let mut spawn = plain("/bin/sleep", &["1000"]);
    spawn.cgroup = group.membership();
    let mut child = scene.supervisor.spawn(spawn, [None; 3]).await.unwrap();
    kill_process(getppid().unwrap(), Signal::KILL).unwrap();
    scene.supervisor.closed().await;
    assert!(matches!(child.wait().await, Err(Error::Lost)));
    let refused = scene
        .supervisor
        .spawn(plain("/bin/true", &[]), [None; 3])
        .await;
    assert!(matches!(refused, Err(Error::Lost)));
    fs::write(scene.directory.join("noticed"), "").unwrap();
    ExitCode::SUCCESS
}
