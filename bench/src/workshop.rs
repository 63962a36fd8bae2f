//! The floor's own work: snapshots, servers, first sessions. Threads and system calls.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{Read as _, Write as _},
    mem::MaybeUninit,
    os::{
        fd::OwnedFd,
        unix::{fs::chown, net::UnixStream, process::CommandExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use branchpool_sys::btrfs;
use bytes::{BufMut, BytesMut};
use postgres_protocol::message::{backend::Message, frontend};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::inotify::{self, CreateFlags, WatchFlags},
    process::{Pid, Signal, kill_process},
};
use snafu::{OptionExt, ResultExt, whatever};

use crate::{
    error::Result,
    floor::{Done, Plan},
};

const SNAPSHOT_THREADS: usize = 16;
const SHARDS: usize = 16;
const START_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Workshop {
    plan: Plan,
    servers: Vec<Server>,
}

#[derive(Debug)]
struct Server {
    name: String,
    child: Child,
    session: Option<UnixStream>,
}

impl Workshop {
    pub(crate) fn new(plan: Plan) -> Result<Self> {
        for shard in 0..SHARDS {
            let path = plan.branches.join(format!("{shard:02x}"));
            fs::create_dir_all(&path).whatever_context("cannot make the floor's directories")?;
        }
        fs::create_dir_all(plan.run.join("s")).whatever_context("cannot make directories")?;
        Ok(Self {
            plan,
            servers: Vec::new(),
        })
    }

    /// All snapshots first, then each server and its first session, as the agent does it.
    pub(crate) fn refill(&mut self, branches: u32) -> Result<Done> {
        let names: Vec<String> = (0..branches)
            .map(|number| format!("floor{number:08}"))
            .collect();
        let watchers = (0..self.plan.starts).map(|_| watcher());
        let watchers: Vec<OwnedFd> = watchers.collect::<Result<_>>()?;
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.plan.run.join("log"));
        let log = log.whatever_context("cannot make the servers' log")?;

        let started = Instant::now();
        each(&names, 0..SNAPSHOT_THREADS, |_, number, name| {
            self.snapshot(number, name)
        })?;
        let snapshots = started.elapsed();
        self.start_all(&names, watchers, &log)?;
        let wall = started.elapsed();
        Ok(Done::Refill { wall, snapshots })
    }

    /// Starts in some threads, and first sessions in as many others, as the agent has a queue for
    /// each.
    fn start_all(&mut self, names: &[String], watchers: Vec<OwnedFd>, log: &File) -> Result<()> {
        let this = &*self;
        let (sender, started) = mpsc::sync_channel::<usize>(names.len());
        let started = Mutex::new(started);
        let sessions = Mutex::new(Vec::new());
        let threads = watchers.len();
        let mut servers = std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let next = lock(&started).recv();
                        let Ok(number) = next else { return };
                        let session = this.first_session(&names[number]);
                        lock(&sessions).push((number, session));
                    }
                });
            }
            // The threads above end with the last sender.
            let sender = sender;
            each(names, watchers, |watcher, number, name| {
                let server = this.start(watcher, log, number, name)?;
                // Nobody takes it only when a session thread has panicked.
                let _taken = sender.send(number);
                Ok(server)
            })
        })?;
        let sessions = sessions
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        for (number, session) in sessions {
            servers[number].session = Some(session?);
        }
        if servers.iter().any(|server| server.session.is_none()) {
            whatever!("a server had no session");
        }
        self.servers = servers;
        Ok(())
    }

    fn branch(&self, number: usize, name: &str) -> (PathBuf, PathBuf) {
        let shard = self.plan.branches.join(format!("{:02x}", number % SHARDS));
        let branch = shard.join(name);
        (shard, branch)
    }

    fn snapshot(&self, number: usize, name: &str) -> Result<()> {
        let (shard, _) = self.branch(number, name);
        let image = btrfs::open_dir(&self.plan.image).whatever_context("cannot open the image")?;
        let shard = btrfs::open_dir(&shard).whatever_context("cannot open the shard")?;
        btrfs::snapshot(&image, &shard, OsStr::new(name), false)
            .whatever_context("cannot make a snapshot")
    }

    fn start(&self, watcher: &OwnedFd, log: &File, number: usize, name: &str) -> Result<Server> {
        let (_, data) = self.branch(number, name);
        let sockets = self.plan.run.join("s").join(name);
        let (uid, gid) = self.plan.user;
        fs::create_dir(&sockets).whatever_context("cannot make a socket directory")?;
        chown(&sockets, Some(uid), Some(gid)).whatever_context("cannot chown")?;
        let flags = WatchFlags::CLOSE_WRITE | WatchFlags::ONLYDIR;
        let watch = inotify::add_watch(watcher, &data, flags).whatever_context("cannot watch")?;
        let handle = || {
            log.try_clone()
                .map(Stdio::from)
                .whatever_context("no descriptor")
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "a small process forks in no time, and the floor has no supervisor"
        )]
        let mut child = Command::new(&self.plan.program)
            .args(self.plan.arguments(&data, &sockets))
            .env_clear()
            .envs(self.plan.environment.iter().cloned())
            .current_dir("/")
            .uid(uid)
            .gid(gid)
            .stdin(Stdio::null())
            .stdout(handle()?)
            .stderr(handle()?)
            .spawn()
            .whatever_context("cannot start a server")?;
        wait_ready(watcher, &mut child, &data)?;
        let _gone = inotify::remove_watch(watcher, watch);
        Ok(Server {
            name: name.to_owned(),
            child,
            session: None,
        })
    }

    fn first_session(&self, name: &str) -> Result<UnixStream> {
        let sockets = self.plan.run.join("s").join(name);
        first_session(&sockets, &self.plan.role, &self.plan.database)
    }

    pub(crate) fn empty(&mut self) -> Result<()> {
        let mut servers = std::mem::take(&mut self.servers);
        for server in &servers {
            let kill = kill_process(Pid::from_child(&server.child), Signal::QUIT);
            kill.whatever_context("cannot stop a server")?;
        }
        for (number, server) in servers.iter_mut().enumerate() {
            server.session = None;
            server
                .child
                .wait()
                .whatever_context("cannot wait for a server")?;
            let (shard, _) = self.branch(number, &server.name);
            let shard = btrfs::open_dir(&shard).whatever_context("cannot open the shard")?;
            btrfs::delete(&shard, OsStr::new(&server.name))
                .whatever_context("cannot delete a branch")?;
            fs::remove_dir_all(self.plan.run.join("s").join(&server.name))
                .whatever_context("cannot remove a socket directory")?;
        }
        Ok(())
    }
}

/// Does `work` for each name, in as many threads as there are tools; results in the names' order.
fn each<Tool: Send, T: Send>(
    names: &[String],
    tools: impl IntoIterator<Item = Tool>,
    work: impl Fn(&Tool, usize, &str) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(names.len()));
    std::thread::scope(|scope| {
        for tool in tools {
            let (next, done, work) = (&next, &done, &work);
            scope.spawn(move || {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(name) = names.get(number) else {
                        return;
                    };
                    let result = work(&tool, number, name);
                    lock(done).push((number, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(number, _)| *number);
    done.into_iter().map(|(_, result)| result).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watcher() -> Result<OwnedFd> {
    inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)
        .whatever_context("cannot make an inotify instance")
}

fn wait_ready(watcher: &OwnedFd, child: &mut Child, data: &Path) -> Result<()> {
    let path = data.join("postmaster.pid");
    let deadline = Instant::now() + START_TIMEOUT;
    let second = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    loop {
        let text = fs::read_to_string(&path).unwrap_or_default();
        let mut lines = text.lines();
        let own = lines
            .next()
            .is_some_and(|line| line.trim() == child.id().to_string());
        if own && lines.nth(6).is_some_and(|line| line.trim() == "ready") {
            return Ok(());
        }
        let mut ready = [PollFd::new(watcher, PollFlags::IN)];
        if poll(&mut ready, Some(&second)).whatever_context("cannot wait")? == 0 {
            let ended = child
                .try_wait()
                .whatever_context("cannot wait for a server")?;
            if ended.is_some() || Instant::now() > deadline {
                whatever!("a server did not become ready: {ended:?}");
            }
        }
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(watcher, &mut buffer);
        while events.next().is_ok() {}
    }
}

/// A session in which the server has answered `SELECT 1`.
fn first_session(sockets: &Path, role: &str, database: &str) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(sockets.join(".s.PGSQL.5432"))
        .whatever_context("cannot connect to a server")?;
    stream
        .set_read_timeout(Some(START_TIMEOUT))
        .whatever_context("cannot set a time limit")?;
    let mut message = BytesMut::new();
    frontend::startup_message([("user", role), ("database", database)], &mut message)
        .whatever_context("no startup message")?;
    exchange(&mut stream, &message)?;
    let mut message = BytesMut::new();
    frontend::query("SELECT 1", &mut message).whatever_context("no query message")?;
    let row = exchange(&mut stream, &message)?;
    if row.as_deref() != Some(b"1".as_slice()) {
        whatever!("SELECT 1 was answered with {row:?}");
    }
    Ok(stream)
}

/// Sends a message and reads until the server is ready for the next; the last row's one value.
fn exchange(stream: &mut UnixStream, message: &[u8]) -> Result<Option<Vec<u8>>> {
    stream
        .write_all(message)
        .whatever_context("cannot send to a server")?;
    let mut buffer = BytesMut::with_capacity(8192);
    let mut bytes = [0; 8192];
    let mut row = None;
    loop {
        while let Some(message) = Message::parse(&mut buffer).whatever_context("not Postgres")? {
            match message {
                Message::ReadyForQuery(_) => return Ok(row),
                // After the count of columns and the value's length.
                Message::DataRow(body) => row = body.buffer().get(4..).map(<[u8]>::to_vec),
                Message::ErrorResponse(_) => whatever!("the server refused"),
                _ => {}
            }
        }
        let read = stream
            .read(&mut bytes)
            .whatever_context("cannot read from a server")?;
        let read = bytes.get(..read).filter(|read| !read.is_empty());
        buffer.put_slice(read.whatever_context("the server hung up")?);
    }
}
