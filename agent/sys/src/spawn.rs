//! Starts a program fenced in from its first instruction on.

use std::{
    convert::Infallible,
    ffi::OsStr,
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process,
};

use rustix::{
    fs::{Mode, OFlags, open},
    io::{Errno, fcntl_dupfd_cloexec},
    pipe::{PipeFlags, pipe_with},
    process::{Gid, Uid},
    stdio::{dup2_stderr, dup2_stdin, dup2_stdout},
    thread::{
        LinkNameSpaceType, move_into_link_name_space, set_no_new_privs, set_thread_groups,
        set_thread_res_gid, set_thread_res_uid,
    },
};
use snafu::{ResultExt, Snafu};

use crate::{cgroup::Membership, mount::Ids, raw, sandbox};

/// Above this the text of a failure is cut, so that one write to the pipe takes it whole.
const FAILURE_MAX: usize = 2048;

/// Private anonymous memory and ELF headers: shared memory would make a dump as big as all buffers.
const CORE_DUMP_FILTER: &[u8] = b"0x31";

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot open cgroup {}: it has to be made before", path.display()))]
    Cgroup { path: PathBuf, source: io::Error },
    #[snafu(display("cannot make a pipe for a new process"))]
    Pipe { source: io::Error },
    #[snafu(display(
        "cannot make a process for {}: the caller has to have one thread, and the limits on processes room",
        program.display()
    ))]
    Clone { program: PathBuf, source: io::Error },
    #[snafu(display("cannot start {}: {step}: {reason}", program.display()))]
    Child {
        program: PathBuf,
        /// What the child was doing.
        step: String,
        reason: String,
        /// `errno`, or 0 where there is none.
        code: i32,
    },
    #[snafu(display("cannot read how the start of {} went", program.display()))]
    Report { program: PathBuf, source: io::Error },
}

/// A program and all that fences it in.
#[derive(Clone, Debug)]
pub struct Command<'a> {
    /// Absolute.
    pub program: &'a Path,
    /// Without the program's own name.
    pub args: Vec<&'a OsStr>,
    /// The whole environment.
    pub env: Vec<(&'a OsStr, &'a OsStr)>,
    pub cwd: &'a Path,
    /// Absent: the caller's own user, groups and capabilities.
    pub user: Option<Ids>,
    /// No set-user-id program, and nothing else, gives it more rights than it has.
    pub no_new_privileges: bool,
    pub cgroup: &'a Membership,
    pub ipc_namespace: bool,
    /// The network namespace to join.
    pub network_namespace: Option<BorrowedFd<'a>>,
    pub landlock: Option<sandbox::Rules<'a>>,
    /// Absent: the caller's own. Ignored where it would lower the caller's and the kernel does not
    /// allow that.
    pub oom_score_adj: Option<i32>,
    /// stdin, stdout, stderr; an absent one is `/dev/null`.
    pub stdio: [Option<BorrowedFd<'a>>; 3],
}

/// A child of this process on its way to the program.
#[derive(Debug)]
pub struct Starting {
    pub pid: u32,
    pub pidfd: OwnedFd,
    program: PathBuf,
    report: File,
}

impl Command<'_> {
    /// Makes the process. Only for a process of one thread, which becomes its parent and has to
    /// reap it, also when [`Starting::finish`] says that the program did not start.
    pub fn start(&self) -> Result<Starting, Error> {
        let cgroup = self
            .cgroup
            .unified
            .as_deref()
            .map(open_cgroup)
            .transpose()?;
        let (report, failure) = pipe_with(PipeFlags::CLOEXEC)
            .map_err(io::Error::from)
            .context(PipeSnafu)?;
        let flags = if self.ipc_namespace { raw::NEW_IPC } else { 0 };
        let child = raw::fork(flags, cgroup.as_ref().map(AsFd::as_fd), || {
            let Err(error) = self.become_program();
            error.send(File::from(failure));
        });
        let child = child.context(CloneSnafu {
            program: self.program,
        })?;
        Ok(Starting {
            pid: child.pid,
            pidfd: child.pidfd,
            program: self.program.to_owned(),
            report: report.into(),
        })
    }

    /// In the child. Things that need root come first.
    fn become_program(&self) -> Result<Infallible, Failure> {
        for group in &self.cgroup.v1 {
            // A lone thread moves without the lock that a write to cgroup.procs takes.
            write(&group.join("tasks"), b"0").at(|| format!("join {}", group.display()))?;
        }
        if let Some(network) = self.network_namespace {
            move_into_link_name_space(network, Some(LinkNameSpaceType::Network))
                .at(|| "join the network namespace")?;
        }
        self.set_stdio().at(|| "set up stdin, stdout and stderr")?;
        raw::reset_signals();
        rustix::process::setsid().at(|| "start a session")?;
        self.set_memory_policy()?;
        std::env::set_current_dir(self.cwd)
            .at(|| format!("change directory to {}", self.cwd.display()))?;
        if let Some(rules) = self.landlock {
            sandbox::restrict(rules).map_err(|error| Failure {
                code: 0,
                step: "restrict by Landlock".to_owned(),
                reason: crate::chain(&error),
            })?;
        }
        self.set_user()?;
        if self.no_new_privileges {
            set_no_new_privs(true).at(|| "forbid new privileges")?;
        }
        raw::close_rest_on_exec().at(|| "mark descriptors close-on-exec")?;
        Err(self.exec()).at(|| "execute it")
    }

    fn set_stdio(&self) -> io::Result<()> {
        let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        // Copies above stderr: one of them could be a target of the steps below.
        let copy = |fd: &Option<BorrowedFd<'_>>| {
            fcntl_dupfd_cloexec(fd.as_ref().unwrap_or(&null.as_fd()), 3)
        };
        let [input, output, errors] = &self.stdio;
        let (input, output, errors) = (copy(input)?, copy(output)?, copy(errors)?);
        dup2_stdin(&input)?;
        dup2_stdout(&output)?;
        dup2_stderr(&errors)?;
        Ok(())
    }

    fn set_memory_policy(&self) -> Result<(), Failure> {
        if let Some(wanted) = self.oom_score_adj {
            let file = Path::new("/proc/self/oom_score_adj");
            match write(file, wanted.to_string().as_bytes()) {
                Err(error) if error.kind() != io::ErrorKind::PermissionDenied => Err(error),
                _ => Ok(()),
            }
            .at(|| format!("set oom_score_adj to {wanted}"))?;
        }
        match write(Path::new("/proc/self/coredump_filter"), CORE_DUMP_FILTER) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
        .at(|| "set coredump_filter")
    }

    fn set_user(&self) -> Result<(), Failure> {
        let Some(user) = self.user else { return Ok(()) };
        let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
        set_thread_groups(&[]).at(|| "drop groups")?;
        set_thread_res_gid(gid, gid, gid).at(|| format!("become group {gid}"))?;
        set_thread_res_uid(uid, uid, uid).at(|| format!("become user {uid}"))
    }

    fn exec(&self) -> io::Error {
        process::Command::new(self.program)
            .args(&self.args)
            .env_clear()
            .envs(self.env.iter().copied())
            .exec()
    }
}

impl Starting {
    /// Waits until the program runs or the child has given up. The child is not reaped.
    pub fn finish(mut self) -> Result<OwnedFd, Error> {
        let mut text = Vec::new();
        (&mut self.report)
            .take(2 * FAILURE_MAX as u64)
            .read_to_end(&mut text)
            .context(ReportSnafu {
                program: &self.program,
            })?;
        match Failure::receive(&text) {
            None => Ok(self.pidfd),
            Some(failure) => ChildSnafu {
                program: self.program,
                step: failure.step,
                reason: failure.reason,
                code: failure.code,
            }
            .fail(),
        }
    }
}

/// Readable as soon as [`Starting::finish`] would not have to wait.
impl AsFd for Starting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.report.as_fd()
    }
}

/// Why the child could not become the program.
#[derive(Debug, PartialEq, Eq)]
struct Failure {
    code: i32,
    step: String,
    reason: String,
}

impl Failure {
    /// In the child: code, step, NUL, reason. Nothing is written by a child that succeeds.
    fn send(&self, mut pipe: File) {
        let mut text = self.code.to_ne_bytes().to_vec();
        text.extend_from_slice(self.step.as_bytes());
        text.push(0);
        text.extend_from_slice(self.reason.as_bytes());
        text.truncate(FAILURE_MAX);
        // The parent that cannot be told is gone.
        let _ = pipe.write_all(&text);
    }

    fn receive(text: &[u8]) -> Option<Self> {
        let (code, text) = text.split_first_chunk()?;
        let text = String::from_utf8_lossy(text);
        let (step, reason) = text.split_once('\0').unwrap_or((&text, ""));
        Some(Self {
            code: i32::from_ne_bytes(*code),
            step: step.to_owned(),
            reason: reason.to_owned(),
        })
    }
}

/// Names the step that an error came from.
trait At<T> {
    fn at<S: Into<String>>(self, step: impl FnOnce() -> S) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at<S: Into<String>>(self, step: impl FnOnce() -> S) -> Result<T, Failure> {
        self.map_err(|error| {
            let error = error.into();
            Failure {
                code: error.raw_os_error().unwrap_or(0),
                step: step().into(),
                reason: error.to_string(),
            }
        })
    }
}

fn open_cgroup(path: &Path) -> Result<OwnedFd, Error> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    open(path, flags, Mode::empty())
        .map_err(|error: Errno| error.into())
        .context(CgroupSnafu { path })
}

fn write(path: &Path, value: &[u8]) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_survives_the_pipe() {
        let failure = Failure {
            code: 13,
            step: "become user 7".to_owned(),
            reason: "Permission denied".to_owned(),
        };
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        failure.send(write.into());
        let mut text = Vec::new();
        File::from(read).read_to_end(&mut text).unwrap();
        assert_eq!(Failure::receive(&text), Some(failure));
    }

    #[test]
    fn a_long_failure_is_cut() {
        let failure = Failure {
            code: 1,
            step: "s".repeat(3 * FAILURE_MAX),
            reason: String::new(),
        };
        let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        failure.send(write.into());
        let mut text = Vec::new();
        File::from(read).read_to_end(&mut text).unwrap();
        assert_eq!(text.len(), FAILURE_MAX);
        assert_eq!(Failure::receive(&text).unwrap().code, 1);
    }

    #[test]
    fn nothing_in_the_pipe_is_success() {
        assert_eq!(Failure::receive(b""), None);
    }

    #[test]
    fn refuses_to_fork_a_process_with_several_threads() {
        // The test harness itself has at least one thread more.
        let cgroup = Membership::default();
        let command = Command {
            program: Path::new("/bin/true"),
            args: Vec::new(),
            env: Vec::new(),
            cwd: Path::new("/"),
            user: None,
            no_new_privileges: true,
            cgroup: &cgroup,
            ipc_namespace: false,
            network_namespace: None,
            landlock: None,
            oom_score_adj: None,
            stdio: [None; 3],
        };
        std::thread::scope(|scope| {
            let started = scope.spawn(|| command.start());
            let error = started.join().unwrap().unwrap_err();
            assert!(matches!(error, Error::Clone { .. }), "{error}");
        });
    }
}
