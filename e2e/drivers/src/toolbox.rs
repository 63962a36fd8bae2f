//! The programs, and their runs.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use serde_json::Value;
use snafu::{ResultExt, Snafu, ensure};
use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

use crate::{Config, Driver, compare, proxy::Proxy};

/// The result of each check, by its name.
pub type Results = BTreeMap<String, Value>;

const SETUP_LIMIT: Duration = Duration::from_secs(600);
const RUN_LIMIT: Duration = Duration::from_secs(300);

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot start {program}: {source}"))]
    Start { program: String, source: io::Error },

    #[snafu(display("{program} has not ended within {} seconds", limit.as_secs()))]
    TimedOut { program: String, limit: Duration },

    #[snafu(display("{program} failed:\n{message}"))]
    Failed { program: String, message: String },

    #[snafu(display("cannot listen on a port of the loopback address: {source}"))]
    Proxy { source: io::Error },

    #[snafu(display("{driver}'s program has not printed one JSON object: {source}: {output}"))]
    Output {
        driver: Driver,
        source: serde_json::Error,
        output: String,
    },
}

/// The programs of all drivers, ready to run.
#[derive(Debug)]
pub struct Toolbox {
    /// The folder of this crate, with the sources.
    sources: PathBuf,
    /// What `scripts/setup-drivers` has made.
    made: PathBuf,
    tokio_postgres: PathBuf,
}

impl Toolbox {
    /// Runs `scripts/setup-drivers`, which does nothing when all is there. `tokio_postgres` is the
    /// program `tokio-postgres-suite`; a test of this package has its path in
    /// `env!("CARGO_BIN_EXE_tokio-postgres-suite")`.
    pub async fn ready(tokio_postgres: &Path) -> Result<Self, Error> {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
        let script = sources.join("../../scripts/setup-drivers");
        let output = finish(Command::new(&script), &script, &[], SETUP_LIMIT).await?;
        Ok(Self {
            sources: sources.to_owned(),
            made: PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()),
            tokio_postgres: tokio_postgres.to_owned(),
        })
    }

    /// Runs the suite of `driver`. A check that fails is a result, `{"failed": …}`; an error is that
    /// the program could not do its first connection, or has not ended in time.
    pub async fn run(&self, driver: Driver, config: &Config) -> Result<Results, Error> {
        let config = serde_json::to_vec(config).expect("a config should be JSON");
        let command = self.suite(driver);
        let output = finish(command, driver.name().as_ref(), &config, RUN_LIMIT).await?;
        serde_json::from_slice(&output.stdout).with_context(|_| OutputSnafu {
            driver,
            output: String::from_utf8_lossy(&output.stdout),
        })
    }

    /// Runs the suite of `driver` through the server under test, then directly, and says what is
    /// wrong with the results: see [`compare::problems`].
    pub async fn compare(
        &self,
        driver: Driver,
        through: &Config,
        direct: &Config,
    ) -> Result<Vec<String>, Error> {
        let through = self.run(driver, through).await?;
        let direct = match direct.socket() {
            Some(socket) if !driver.knows_unix_sockets() => {
                let proxy = Proxy::start(&socket).await.context(ProxySnafu)?;
                self.run(driver, &direct.at(proxy.address())).await?
            }
            _ => self.run(driver, direct).await?,
        };
        Ok(compare::problems(driver, &through, &direct))
    }

    /// Runs the example that docs/connecting.md shows for `driver`, with `url` as `DATABASE_URL`, and
    /// gives what it prints.
    pub async fn run_example(&self, driver: Driver, url: &str) -> Result<String, Error> {
        let mut command = self.example(driver);
        command.env("DATABASE_URL", url);
        let name = format!("the example of {driver}");
        let output = finish(command, name.as_ref(), &[], RUN_LIMIT).await?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn suite(&self, driver: Driver) -> Command {
        match driver {
            Driver::Asyncpg => self.python("asyncpg_suite.py"),
            Driver::NodePostgres => self.node("suite.js"),
            Driver::Pgjdbc => self.java("Main"),
            Driver::Pgx => command(self.made.join("go/suite")),
            Driver::Psql => self.python("psql_suite.py"),
            Driver::Psycopg => self.python("psycopg_suite.py"),
            Driver::Sqlalchemy => self.python("sqlalchemy_suite.py"),
            Driver::TokioPostgres => command(&self.tokio_postgres),
        }
    }

    fn example(&self, driver: Driver) -> Command {
        match driver {
            Driver::Asyncpg => self.python("example_asyncpg.py"),
            Driver::NodePostgres => self.node("example.js"),
            Driver::Pgjdbc => self.java("Example"),
            Driver::Pgx => command(self.made.join("go/example")),
            Driver::Psql => self.shell("example.sh"),
            Driver::Psycopg => self.python("example_psycopg.py"),
            Driver::Sqlalchemy => self.python("example_sqlalchemy.py"),
            Driver::TokioPostgres => {
                command(self.tokio_postgres.with_file_name("tokio-postgres-example"))
            }
        }
    }

    fn shell(&self, script: &str) -> Command {
        let mut command = command("sh");
        command.arg(self.sources.join("shell").join(script));
        command
    }

    /// The text of the example, as docs/connecting.md has it.
    pub fn example_source(driver: Driver) -> &'static str {
        match driver {
            Driver::Asyncpg => include_str!("../python/example_asyncpg.py"),
            Driver::NodePostgres => include_str!("../node/example.js"),
            Driver::Pgjdbc => include_str!("../java/Example.java"),
            Driver::Pgx => include_str!("../go/example/main.go"),
            Driver::Psql => include_str!("../shell/example.sh"),
            Driver::Psycopg => include_str!("../python/example_psycopg.py"),
            Driver::Sqlalchemy => include_str!("../python/example_sqlalchemy.py"),
            Driver::TokioPostgres => include_str!("../rust/example.rs"),
        }
    }

    fn python(&self, script: &str) -> Command {
        let mut command = command(self.made.join("python/bin/python"));
        command
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .arg(self.sources.join("python").join(script));
        command
    }

    fn node(&self, script: &str) -> Command {
        let mut command = self.tool("node");
        command
            .arg("--no-deprecation")
            .arg(self.made.join("node").join(script));
        command
    }

    /// The machine's, or what `scripts/setup-drivers` has got in its place.
    fn tool(&self, name: &str) -> Command {
        let own = self.made.join("bin").join(name);
        command(if own.exists() { own } else { name.into() })
    }

    fn java(&self, class: &str) -> Command {
        let made = self.made.join("java");
        let mut command = command("java");
        command
            // Without the file that it would leave in /tmp.
            .arg("-XX:-UsePerfData")
            .arg("-cp")
            .arg(format!("{0}/classes:{0}/jars/*", made.display()))
            .arg(class);
        command
    }
}

/// Without the variables and files by which libpq and others would be told something else.
fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("LANG", "C.UTF-8")
        .env("HOME", "/nonexistent");
    command
}

async fn finish(
    mut command: Command,
    name: &Path,
    input: &[u8],
    limit: Duration,
) -> Result<Output, Error> {
    let program = name.display().to_string();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|_| StartSnafu { program: &program })?;
    let mut stdin = child.stdin.take().expect("the input should be a pipe");
    let run = async {
        // A program that has ended already says why on its error output.
        let _ = stdin.write_all(input).await;
        drop(stdin);
        child.wait_with_output().await
    };
    let Ok(output) = timeout(limit, run).await else {
        return TimedOutSnafu { program, limit }.fail();
    };
    let output = output.with_context(|_| StartSnafu { program: &program })?;
    ensure!(
        output.status.success(),
        FailedSnafu {
            program,
            message: String::from_utf8_lossy(&output.stderr),
        }
    );
    Ok(output)
}
