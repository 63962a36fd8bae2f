//! A terminal for a program under test.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Write},
    os::fd::OwnedFd,
    process::Stdio,
    sync::mpsc::{Receiver, sync_channel},
    thread,
    time::Duration,
};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use tokio::process::{Child, Command};

/// Longer than anything here takes, so that a hang fails instead of hanging the run.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// The far side of a pseudo-terminal.
pub(crate) struct Terminal {
    keys: File,
    output: Receiver<Vec<u8>>,
    pub(crate) seen: String,
}

impl Terminal {
    /// Runs a command with the terminal as its controlling one.
    pub(crate) fn run(command: &Command) -> (Self, Child) {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap();
        let near = || {
            let path = path.to_str().unwrap();
            let file = OpenOptions::new().read(true).write(true).open(path);
            Stdio::from(OwnedFd::from(file.unwrap()))
        };
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

    /// Waits until the terminal has shown a text.
    pub(crate) fn until(&mut self, text: &str) {
        while !self.seen.contains(text) {
            let part = self.output.recv_timeout(PATIENCE);
            let part = part.unwrap_or_else(|_| panic!("no {text:?} in {:?}", self.seen));
            self.seen.push_str(&String::from_utf8_lossy(&part));
        }
    }

    pub(crate) fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }
}
