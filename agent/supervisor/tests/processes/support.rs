//! The parts that this program takes, and what the tests share.

use std::{
    env,
    fs::File,
    future::Future,
    os::fd::AsFd,
    path::{Path, PathBuf},
    pin::Pin,
    process::{Child, Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

use branchpool_supervisor::{
    client::Supervisor,
    protocol::{Outcome, Spawn},
};
use branchpool_sys::cgroup::{Base, Layout, Membership};
use libtest_mimic::Trial;
use tempfile::TempDir;

/// Only there so that a broken test ends.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) type Agent = Pin<Box<dyn Future<Output = ExitCode>>>;

/// What an agent has at hand.
pub(crate) struct Scene {
    pub(crate) supervisor: Supervisor,
    /// Its own, removed by the test.
    pub(crate) directory: PathBuf,
    pub(crate) groups: Base,
}

/// A test whose whole body is an agent's life.
pub(crate) fn trial(name: &'static str) -> Trial {
    Trial::test(name, move || {
        let stage = Stage::new(name.to_owned());
        let status = stage.start().wait().unwrap();
        if status.success() {
            Ok(())
        } else {
            Err(format!("{status}").into())
        }
    })
}

/// A directory and cgroups for one test, cleaned up at its end.
pub(crate) struct Stage {
    name: String,
    pub(crate) directory: TempDir,
}

impl Stage {
    pub(crate) fn new(name: String) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // Other users have to get through.
        std::fs::set_permissions(
            directory.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        Self { name, directory }
    }

    /// Starts a supervisor whose agent is the one of that name.
    pub(crate) fn start(&self) -> Child {
        Command::new(env::current_exe().unwrap())
            .args(["supervise", &self.name])
            .arg(self.directory.path())
            .spawn()
            .unwrap()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let Ok(base) = base(self.directory.path()) else {
            return;
        };
        for name in base.names().unwrap_or_default() {
            let Ok(group) = base.group(&name) else {
                continue;
            };
            let _ = group.kill(PATIENCE);
            if let Err(error) = group.remove() {
                eprintln!("{error}");
            }
        }
        let _ = base.remove();
    }
}

/// The directory's name is random, so it serves for cgroups as well.
fn base(directory: &Path) -> Result<Base, branchpool_sys::cgroup::Error> {
    let name = directory.file_name().unwrap().to_str().unwrap();
    Base::open(
        &Layout::detect()?,
        &format!("test-{}", name.trim_start_matches('.')),
    )
}

pub(crate) fn be_agent(name: &str, directory: PathBuf) -> ExitCode {
    // A panic is no crash to be repaired by another try.
    std::panic::catch_unwind(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let scene = Scene {
                supervisor: Supervisor::from_env().unwrap(),
                groups: base(&directory).unwrap(),
                directory,
            };
            agent(name, scene).await
        })
    })
    .unwrap_or(ExitCode::from(70))
}

fn agent(name: &str, scene: Scene) -> Agent {
    match name.split_once('/').unwrap() {
        ("lifecycle", name) => crate::lifecycle::agent(name, scene),
        ("groups", name) => crate::groups::agent(name, scene),
        ("isolation", name) => crate::isolation::agent(name, scene),
        ("cost", name) => crate::cost::agent(name, scene),
        _ => panic!("no agent {name}"),
    }
}

/// A program with nothing that fences it in.
pub(crate) fn plain(program: &str, args: &[&str]) -> Spawn {
    Spawn {
        program: program.into(),
        args: args.iter().map(|&arg| arg.to_owned()).collect(),
        env: vec![("PATH".to_owned(), "/usr/bin:/bin".to_owned())],
        cwd: "/".into(),
        user: None,
        cgroup: Membership::default(),
        mount: None,
        ipc_namespace: false,
        network_namespace: false,
        landlock: None,
        oom_score_adj: 0,
    }
}

/// The body of an agent that ends when its test is through.
pub(crate) fn body(test: impl Future<Output = ()> + 'static) -> Agent {
    Box::pin(async {
        test.await;
        ExitCode::SUCCESS
    })
}

/// Waits for what no event tells of.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Runs a shell script with standard output in a file: how it ended and what it wrote.
pub(crate) async fn output_of(scene: &Scene, mut spawn: Spawn, script: &str) -> (Outcome, String) {
    let path = scene.directory.join("output");
    let file = File::create(&path).unwrap();
    spawn.program = "/bin/bash".into();
    spawn.args = vec!["-c".to_owned(), script.to_owned()];
    let stdio = [None, Some(file.as_fd()), Some(file.as_fd())];
    let mut child = scene.supervisor.spawn(spawn, stdio).await.unwrap();
    let outcome = child.wait().await.unwrap();
    (outcome, std::fs::read_to_string(path).unwrap())
}
