//! A real standalone agent on a real Btrfs in a file, with real Postgres.

#[path = "node/addresses.rs"]
mod addresses;
#[path = "node/processes.rs"]
mod processes;
#[path = "node/sql.rs"]
mod sql;
#[path = "node/waits.rs"]
mod waits;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use branchpool_agent_api::{
    Lease, LeaseRequest, PoolName, ResetRequest,
    client::{Client, ClientError, Target},
};
use tempfile::TempDir;

pub(crate) use self::{
    processes::{cgroups, command_of, descendants, parent_of, processes, send, wait_gone},
    sql::{ask, connect, connect_at},
};

/// A pool of a database with one table `items (id, body)` of three rows.
pub(crate) fn pool(name: &str, replicas: u32, max_branches: u32, more: &str) -> String {
    format!(
        "apiVersion: branchpool.dev/v1alpha1
kind: BranchPool
metadata:
  name: {name}
spec:
  replicas: {replicas}
  maxBranches: {max_branches}
  postgres:
    version: 15
  source:
    sql:
      scripts:
        - name: items
          sql: |
            CREATE TABLE items (id integer PRIMARY KEY, body text NOT NULL);
            INSERT INTO items VALUES (1, 'one'), (2, 'two'), (3, 'three');
{more}"
    )
}

/// What a node is started with.
pub(crate) struct Setup {
    pub(crate) manifests: Vec<(String, String)>,
    pub(crate) size: &'static str,
    /// Address of the gateway; none by default, for most tests look at the branches themselves.
    pub(crate) gateway: &'static str,
    pub(crate) args: Vec<String>,
    /// A command that runs the agent as its only child, with arguments.
    pub(crate) wrapper: Vec<&'static str>,
    /// With an operator in place of manifests: the branch filesystem.
    pub(crate) operated: Option<PathBuf>,
}

impl Setup {
    pub(crate) fn new(manifest: String) -> Self {
        Self {
            manifests: vec![("pools.yaml".into(), manifest)],
            size: "8Gi",
            gateway: "none",
            args: Vec::new(),
            wrapper: Vec::new(),
            operated: None,
        }
    }
}

pub(crate) struct Node {
    dir: TempDir,
    setup: Setup,
    supervisor: Option<Child>,
    pub(crate) client: Client,
}

impl Node {
    /// Started, and answering.
    pub(crate) async fn start(setup: Setup) -> Self {
        let mut node = Self::launched(setup);
        node.wait_serving().await;
        node
    }

    pub(crate) fn launched(setup: Setup) -> Self {
        let dir = tempfile::Builder::new().prefix("bpn").tempdir().unwrap();
        // The servers' users pass through.
        fs::set_permissions(
            dir.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o711),
        )
        .unwrap();
        fs::create_dir(dir.path().join("manifests")).unwrap();
        for (name, text) in &setup.manifests {
            fs::write(dir.path().join("manifests").join(name), text).unwrap();
        }
        let client = Client::new(Target::Unix(dir.path().join("run/agent.sock")));
        let mut node = Self {
            dir,
            setup,
            supervisor: None,
            client,
        };
        node.launch();
        node
    }

    /// Starts the agent again on the same data.
    pub(crate) async fn restart(&mut self) {
        assert!(self.supervisor.is_none(), "it still runs");
        self.launch();
        self.wait_serving().await;
    }

    pub(crate) fn launch(&mut self) {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log_path())
            .unwrap();
        let agent = crate::agent_binary();
        let agent = agent.to_str().expect("paths of builds should be UTF-8");
        let words = [self.setup.wrapper.as_slice(), &[agent]].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        match &self.setup.operated {
            Some(root) => command.arg("run").arg("--root").arg(root),
            None => command
                .arg("standalone")
                .arg("-f")
                .arg(self.manifest_dir())
                .arg("--data-dir")
                .arg(self.dir.path().join("data"))
                .args(["--size", self.setup.size]),
        };
        let child = command
            .arg("--run-dir")
            .arg(self.dir.path().join("run"))
            .args(["--gateway", self.setup.gateway])
            .args(&self.setup.args)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.supervisor = Some(child);
    }

    pub(crate) async fn wait_serving(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.client.ready().await.is_err() {
            if let Some(child) = &mut self.supervisor
                && let Some(status) = child.try_wait().unwrap()
            {
                panic!("the agent ended with {status}: {}", self.log());
            }
            assert!(
                Instant::now() < deadline,
                "the agent does not answer: {}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Closes the connections of the client so far.
    pub(crate) fn renew_client(&mut self) {
        self.client = Client::new(Target::Unix(self.run_dir().join("agent.sock")));
    }

    /// Open descriptors of the agent.
    pub(crate) fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.agent_pid()))
            .unwrap()
            .count()
    }

    /// Waits until the agent has no more than these open, give or take one of a request under way.
    pub(crate) fn wait_descriptors(&self, most: usize) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.descriptors() > most + 1 {
            assert!(
                Instant::now() < deadline,
                "{} descriptors, {most} before",
                self.descriptors()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until this many links are there. A branch tells that it is ready before its link is
    /// made; a lease of it is answered after.
    pub(crate) fn wait_addresses(&self, count: usize) {
        let directory = self.run_dir().join("e");
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let found = fs::read_dir(&directory).unwrap().count();
            if found == count {
                return;
            }
            assert!(Instant::now() < deadline, "{found} addresses, not {count}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn manifest_dir(&self) -> PathBuf {
        self.dir.path().join("manifests")
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.dir.path().join("data/btrfs.img")
    }

    /// The branch filesystem, seen through the agent's mount namespace.
    pub(crate) fn root(&self) -> PathBuf {
        let data = self.dir.path().join("data/root");
        let process = PathBuf::from(format!("/proc/{}/root", self.supervisor_pid()));
        process.join(data.strip_prefix("/").unwrap())
    }

    /// The branch filesystem's path in the agent's mount namespace.
    pub(crate) fn inner_root(&self) -> PathBuf {
        self.dir.path().join("data/root")
    }

    pub(crate) fn directory(&self) -> &Path {
        self.dir.path()
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join("agent.log")
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    pub(crate) fn supervisor_pid(&self) -> u32 {
        let started = self.supervisor.as_ref().expect("the agent runs").id();
        if self.setup.wrapper.is_empty() {
            return started;
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match descendants(started).first() {
                Some(pid)
                    if command_of(*pid).starts_with(&*crate::agent_binary().to_string_lossy()) =>
                {
                    return *pid;
                }
                _ => assert!(Instant::now() < deadline, "there is no supervisor"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The agent below the supervisor.
    pub(crate) fn agent_pid(&self) -> u32 {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let found = self
                .children()
                .into_iter()
                .find(|pid| command_of(*pid).contains("branchpool-agent"));
            match found {
                Some(pid) => return pid,
                None => assert!(Instant::now() < deadline, "there is no agent"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Children of the supervisor.
    pub(crate) fn children(&self) -> Vec<u32> {
        descendants(self.supervisor_pid())
    }

    /// Every process that belongs to this node's servers: their command lines name its directory,
    /// and backends are children of those.
    pub(crate) fn postmasters(&self) -> Vec<u32> {
        processes()
            .into_iter()
            .filter(|pid| self.is_postmaster(*pid))
            .collect()
    }

    /// A child that was forked just now still shows the command of its postmaster.
    fn is_postmaster(&self, pid: u32) -> bool {
        self.has_its_command(pid)
            && parent_of(pid).is_some_and(|parent| !self.has_its_command(parent))
    }

    fn has_its_command(&self, pid: u32) -> bool {
        let command = command_of(pid);
        command.contains("/postgres\0-D\0") && command.contains(&*self.dir.path().to_string_lossy())
    }

    /// The postmaster of a branch, if it runs.
    pub(crate) fn postmaster_of(&self, branch: &str) -> Option<u32> {
        let config = format!("b/{branch}/postgresql.conf");
        self.postmasters()
            .into_iter()
            .find(|pid| command_of(*pid).contains(&config))
    }

    pub(crate) async fn lease(&self, pool: &str, uid: &str) -> Result<Lease, ClientError> {
        self.client
            .lease(uid, &request(pool))
            .await
            .map(|(lease, _)| lease)
    }

    pub(crate) async fn reset(&self, uid: &str, token: &str) -> Result<Lease, ClientError> {
        let request = ResetRequest {
            token: token.to_owned(),
            epoch: None,
        };
        self.client.reset(uid, &request).await
    }

    /// Asks the agent to stop, and waits until it has.
    pub(crate) fn stop(&mut self) -> ExitStatus {
        self.signal_supervisor(rustix::process::Signal::TERM);
        self.wait_exit()
    }

    pub(crate) fn signal_supervisor(&self, signal: rustix::process::Signal) {
        send(self.supervisor_pid(), signal);
    }

    pub(crate) fn wait_exit(&mut self) -> ExitStatus {
        let mut child = self.supervisor.take().expect("the agent runs");
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status;
            }
            if Instant::now() > deadline {
                let _ = child.kill();
                panic!("the agent does not end: {}", self.log());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Supervisor and agent are gone at once; the servers go on.
    pub(crate) fn kill_manager(&mut self) {
        let agent = self.agent_pid();
        let mut child = self.supervisor.take().expect("the agent runs");
        child.kill().unwrap();
        child.wait().unwrap();
        send(agent, rustix::process::Signal::KILL);
        wait_gone(agent);
    }

    /// The agent is gone at once; the supervisor starts it again.
    pub(crate) fn kill_agent(&self) {
        let agent = self.agent_pid();
        send(agent, rustix::process::Signal::KILL);
        wait_gone(agent);
    }

    /// As when the power fails: everything is gone at once, servers included.
    pub(crate) fn kill_everything(&mut self) {
        let agent = self.agent_pid();
        let servers = self.postmasters();
        let backends: Vec<u32> = servers.iter().flat_map(|pid| descendants(*pid)).collect();
        let mut child = self.supervisor.take().expect("the agent runs");
        child.kill().unwrap();
        child.wait().unwrap();
        for pid in [agent].into_iter().chain(servers).chain(backends) {
            send(pid, rustix::process::Signal::KILL);
            wait_gone(pid);
        }
    }

    /// What the node must not leave behind once it has been stopped.
    pub(crate) fn assert_nothing_left(&self) {
        assert!(self.supervisor.is_none(), "it still runs");
        let place = self.dir.path().to_string_lossy().into_owned();
        let left: Vec<String> = processes()
            .into_iter()
            .map(command_of)
            .filter(|command| command.contains(&place))
            .collect();
        assert!(left.is_empty(), "processes left: {left:?}");
        let loops = Command::new("losetup")
            .arg("-j")
            .arg(self.image())
            .output()
            .unwrap();
        assert!(
            loops.stdout.is_empty(),
            "loop device left: {}",
            String::from_utf8_lossy(&loops.stdout)
        );
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(&place), "mount left");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let Some(mut child) = self.supervisor.take() else {
            return;
        };
        let supervisor = match descendants(child.id()).first() {
            Some(pid) if !self.setup.wrapper.is_empty() => *pid,
            _ => child.id(),
        };
        send(supervisor, rustix::process::Signal::TERM);
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            if matches!(child.try_wait(), Ok(Some(_))) {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = child.kill();
        let _ = child.wait();
        // One that had not yet taken over the servers of the last leaves them.
        for postmaster in self.postmasters() {
            for pid in descendants(postmaster).into_iter().chain([postmaster]) {
                send(pid, rustix::process::Signal::KILL);
                wait_gone(pid);
            }
        }
        for group in cgroups(self) {
            for slot in fs::read_dir(&group).into_iter().flatten().flatten() {
                // Files are not removed that way.
                let _ = fs::remove_dir(slot.path());
            }
            let _ = fs::remove_dir(&group);
        }
    }
}

pub(crate) fn pool_name(name: &str) -> PoolName {
    PoolName {
        namespace: "default".into(),
        name: name.into(),
    }
}

pub(crate) fn request(pool: &str) -> LeaseRequest {
    LeaseRequest {
        pool: pool_name(pool),
        ttl_seconds: None,
        holder: None,
        epoch: None,
    }
}
