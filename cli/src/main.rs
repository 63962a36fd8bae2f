//! `kubectl-branch`: leases of Postgres branches from the command line.

mod agent;
mod args;
mod cluster;
mod commands;
mod duration;
mod environment;
mod error;
mod names;
mod output;
mod progress;
mod run;
mod signals;

use std::process::ExitCode;

use clap::Parser;

use crate::{args::Cli, error::CliError};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    match commands::execute(cli).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn tell(error: &CliError) {
    if !error.is_silent() {
        eprintln!("error: {error}");
    }
}
