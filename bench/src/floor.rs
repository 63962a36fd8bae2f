//! The floor: a process that makes the system calls of a refill and nothing else. It is given what
//! one of the agent's servers was started with, so that both start the same program with the same
//! settings on the same image.

use std::{
    fs,
    io::{BufRead as _, Write as _},
    os::unix::fs::{MetadataExt, chown},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use snafu::{OptionExt, ResultExt, whatever};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout},
    time::timeout,
};

use crate::{
    account::Account,
    agent::{Agent, DATABASE, ROLE, Span},
    error::Result,
    machine::Machine,
    options::Options,
};

const PATIENCE: Duration = Duration::from_mins(2);
const DATA: &str = "{data}";
const CONFIG: &str = "{config}";
const SOCKETS: &str = "{sockets}";

/// All that the floor's process has to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) image: PathBuf,
    /// 16 directories are made below.
    pub(crate) branches: PathBuf,
    pub(crate) run: PathBuf,
    pub(crate) program: PathBuf,
    /// With `{data}`, `{config}` and `{sockets}` where a server's own paths go.
    arguments: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) config: PathBuf,
    /// Owner of the files on disk, whom the servers run as.
    pub(crate) user: (u32, u32),
    pub(crate) role: String,
    pub(crate) database: String,
    /// Servers that start at a time.
    pub(crate) starts: u32,
}

impl Plan {
    pub(crate) fn arguments(&self, data: &Path, sockets: &Path) -> Vec<String> {
        let fill = |argument: &String| {
            argument
                .replace(DATA, &data.display().to_string())
                .replace(CONFIG, &self.config.display().to_string())
                .replace(SOCKETS, &sockets.display().to_string())
        };
        self.arguments.iter().map(fill).collect()
    }

    /// Taken from a server that the agent has started just now.
    pub(crate) fn of(agent: &Agent, machine: &Machine, options: &Options) -> Result<Self> {
        let server = Server::find(agent)?;
        let run = machine.memory().join("floor");
        fs::create_dir_all(&run).whatever_context("cannot make the floor's run directory")?;
        let config = run.join("postgresql.conf");
        fs::copy(server.value("config_file")?, &config)
            .whatever_context("cannot copy the servers' configuration")?;
        let image = only_image(&machine.root().join("golden"))?;
        let owner = fs::metadata(image.join("PG_VERSION"))
            .whatever_context("the image has no PG_VERSION")?;
        let arguments = server.arguments()?;
        let user = (owner.uid(), owner.gid());
        chown(&config, Some(user.0), Some(user.1)).whatever_context("cannot chown")?;
        Ok(Self {
            image,
            branches: machine.root().join("floor"),
            run,
            program: server.program,
            arguments,
            environment: server.environment,
            config,
            user,
            role: ROLE.to_owned(),
            database: DATABASE.to_owned(),
            starts: options.starts,
        })
    }
}

/// A postmaster of the agent, as `/proc` shows it.
struct Server {
    program: PathBuf,
    command: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Server {
    fn find(agent: &Agent) -> Result<Self> {
        let run = agent.run.display().to_string();
        let found = agent
            .daemon
            .account
            .processes()
            .into_iter()
            .find_map(|pid| {
                let command = strings(&format!("/proc/{pid}/cmdline"));
                let ours = command
                    .iter()
                    .any(|part| part.starts_with("config_file=") && part.contains(&run));
                ours.then_some((pid, command))
            });
        let (pid, command) = found.whatever_context("the agent has no server")?;
        let program = fs::read_link(format!("/proc/{pid}/exe"))
            .whatever_context("the server has no program")?;
        let environment = strings(&format!("/proc/{pid}/environ"))
            .iter()
            .filter_map(|entry| entry.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        Ok(Self {
            program,
            command,
            environment,
        })
    }

    fn value(&self, setting: &str) -> Result<&str> {
        self.command
            .iter()
            .find_map(|part| part.strip_prefix(setting)?.strip_prefix('='))
            .with_whatever_context(|| format!("the server was started without {setting}"))
    }

    /// The command line with the server's own paths taken out.
    fn arguments(&self) -> Result<Vec<String>> {
        let after_d = self.command.iter().skip_while(|part| *part != "-D").nth(1);
        let data = after_d.whatever_context("the server was started without -D")?;
        let config = self.value("config_file")?;
        let sockets = self.value("unix_socket_directories")?.trim_matches('"');
        let blank = |part: &String| {
            part.replace(sockets, SOCKETS)
                .replace(config, CONFIG)
                .replace(data.as_str(), DATA)
        };
        let arguments: Vec<String> = self.command.iter().skip(1).map(blank).collect();
        for place in [DATA, CONFIG, SOCKETS] {
            if !arguments.iter().any(|part| part.contains(place)) {
                whatever!("the server's command line has no place for {place}: {arguments:?}");
            }
        }
        Ok(arguments)
    }
}

/// The strings of a file that a NUL ends each of.
fn strings(path: &str) -> Vec<String> {
    let bytes = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let text = text.strip_suffix('\0').unwrap_or(&text);
    text.split('\0').map(str::to_owned).collect()
}

fn only_image(golden: &Path) -> Result<PathBuf> {
    let mut directory = golden.to_owned();
    // The pool's directory, and in it the generation.
    for _ in 0..2 {
        let entries = fs::read_dir(&directory)
            .with_whatever_context(|_| format!("cannot read {}", directory.display()))?;
        let mut entries = entries.flatten().map(|entry| entry.path());
        let Some(only) = entries.next().filter(|_| entries.next().is_none()) else {
            whatever!("{} should hold one entry", directory.display())
        };
        directory = only;
    }
    Ok(directory)
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    Refill(u32),
    Empty,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Done {
    Refill { wall: Duration, snapshots: Duration },
    Empty,
    Failed(String),
}

/// The floor's process as the measuring one sees it.
#[derive(Debug)]
pub(crate) struct Floor {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    account: Account,
    plan: Plan,
}

impl Floor {
    /// While the agent has servers, to be like those.
    pub(crate) async fn start(agent: &Agent, machine: &Machine, options: &Options) -> Result<Self> {
        let plan = Plan::of(agent, machine, options)?;
        let account = Account::create("floor")?;
        let own = std::env::current_exe().whatever_context("cannot find this program")?;
        let mut child = crate::process::in_account(&account, &own)?
            .arg("floor")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .whatever_context("cannot start the floor's process")?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            whatever!("the floor's process has no pipes")
        };
        let answers = BufReader::new(answers).lines();
        let mut floor = Self {
            child,
            orders,
            answers,
            account,
            plan,
        };
        let plan = floor.plan.clone();
        floor.send(&plan).await?;
        Ok(floor)
    }

    async fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message).whatever_context("no JSON")?;
        line.push(b'\n');
        let sent = self.orders.write_all(&line).await;
        sent.whatever_context("the floor's process is gone")
    }

    async fn ask(&mut self, order: &Order) -> Result<Done> {
        self.send(order).await?;
        let line = timeout(PATIENCE, self.answers.next_line())
            .await
            .whatever_context("the floor's process does not answer")?
            .whatever_context("the floor's process cannot be read")?
            .whatever_context("the floor's process ended")?;
        match serde_json::from_str(&line).whatever_context("no answer")? {
            Done::Failed(why) => whatever!("the floor failed: {why}"),
            done => Ok(done),
        }
    }

    /// And how long the snapshots took.
    pub(crate) async fn refill(&mut self, branches: u32) -> Result<(Span, Duration)> {
        let cpu = self.account.cpu()?;
        let Done::Refill { wall, snapshots } = self.ask(&Order::Refill(branches)).await? else {
            whatever!("the floor answers another question")
        };
        let cpu = self.account.cpu()?.saturating_sub(cpu);
        Ok((Span { wall, cpu }, snapshots))
    }

    pub(crate) async fn empty(&mut self) -> Result<()> {
        self.ask(&Order::Empty).await?;
        crate::checks::shards_are_empty(&self.plan.branches)
    }

    pub(crate) fn socket_directories(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(self.plan.run.join("s"))
            .whatever_context("cannot read the floor's run directory")?;
        Ok(entries.flatten().map(|entry| entry.path()).collect())
    }

    pub(crate) async fn stop(mut self) -> Result<()> {
        drop(self.orders);
        let status = timeout(PATIENCE, self.child.wait())
            .await
            .whatever_context("the floor's process does not end")?
            .whatever_context("cannot wait for the floor's process")?;
        let left = self.account.processes();
        if !status.success() || !left.is_empty() {
            whatever!("the floor's process ended with {status} and left {left:?}");
        }
        Ok(())
    }
}

/// The process itself: a plan, then orders, one a line.
pub(crate) fn run() -> Result<()> {
    let mut lines = std::io::stdin().lock().lines();
    let plan = lines.next().whatever_context("no plan")?;
    let mut workshop = crate::workshop::Workshop::new(decode(&plan)?)?;
    for line in lines {
        let done = match decode(&line)? {
            Order::Refill(branches) => workshop.refill(branches),
            Order::Empty => workshop.empty().map(|()| Done::Empty),
        };
        let done = done.unwrap_or_else(|error| Done::Failed(error.to_string()));
        let answer = serde_json::to_string(&done).whatever_context("no JSON")?;
        let mut output = std::io::stdout().lock();
        writeln!(output, "{answer}").whatever_context("nobody listens")?;
        output.flush().whatever_context("nobody listens")?;
    }
    workshop.empty()
}

fn decode<T: DeserializeOwned>(line: &std::io::Result<String>) -> Result<T> {
    match line {
        Ok(line) => serde_json::from_str(line).whatever_context("not understood"),
        Err(error) => whatever!("stdin cannot be read: {error}"),
    }
}
