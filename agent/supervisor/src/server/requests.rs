//! What the agent asks for, and what it is told.

use std::{
    collections::{HashSet, VecDeque},
    error::Error,
    ffi::OsStr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use branchpool_sys::{
    chain,
    mount::{self, IdMounts},
    namespace,
    sandbox::Rules,
    spawn::{self, Starting},
};
use rustix::event::{PollFd, PollFlags, poll};

use crate::{
    protocol::{Answer, Command, Message, Outcome, Request, Spawn},
    wire,
};

/// Kept user namespaces, one descriptor each: more branches than this share the cost of making them.
const USER_NAMESPACES: usize = 256;
/// With this much unsent or unfinished no more requests are read.
const BACKLOG_MAX: usize = 256;

#[derive(Debug)]
pub(super) struct Requests {
    /// None between two agents.
    socket: Option<OwnedFd>,
    outgoing: VecDeque<(Vec<u8>, Option<OwnedFd>)>,
    starting: Vec<Start>,
    /// Children whose end the present agent is told.
    children: HashSet<u32>,
    mounts: IdMounts,
    /// The network namespace that all branches share, made when first needed.
    network: Option<OwnedFd>,
    buffer: Vec<u8>,
}

#[derive(Debug)]
struct Start {
    /// The request; none when the agent that made it is gone.
    id: Option<u64>,
    child: Starting,
}

impl Requests {
    pub(super) fn new() -> Self {
        Self {
            socket: None,
            outgoing: VecDeque::new(),
            starting: Vec::new(),
            children: HashSet::new(),
            mounts: IdMounts::new(USER_NAMESPACES),
            network: None,
            buffer: vec![0; wire::MESSAGE_MAX],
        }
    }

    pub(super) fn connect(&mut self, socket: OwnedFd) {
        self.disconnect();
        self.socket = Some(socket);
    }

    /// Forgets all that belongs to the agent that is gone. The programs go on.
    pub(super) fn disconnect(&mut self) {
        self.socket = None;
        self.outgoing.clear();
        self.children.clear();
        for start in &mut self.starting {
            start.id = None;
        }
    }

    pub(super) fn interests(&self) -> Vec<PollFd<'_>> {
        let mut fds = Vec::new();
        for start in &self.starting {
            fds.push(PollFd::from_borrowed_fd(start.child.as_fd(), PollFlags::IN));
        }
        if let Some(socket) = &self.socket {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, self.has_room());
            flags.set(PollFlags::OUT, !self.outgoing.is_empty());
            fds.push(PollFd::from_borrowed_fd(socket.as_fd(), flags));
        }
        fds
    }

    fn has_room(&self) -> bool {
        self.outgoing.len() + self.starting.len() < BACKLOG_MAX
    }

    /// Carries out one request, if there is one and room for its answer. One at a time, so that
    /// answers to a burst of requests do not wait for the last of them.
    pub(super) fn receive(&mut self) {
        let Some(socket) = self.socket.as_ref().filter(|_| self.has_room()) else {
            return;
        };
        match wire::receive(socket, &mut self.buffer) {
            Ok(Some((length, fds))) => match wire::decode(&self.buffer[..length]) {
                Ok(request) => self.carry_out(request, &fds),
                Err(error) => self.hang_up(&error),
            },
            Ok(None) => self.socket = None,
            Err(error) if error.would_block() => {}
            Err(error) => self.hang_up(&error),
        }
    }

    /// An agent that cannot be understood, or not be told the end of a program, has to start anew.
    fn hang_up(&mut self, error: &wire::Error) {
        let error: &(dyn Error + 'static) = error;
        tracing::error!(error, "closing the connection to the agent");
        self.disconnect();
    }

    fn carry_out(&mut self, Request { id, command }: Request, fds: &[OwnedFd]) {
        match command {
            Command::Spawn { spawn, stdio } => match self.start(&spawn, stdio, fds) {
                Ok(child) => self.starting.push(Start {
                    id: Some(id),
                    child,
                }),
                Err(reason) => self.answer(id, Err(reason), None),
            },
            Command::Unmount { target } => {
                let result = mount::unmount(&target);
                let result = result.map(|()| Answer::Unmounted);
                self.answer(id, result.map_err(|error| chain(&error)), None);
            }
        }
    }

    fn start(
        &mut self,
        spawn: &Spawn,
        stdio: [bool; 3],
        fds: &[OwnedFd],
    ) -> Result<Starting, String> {
        let stdio = assign(stdio, fds)?;
        if spawn.network_namespace && self.network.is_none() {
            self.network = Some(namespace::network().map_err(|error| chain(&error))?);
        }
        if let Some(wanted) = &spawn.mount {
            self.mounts
                .mount(
                    &wanted.source,
                    &wanted.target,
                    wanted.on_disk,
                    wanted.inside,
                )
                .map_err(|error| chain(&error))?;
        }
        let network = self.network.as_ref().filter(|_| spawn.network_namespace);
        let command = spawn::Command {
            program: &spawn.program,
            args: spawn.args.iter().map(OsStr::new).collect(),
            env: spawn
                .env
                .iter()
                .map(|(name, value)| (name.as_ref(), value.as_ref()))
                .collect(),
            cwd: &spawn.cwd,
            user: spawn.user,
            no_new_privileges: true,
            cgroup: &spawn.cgroup,
            ipc_namespace: spawn.ipc_namespace,
            network_namespace: network.map(AsFd::as_fd),
            landlock: spawn.landlock.as_ref().map(|rules| Rules {
                read_execute: &rules.read_execute,
                read: &rules.read,
                read_write: &rules.read_write,
                network: rules.network,
            }),
            oom_score_adj: Some(spawn.oom_score_adj),
            stdio,
        };
        command.start().map_err(|error| chain(&error))
    }

    /// Answers for the children that have become their program or given up.
    pub(super) fn finish_starts(&mut self) {
        let through = |start: &mut Start| is_readable(start.child.as_fd());
        let through: Vec<_> = self.starting.extract_if(.., through).collect();
        for start in through {
            self.finish(start);
        }
    }

    /// A child was reaped.
    pub(super) fn ended(&mut self, pid: u32, outcome: Outcome) {
        let start = self
            .starting
            .iter()
            .position(|start| start.child.pid == pid);
        if let Some(at) = start {
            let start = self.starting.swap_remove(at);
            self.finish(start);
        }
        if self.children.remove(&pid) {
            self.tell(&Message::Exited { pid, outcome }, None);
        }
    }

    fn finish(&mut self, start: Start) {
        let pid = start.child.pid;
        let result = start.child.finish();
        let Some(id) = start.id else { return };
        match result {
            Ok(pidfd) => {
                self.children.insert(pid);
                self.answer(id, Ok(Answer::Spawned { pid }), Some(pidfd));
            }
            Err(error) => self.answer(id, Err(chain(&error)), None),
        }
    }

    fn answer(&mut self, id: u64, result: Result<Answer, String>, fd: Option<OwnedFd>) {
        self.tell(&Message::Done { id, result }, fd);
    }

    fn tell(&mut self, message: &Message, fd: Option<OwnedFd>) {
        if self.socket.is_none() {
            return;
        }
        match wire::encode(message) {
            Ok(bytes) => self.outgoing.push_back((bytes, fd)),
            Err(error) => self.hang_up(&error),
        }
    }

    /// Sends what there is room for.
    pub(super) fn send(&mut self) {
        while let (Some(socket), Some((bytes, fd))) = (&self.socket, self.outgoing.front()) {
            let fds: Vec<BorrowedFd<'_>> = fd.iter().map(AsFd::as_fd).collect();
            match wire::send(socket, bytes, &fds) {
                Ok(()) => {
                    self.outgoing.pop_front();
                }
                Err(error) if error.would_block() => return,
                Err(error) => self.hang_up(&error),
            }
        }
    }
}

/// Puts the descriptors that came to their places.
fn assign(wanted: [bool; 3], fds: &[OwnedFd]) -> Result<[Option<BorrowedFd<'_>>; 3], String> {
    let mut fds = fds.iter();
    let assigned = wanted.map(|wanted| wanted.then(|| fds.next().map(AsFd::as_fd)).flatten());
    if assigned.map(|fd| fd.is_some()) != wanted || fds.next().is_some() {
        return Err("other descriptors came than were announced".to_owned());
    }
    Ok(assigned)
}

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    poll(&mut fds, Some(&rustix::event::Timespec::default())).is_ok_and(|ready| ready > 0)
}
