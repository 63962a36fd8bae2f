//! Control groups of real processes, on each kind of hierarchy that this machine has.

use std::{
    fs::{self, File},
    os::fd::AsFd,
};

use branchpool_supervisor::protocol::Outcome;
use branchpool_sys::cgroup::{Base, Controller, Group, Layout, Limits};
use libtest_mimic::Trial;

use crate::support::{Agent, PATIENCE, Scene, body, eventually, output_of, plain, trial};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("groups/kill_leaves_nothing"),
        trial("groups/kill_leaves_nothing_on_v1_alone"),
        trial("groups/frozen_means_that_nothing_moves"),
        trial("groups/frozen_means_that_nothing_moves_on_v1_alone"),
        trial("groups/limits_hold"),
        trial("groups/a_group_is_found_again"),
    ]
}

pub(crate) fn agent(name: &str, scene: Scene) -> Agent {
    match name {
        "kill_leaves_nothing" => body(kill(scene)),
        "kill_leaves_nothing_on_v1_alone" => body(kill(on_v1_alone(scene))),
        "frozen_means_that_nothing_moves" => body(freeze(scene)),
        "frozen_means_that_nothing_moves_on_v1_alone" => body(freeze(on_v1_alone(scene))),
        "limits_hold" => body(limits(scene)),
        "a_group_is_found_again" => body(found_again(scene)),
        _ => panic!("no agent {name}"),
    }
}

/// As on a machine without cgroup2. Skips itself, by leaving the scene as it is, on one without v1.
fn on_v1_alone(mut scene: Scene) -> Scene {
    let layout = Layout {
        unified: None,
        ..Layout::detect().unwrap()
    };
    if layout.v1.contains_key("freezer") {
        let name = scene.directory.file_name().unwrap().to_str().unwrap();
        let name = format!("test-{}", name.trim_start_matches('.'));
        scene.groups = Base::open(&layout, &name).unwrap();
        assert_eq!(scene.groups.group("events").unwrap().events_file(), None);
    }
    scene
}

async fn kill(scene: Scene) {
    let group = scene.groups.group("slot-1").unwrap();
    assert!(group.is_empty().unwrap());
    let script = "trap '' TERM; for i in 1 2 3; do sleep 1000 & done; echo up; wait";
    let mut spawn = plain("/bin/bash", &["-c", script]);
    spawn.cgroup = group.membership();
    let mut child = scene.supervisor.spawn(spawn, [None; 3]).await.unwrap();
    eventually("all four run", || group.processes().unwrap().len() == 4);
    assert!(group.processes().unwrap().contains(&child.pid));
    assert!(!group.is_empty().unwrap());
    assert!(group.remove().is_err());

    group.kill(PATIENCE).unwrap();
    assert!(group.is_empty().unwrap());
    assert_eq!(child.wait().await.unwrap(), Outcome::Signal(9));
    group.kill(PATIENCE).unwrap();
    // The next branch in the slot can start, at once and from a new handle.
    for group in [group.clone(), scene.groups.group("slot-1").unwrap()] {
        let mut spawn = plain("/bin/true", &[]);
        spawn.cgroup = group.membership();
        let mut child = scene.supervisor.spawn(spawn, [None; 3]).await.unwrap();
        assert_eq!(child.wait().await.unwrap(), Outcome::Code(0));
    }
    group.remove().unwrap();
    group.remove().unwrap();
    assert!(group.is_empty().unwrap());
    group.kill(PATIENCE).unwrap();
}

async fn freeze(scene: Scene) {
    let group = scene.groups.group("slot-1").unwrap();
    let path = scene.directory.join("ticks");
    let file = File::create(&path).unwrap();
    let size = || fs::metadata(&path).unwrap().len();
    let mut spawn = plain(
        "/bin/bash",
        &[
            "-c",
            "while :; do echo tick; done & while :; do echo tick; done",
        ],
    );
    spawn.cgroup = group.membership();
    let stdio = [None, Some(file.as_fd()), None];
    let mut child = scene.supervisor.spawn(spawn, stdio).await.unwrap();
    eventually("it writes", || size() > 0);

    group.freeze(PATIENCE).unwrap();
    let frozen = size();
    for _ in 0..50 {
        std::thread::sleep(std::time::Duration::from_millis(2));
        assert_eq!(size(), frozen);
    }
    group.thaw(PATIENCE).unwrap();
    eventually("it writes again", || size() > frozen);

    group.freeze(PATIENCE).unwrap();
    group.kill(PATIENCE).unwrap();
    assert_eq!(child.wait().await.unwrap(), Outcome::Signal(9));
    assert!(group.is_empty().unwrap());
}

async fn limits(scene: Scene) {
    let group = scene.groups.group("slot-1").unwrap();
    let has = |controller| !scene.groups.missing().contains(&controller);
    let limited = || {
        let mut spawn = plain("", &[]);
        spawn.cgroup = group.membership();
        spawn
    };
    let limits = Limits {
        memory: Some(32 << 20),
        cpu_millicores: Some(500),
        pids: Some(8),
    };
    group.set_limits(limits).unwrap();
    group.set_cpu_weight(50).unwrap();
    if has(Controller::Pids) {
        let (outcome, text) =
            output_of(&scene, limited(), "for i in {1..20}; do sleep 1000 & done").await;
        assert!(text.contains("fork"), "{outcome:?}: {text}");
        group.kill(PATIENCE).unwrap();
    }
    if has(Controller::Memory) {
        assert_eq!(group.oom_kills().unwrap(), Some(0));
        let (outcome, _) = output_of(&scene, limited(), "exec tail /dev/zero").await;
        assert_eq!(outcome, Outcome::Signal(9));
        assert_eq!(group.oom_kills().unwrap(), Some(1));
    }
    // The next branch in the slot may have more.
    group.set_limits(Limits::default()).unwrap();
    let (outcome, text) =
        output_of(&scene, limited(), "for i in {1..20}; do true & done; wait").await;
    assert_eq!((outcome, text.as_str()), (Outcome::Code(0), ""));
    // What these files say is what the kernel took.
    for (controller, file, expected) in [
        ("cpu", "cpu.shares", "512"),
        ("cpu", "cpu.cfs_quota_us", "-1"),
        ("pids", "pids.max", "max"),
    ] {
        assert_v1(&group, controller, file, expected);
    }
    group.set_limits(limits).unwrap();
    assert_v1(&group, "cpu", "cpu.cfs_quota_us", "50000");
    assert_v1(&group, "memory", "memory.limit_in_bytes", "33554432");
    assert_v1(&group, "pids", "pids.max", "8");
}

fn assert_v1(group: &Group, controller: &str, file: &str, expected: &str) {
    let Some(place) = Layout::detect().unwrap().v1.remove(controller) else {
        return;
    };
    let directories = group.membership().v1;
    let directory = directories
        .iter()
        .find(|path| path.starts_with(&place.top))
        .unwrap();
    assert_eq!(
        fs::read_to_string(directory.join(file)).unwrap().trim(),
        expected
    );
}

async fn found_again(scene: Scene) {
    let made = scene.groups.group("slot-7").unwrap();
    let again = scene.groups.group("slot-7").unwrap();
    assert_eq!(made.membership(), again.membership());
    assert_eq!(scene.groups.names().unwrap(), ["slot-7"]);
    made.remove().unwrap();
    assert!(scene.groups.names().unwrap().is_empty());
}
