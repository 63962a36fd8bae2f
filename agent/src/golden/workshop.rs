//! Where an image is made: its directory, a private server on it, and the tools' surroundings.

use std::{
    fs, io,
    io::Write,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
    time::Duration,
};

use branchpool_supervisor::protocol::User;
use snafu::{OptionExt, ResultExt, ensure};
use tempfile::TempDir;

use super::{
    Env, GoldenSpec, Script, Source, discard,
    error::{
        GenerationExistsSnafu, KillSnafu, MajorMissingSnafu, Result, ScriptSnafu, ServerSnafu,
        SessionSnafu, SpecSnafu,
    },
    tool::{self, Output, Tool, blocking},
};
use crate::{
    postgres::{
        config::{self, Control, Phase, Profile, Tuning},
        installation::Installation,
        server::{self, DROP_TIMEOUT, Launch, Server, StopMode},
        session::{self, Session, Startup},
    },
    storage::tree::remove_tree,
};

/// A start may replay nothing, but the disk may be slow.
const START_TIMEOUT: Duration = Duration::from_mins(1);
/// A shutdown writes all dirty buffers.
const STOP_TIMEOUT: Duration = Duration::from_mins(5);
/// Longest name of a role or database, in bytes.
const MAX_NAME: usize = 63;

pub(super) struct Workshop<'a> {
    pub(super) env: &'a Env,
    pub(super) spec: &'a GoldenSpec,
    pub(super) installation: &'a Installation,
    /// The image while it is made.
    pub(super) data_dir: PathBuf,
    pub(super) log: PathBuf,
    run: TempDir,
}

impl<'a> Workshop<'a> {
    /// Checks what needs no IO on the source, and makes the surroundings. Blocks shortly.
    pub(super) fn open(env: &'a Env, spec: &'a GoldenSpec) -> Result<Self> {
        check(spec)?;
        let installation = env
            .installations
            .iter()
            .find(|installation| installation.major == spec.major)
            .with_context(|| MajorMissingSnafu {
                wanted: spec.major,
                found: majors(&env.installations),
            })?;
        let sealed = env.layout.golden_generation(&spec.pool, spec.generation);
        let exists = fs::symlink_metadata(&sealed).is_ok();
        ensure!(!exists, GenerationExistsSnafu { path: sealed });
        let data_dir = env.layout.building_generation(&spec.pool, spec.generation);
        discard::discard(&data_dir)
            .map_err(super::Error::io("removing the unfinished image", &data_dir))?;
        let log = env
            .layout
            .log(&format!("build-{}-{}", spec.pool, spec.generation));
        super::files::remove(&log).map_err(super::Error::io("removing the old log", &log))?;
        let run = make_run_dir(env).map_err(super::Error::io(
            "making a directory for the build in",
            env.layout.run(),
        ))?;
        Ok(Self {
            env,
            spec,
            installation,
            data_dir,
            log,
            run,
        })
    }

    /// Ends what still runs, and removes what was not sealed.
    pub(super) async fn close(self) -> Result<()> {
        server::kill_group(&self.env.group)
            .await
            .context(KillSnafu)?;
        let (data_dir, log) = (self.data_dir.clone(), self.log.clone());
        blocking("removing the unfinished image", &self.data_dir, move || {
            discard::discard(&data_dir)?;
            // What matters of a failed build's log is in its error.
            super::files::remove(&log)
        })
        .await
    }

    pub(super) fn socket_dir(&self) -> PathBuf {
        self.run.path().join("s")
    }

    fn control(&self) -> Control {
        let file = |name: &str| self.run.path().join(name);
        Control {
            data_dir: self.data_dir.clone(),
            config_file: file("postgresql.conf"),
            hba_file: file("pg_hba.conf"),
            ident_file: file("pg_ident.conf"),
            socket_dir: self.socket_dir(),
            // Nothing is flushed while the image is made; sealing it flushes all.
            tuning: Tuning::Ephemeral,
            ipc_namespace: self.env.isolation.ipc_namespace,
        }
    }

    /// Starts a server on the image. `overrides` are settings that win over the profile's.
    pub(super) async fn start(
        &self,
        profile: &Profile,
        overrides: &[(&str, &str)],
    ) -> Result<Server> {
        let control = self.control();
        let files = [
            (
                &control.config_file,
                config::render(profile, Phase::Warming),
            ),
            (&control.hba_file, config::build_hba().to_owned()),
            (&control.ident_file, String::new()),
        ];
        for (path, text) in files {
            write_readable(path, &text).map_err(super::Error::io("writing", path))?;
        }
        let user = &self.env.disk_user;
        let launch = Launch {
            installation: self.installation,
            control,
            overrides: BUILD_SETTINGS
                .iter()
                .chain(overrides)
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            mount: None,
            user: User {
                uid: user.uid,
                gid: user.gid,
            },
            group: &self.env.group,
            isolation: self.env.isolation,
            log: &self.log,
            timeout: START_TIMEOUT,
        };
        server::start(&self.env.supervisor, &self.env.watcher, launch)
            .await
            .context(ServerSnafu)
    }

    pub(super) async fn stop(&self, server: &Server) -> Result<()> {
        server
            .stop(StopMode::Fast, STOP_TIMEOUT)
            .await
            .context(ServerSnafu)
    }

    /// A session as the superuser `postgres`.
    pub(super) async fn session(&self, database: &str) -> Result<Session> {
        let startup = Startup {
            user: "postgres".to_owned(),
            database: database.to_owned(),
            parameters: Vec::new(),
        };
        Session::open(&self.socket_dir(), startup)
            .await
            .with_context(|_| SessionSnafu {
                action: format!("connecting to the database {database}"),
            })
    }

    /// Runs a script by `psql` in the pool's database as `role`.
    pub(super) async fn run_script(
        &self,
        kind: &'static str,
        script: &Script,
        role: &str,
    ) -> Result<()> {
        let path = self.run.path().to_owned();
        let sql = script.sql.clone();
        let stdin = blocking("writing a script in", self.run.path(), move || {
            let mut file = tempfile::tempfile_in(path)?;
            file.write_all(sql.as_bytes())?;
            io::Seek::rewind(&mut file)?;
            Ok(file)
        })
        .await?;
        let set = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let env = vec![
            set("PGHOST", &self.socket_dir().display().to_string()),
            set("PGPORT", "5432"),
            set("PGUSER", role),
            set("PGDATABASE", &self.spec.database),
            set("PGCLIENTENCODING", "UTF8"),
            set("PGAPPNAME", "branchpool build"),
        ];
        let args = ["-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", "-"];
        let tool = Tool {
            program: &self.installation.psql,
            args: args.map(str::to_owned).to_vec(),
            env,
            stdin: Some(stdin),
        };
        let output = tool::run(self, tool).await?;
        if output.succeeded() {
            return Ok(());
        }
        let name = &script.name;
        let message = psql_error(&output);
        ScriptSnafu {
            kind,
            name,
            message,
        }
        .fail()
    }

    /// A setting in the image's own configuration files.
    pub(super) async fn configured(&self, setting: &str) -> Result<String> {
        let postgres = self.installation.program("postgres");
        let tool = Tool {
            program: &postgres,
            args: vec![
                "-D".to_owned(),
                self.data_dir.display().to_string(),
                "-C".to_owned(),
                setting.to_owned(),
            ],
            env: Vec::new(),
            stdin: None,
        };
        let answer = tool::run(self, tool).await?;
        let answer = answer.expect_success(&format!(
            "reading {setting} from the source's postgresql.conf"
        ))?;
        Ok(answer.trim_end_matches('\n').to_owned())
    }
}

impl Drop for Workshop<'_> {
    /// For a build whose future is dropped; an orderly end has killed everything before.
    fn drop(&mut self) {
        if let Err(error) = self.env.group.kill(DROP_TIMEOUT) {
            let error = crate::postgres::chain(&error);
            tracing::warn!(error, "processes of an abandoned build could not be killed");
        }
        // Scripts may have left anything in it.
        if let Err(error) = remove_tree(&self.socket_dir()) {
            tracing::warn!(%error, "the socket directory of a build could not be removed");
        }
    }
}

/// A load in few checkpoints, of which none has to be durable.
const BUILD_SETTINGS: [(&str, &str); 3] = [
    ("max_wal_size", "1GB"),
    ("maintenance_work_mem", "64MB"),
    ("log_min_messages", "warning"),
];

fn check(spec: &GoldenSpec) -> Result<()> {
    let refuse = |field, value: &str, reason| {
        SpecSnafu {
            field,
            value,
            reason,
        }
        .fail()
    };
    for (field, name) in [("database", &spec.database), ("role", &spec.role)] {
        if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
            return refuse(
                field,
                name,
                "a name has 1 to 63 bytes and no control characters",
            );
        }
    }
    if ["template0", "template1"].contains(&spec.database.as_str()) {
        return refuse(
            "database",
            &spec.database,
            "templates are for making databases, not for use",
        );
    }
    if spec.role.starts_with("pg_") {
        return refuse(
            "role",
            &spec.role,
            "names that begin with pg_ belong to Postgres",
        );
    }
    if spec.role == "postgres" && !spec.superuser {
        return refuse(
            "role",
            &spec.role,
            "it is a superuser; set superuser, or choose another role",
        );
    }
    if let Source::Subvolume { name } = &spec.source {
        let mut components = Path::new(name).components();
        let plain = matches!(components.next(), Some(std::path::Component::Normal(_)));
        if !plain || components.next().is_some() || name.contains(['\0', '/']) {
            return refuse(
                "source.subvolume",
                name,
                "it must be the name of a directory, without slashes",
            );
        }
    }
    Ok(())
}

fn majors(installations: &[Installation]) -> String {
    if installations.is_empty() {
        return "none".to_owned();
    }
    let majors: Vec<String> = installations
        .iter()
        .map(|installation| installation.major.to_string())
        .collect();
    majors.join(", ")
}

/// A directory that the tools can pass through, with one for sockets that is theirs alone.
fn make_run_dir(env: &Env) -> io::Result<TempDir> {
    let parent = env.layout.build_runs();
    fs::create_dir_all(&parent)?;
    fs::set_permissions(&parent, fs::Permissions::from_mode(0o711))?;
    let run = tempfile::Builder::new().prefix("").tempdir_in(&parent)?;
    fs::set_permissions(run.path(), fs::Permissions::from_mode(0o711))?;
    let sockets = run.path().join("s");
    fs::create_dir(&sockets)?;
    chown(&sockets, Some(env.disk_user.uid), Some(env.disk_user.gid))?;
    fs::set_permissions(&sockets, fs::Permissions::from_mode(0o700))?;
    Ok(run)
}

fn write_readable(path: &Path, text: &str) -> io::Result<()> {
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644))
}

/// The line in which psql says why it stopped, with the statement's line number.
fn psql_error(output: &Output) -> String {
    const PREFIX: &str = "psql:<stdin>:";
    let lines: Vec<&str> = output.stderr.lines().collect();
    let is_error = |line: &str| {
        ["ERROR:", "FATAL:", "error:", "PANIC:"]
            .iter()
            .any(|word| line.contains(word))
    };
    let Some(at) = lines.iter().rposition(|line| is_error(line)) else {
        let last = lines.last().copied().unwrap_or("no message");
        return format!("psql ended with {:?}: {last}", output.outcome);
    };
    // What follows explains: DETAIL, HINT, the statement's text.
    let mut message = match lines[at]
        .strip_prefix(PREFIX)
        .and_then(|rest| rest.split_once(": "))
    {
        Some((line, text)) => format!("line {line}: {text}"),
        None => lines[at].to_owned(),
    };
    for line in lines[at + 1..]
        .iter()
        .take(4)
        .filter(|line| !line.trim().is_empty())
    {
        message.push_str(" | ");
        message.push_str(line.trim());
    }
    message
}

/// The answer of a query in a session of a build.
pub(super) trait Doing<T> {
    fn doing(self, action: impl Into<String>) -> Result<T>;
}

impl<T> Doing<T> for Result<T, session::Error> {
    fn doing(self, action: impl Into<String>) -> Result<T> {
        self.with_context(|_| SessionSnafu {
            action: action.into(),
        })
    }
}

/// A name as SQL wants it.
pub(super) fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A string as SQL wants it, whatever `standard_conforming_strings` says.
pub(super) fn literal(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use branchpool_supervisor::protocol::Outcome;

    use super::*;

    fn failed(stderr: &str) -> Output {
        Output {
            outcome: Outcome::Code(3),
            stdout: String::new(),
            stderr: stderr.to_owned(),
        }
    }

    #[test]
    fn psql_errors_name_the_line() {
        let output = failed(
            "psql:<stdin>:1: NOTICE:  hello\npsql:<stdin>:12: ERROR:  relation \"x\" does not exist\nLINE 1: SELECT * FROM x\n                      ^\n",
        );
        assert_eq!(
            psql_error(&output),
            "line 12: ERROR:  relation \"x\" does not exist | LINE 1: SELECT * FROM x | ^"
        );
    }

    #[test]
    fn a_silent_psql_is_quoted_by_its_end() {
        assert_eq!(
            psql_error(&failed("")),
            "psql ended with Code(3): no message"
        );
    }

    #[test]
    fn sql_quoting() {
        assert_eq!(identifier("a\"b"), "\"a\"\"b\"");
        assert_eq!(literal("a'b\\"), "E'a''b\\\\'");
    }
}
