//! The command line of `branchpool-operator`.

use std::net::SocketAddr;

use clap::{Parser, ValueEnum};

/// Keeps pools of Postgres branches on a cluster's nodes and hands them out to leases.
#[derive(Clone, Debug, Parser)]
#[command(name = "branchpool-operator", version, about, max_term_width = 100)]
pub struct Cli {
    /// The operator's own namespace
    #[arg(long, value_name = "NAME", env = "POD_NAMESPACE")]
    pub namespace: String,
    /// Who this is among the operator's replicas: the Pod's name
    #[arg(long, value_name = "NAME", env = "POD_NAME")]
    pub name: String,
    /// Name of the coordination Lease that replicas elect their leader by
    #[arg(long, value_name = "NAME", default_value = "branchpool-operator")]
    pub lease_name: String,
    /// Namespace of the agents' Pods
    #[arg(long, value_name = "NAME", env = "AGENT_NAMESPACE")]
    pub agent_namespace: String,
    /// Labels of the agents' Pods
    #[arg(
        long,
        value_name = "SELECTOR",
        default_value = "app.kubernetes.io/name=branchpool,app.kubernetes.io/component=agent"
    )]
    pub agent_selector: String,
    /// Port of the agents' API
    #[arg(long, value_name = "PORT", default_value_t = 7433)]
    pub agent_port: u16,
    /// Account of the agents' Pods
    #[arg(long, value_name = "NAME", default_value = "branchpool-agent")]
    pub agent_service_account: String,
    /// Reach agents without TLS, on a machine where nobody else is
    #[arg(long, hide = true)]
    pub agents_in_plain_http: bool,
    /// Name of the operator's own Service, which its certificate is for
    #[arg(long, value_name = "NAME", default_value = "branchpool-operator")]
    pub service_name: String,
    /// Where agents enrol and the lease API is served, by TLS
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:8443")]
    pub listen: SocketAddr,
    /// Namespaces whose pools and leases are served [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub watch_namespaces: Vec<String>,
    /// Where health and metrics are served, in plain HTTP
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:8080")]
    pub metrics_listen: SocketAddr,
    /// Writes to the API server at a time
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub api_writes: u32,
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
