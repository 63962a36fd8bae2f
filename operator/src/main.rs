//! `branchpool-operator`.

use std::{io::IsTerminal, process::ExitCode, time::Duration};

use branchpool_operator::{
    app,
    cli::{Cli, LogFormat},
};
use clap::Parser;
use kube::{Client, Config};
use tokio::signal::unix::{SignalKind, signal};
use tracing::error;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    start_log(cli.log_format);
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(problem) => {
            error!("the runtime could not be set up: {problem}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(serve(cli));
    runtime.shutdown_timeout(Duration::from_secs(1));
    code
}

async fn serve(cli: Cli) -> ExitCode {
    let client = match connect().await {
        Ok(client) => client,
        Err(problem) => {
            error!("no API server is known: {problem}. Run this in a Pod, or set KUBECONFIG");
            return ExitCode::FAILURE;
        }
    };
    let stop = async {
        let (Ok(mut term), Ok(mut int)) = (
            signal(SignalKind::terminate()),
            signal(SignalKind::interrupt()),
        ) else {
            return std::future::pending().await;
        };
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    };
    match app::run(cli, client, stop).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            error!("{problem}");
            ExitCode::FAILURE
        }
    }
}

async fn connect() -> Result<Client, Box<dyn std::error::Error>> {
    let config = Config::infer().await?;
    Ok(Client::try_from(config)?)
}

fn start_log(format: LogFormat) {
    let filter =
        EnvFilter::try_from_env("BRANCHPOOL_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    match format {
        LogFormat::Text => builder.with_target(false).init(),
        LogFormat::Json => builder.json().init(),
    }
}
