//! The command line of `branchpool-agent`.

use std::{ffi::OsString, net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};

use branchpool_trust::enrol;

use crate::sql::Limits;

/// Keeps pools of prestarted Postgres branches on one node and hands them out.
#[derive(Debug, Parser)]
#[command(name = "branchpool-agent", version, about, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve pools from manifests in files, on this machine alone
    ///
    /// The manifests are the same that a cluster takes; edits are taken in at once. Without --root
    /// the branches live in a Btrfs filesystem in a file below --data-dir.
    #[command(
        after_help = "Example:\n  branchpool-agent standalone -f examples/quickstart\n  kubectl-branch pools"
    )]
    Standalone(Box<Standalone>),
    /// Serve pools that an operator sends
    Run(Box<Run>),
    /// Check whether this machine can hold branches, and say what is missing
    Preflight(Box<Preflight>),
    /// Be the parent of an agent and of all its servers, and start the agent again when it crashes
    ///
    /// Process 1 of a container. `run` and `standalone` do this by themselves.
    Supervise {
        /// Arguments of the agent, such as: run --root /var/lib/branchpool
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        arguments: Vec<OsString>,
    },
}

#[derive(Debug, Args)]
pub struct Standalone {
    /// Directory or file with BranchPool manifests; may be given several times
    #[arg(short = 'f', long = "manifests", value_name = "PATH", required = true)]
    pub manifests: Vec<PathBuf>,
    /// Where the Btrfs file, its mount point and the journal are kept when no --root is given
    #[arg(long, value_name = "DIR", default_value = "/var/lib/branchpool")]
    pub data_dir: PathBuf,
    /// Size of the Btrfs file when it is made; the file is sparse
    #[arg(long, value_name = "BYTES", default_value = "20Gi", value_parser = size)]
    pub size: u64,
    /// Directory on a Btrfs filesystem to use instead of a file
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
    #[command(flatten)]
    pub common: Common,
}

#[derive(Debug, Args)]
pub struct Run {
    /// Directory on a Btrfs filesystem that holds the branches
    #[arg(long, value_name = "DIR", env = "BRANCHPOOL_ROOT")]
    pub root: PathBuf,
    #[command(flatten)]
    pub operator: Operator,
    /// Plain HTTP for /healthz, /readyz and /metrics alone [default with --operator: 0.0.0.0:7434]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub health_listen: Option<SocketAddr>,
    #[command(flatten)]
    pub common: Common,
}

/// The operator, who alone is then answered on TCP, by mutual TLS.
#[derive(Debug, Args)]
pub struct Operator {
    /// Operator to enrol with, such as `https://branchpool-operator.branchpool-system.svc:443`; the API on
    /// TCP is then for it alone, by mutual TLS, and --listen is 0.0.0.0:7433 unless given
    #[arg(id = "operator", long, value_name = "URL", requires_all = ["operator_ca", "operator_token"], conflicts_with = "token_file")]
    pub address: Option<enrol::Address>,
    /// Certificates of the operator's CA in PEM; waited for, and followed when they change
    #[arg(
        id = "operator_ca",
        long = "operator-ca",
        value_name = "FILE",
        requires = "operator"
    )]
    pub ca: Option<PathBuf>,
    /// Token of this Pod for the operator, read anew for each certificate
    #[arg(
        id = "operator_token",
        long = "operator-token",
        value_name = "FILE",
        requires = "operator"
    )]
    pub token: Option<PathBuf>,
}

impl Operator {
    pub fn options(&self) -> Option<enrol::Options> {
        Some(enrol::Options {
            operator: self.address.clone()?,
            bundle: self.ca.clone()?,
            token: self.token.clone()?,
        })
    }
}

#[derive(Debug, Args)]
pub struct Preflight {
    /// Directory on a Btrfs filesystem that is to hold the branches
    #[arg(long, value_name = "DIR")]
    pub root: PathBuf,
    /// Further directories with Postgres programs
    #[arg(long = "postgres-bindir", value_name = "DIR")]
    pub postgres_bindirs: Vec<PathBuf>,
    /// OS user that owns the data on disk
    #[arg(long, value_name = "NAME", default_value = "postgres")]
    pub postgres_user: String,
}

#[derive(Debug, Args)]
pub struct Common {
    /// Where sockets are; short, for a socket's path has at most 107 bytes
    #[arg(long, value_name = "DIR", default_value = "/run/branchpool")]
    pub run_dir: PathBuf,
    /// TCP address for the HTTP API, beside the Unix socket agent.sock in --run-dir
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// File with the bearer token that is wanted on TCP; needed for other than loopback addresses
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Where the gateway takes Postgres clients; none: branches are reached on this machine alone
    #[arg(long, value_name = "ADDRESS:PORT|none", default_value = "127.0.0.1:7432", value_parser = gateway)]
    pub gateway: Listen,
    /// Host name or address that holders are told to connect to [default: localhost for a loopback
    /// address, otherwise the host's name]
    #[arg(long, value_name = "NAME")]
    pub gateway_host: Option<String>,
    /// Also serve clients without TLS
    #[arg(long)]
    pub gateway_plaintext: bool,
    /// Certificate of the gateway in PEM, followed when it changes [default: one of the agent's own
    /// CA, whose certificate is ca.crt in --run-dir]
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Key of that certificate
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// What holders are told to trust with that certificate [default: what their system trusts]
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_ca: Option<PathBuf>,
    /// Name of this node [default: the host's name]
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub name: Option<String>,
    /// Most branches with a server on this node, over all pools
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=30_000))]
    pub max_branches: u32,
    /// Directory with Postgres programs, beside those that Debian's packages install; may be given
    /// several times
    #[arg(long = "postgres-bindir", value_name = "DIR")]
    pub postgres_bindirs: Vec<PathBuf>,
    /// OS user that owns the data on disk
    #[arg(long, value_name = "NAME", default_value = "postgres")]
    pub postgres_user: String,
    /// First of the user ids that servers run as, one per branch
    #[arg(long, value_name = "UID", default_value_t = 1_500_000_000, value_parser = clap::value_parser!(u32).range(100_000..=4_000_000_000))]
    pub uid_base: u32,
    /// Longest build of a golden image
    #[arg(long, value_name = "SECONDS", default_value = "3600", value_parser = seconds)]
    pub build_timeout: Duration,
    /// How long a stop waits for servers to end in order
    #[arg(long, value_name = "SECONDS", default_value = "25", value_parser = seconds)]
    pub stop_timeout: Duration,
    /// Size at which a server's log is emptied
    #[arg(long, value_name = "BYTES", default_value = "8Mi", value_parser = size)]
    pub log_cap: u64,
    #[command(flatten)]
    pub sql: Sql,
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// Bounds of SQL over HTTP.
#[derive(Debug, Args)]
pub struct Sql {
    /// Read queries over HTTP at a time
    #[arg(long = "sql-reads", value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub reads: u32,
    /// Queries over HTTP at a time that may write
    #[arg(long = "sql-writes", value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub writes: u32,
    /// Time of a query over HTTP that does not ask for another
    #[arg(long = "sql-timeout", value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
    /// Most time that a query over HTTP may ask for
    #[arg(long = "sql-max-timeout", value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub max_timeout: Duration,
    /// Longest answer to a query over HTTP; a running query holds up to three times as much
    #[arg(long = "sql-max-result", value_name = "BYTES", default_value = "10Mi", value_parser = size)]
    pub max_result: u64,
}

impl Sql {
    pub fn limits(&self) -> Limits {
        Limits {
            reads: self.reads,
            writes: self.writes,
            timeout: self.timeout.min(self.max_timeout),
            max_timeout: self.max_timeout,
            result: usize::try_from(self.max_result).unwrap_or(usize::MAX),
            ..Limits::default()
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// An address, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen(pub Option<SocketAddr>);

fn gateway(text: &str) -> Result<Listen, String> {
    if text == "none" {
        return Ok(Listen(None));
    }
    let address = text.parse();
    address
        .map(|address| Listen(Some(address)))
        .map_err(|_| "expected an IP address and a port, such as 0.0.0.0:7432, or none".to_owned())
}

/// Bytes as Kubernetes writes them: `20Gi`, `500M`, `1073741824`.
fn size(text: &str) -> Result<u64, String> {
    text.parse::<branchpool_crds::Quantity>()
        .map(|quantity| quantity.units())
        .map_err(|error| error.to_string())
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<u64>() {
        Ok(seconds) if (1..=604_800).contains(&seconds) => Ok(Duration::from_secs(seconds)),
        _ => Err("expected whole seconds from 1 to 604800".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn an_operator_needs_its_files_and_allows_no_token() {
        let parse = |more: &[&str]| {
            let words = ["branchpool-agent", "run", "--root", "/r"];
            Cli::try_parse_from(words.iter().chain(more)).map_err(|error| error.to_string())
        };
        let operator = ["--operator", "https://op.ns.svc"];
        let ca = ["--operator-ca", "/ca.crt"];
        let token = ["--operator-token", "/token"];
        let all = [operator, ca, token].concat();
        let Command::Run(run) = parse(&all).unwrap().command else {
            panic!("it is no run");
        };
        let options = run.operator.options().unwrap();
        assert_eq!(options.operator.to_string(), "https://op.ns.svc:443");
        assert!(parse(&[]).is_ok());
        for (words, says) in [
            ([operator, ca].concat(), "--operator-token"),
            ([operator, token].concat(), "--operator-ca"),
            ([ca, token].concat(), "--operator <URL>"),
            ([&all[..], &["--token-file", "/t"]].concat(), "--token-file"),
            (vec!["--operator", "http://op"], "https://"),
        ] {
            let refusal = parse(&words).unwrap_err();
            assert!(refusal.contains(says), "{words:?}: {refusal}");
        }
        // On one machine there is no operator.
        let words = ["branchpool-agent", "standalone", "-f", "."];
        assert!(Cli::try_parse_from(words.iter().chain(&operator)).is_err());
    }

    #[test]
    fn the_gateway_may_be_none() {
        assert_eq!(gateway("none"), Ok(Listen(None)));
        let address = "127.0.0.1:7432".parse().unwrap();
        assert_eq!(gateway("127.0.0.1:7432"), Ok(Listen(Some(address))));
        assert!(gateway("localhost:7432").is_err());
    }

    #[test]
    fn sizes_are_quantities() {
        assert_eq!(size("20Gi"), Ok(20 << 30));
        assert_eq!(size("500M"), Ok(500_000_000));
        assert!(size("many").is_err());
    }
}
