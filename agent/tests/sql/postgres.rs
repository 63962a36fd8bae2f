//! A Postgres server of its own, on a Unix socket only.

use std::{
    fs,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Mutex,
    time::{Duration, Instant},
};

use branchpool_agent::{
    postgres::{
        installation::disk_user,
        session::{Session, Startup},
    },
    sql::SqlTarget,
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) struct Postgres {
    directory: TempDir,
    server: Child,
}

impl Postgres {
    /// With a superuser and a database `app`, and a table `items` of three rows.
    pub(crate) async fn start() -> Self {
        let directory = tempfile::Builder::new().prefix("bps").tempdir().unwrap();
        let user = disk_user("postgres").unwrap();
        chown(directory.path(), Some(user.uid), Some(user.gid)).unwrap();
        let programs = newest_programs();
        let data = directory.path().join("data");
        copy(&template(&programs, directory.path()), &data);
        let log = fs::File::create(directory.path().join("log")).unwrap();
        let server = as_user(&programs.join("postgres"))
            .arg("-D")
            .arg(&data)
            .arg("-k")
            .arg(directory.path())
            .args(["-c", "listen_addresses=", "-c", "fsync=off"])
            .stderr(log)
            .spawn()
            .unwrap();
        let postgres = Self { directory, server };
        postgres
            .open("postgres")
            .await
            .execute("CREATE DATABASE app")
            .await
            .unwrap();
        let table = "CREATE TABLE items (id int PRIMARY KEY, body text NOT NULL);
            INSERT INTO items VALUES (1, 'one'), (2, 'two'), (3, 'three')";
        postgres.open("app").await.execute(table).await.unwrap();
        postgres
    }

    pub(crate) fn target(&self) -> SqlTarget {
        SqlTarget {
            socket_dir: self.directory.path().to_owned(),
            role: "app".to_owned(),
            database: "app".to_owned(),
        }
    }

    /// A session, as soon as the server gives one.
    pub(crate) async fn open(&self, database: &str) -> Session {
        let startup = Startup {
            user: "app".to_owned(),
            database: database.to_owned(),
            parameters: Vec::new(),
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            match Session::open(self.directory.path(), startup.clone()).await {
                Ok(session) => return session,
                Err(error) => assert!(Instant::now() < deadline, "{error}\n{}", self.log()),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until this many sessions of HTTP requests are there that run such a query.
    pub(crate) async fn wait_sessions(&self, count: usize, like: &str) {
        let sql = format!(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'branchpool-sql' AND query LIKE '{like}'"
        );
        let mut session = self.open("app").await;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = session.query_one(&sql).await.unwrap().unwrap();
            if found == count.to_string() {
                return;
            }
            assert!(Instant::now() < deadline, "{found} sessions run {like}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Ends the server, and with it all sessions.
    pub(crate) fn stop(&mut self) {
        if let Ok(None) = self.server.try_wait() {
            let pid = Pid::from_child(&self.server);
            kill_process(pid, Signal::INT).unwrap();
            self.server.wait().unwrap();
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A fresh data directory, made once for all tests and kept for the next run.
fn template(programs: &Path, scratch: &Path) -> PathBuf {
    static MAKING: Mutex<()> = Mutex::new(());
    let _one_makes_it = MAKING.lock().unwrap();
    let version = Command::new(programs.join("postgres"))
        .arg("--version")
        .output()
        .unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    let name: String = version
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '.')
        .collect();
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if kept.exists() {
        return kept;
    }
    // The server's user need not reach where it is kept.
    let made = scratch.join("template");
    let output = as_user(&programs.join("initdb"))
        .args([
            "--no-sync",
            "--no-instructions",
            "--username=app",
            "--auth=trust",
        ])
        .args(["--encoding=UTF8", "--locale=C.UTF-8", "-D"])
        .arg(&made)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let unfinished = kept.with_extension(std::process::id().to_string());
    copy(&made, &unfinished);
    if let Err(error) = fs::rename(&unfinished, &kept) {
        // Another run was faster.
        assert!(kept.exists(), "{error}");
        fs::remove_dir_all(&unfinished).unwrap();
    }
    kept
}

fn copy(from: &Path, to: &Path) {
    let mut command = Command::new("cp");
    let status = command.arg("-a").arg(from).arg(to).status().unwrap();
    assert!(status.success(), "{command:?}");
}

fn as_user(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args([
            "--reuid=postgres",
            "--regid=postgres",
            "--clear-groups",
            "--",
        ])
        .arg(program)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

fn newest_programs() -> PathBuf {
    let majors = [18, 17, 16, 15, 14];
    let mut directories = majors
        .iter()
        .map(|major| format!("/usr/lib/postgresql/{major}/bin").into());
    directories
        .find(|directory: &PathBuf| directory.join("initdb").exists())
        .expect("a Postgres server should be installed")
}
