//! Namespaces of their own for programs, which all end when these do.

use std::{
    ffi::OsStr,
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use branchpool_sys::process;
use snafu::{OptionExt, ResultExt, Snafu};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    process::{Child, Command},
    sync::Mutex,
};

/// How long the kernel may take to end all processes of a space.
pub(crate) const END_LIMIT: Duration = Duration::from_secs(30);

/// Not that of a user, which may lack the second half.
pub(crate) const PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin";

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display(
        "cannot start {program}: is it installed? `scripts/setup cluster` sees to it"
    ))]
    Start { program: String, source: io::Error },
    #[snafu(display("cannot hand on the lock of a cluster"))]
    Lock { source: io::Error },
    #[snafu(display("cannot detach a space"))]
    Detach { source: io::Error },
    #[snafu(display("cannot follow the first process of a space"))]
    Process { source: process::Error },
    #[snafu(display("cannot set up namespaces; this needs root and CAP_SYS_ADMIN, and {} may say more", log.display()))]
    NotReady { log: PathBuf },
    #[snafu(display("the processes of a space do not end"))]
    DoesNotEnd,
    #[snafu(display("{command} failed: {output}"))]
    Command { command: String, output: String },
}

#[derive(Debug)]
pub(crate) struct Plan<'a> {
    /// Held by the first process as long as it lives.
    pub(crate) lock: &'a File,
    /// Whether it has a network of its own.
    pub(crate) network: bool,
    /// For bash, run by the first process with its own mounts, before anything else is started.
    pub(crate) setup: &'a str,
    pub(crate) environment: Vec<(&'a str, &'a OsStr)>,
    /// For what the setup prints.
    pub(crate) log: &'a Path,
}

/// Mount, process, IPC and host name namespaces, on request also a network. All in it ends when this is
/// dropped, and when this process ends in whatever way, unless it has been detached.
#[derive(Debug)]
pub(crate) struct Space {
    /// Of the first process, as seen from here.
    pid: u32,
    pidfd: OwnedFd,
    detached: AtomicBool,
    /// `unshare`, whose standard input the first process reads.
    first: Mutex<Child>,
}

/// The first process sees its number in the outer world as long as /proc is that one's. Then it adopts
/// and reaps others, and ends with its standard input, or never once it has read a line.
const FIRST_PROCESS: &str = r#"
exec 9>&2 2>>"$LOG"
read -r pid _ </proc/self/stat
mount -t proc proc /proc
eval "$SETUP" >&2
echo "$pid"
exec >&2
if read -r _; then sleep infinity & wait; fi
"#;

impl Space {
    pub(crate) async fn start(plan: Plan<'_>) -> Result<Self, Error> {
        let lock = plan.lock.try_clone().context(LockSnafu)?;
        // A session of its own: Ctrl-C in a terminal reaches the harness, which then ends it.
        let mut command = Command::new("setsid");
        command.args(["unshare", "--mount", "--pid", "--ipc", "--uts"]);
        if plan.network {
            command.arg("--net");
        }
        let mut unshare = command
            .args(["--fork", "--kill-child", "--propagation", "private"])
            .args(["bash", "-euc", FIRST_PROCESS])
            .env("SETUP", plan.setup)
            .env("LOG", plan.log)
            .envs(plan.environment)
            .env("PATH", PATH)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // The one more descriptor that can be handed on.
            .stderr(lock)
            .spawn()
            .context(StartSnafu { program: "unshare" })?;
        let output = unshare.stdout.take().expect("the output should be a pipe");
        let line = BufReader::new(output).lines().next_line().await;
        let pid = line
            .ok()
            .flatten()
            .and_then(|line| line.trim().parse().ok())
            .context(NotReadySnafu { log: plan.log })?;
        Ok(Self {
            pid,
            pidfd: process::open(pid).context(ProcessSnafu)?,
            detached: AtomicBool::new(false),
            first: Mutex::new(unshare),
        })
    }

    /// From now on it does not end with this process.
    pub(crate) async fn detach(&self) -> Result<(), Error> {
        let mut first = self.first.lock().await;
        let input = first.stdin.as_mut().expect("the input should be a pipe");
        input.write_all(b"stay\n").await.context(DetachSnafu)?;
        self.detached.store(true, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// A command in all its namespaces. `nsenter` stays as the parent, and tells its end.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.pid))
            .args(["--mount", "--pid", "--ipc", "--uts", "--net", "--"])
            .arg(program)
            .current_dir("/")
            .stdin(Stdio::null());
        command
    }

    /// A command in its network, which sees everything else as this process does.
    pub(crate) fn network_command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.pid))
            .args(["--net", "--", program]);
        command
    }

    /// A path that leads from here to what `path` is in there.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.pid))
    }

    /// Ends all processes and waits until they are gone.
    pub(crate) fn end(&self) -> Result<(), Error> {
        process::signal(&self.pidfd, 9).context(ProcessSnafu)?;
        // The first process of a namespace is gone when all others are.
        if process::wait(&self.pidfd, Some(END_LIMIT)).context(ProcessSnafu)? {
            Ok(())
        } else {
            DoesNotEndSnafu.fail()
        }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        if !self.detached.load(Ordering::Relaxed)
            && let Err(error) = self.end()
        {
            eprintln!("{}", branchpool_sys::chain(&error));
        }
    }
}

/// Whether the process is the first of a space.
pub(crate) fn is_first_process(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| {
        let text = String::from_utf8_lossy(&line);
        text.starts_with("bash") && text.contains(FIRST_PROCESS)
    })
}

/// Runs a command to its end and gives what it printed.
pub async fn run(mut command: Command) -> Result<String, Error> {
    let shown = shown(&command);
    let output = command
        .kill_on_drop(true)
        .output()
        .await
        .with_context(|_| StartSnafu { program: &shown })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let mut text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stdout));
    let output = text.trim().to_owned();
    CommandSnafu {
        command: shown,
        output,
    }
    .fail()
}

fn shown(command: &Command) -> String {
    let command = command.as_std();
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(OsStr::to_string_lossy));
    words.join(" ")
}
