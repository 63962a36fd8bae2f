//! The command line.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use branchpool_agent_api::{PoolName, Target, check};
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::duration;

const AFTER_HELP: &str = "\
Examples:
  kubectl-branch pools                        what there is to lease
  kubectl-branch lease shop -- make test      a branch for one command
  kubectl-branch lease shop --ttl 2h          a branch to keep; prints URI and id
  kubectl-branch ls                           who holds what
  kubectl-branch psql shop                    a shell on a throw-away branch
  kubectl-branch release shop-4kx7pq2m        give it back

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no branch was ready in time. A command that was run \
passes its own on: 128+N when signal N ended it, 127 when it was not found, 126 when it could not \
be started.";

/// Leases Postgres branches: private, writable copies of a prepared database, ready in
/// milliseconds and gone when they are given back or their time is up.
///
/// Talks to the cluster that kubectl talks to, by the same kubeconfig, context and namespace; with
/// --server, or `BRANCHPOOL_SERVER` set, to a standalone agent. Called by kubectl as `kubectl branch`
/// when it is on the PATH.
#[derive(Debug, Parser)]
#[command(name = "kubectl-branch", version, after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Args, Debug)]
pub(crate) struct Global {
    #[allow(clippy::doc_markdown, rustdoc::bare_urls)] // A help text, not Markdown.
    /// Talk to a standalone agent at unix:/PATH or http://HOST:PORT instead of a cluster [env: BRANCHPOOL_SERVER]
    #[arg(
        long,
        global = true,
        value_name = "ADDRESS",
        conflicts_with_all = ["context", "kubeconfig", "all_namespaces"]
    )]
    pub(crate) server: Option<Target>,

    /// Context of the kubeconfig to use instead of the current one
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) context: Option<String>,

    /// Kubeconfig file to use instead of KUBECONFIG or ~/.kube/config
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,

    /// File with the bearer token that a standalone agent wants on TCP
    #[arg(
        long,
        global = true,
        env = "BRANCHPOOL_TOKEN_FILE",
        value_name = "FILE"
    )]
    pub(crate) token_file: Option<PathBuf>,

    /// Namespace of pools, and of leases; in a cluster the context's own without it
    #[arg(short, long, global = true, value_name = "NAMESPACE", value_parser = label)]
    pub(crate) namespace: Option<String>,

    /// List pools and leases of all namespaces of a cluster
    #[arg(short = 'A', long, global = true, conflicts_with = "namespace")]
    pub(crate) all_namespaces: bool,

    /// Print objects as the API gives them; of a standalone agent, times in milliseconds since 1970
    #[arg(short, long, global = true, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Json,
    Yaml,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// List pools, or show one with its conditions
    Pools {
        #[arg(value_name = "POOL", value_parser = pool)]
        name: Option<PoolArg>,
    },

    /// Lease a branch; with a command, for as long as the command runs
    Lease(Lease),

    /// List leases
    #[command(visible_alias = "leases")]
    Ls,

    /// Start a lease's time anew
    Renew {
        #[arg(value_name = "ID", value_parser = id)]
        id: String,
        /// How long from now, such as 90s, 30m or 1h30m; without it the pool's default
        #[arg(long, value_name = "DURATION", value_parser = ttl)]
        ttl: Option<Duration>,
    },

    /// Put a fresh branch behind a lease's address; everything written to the old one is lost
    Reset {
        #[arg(value_name = "ID", value_parser = id)]
        id: String,
    },

    /// Give leases back; their branches and all that was written are lost
    Release {
        #[arg(value_name = "ID", value_parser = id, required = true)]
        ids: Vec<String>,
    },

    /// Open psql on a leased branch, or on one leased for the session
    ///
    /// With the id of a lease, on its branch. With the name of a pool, a branch is leased, and
    /// released when psql ends.
    #[command(after_help = PSQL_HELP)]
    Psql {
        #[arg(value_name = "ID|POOL")]
        what: String,
        #[command(flatten)]
        wait: Wait,
        /// Passed on to psql
        #[arg(last = true, value_name = "ARGS")]
        arguments: Vec<OsString>,
    },

    /// Show the node, or a cluster's nodes: what they have, what they lack, what holds them back
    ///
    /// Against a cluster the exit code is 1 when no node can hold branches.
    Status,

    /// Print a completion script for a shell
    #[command(after_help = "Example:\n  source <(kubectl-branch completion bash)")]
    Completion { shell: Shell },
}

const LEASE_HELP: &str = "\
Without a command the URI and the id of the lease are printed, a line each, and the lease stays until it is \
released or its time is up. In a cluster the id is the name of a BranchLease.

With a command these are set in its environment: DATABASE_URL, PGHOST, PGPORT, PGDATABASE, PGUSER, PGPASSWORD, \
PGSSLMODE, PGSSLROOTCERT and BRANCHPOOL_LEASE (the id), each that applies. The lease is renewed while the command runs and released when it \
ends. SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to it.

Examples:
  kubectl-branch lease shop -- make test
  kubectl-branch lease staging/shop --ttl 2h --holder 'review of #218'
  kubectl-branch lease shop | head -n 1
  kubectl-branch lease shop --id ci-job-7 --wait 5m -- sh -c 'psql \"$DATABASE_URL\" -f migrate.sql'";

const PSQL_HELP: &str = "\
Examples:
  kubectl-branch psql shop
  kubectl-branch psql shop-4kx7pq2m -- -c 'select count(*) from orders'";

#[derive(Args, Debug)]
#[command(after_help = LEASE_HELP)]
pub(crate) struct Lease {
    /// NAME or NAMESPACE/NAME
    #[arg(value_name = "POOL", value_parser = pool)]
    pub(crate) pool: PoolArg,

    /// How long, such as 90s, 30m or 1h30m; without it the pool's default
    #[arg(long, value_name = "DURATION", value_parser = ttl)]
    pub(crate) ttl: Option<Duration>,

    /// Who holds the lease, shown by ls; without it USER@HOST
    #[arg(long, value_name = "TEXT", value_parser = holder)]
    pub(crate) holder: Option<String>,

    /// Id of the lease; asking again with the same id gives the same lease
    #[arg(long, value_name = "ID", value_parser = id)]
    pub(crate) id: Option<String>,

    /// Place in the pool's queue, in a cluster
    #[arg(long, value_name = "PRIORITY", ignore_case = true)]
    pub(crate) priority: Option<Priority>,

    #[command(flatten)]
    pub(crate) wait: Wait,

    /// Command to run with the branch
    #[arg(last = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct Wait {
    /// How long to wait for a branch when none is ready; 0s: not at all. A lease that has none by then is
    /// given back
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration::parse)]
    pub(crate) wait: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Priority {
    High,
    Medium,
    Low,
}

/// A pool as it was typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolArg {
    namespace: Option<String>,
    name: String,
}

impl PoolArg {
    /// `Err` with a sentence when the two namespaces differ.
    pub(crate) fn resolve(
        &self,
        namespace: Option<&str>,
        default: &str,
    ) -> Result<PoolName, String> {
        let namespace = match (self.namespace.as_deref(), namespace) {
            (Some(typed), Some(option)) if typed != option => {
                return Err(format!(
                    "{typed}/{} is not in namespace {option}; leave out one of the two",
                    self.name
                ));
            }
            (Some(namespace), _) | (None, Some(namespace)) => namespace,
            (None, None) => default,
        };
        Ok(PoolName::new(namespace, &self.name))
    }
}

pub(crate) fn pool(text: &str) -> Result<PoolArg, String> {
    let name: PoolName = text.parse()?;
    Ok(PoolArg {
        namespace: text.contains('/').then_some(name.namespace),
        name: name.name,
    })
}

fn label(text: &str) -> Result<String, String> {
    check::dns_label(text)?;
    Ok(text.to_owned())
}

fn id(text: &str) -> Result<String, String> {
    check::uid(text)?;
    Ok(text.to_owned())
}

fn holder(text: &str) -> Result<String, String> {
    check::holder(text)?;
    Ok(text.to_owned())
}

fn ttl(text: &str) -> Result<Duration, String> {
    let ttl = duration::parse(text)?;
    check::ttl_seconds(ttl.as_secs())?;
    Ok(ttl)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, error::ErrorKind};

    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(["kubectl-branch"].into_iter().chain(line.split(' ')))
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_command_is_taken_as_it_is() {
        let cli = parse("lease a/shop --ttl 1h30m -- make -n test --ttl").unwrap();
        let Command::Lease(lease) = cli.command else {
            panic!("{cli:?}")
        };
        assert_eq!(lease.command, ["make", "-n", "test", "--ttl"]);
        assert_eq!(lease.ttl, Some(Duration::from_mins(90)));
        assert_eq!(lease.wait.wait, Duration::from_mins(1));
        assert_eq!(
            lease.pool.resolve(None, "default").unwrap(),
            PoolName::new("a", "shop")
        );
    }

    #[test]
    fn wrong_usage_is_told_before_anything_is_sent() {
        for (line, says) in [
            ("lease Shop", "DNS label"),
            ("lease a/b/c", "DNS label"),
            ("lease shop --ttl 0s", "from 1"),
            ("lease shop --ttl 30", "unit"),
            ("lease shop --ttl 400d", "31536000"),
            ("lease shop --id a/b", "letters"),
            ("lease shop --wait soon", "number"),
            ("renew ..", "letters"),
            ("release", "required"),
            ("-n Prod ls", "DNS label"),
            ("--server ftp://a ls", "unix:/PATH"),
            ("ls --server unix:/a --context test", "cannot be used with"),
            ("ls -A -n a", "cannot be used with"),
            ("lease shop --priority urgent", "possible values: high"),
            ("ls -o xml", "xml"),
            ("lease shop make test", "unexpected argument"),
        ] {
            let error = parse(line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
            assert!(error.to_string().contains(says), "{line}: {error}");
        }
        let long = format!("lease {}", "x".repeat(253));
        assert!(parse(&long).unwrap_err().to_string().contains("253"));
    }

    #[test]
    fn help_is_no_failure() {
        for line in ["--help", "lease --help", "psql --help"] {
            assert_eq!(parse(line).unwrap_err().kind(), ErrorKind::DisplayHelp);
        }
    }

    #[test]
    fn a_namespace_is_named_once_or_twice_the_same() {
        let resolve = |text, option| {
            pool(text)
                .unwrap()
                .resolve(option, "default")
                .map(|name| name.to_string())
        };
        assert_eq!(resolve("shop", None).unwrap(), "default/shop");
        assert_eq!(resolve("shop", Some("a")).unwrap(), "a/shop");
        assert_eq!(resolve("a/shop", Some("a")).unwrap(), "a/shop");
        assert!(
            resolve("a/shop", Some("b"))
                .unwrap_err()
                .contains("namespace b")
        );
    }
}
