//! Runs a test program twice: as the supervisor, and below it as the agent that holds the tests.
#![allow(dead_code, reason = "each test program uses a part")]

use std::{
    env, fs,
    future::Future,
    os::{fd::AsFd, unix::fs::chown},
    path::{Path, PathBuf},
    pin::Pin,
    process::{Command, ExitCode, Output},
    sync::Arc,
    time::Duration,
};

use branchpool_agent::{
    golden::Env,
    postgres::{
        config::{self, Control, Phase, Profile},
        installation::{self, Installation, OsUser},
        readiness::Watcher,
        sandbox::Isolation,
        server::{self, Launch, Server},
        session::{self, Session, Startup},
    },
    storage::Layout,
};
use branchpool_supervisor::{
    FD_VARIABLE,
    client::Supervisor,
    protocol::{IdMount, User},
    server::{Program, supervise},
};
use branchpool_sys::{
    btrfs,
    cgroup::{self, Base, Group},
};
use libtest_mimic::{Arguments, Trial};
use tokio::runtime::Runtime;

use crate::loop_btrfs::LoopBtrfs;

/// The supervisor does not start an agent again that ends with this code.
const FAILED: u8 = 70;
const SIZE: u64 = 2 << 30;

pub(crate) type Test = fn(Arc<Context>) -> Pin<Box<dyn Future<Output = ()> + Send>>;

/// What all tests of the program share.
pub(crate) struct Context {
    supervisor: Supervisor,
    watcher: Watcher,
    base: Base,
}

pub(crate) fn main(tests: &[(&'static str, Test)]) -> ExitCode {
    let mut arguments = Arguments::from_args();
    if env::var_os(FD_VARIABLE).is_none() && !arguments.list {
        let program = Program {
            path: env::current_exe().unwrap(),
            args: env::args_os().skip(1).collect(),
        };
        return ExitCode::from(supervise(program).unwrap());
    }
    if arguments.list {
        let trials = tests.iter().map(|(name, _)| Trial::test(*name, || Ok(())));
        return libtest_mimic::run(&arguments, trials.collect()).exit_code();
    }
    arguments.test_threads.get_or_insert(2);
    let runtime = Arc::new(Runtime::new().unwrap());
    let context = {
        let _inside = runtime.enter();
        let layout = cgroup::Layout::detect().unwrap();
        let name = format!("branchpool-test-{}", std::process::id());
        Arc::new(Context {
            supervisor: Supervisor::from_env().unwrap(),
            watcher: Watcher::new().unwrap(),
            base: Base::open(&layout, &name).unwrap(),
        })
    };
    let trials = tests
        .iter()
        .map(|(name, test)| {
            let (runtime, context, test) = (Arc::clone(&runtime), Arc::clone(&context), *test);
            Trial::test(*name, move || {
                runtime.block_on(test(context));
                Ok(())
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    for name in context.base.names().unwrap() {
        let group = context.base.group(&name).unwrap();
        group.kill(Duration::from_secs(10)).unwrap();
        group.remove().unwrap();
    }
    context.base.clone().remove().unwrap();
    if conclusion.has_failed() {
        ExitCode::from(FAILED)
    } else {
        ExitCode::SUCCESS
    }
}

/// A node of its own for one test.
pub(crate) struct Node {
    pub(crate) env: Env,
    pub(crate) run: PathBuf,
    slots: Group,
    btrfs: LoopBtrfs,
}

impl Node {
    pub(crate) fn new(context: &Context, name: &str) -> Self {
        let btrfs = LoopBtrfs::new(SIZE);
        let run = btrfs.outside().join("r");
        let layout = Layout::new(btrfs.root(), &run).unwrap();
        layout.create().unwrap();
        let group = |kind: &str| context.base.group(&format!("{name}-{kind}")).unwrap();
        Self {
            env: Env {
                supervisor: context.supervisor.clone(),
                watcher: context.watcher.clone(),
                layout,
                installations: installation::find(&[]).unwrap().into(),
                disk_user: disk_user(),
                group: group("build"),
                isolation: Isolation::FULL,
                time_limit: Duration::from_mins(2),
            },
            run,
            slots: group("slot"),
            btrfs,
        }
    }

    pub(crate) fn root(&self) -> &Path {
        self.btrfs.root()
    }

    pub(crate) fn installation(&self) -> &Installation {
        &self.env.installations[0]
    }

    /// Nothing under construction, and no process.
    pub(crate) fn assert_nothing_left(&self) {
        let left: Vec<_> = fs::read_dir(self.env.layout.building()).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
        assert_eq!(self.env.group.processes().unwrap(), Vec::<u32>::new());
    }

    /// A writable snapshot of a sealed image.
    pub(crate) fn branch_of(&self, image: &Path, name: &str) -> Branch<'_> {
        let parent = self.root().join("branches/00");
        let data_dir = parent.join(name);
        let parent = btrfs::open_dir(&parent).unwrap();
        btrfs::snapshot(
            btrfs::open_dir(image).unwrap(),
            parent.as_fd(),
            name.as_ref(),
            false,
        )
        .unwrap();
        self.branch(data_dir, name)
    }

    /// A branch on an existing data directory.
    pub(crate) fn branch(&self, data_dir: PathBuf, name: &str) -> Branch<'_> {
        let run = self.run.join("b").join(name);
        fs::create_dir_all(run.join("s")).unwrap();
        let branch = Branch {
            node: self,
            log: self.root().join("logs").join(format!("{name}.log")),
            data_dir,
            run,
            isolation: Isolation::FULL,
            user: User {
                uid: 600_001,
                gid: 600_001,
            },
        };
        set_mode(&branch.run, 0o711);
        set_mode(&branch.socket_dir(), 0o700);
        chown(branch.socket_dir(), Some(600_001), Some(600_001)).unwrap();
        branch
    }

    /// A data directory below `sources`, made as a user would.
    pub(crate) fn source(&self, name: &str) -> SourceDir<'_> {
        let path = self.env.layout.sources().join(name);
        let user = &self.env.disk_user;
        command("btrfs", &["subvolume", "create", path.to_str().unwrap()]);
        chown(&path, Some(user.uid), Some(user.gid)).unwrap();
        set_mode(&path, 0o700);
        // A user's own server passes through here.
        set_mode(&self.env.layout.sources(), 0o711);
        let sockets = self.run.join("sources");
        fs::create_dir_all(&sockets).unwrap();
        chown(&sockets, Some(user.uid), Some(user.gid)).unwrap();
        let source = SourceDir {
            node: self,
            path,
            sockets,
        };
        source.pg(
            "initdb",
            &["-U", "postgres", "-A", "trust", "-N", "--locale=C.UTF-8"],
        );
        source
    }
}

pub(crate) fn disk_user() -> OsUser {
    installation::disk_user("postgres").unwrap()
}

pub(crate) fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
}

pub(crate) fn command(program: &str, args: &[&str]) -> Output {
    let output = Command::new(program)
        .args(args)
        .current_dir("/")
        .output()
        .unwrap();
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
    output
}

/// A source that is worked on with the ordinary tools.
pub(crate) struct SourceDir<'a> {
    node: &'a Node,
    pub(crate) path: PathBuf,
    sockets: PathBuf,
}

impl SourceDir<'_> {
    fn pg(&self, program: &str, args: &[&str]) {
        let program = self.node.installation().program(program);
        let mut all = vec!["-u", "postgres", "--", program.to_str().unwrap(), "-D"];
        all.push(self.path.to_str().unwrap());
        all.extend(args);
        // Its server would hold a pipe open.
        let status = Command::new("runuser")
            .args(&all)
            .current_dir("/")
            .env("LC_ALL", "C.UTF-8")
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(status.success(), "{all:?}");
    }

    pub(crate) fn start(&self) {
        let options = format!(
            "-k {} -c listen_addresses= -c max_prepared_transactions=5 -c wal_level=logical",
            self.sockets.display()
        );
        let log = self.sockets.join("log");
        self.pg(
            "pg_ctl",
            &["-w", "-l", log.to_str().unwrap(), "-o", &options, "start"],
        );
    }

    pub(crate) fn stop(&self, mode: &str) {
        self.pg("pg_ctl", &["-w", "-m", mode, "stop"]);
    }

    pub(crate) fn sql(&self, database: &str, sql: &str) {
        let host = self.sockets.to_str().unwrap();
        for statement in sql.split(";;") {
            command(
                "psql",
                &[
                    "-X",
                    "-q",
                    "-v",
                    "ON_ERROR_STOP=1",
                    "-h",
                    host,
                    "-U",
                    "postgres",
                    "-d",
                    database,
                    "-c",
                    statement,
                ],
            );
        }
    }

    /// Statements are separated by `;;`.
    pub(crate) fn filled(self, sql: &str) -> Self {
        self.start();
        self.sql(
            "postgres",
            "CREATE ROLE app LOGIN;;CREATE DATABASE app OWNER app",
        );
        self.sql("app", sql);
        self.stop("fast");
        self
    }
}

/// A data directory with what a server on it needs.
pub(crate) struct Branch<'a> {
    pub(crate) node: &'a Node,
    pub(crate) data_dir: PathBuf,
    pub(crate) run: PathBuf,
    pub(crate) log: PathBuf,
    pub(crate) isolation: Isolation,
    pub(crate) user: User,
}

impl Branch<'_> {
    pub(crate) fn socket_dir(&self) -> PathBuf {
        self.run.join("s")
    }

    pub(crate) fn configure(&self, profile: &Profile, phase: Phase, role: &str) {
        let files = [
            ("postgresql.conf", config::render(profile, phase)),
            ("pg_hba.conf", config::hba(role)),
            ("pg_ident.conf", config::ident(role, "root")),
        ];
        for (name, text) in files {
            fs::write(self.run.join(name), text).unwrap();
            set_mode(&self.run.join(name), 0o644);
        }
    }

    pub(crate) async fn start(
        &self,
        profile: &Profile,
        role: &str,
    ) -> Result<Server, server::Error> {
        self.configure(profile, Phase::Warming, role);
        self.launch(profile, Duration::from_secs(30)).await
    }

    /// With an idmapped mount, unless it runs as the disk user.
    pub(crate) async fn launch(
        &self,
        profile: &Profile,
        timeout: Duration,
    ) -> Result<Server, server::Error> {
        let disk_user = &self.node.env.disk_user;
        let on_disk = User {
            uid: disk_user.uid,
            gid: disk_user.gid,
        };
        let mount = (self.user != on_disk).then(|| IdMount {
            source: self.data_dir.clone(),
            target: self.node.root().join("mnt/1"),
            on_disk,
            inside: self.user,
        });
        if mount.is_none() {
            // Without a mount of its own the server passes through where the branches lie.
            for parent in self.data_dir.ancestors().skip(1).take(2) {
                set_mode(parent, 0o711);
            }
        }
        if let Some(mount) = &mount {
            fs::create_dir_all(&mount.target).unwrap();
        }
        chown(self.socket_dir(), Some(self.user.uid), Some(self.user.gid)).unwrap();
        let file = |name: &str| self.run.join(name);
        let launch = Launch {
            installation: self.node.installation(),
            control: Control {
                data_dir: mount
                    .as_ref()
                    .map_or(&self.data_dir, |mount| &mount.target)
                    .clone(),
                config_file: file("postgresql.conf"),
                hba_file: file("pg_hba.conf"),
                ident_file: file("pg_ident.conf"),
                socket_dir: self.socket_dir(),
                tuning: profile.tuning,
                ipc_namespace: self.isolation.ipc_namespace,
            },
            overrides: Vec::new(),
            mount,
            user: self.user,
            group: &self.node.slots,
            isolation: self.isolation,
            log: &self.log,
            timeout,
        };
        server::start(&self.node.env.supervisor, &self.node.env.watcher, launch).await
    }

    pub(crate) async fn session(
        &self,
        user: &str,
        database: &str,
    ) -> Result<Session, session::Error> {
        let startup = Startup {
            user: user.to_owned(),
            database: database.to_owned(),
            parameters: Vec::new(),
        };
        Session::open(&self.socket_dir(), startup).await
    }

    pub(crate) fn group(&self) -> &Group {
        &self.node.slots
    }
}

/// All rows of the first column.
pub(crate) async fn column(session: &mut Session, sql: &str) -> Vec<String> {
    let rows = session.query(sql).await.unwrap();
    rows.into_iter()
        .map(|row| row[0].clone().unwrap_or_default())
        .collect()
}

#[macro_export]
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        fn main() -> std::process::ExitCode {
            supervised::main(&[$((stringify!($name), |context| Box::pin($name(context)))),*])
        }
    };
}
