//! On a terminal: the progress line, and the keys that signal the whole foreground group.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Write},
    os::fd::OwnedFd,
    process::Stdio,
    sync::mpsc::{Receiver, sync_channel},
    thread,
};

use branchpool_agent_api::LeasePhase;
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use tokio::process::{Child, Command};

use super::{Agent, PATIENCE, code, finish, send};

/// The far side of a pseudo-terminal.
struct Terminal {
    keys: File,
    output: Receiver<Vec<u8>>,
    seen: String,
}

impl Terminal {
    /// Runs the binary with the terminal as its controlling one.
    fn run(agent: &Agent, arguments: &[&str]) -> (Self, Child) {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap();
        let near = || {
            let path = path.to_str().unwrap();
            let file = OpenOptions::new().read(true).write(true).open(path);
            Stdio::from(OwnedFd::from(file.unwrap()))
        };
        let command = agent.command(arguments);
        let command = command.as_std();
        let variables = command
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?)));
        let child = Command::new("setsid")
            .args(["--ctty", "--wait"])
            .arg(command.get_program())
            .args(command.get_args())
            .envs(variables)
            .stdin(near())
            .stdout(near())
            .stderr(near())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let keys = File::from(master);
        let (sender, output) = sync_channel(64);
        let mut far = keys.try_clone().unwrap();
        // Ends when the last process on the terminal does, which reads as an error.
        thread::spawn(move || {
            let mut buffer = [0; 1024];
            while let Ok(count @ 1..) = far.read(&mut buffer) {
                if sender.send(buffer[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        let seen = String::new();
        (Self { keys, output, seen }, child)
    }

    fn until(&mut self, text: &str) {
        while !self.seen.contains(text) {
            let part = self.output.recv_timeout(PATIENCE);
            let part = part.unwrap_or_else(|_| panic!("no {text:?} in {:?}", self.seen));
            self.seen.push_str(&String::from_utf8_lossy(&part));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_warms_shows_progress() {
    let agent = Agent::start().await;
    agent.shop(0).await;
    let (mut terminal, child) = Terminal::run(&agent, &["lease", "shop", "--wait", "10m"]);
    terminal.until("default/shop: 0 of 0 ready");
    agent.shop(1).await;
    terminal.until("default/shop: 1 of 1 ready");
    terminal.until("\r\u{1b}[Kpostgresql:///app");
    assert_eq!(code(&finish(child).await), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_reaches_the_command_once() {
    let agent = Agent::with_shop().await;
    let script = "trap 'echo interrupted' INT; trap 'echo terminated; exit 9' TERM; \
        echo started; until read line; do :; done";
    let arguments = ["lease", "shop", "--id", "l1", "--", "sh", "-c", script];
    let (mut terminal, child) = Terminal::run(&agent, &arguments);
    terminal.until("started");
    // Held until the command has had its signal from the terminal: two at once would count as one.
    send(Signal::STOP, &child);
    terminal.press("\u{3}");
    terminal.until("interrupted");
    // Passed on after whatever is made of the first.
    send(Signal::TERM, &child);
    send(Signal::CONT, &child);
    terminal.until("terminated");
    assert_eq!(code(&finish(child).await), 9);
    let interruptions = terminal.seen.matches("interrupted").count();
    assert_eq!(interruptions, 1, "{:?}", terminal.seen);
    assert_eq!(agent.phase("l1"), Some(LeasePhase::Released));
}
