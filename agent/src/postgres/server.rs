//! A running server: start, readiness, reload, stop.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{ffi::OsStrExt, fs::OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use branchpool_supervisor::{
    client::{self, Child, Supervisor},
    protocol::{IdMount, Outcome, Spawn, User},
};
use branchpool_sys::{cgroup::Group, process};
use snafu::{ResultExt, Snafu, ensure};
use tokio::{process::Command, time::Instant};

use super::{
    chain,
    config::{self, Control},
    installation::Installation,
    pidfile::{PidFile, SharedMemory},
    readiness::{self, Interest, Watch, Watcher},
    sandbox::{self, Isolation},
    session::{MAX_SOCKET_PATH, SOCKET_NAME},
};

/// Bytes of the log that an error quotes at most.
const LOG_EXCERPT: u64 = 2048;
const LOG_LINES: usize = 12;
/// How long the rest of a cgroup may take to die after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// The same in a destructor, which cannot wait asynchronously; usually it takes milliseconds.
pub(crate) const DROP_TIMEOUT: Duration = Duration::from_millis(500);
/// A server is among the first to go when memory is short, but after its own clients' queries.
const OOM_SCORE_ADJ: i32 = 100;

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGQUIT: i32 = 3;

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("the socket path {} has {length} bytes, but Unix allows {MAX_SOCKET_PATH}; choose a shorter run directory", path.display()))]
    SocketPathTooLong { path: PathBuf, length: usize },

    #[snafu(display("the server's log file {} could not be opened: {source}", path.display()))]
    OpenLog { path: PathBuf, source: io::Error },

    #[snafu(display("{source}"))]
    Watch { source: readiness::Error },

    #[snafu(display("the server on {} could not be started: {}", data_dir.display(), chain(source.as_ref())))]
    Spawn {
        data_dir: PathBuf,
        #[snafu(source(from(client::Error, Box::new)))]
        source: Box<client::Error>,
    },

    #[snafu(display("the pid file in {} could not be read: {source}", data_dir.display()))]
    ReadPidFile {
        data_dir: PathBuf,
        source: io::Error,
    },

    #[snafu(display("the server on {} ended before it was ready ({}); its log says: {log}", data_dir.display(), describe(*outcome)))]
    Died {
        data_dir: PathBuf,
        outcome: Option<Outcome>,
        log: String,
    },

    #[snafu(display("the server on {} was not ready after {} s; its log says: {log}", data_dir.display(), timeout.as_secs_f32()))]
    TimedOut {
        data_dir: PathBuf,
        timeout: Duration,
        log: String,
    },

    #[snafu(display("process {pid} could not be waited for: {}", chain(source.as_ref())))]
    Wait {
        pid: u32,
        #[snafu(source(from(client::Error, Box::new)))]
        source: Box<client::Error>,
    },

    #[snafu(display(
        "the server with process id {pid} could not be signalled: {}",
        chain(source)
    ))]
    Signal { pid: u32, source: process::Error },

    #[snafu(display(
        "the processes of the server with process id {pid} could not be killed: {}",
        chain(source)
    ))]
    Kill {
        pid: u32,
        source: branchpool_sys::cgroup::Error,
    },

    #[snafu(display("the server with process id {pid} did not stop within {} s and was killed", timeout.as_secs_f32()))]
    Killed { pid: u32, timeout: Duration },

    #[snafu(display("the mount of the data directory could not be removed: {}", chain(source.as_ref())))]
    Unmount {
        #[snafu(source(from(client::Error, Box::new)))]
        source: Box<client::Error>,
    },
}

type Result<T, E = Error> = std::result::Result<T, E>;

fn describe(outcome: Option<Outcome>) -> String {
    match outcome {
        Some(Outcome::Code(code)) => format!("exit code {code}"),
        Some(Outcome::Signal(signal)) => format!("signal {signal}"),
        None => "unknown how".to_owned(),
    }
}

/// How to start a server.
#[derive(Debug)]
pub struct Launch<'a> {
    pub installation: &'a Installation,
    /// Paths as the server sees them; its data directory is the mount's target if there is one.
    pub control: Control,
    /// Settings for the end of the command line, which win over all others.
    pub overrides: Vec<(String, String)>,
    pub mount: Option<IdMount>,
    pub user: User,
    pub group: &'a Group,
    pub isolation: Isolation,
    /// Appended to; stdout and stderr of the server.
    pub log: &'a Path,
    /// From the spawn until ready.
    pub timeout: Duration,
}

impl Launch<'_> {
    /// The data directory as the agent sees it, with or without the mount.
    fn data_dir(&self) -> &Path {
        self.mount
            .as_ref()
            .map_or(&self.control.data_dir, |mount| &mount.source)
    }

    fn spawn(&self) -> Spawn {
        Spawn {
            program: self.installation.program("postgres"),
            args: config::arguments(&self.control, &self.overrides),
            env: environment(),
            cwd: PathBuf::from("/"),
            user: Some(self.user),
            cgroup: self.group.membership(),
            mount: self.mount.clone(),
            ipc_namespace: self.isolation.ipc_namespace,
            network_namespace: self.isolation.network_namespace && !self.isolation.outbound,
            landlock: self.isolation.landlock.then(|| {
                let control = &self.control;
                // Their directories: a file that is replaced by rename is another file to Landlock.
                let read = [&control.config_file, &control.hba_file, &control.ident_file]
                    .into_iter()
                    .filter_map(|file| file.parent());
                let read_write = [&control.data_dir, &control.socket_dir];
                sandbox::rules(
                    self.installation,
                    read.map(Path::to_owned),
                    read_write.into_iter().cloned(),
                    self.isolation.outbound,
                )
            }),
            oom_score_adj: OOM_SCORE_ADJ,
        }
    }
}

/// The whole environment of servers and tools.
pub fn environment() -> Vec<(String, String)> {
    [
        ("PATH", "/usr/local/bin:/usr/bin:/bin"),
        ("LC_ALL", "C.UTF-8"),
        ("PG_OOM_ADJUST_FILE", ""),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .collect()
}

/// Starts a server and waits until it accepts connections. After an error, or when the future
/// is dropped, nothing of it runs any more.
pub async fn start(
    supervisor: &Supervisor,
    watcher: &Watcher,
    launch: Launch<'_>,
) -> Result<Server> {
    check_socket_path(&launch.control.socket_dir)?;
    let log = open_log(launch.log).context(OpenLogSnafu { path: launch.log })?;
    let log_start = log.metadata().map_or(0, |metadata| metadata.len());
    let data_dir = launch.data_dir().to_owned();
    let watch = watcher
        .watch(&data_dir, Interest::Written)
        .context(WatchSnafu)?;

    let mut guard = KillOnDrop {
        group: launch.group,
        armed: true,
    };
    let stdio = [None, Some(log.as_fd()), Some(log.as_fd())];
    let mut child = supervisor
        .spawn(launch.spawn(), stdio)
        .await
        .context(SpawnSnafu {
            data_dir: &data_dir,
        })?;
    let ready = wait_until_ready(&mut child, watch, &launch, log_start).await;
    let server = Server {
        pid: child.pid,
        pidfd: Arc::clone(&child.pidfd),
        supervisor: supervisor.clone(),
        group: launch.group.clone(),
        data_dir,
        mount: launch.mount.as_ref().map(|mount| mount.target.clone()),
        ipc_namespace: launch.isolation.ipc_namespace,
    };
    match ready {
        Ok(()) => {
            guard.armed = false;
            Ok(server)
        }
        Err(error) => {
            // The reason counts, not what went wrong while tidying up.
            let _ = server.kill_rest().await;
            Err(error)
        }
    }
}

fn check_socket_path(socket_dir: &Path) -> Result<()> {
    let path = socket_dir.join(SOCKET_NAME);
    let length = path.as_os_str().as_bytes().len();
    ensure!(
        length <= MAX_SOCKET_PATH,
        SocketPathTooLongSnafu { path, length }
    );
    Ok(())
}

fn open_log(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

async fn wait_until_ready(
    child: &mut Child,
    mut watch: Watch,
    launch: &Launch<'_>,
    log_start: u64,
) -> Result<()> {
    let data_dir = launch.data_dir();
    let deadline = Instant::now() + launch.timeout;
    loop {
        let file = PidFile::read(data_dir).context(ReadPidFileSnafu { data_dir })?;
        if file.is_some_and(|file| file.is_ready(child.pid)) {
            return Ok(());
        }
        tokio::select! {
            () = watch.changed() => {}
            outcome = child.wait() => {
                let log = log_excerpt(launch.log, log_start);
                return DiedSnafu { data_dir, outcome: outcome.ok(), log }.fail();
            }
            () = tokio::time::sleep_until(deadline) => {
                let log = log_excerpt(launch.log, log_start);
                return TimedOutSnafu { data_dir, timeout: launch.timeout, log }.fail();
            }
        }
    }
}

/// The last lines that were written to the log since `start`.
pub fn log_excerpt(path: &Path, start: u64) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let end = file.metadata()?.len();
        file.seek(SeekFrom::Start(start.max(end.saturating_sub(LOG_EXCERPT))))?;
        let mut bytes = Vec::new();
        file.take(LOG_EXCERPT).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let text = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    if lines.is_empty() {
        return "nothing".to_owned();
    }
    lines[lines.len().saturating_sub(LOG_LINES)..].join(" | ")
}

/// Kills what was started when its future is dropped half-way. A mount that stays behind is
/// replaced by the next spawn of the slot.
struct KillOnDrop<'a> {
    group: &'a Group,
    armed: bool,
}

impl Drop for KillOnDrop<'_> {
    fn drop(&mut self) {
        if self.armed
            && let Err(error) = self.group.kill(DROP_TIMEOUT)
        {
            tracing::warn!(%error, "processes of an abandoned start could not be killed");
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// No checkpoint, no goodbye to clients: the next start recovers.
    Immediate,
    /// Clients are thrown out, everything is written: the next start needs no recovery.
    Fast,
}

impl StopMode {
    fn signal(self) -> i32 {
        match self {
            Self::Immediate => SIGQUIT,
            Self::Fast => SIGINT,
        }
    }
}

/// A server that was ready once. Dropping it leaves the server running.
#[derive(Clone, Debug)]
pub struct Server {
    pub pid: u32,
    pub pidfd: Arc<OwnedFd>,
    pub supervisor: Supervisor,
    pub group: Group,
    /// The data directory as the agent sees it.
    pub data_dir: PathBuf,
    /// To be unmounted after the end.
    pub mount: Option<PathBuf>,
    pub ipc_namespace: bool,
}

impl Server {
    /// Resolves when the postmaster has ended.
    pub async fn ended(&self) -> Result<()> {
        client::wait_pidfd(&self.pidfd)
            .await
            .context(WaitSnafu { pid: self.pid })
    }

    /// Makes the server read its configuration again.
    pub fn reload(&self) -> Result<()> {
        self.signal(SIGHUP).map(drop)
    }

    /// Stops the server within `timeout`, then kills what is left of its cgroup, removes shared
    /// memory that outlived it, and unmounts. All of that is done even when the answer is an
    /// error; [`Error::Killed`] says that the server itself did not obey in time.
    pub async fn stop(&self, mode: StopMode, timeout: Duration) -> Result<()> {
        let stopped = self.ask_to_stop(mode, timeout).await;
        let rest = self.kill_rest().await;
        stopped.and(rest)
    }

    async fn ask_to_stop(&self, mode: StopMode, timeout: Duration) -> Result<()> {
        if !self.signal(mode.signal())? {
            return Ok(());
        }
        match tokio::time::timeout(timeout, self.ended()).await {
            Ok(ended) => ended,
            Err(_) => KilledSnafu {
                pid: self.pid,
                timeout,
            }
            .fail(),
        }
    }

    /// `false`: it has ended already.
    fn signal(&self, signal: i32) -> Result<bool> {
        process::signal(&self.pidfd, signal).context(SignalSnafu { pid: self.pid })
    }

    async fn kill_rest(&self) -> Result<()> {
        let killed = kill_group(&self.group)
            .await
            .context(KillSnafu { pid: self.pid });
        if killed.is_ok() && !self.ipc_namespace {
            self.remove_shared_memory().await;
        }
        let unmounted = match &self.mount {
            Some(target) => self.supervisor.unmount(target).await.context(UnmountSnafu),
            None => Ok(()),
        };
        killed.and(unmounted)
    }

    /// A server that ends by itself removes its pid file and its segment; after SIGKILL both stay.
    async fn remove_shared_memory(&self) {
        let Ok(Some(file)) = PidFile::read(&self.data_dir) else {
            return;
        };
        let Some(SharedMemory { id, .. }) = file.shared_memory.filter(|_| file.pid == self.pid)
        else {
            return;
        };
        let removed = Command::new("ipcrm")
            .args(["-m", &id.to_string()])
            .kill_on_drop(true)
            .output()
            .await;
        match removed {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                let message = String::from_utf8_lossy(&output.stderr).into_owned();
                tracing::warn!(
                    id,
                    message,
                    "a killed server's shared memory could not be removed"
                );
            }
            Err(error) => tracing::warn!(id, %error, "ipcrm could not be run"),
        }
    }
}

/// Kills everything in the cgroup and waits until it is empty.
pub async fn kill_group(group: &Group) -> std::result::Result<(), branchpool_sys::cgroup::Error> {
    let group = group.clone();
    tokio::task::spawn_blocking(move || group.kill(KILL_TIMEOUT))
        .await
        .expect("killing a group should not panic")
}
