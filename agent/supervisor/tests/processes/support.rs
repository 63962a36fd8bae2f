//! The parts that this program takes, and what the tests share.

use std::{
    env,
    future::Future,
    path::{Path, PathBuf},
    pin::Pin,
    process::{Child, Command, ExitCode, ExitStatus},
    time::Duration,
};

use branchpool_supervisor::{client::Supervisor, protocol::Spawn};
use branchpool_sys::cgroup::{Base, Layout, Membership};
use libtest_mimic::Trial;
use tempfile::TempDir;

/// Only there so that a broken test ends.
pub const PATIENCE: Duration = Duration::from_secs(60);

type Agent = Pin<Box<dyn Future<Output = ExitCode>>>;

/// What an agent has at hand.
pub struct Scene {
    pub supervisor: Supervisor,
    /// Its own, removed by the test.
    pub directory: PathBuf,
    pub groups: Base,
}

/// A test whose whole body is an agent's life.
pub fn trial(name: &'static str) -> Trial {
    Trial::test(name, move || {
        let stage = Stage::new(name);
        let status = stage.start().wait().unwrap();
        if status.success() {
            Ok(())
        } else {
            Err(format!("{status}").into())
        }
    })
}

/// A directory and cgroups for one test, cleaned up at its end.
pub struct Stage {
    name: &'static str,
    pub directory: TempDir,
}

impl Stage {
    pub fn new(name: &'static str) -> Self {
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
    pub fn start(&self) -> Child {
        Command::new(env::current_exe().unwrap())
            .args(["supervise", self.name])
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

pub fn be_agent(name: &str, directory: PathBuf) -> ExitCode {
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
    crate::lifecycle::agent(name, scene).unwrap_or_else(|| panic!("no agent {name}"))
}

/// A program with nothing that fences it in.
pub fn plain(program: &str, args: &[&str]) -> Spawn {
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

pub fn code(status: ExitStatus) -> Option<i32> {
    status.code()
}
