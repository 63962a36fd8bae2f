//! A superuser of a branch, who runs SQL and programs there, and root, who runs the same outside.

use std::process::Command;

use branchpool_agent_api::Lease;

use crate::node::{Node, ask, command_of, connect, pool, wait_gone};

/// A pool whose role is a superuser.
pub(crate) fn superuser_pool(name: &str, replicas: u32, more: &str) -> String {
    let plain = pool(name, replicas, 4 * replicas, more);
    plain.replace("version: 15\n", "version: 15\n    superuser: true\n")
}

/// What a program said, and whether it ended well.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    pub(crate) ok: bool,
    pub(crate) text: String,
}

impl Said {
    /// From an output whose last line tells the exit code.
    fn parse(output: &str) -> Self {
        let (text, code) = output.rsplit_once("exit=").unwrap();
        Self {
            ok: code.trim() == "0",
            text: text.to_owned(),
        }
    }
}

fn wrapped(script: &str) -> String {
    format!("( {script}\n) 2>&1; echo \"exit=$?\"")
}

/// Whoever holds a lease, with a session.
pub(crate) struct Inmate {
    pub(crate) lease: Lease,
    pub(crate) client: tokio_postgres::Client,
    pub(crate) postmaster: u32,
    /// As its server sees it.
    pub(crate) data: String,
    pub(crate) sockets: String,
}

impl Inmate {
    pub(crate) async fn enter(node: &Node, pool: &str, uid: &str) -> Self {
        node.wait_pool(pool, |pool| pool.ready > 0).await;
        let lease = node.lease_patiently(pool, uid).await;
        Self::of(node, lease).await
    }

    pub(crate) async fn of(node: &Node, lease: Lease) -> Self {
        let client = connect(&lease).await.unwrap();
        client
            .batch_execute("CREATE TEMP TABLE said (line text)")
            .await
            .unwrap();
        let postmaster = node.postmaster_of(&lease.branch).unwrap();
        let command = command_of(postmaster);
        let data = command.split('\0').nth(2).unwrap().to_owned();
        let sockets = node.run_dir().join(format!("b/{}/s", lease.branch));
        Self {
            sockets: sockets.display().to_string(),
            lease,
            client,
            postmaster,
            data,
        }
    }

    pub(crate) async fn sql(&self, sql: &str) -> Result<String, String> {
        ask(&self.client, sql)
            .await
            .map_err(|error| match error.as_db_error() {
                Some(error) => format!("{error} {:?}", error.detail()),
                None => error.to_string(),
            })
    }

    /// Runs a program in the server's place.
    pub(crate) async fn run(&self, script: &str) -> Said {
        let sql = format!(
            "TRUNCATE said; \
             COPY said FROM PROGRAM $script${}$script$ \
             WITH (FORMAT csv, DELIMITER E'\\x01', QUOTE E'\\x02'); \
             SELECT string_agg(line, E'\\n') FROM said",
            wrapped(script)
        );
        Said::parse(&self.sql(&sql).await.unwrap())
    }

    /// Runs it in the background, where it goes on after the answer.
    pub(crate) async fn run_aside(&self, script: &str) {
        let said = self
            .run(&format!("( {script}\n) </dev/null >/dev/null 2>&1 &"))
            .await;
        assert!(said.ok, "{said:?}");
    }

    /// Runs something in the data directory and then ends the server, by the superuser's own hand.
    pub(crate) async fn end(&self, script: &str) {
        let sql = format!(
            "COPY (SELECT 1) TO PROGRAM $script$cd {} && {script} && kill -9 {}$script$",
            self.data, self.postmaster
        );
        // The answer may or may not get through before the end.
        let _cut_off = self.sql(&sql).await;
        wait_gone(self.postmaster);
    }
}

/// Runs a program as root, with the agent's view of the filesystem.
pub(crate) fn run_as_root(node: &Node, script: &str) -> Said {
    let output = Command::new("nsenter")
        .args(["-t", &node.supervisor_pid().to_string(), "-m", "--"])
        .args(["sh", "-c", &wrapped(script)])
        .output()
        .unwrap();
    Said::parse(&String::from_utf8_lossy(&output.stdout))
}
