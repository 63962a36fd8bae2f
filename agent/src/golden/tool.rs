//! Programs of a build, run where they can do no harm: in the build's cgroup, as the disk user,
//! behind the same walls as a server.

use std::{fs::File, io, os::fd::AsFd, path::Path};

use branchpool_supervisor::protocol::{Outcome, Spawn, User};
use snafu::ResultExt;
use tokio::{io::AsyncReadExt, net::unix::pipe};

use super::{
    error::{Error, IoSnafu, Result, StartToolSnafu, ToolSnafu},
    workshop::Workshop,
};
use crate::postgres::{sandbox, server};

/// What is kept of each output stream, from its end, in bytes.
const MAX_OUTPUT: usize = 16 * 1024;
/// What an orphan that keeps writing can make us read after the program's end, in bytes.
const MAX_AFTER_END: usize = 1 << 20;

/// What a program left.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) outcome: Outcome,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Output {
    pub(super) fn succeeded(&self) -> bool {
        self.outcome == Outcome::Code(0)
    }

    /// The answer, or an error with the program's last words.
    pub(super) fn expect_success(self, program: &str) -> Result<String> {
        if self.succeeded() {
            return Ok(self.stdout);
        }
        let lines: Vec<&str> = self
            .stderr
            .lines()
            .filter(|line| !line.is_empty())
            .collect();
        let message = match lines[lines.len().saturating_sub(5)..].join(" | ") {
            words if words.is_empty() => {
                format!("it ended with {:?} and said nothing", self.outcome)
            }
            words => words,
        };
        ToolSnafu { program, message }.fail()
    }
}

/// A program with arguments.
pub(super) struct Tool<'a> {
    pub(super) program: &'a Path,
    pub(super) args: Vec<String>,
    /// Beyond [`server::environment`].
    pub(super) env: Vec<(String, String)>,
    pub(super) stdin: Option<File>,
}

pub(super) async fn run(workshop: &Workshop<'_>, tool: Tool<'_>) -> Result<Output> {
    let program = tool.program.display().to_string();
    let (stdout, stdout_end) = pipe_pair()?;
    let (stderr, stderr_end) = pipe_pair()?;
    let script = tool.stdin.as_ref().map(AsFd::as_fd);
    let stdio = [script, Some(stdout_end.as_fd()), Some(stderr_end.as_fd())];
    let mut child = workshop
        .env
        .supervisor
        .spawn(spawn(workshop, &tool), stdio)
        .await
        .context(StartToolSnafu { program: &program })?;
    drop((stdout_end, stderr_end));

    let mut stdout = Tail::new(stdout);
    let mut stderr = Tail::new(stderr);
    let outcome = loop {
        tokio::select! {
            () = stdout.read() => {}
            () = stderr.read() => {}
            outcome = child.wait() => break outcome.context(StartToolSnafu { program: &program })?,
        }
    };
    // Not until the end of file: an orphan may hold the pipes open.
    stdout.drain();
    stderr.drain();
    Ok(Output {
        outcome,
        stdout: stdout.text(),
        stderr: stderr.text(),
    })
}

fn spawn(workshop: &Workshop<'_>, tool: &Tool<'_>) -> Spawn {
    let env = workshop.env;
    let mut environment = server::environment();
    environment.extend(tool.env.iter().cloned());
    Spawn {
        program: tool.program.to_owned(),
        args: tool.args.clone(),
        env: environment,
        cwd: "/".into(),
        user: Some(User {
            uid: env.disk_user.uid,
            gid: env.disk_user.gid,
        }),
        cgroup: env.group.membership(),
        mount: None,
        ipc_namespace: env.isolation.ipc_namespace,
        network_namespace: env.isolation.network_namespace,
        landlock: env.isolation.landlock.then(|| {
            let read_write = [workshop.data_dir.clone(), workshop.socket_dir()];
            sandbox::rules(workshop.installation, [], read_write, false)
        }),
        oom_score_adj: 0,
    }
}

fn pipe_pair() -> Result<(pipe::Receiver, std::os::fd::OwnedFd)> {
    let pair = || -> io::Result<_> {
        let (sender, receiver) = pipe::pipe()?;
        Ok((receiver, sender.into_blocking_fd()?))
    };
    pair().context(IoSnafu {
        action: "making a pipe for",
        path: "a program",
    })
}

/// The end of what comes out of a pipe.
struct Tail {
    pipe: pipe::Receiver,
    bytes: Vec<u8>,
    ended: bool,
}

impl Tail {
    fn new(pipe: pipe::Receiver) -> Self {
        Self {
            pipe,
            bytes: Vec::new(),
            ended: false,
        }
    }

    /// Reads once; never returns after the end of file.
    async fn read(&mut self) {
        if self.ended {
            std::future::pending::<()>().await;
        }
        let read = self.pipe.read_buf(&mut self.bytes).await;
        self.ended = !matches!(read, Ok(1..));
        self.trim();
    }

    /// Takes what is there without waiting.
    fn drain(&mut self) {
        let mut buffer = [0; 4096];
        let mut total = 0;
        while total < MAX_AFTER_END
            && let Ok(read @ 1..) = self.pipe.try_read(&mut buffer)
        {
            self.bytes.extend_from_slice(&buffer[..read]);
            self.trim();
            total += read;
        }
    }

    fn trim(&mut self) {
        if self.bytes.len() > 2 * MAX_OUTPUT {
            self.bytes.drain(..self.bytes.len() - MAX_OUTPUT);
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

impl Error {
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}

/// Work that blocks, with what is said of its failure.
pub(super) async fn blocking<T: Send + 'static>(
    action: &'static str,
    path: &Path,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T> {
    crate::blocking::blocking(work)
        .await
        .unwrap_or_else(|error| Err(io::Error::other(error)))
        .map_err(Error::io(action, path))
}
