//! What the gateway is compared with: a Postgres with the settings of a branch that listens on TCP,
//! and pgbouncer and a bare copying loop in front of a branch.

use std::{
    ffi::OsStr,
    fs,
    net::Ipv4Addr,
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use branchpool_sys::btrfs;
use rustix::process::{Pid, Signal, getegid, geteuid, kill_process};
use snafu::{OptionExt, ResultExt, whatever};
use tokio::{net::TcpStream, process::Child, time::sleep};

use crate::{
    account::Account,
    agent::{Agent, DATABASE, ROLE},
    checks,
    error::Result,
    floor::Plan,
    gateway::client::{Session, Target},
    machine::Machine,
    options::Options,
    process::in_account,
};

const PATIENCE: Duration = Duration::from_secs(30);
/// Good for servers on loopback that live for a run.
const PASSWORD: &str = "of the measurement";
/// The role that pgbouncer comes as: the pool's own is let in by its name on the system.
const BOUNCED: &str = "bounced";
const PGBOUNCER: [&str; 2] = ["/usr/sbin/pgbouncer", "/usr/local/bin/pgbouncer"];

/// A program in an account of its own, under another user.
#[derive(Debug)]
struct Service {
    child: Child,
    account: Account,
    end: Signal,
    log: PathBuf,
}

impl Service {
    fn start(
        name: &str,
        (uid, gid): (u32, u32),
        program: &Path,
        arguments: &[String],
        environment: &[(String, String)],
        directory: &Path,
        end: Signal,
    ) -> Result<Self> {
        let account = Account::create(name)?;
        let log = directory.join("log");
        let output = fs::File::create(&log).whatever_context("cannot make a log")?;
        let errors = output.try_clone().whatever_context("cannot make a log")?;
        let child = in_account(&account, Path::new("/usr/bin/setpriv"))?
            .args([format!("--reuid={uid}"), format!("--regid={gid}")])
            .args(["--clear-groups", "--"])
            .arg(program)
            .args(arguments)
            .env_clear()
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn()
            .with_whatever_context(|_| format!("cannot start {}", program.display()))?;
        Ok(Self {
            child,
            account,
            end,
            log,
        })
    }

    /// Waits until a client can log in.
    async fn wait_serving(&mut self, target: &Target) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = Session::open(target).await {
            let ended = self.child.try_wait();
            if ended
                .whatever_context("cannot wait for a server")?
                .is_some()
                || Instant::now() > deadline
            {
                whatever!("{error}; its log: {}", self.log());
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn tell(&self) {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        if let Some(pid) = pid.and_then(Pid::from_raw) {
            let _gone = kill_process(pid, self.end);
        }
    }

    async fn stop(mut self) -> Result<()> {
        self.tell();
        let ended = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        ended
            .whatever_context("a server does not end")?
            .whatever_context("cannot wait for a server")?;
        let left = self.account.processes();
        if !left.is_empty() {
            whatever!("a server left processes behind: {left:?}");
        }
        Ok(())
    }
}

impl Drop for Service {
    /// SIGKILL, which comes with the account's end, would leave a server's shared memory behind.
    fn drop(&mut self) {
        self.tell();
        let deadline = Instant::now() + Duration::from_secs(5);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A server on a snapshot of the branches' image, with their program, configuration and command
/// line, that listens on TCP and asks for SCRAM.
#[derive(Debug)]
pub(crate) struct Direct {
    service: Service,
    data: PathBuf,
    pub(crate) sockets: PathBuf,
    pub(crate) target: Target,
}

impl Direct {
    pub(crate) async fn start(agent: &Agent, machine: &Machine, options: &Options) -> Result<Self> {
        let plan = Plan::of(agent, machine, options)?;
        let data = machine.root().join("direct");
        snapshot(&plan.image, &data)?;
        let run = machine.memory().join("direct");
        let sockets = run.join("s");
        private_directory(&sockets, plan.user)?;
        let hba = run.join("hba");
        // The socket's directory is the lock.
        fs::write(
            &hba,
            "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n",
        )
        .whatever_context("cannot write a server's rules")?;
        let port = free_port()?;
        let mut arguments = plan.arguments(&data, &sockets);
        for setting in [
            "listen_addresses=127.0.0.1".to_owned(),
            format!("port={port}"),
            format!("hba_file={}", hba.display()),
        ] {
            arguments.extend(["-c".to_owned(), setting]);
        }
        let (program, environment) = (&plan.program, &plan.environment);
        let end = Signal::QUIT;
        let service = Service::start(
            "direct",
            plan.user,
            program,
            &arguments,
            environment,
            &run,
            end,
        )?;
        let target = Target {
            port,
            user: ROLE.to_owned(),
            password: PASSWORD.to_owned(),
            database: DATABASE.to_owned(),
        };
        let mut direct = Self {
            service,
            data,
            sockets,
            target,
        };
        direct.give_password(port).await?;
        direct.service.wait_serving(&direct.target).await?;
        Ok(direct)
    }

    async fn give_password(&mut self, port: u16) -> Result<()> {
        // By the name that a branch's socket has, for the same checks.
        let socket = self.sockets.join(format!(".s.PGSQL.{port}"));
        let own = self.sockets.join(".s.PGSQL.5432");
        std::os::unix::fs::symlink(&socket, &own).whatever_context("cannot link a socket")?;
        let deadline = Instant::now() + PATIENCE;
        let sql = format!("ALTER ROLE {ROLE} PASSWORD '{PASSWORD}'");
        while let Err(error) = checks::execute(&self.sockets, &sql).await {
            if Instant::now() > deadline {
                whatever!("{error}; the server's log: {}", self.service.log());
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.service.stop().await?;
        let (parent, name) = parts(&self.data)?;
        btrfs::delete(&parent, name).whatever_context("cannot delete a snapshot")
    }
}

/// Debian's pgbouncer, one pooled session per client, in front of a branch's own socket.
#[derive(Debug)]
pub(crate) struct Pgbouncer {
    service: Service,
    pub(crate) target: Target,
}

impl Pgbouncer {
    pub(crate) fn program() -> Option<PathBuf> {
        let found = PGBOUNCER.iter().map(PathBuf::from);
        found.into_iter().find(|program| program.exists())
    }

    /// The branch must have the tables that are to be measured.
    pub(crate) async fn start(program: &Path, sockets: &Path, machine: &Machine) -> Result<Self> {
        let role = format!(
            "CREATE ROLE {BOUNCED} LOGIN PASSWORD '{PASSWORD}';
             GRANT ALL ON ALL TABLES IN SCHEMA public TO {BOUNCED}"
        );
        checks::execute(sockets, &role).await?;
        // The branch lets its own user to its socket, and nobody else but root, which pgbouncer
        // refuses to be.
        let owner = fs::metadata(sockets).whatever_context("a branch has no directory")?;
        let user = (owner.uid(), owner.gid());
        let run = machine.memory().join("pgbouncer");
        private_directory(&run, user)?;
        let port = free_port()?;
        let (users, configuration) = (run.join("users"), run.join("pgbouncer.ini"));
        let settings = format!(
            "[databases]
{DATABASE} = host={sockets} port=5432 user={BOUNCED} password='{PASSWORD}'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {users}
pool_mode = session
default_pool_size = 40
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
",
            sockets = sockets.display(),
            users = users.display(),
        );
        for (path, text) in [
            (&configuration, settings),
            (&users, format!("\"{BOUNCED}\" \"{PASSWORD}\"\n")),
        ] {
            let written = fs::write(path, text)
                .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o600)))
                .and_then(|()| chown(path, Some(user.0), Some(user.1)));
            written.with_whatever_context(|_| format!("cannot write {}", path.display()))?;
        }
        let arguments = [configuration.display().to_string()];
        let service = Service::start(
            "bouncer",
            user,
            program,
            &arguments,
            &[],
            &run,
            Signal::TERM,
        )?;
        let mut pgbouncer = Self {
            service,
            target: Target {
                port,
                user: BOUNCED.to_owned(),
                password: PASSWORD.to_owned(),
                database: DATABASE.to_owned(),
            },
        };
        let target = pgbouncer.target.clone();
        pgbouncer.service.wait_serving(&target).await?;
        Ok(pgbouncer)
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.service.stop().await
    }
}

/// A bare copying loop in front of a branch's own socket, which lets it in as it does the gateway.
#[derive(Debug)]
pub(crate) struct Copy {
    service: Service,
    pub(crate) port: u16,
}

impl Copy {
    pub(crate) async fn start(sockets: &Path, machine: &Machine) -> Result<Self> {
        let program = std::env::current_exe().whatever_context("cannot find this program")?;
        let user = (geteuid().as_raw(), getegid().as_raw());
        let run = machine.memory().join("copy");
        private_directory(&run, user)?;
        let port = free_port()?;
        let socket = sockets.join(".s.PGSQL.5432").display().to_string();
        let arguments = ["copy-floor".to_owned(), port.to_string(), socket];
        let end = Signal::KILL;
        let service = Service::start("copy", user, &program, &arguments, &[], &run, end)?;
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port))
            .await
            .is_err()
        {
            if Instant::now() > deadline {
                whatever!(
                    "the copying loop does not listen; its log: {}",
                    service.log()
                );
            }
            sleep(Duration::from_millis(20)).await;
        }
        Ok(Self { service, port })
    }

    pub(crate) async fn stop(self) -> Result<()> {
        self.service.stop().await
    }
}

/// Free a moment ago.
fn free_port() -> Result<u16> {
    let address = crate::agent::free_address()?;
    let port = address
        .rsplit(':')
        .next()
        .and_then(|port| port.parse().ok());
    port.whatever_context("no free TCP port")
}

fn private_directory(path: &Path, (uid, gid): (u32, u32)) -> Result<()> {
    let made = fs::create_dir_all(path)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o700)))
        .and_then(|()| chown(path, Some(uid), Some(gid)));
    made.with_whatever_context(|_| format!("cannot make {}", path.display()))
}

fn snapshot(image: &Path, to: &Path) -> Result<()> {
    let image = btrfs::open_dir(image).whatever_context("cannot open the image")?;
    let (parent, name) = parts(to)?;
    btrfs::snapshot(&image, &parent, name, false).whatever_context("cannot make a snapshot")
}

fn parts(path: &Path) -> Result<(std::os::fd::OwnedFd, &OsStr)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        whatever!("{} has no parent", path.display())
    };
    let parent = btrfs::open_dir(parent).whatever_context("cannot open a directory")?;
    Ok((parent, name))
}
