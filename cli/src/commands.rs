//! What is talked to, and then what each command does.

use branchpool_agent_api::Target;
use clap::CommandFactory;

use crate::{
    agent,
    args::{Cli, Command, Global},
    cluster,
    error::{CliError, UsageSnafu},
    output,
};

/// Names the standalone agent for every call of a shell.
const SERVER: &str = "BRANCHPOOL_SERVER";

pub(crate) async fn execute(cli: Cli) -> Result<(), CliError> {
    let Cli { global, command } = cli;
    if let Command::Completion { shell } = command {
        return completion(shell);
    }
    let from_environment = std::env::var(SERVER).ok().filter(|value| !value.is_empty());
    match standalone(&global, from_environment)? {
        Some(target) => agent::execute(target, &global, command).await,
        None => cluster::execute(&global, command).await,
    }
}

/// The standalone agent to talk to, `None` for the cluster. What is typed wins over the environment, and without
/// either it is the cluster.
fn standalone(
    global: &Global,
    from_environment: Option<String>,
) -> Result<Option<Target>, CliError> {
    if let Some(server) = &global.server {
        return Ok(Some(server.clone()));
    }
    if global.context.is_some() || global.kubeconfig.is_some() || global.all_namespaces {
        return Ok(None);
    }
    let parsed = from_environment.map(|address| address.parse()).transpose();
    parsed.map_err(|why| {
        UsageSnafu {
            message: format!("{SERVER}: {why}"),
        }
        .build()
    })
}

fn completion(shell: clap_complete::Shell) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "kubectl-branch", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn target(line: &str, environment: Option<&str>) -> Option<String> {
        let words = ["kubectl-branch"].into_iter().chain(line.split(' '));
        let cli = Cli::try_parse_from(words).unwrap();
        let target = standalone(&cli.global, environment.map(str::to_owned)).unwrap();
        target.map(|target| target.to_string())
    }

    #[test]
    fn what_is_talked_to_follows_from_what_was_typed() {
        const SOCKET: &str = "unix:/run/branchpool/agent.sock";
        assert_eq!(target("ls", None), None);
        assert_eq!(target("ls", Some(SOCKET)).as_deref(), Some(SOCKET));
        assert_eq!(
            target("ls --server unix:/a", Some(SOCKET)).as_deref(),
            Some("unix:/a")
        );
        for line in ["ls --context test", "ls --kubeconfig /a", "ls -A"] {
            assert_eq!(target(line, Some(SOCKET)), None, "{line}");
        }
        let words = ["kubectl-branch", "ls"];
        let cli = Cli::try_parse_from(words).unwrap();
        let refused = standalone(&cli.global, Some("ftp://a".to_owned())).unwrap_err();
        assert!(
            refused.to_string().starts_with("BRANCHPOOL_SERVER: "),
            "{refused}"
        );
        assert_eq!(refused.exit_code(), 2);
    }
}
