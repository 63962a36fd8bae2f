//! What a spawn costs. Asserts nothing about time: run it with `--ignored --nocapture`.

use std::time::{Duration, Instant};

use branchpool_supervisor::protocol::{Outcome, Spawn};
use libtest_mimic::Trial;

use crate::{
    isolation::{Disk, SLOT, fenced},
    support::{Agent, Scene, body, trial},
};

const ROUNDS: usize = 200;

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("cost/spawn").with_ignored_flag(true)]
}

pub(crate) fn agent(name: &str, scene: Scene) -> Agent {
    assert_eq!(name, "spawn");
    body(spawn(scene))
}

/// One thing less of what fences a branch in, to see what it costs.
type Without = fn(&mut Spawn);

async fn spawn(scene: Scene) {
    let disk = Disk::new(&scene);
    let (data, mount) = (disk.subvolume("data"), disk.directory("mnt", SLOT));
    let variants: [(&str, Without); 9] = [
        ("all", |_| {}),
        ("without mount", |spawn| spawn.mount = None),
        ("without v1 cgroups", |spawn| spawn.cgroup.v1.clear()),
        ("without v2 cgroup", |spawn| spawn.cgroup.unified = None),
        ("without IPC namespace", |spawn| spawn.ipc_namespace = false),
        ("without network namespace", |spawn| {
            spawn.network_namespace = false
        }),
        ("without Landlock", |spawn| spawn.landlock = None),
        ("without user", |spawn| spawn.user = None),
        ("nothing", |spawn| {
            *spawn = Spawn {
                cwd: "/".into(),
                ..crate::support::plain("", &[])
            };
        }),
    ];
    let mut times = variants.map(|_| (Vec::new(), Vec::new()));
    for _ in 0..ROUNDS {
        // Interleaved, so that neighbours disturb all alike.
        for ((_, without), times) in variants.iter().zip(&mut times) {
            let mut spawn = fenced(&scene, &disk, &data, &mount, SLOT, "slot-1");
            without(&mut spawn);
            spawn.program = "/bin/true".into();
            let begin = Instant::now();
            let mut child = scene.supervisor.spawn(spawn, [None; 3]).await.unwrap();
            times.0.push(begin.elapsed());
            assert_eq!(child.wait().await.unwrap(), Outcome::Code(0));
            times.1.push(begin.elapsed());
        }
    }
    for ((name, _), (started, ended)) in variants.iter().zip(times) {
        let (started, ended) = (Share::of(started), Share::of(ended));
        println!("{name:26} running {started}, ended {ended}");
    }
}

struct Share {
    median: Duration,
    p95: Duration,
}

impl Share {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        Self {
            median: times[times.len() / 2],
            p95: times[times.len() * 95 / 100],
        }
    }
}

impl std::fmt::Display for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        write!(f, "{:.2} ms (p95 {:.2})", ms(self.median), ms(self.p95))
    }
}
