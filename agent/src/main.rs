//! `branchpool-agent`: the supervisor, and below it the agent.

mod caller;
mod serve;

use std::{ffi::OsString, process::ExitCode};

use branchpool_agent::{
    cli::{Cli, Command, PrepareNode},
    preflight, prepare,
};
use branchpool_supervisor::{
    FD_VARIABLE,
    server::{Program, supervise},
};
use branchpool_sys::chain;
use clap::Parser;

/// A lease is some dozens of short strings, made and dropped on both of its threads: a tenth less CPU
/// time than with the system's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// sysexits.h: an internal failure, where a new try may help.
const FAILURE: u8 = 1;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let supervised = std::env::var_os(FD_VARIABLE).is_some();
    match cli.command {
        Command::Supervise { arguments } => supervise_agent(arguments),
        Command::Standalone(_) | Command::Run(_) if !supervised => {
            supervise_agent(std::env::args_os().skip(1).collect())
        }
        Command::Standalone(options) => serve::standalone(*options),
        Command::Run(options) => serve::run(*options),
        Command::PrepareNode(options) => prepare_node(options),
        Command::Preflight(options) => {
            let report = preflight::check(
                &options.root,
                &options.postgres_bindirs,
                &options.postgres_user,
            );
            match report {
                Ok(report) => {
                    println!("{report}");
                    ExitCode::SUCCESS
                }
                Err(error) => {
                    eprintln!("branchpool-agent: {error}");
                    ExitCode::from(error.exit_code())
                }
            }
        }
    }
}

fn prepare_node(options: PrepareNode) -> ExitCode {
    let PrepareNode {
        devices,
        mount_point,
        label,
        count,
        format,
        dry_run,
    } = options;
    let wanted = prepare::plan::Wanted {
        mount_point,
        label,
        count: count.map(usize::from),
        format,
    };
    match prepare::prepare(&devices, &wanted, dry_run) {
        Ok(done) => {
            println!("{done}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("branchpool-agent: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn supervise_agent(args: Vec<OsString>) -> ExitCode {
    if !rustix::process::geteuid().is_root() {
        let error = preflight::Error::NotRoot;
        eprintln!("branchpool-agent: {error}");
        return ExitCode::from(error.exit_code());
    }
    let path = match std::env::current_exe() {
        Ok(path) => path,
        Err(error) => {
            eprintln!("branchpool-agent: its own program file cannot be found: {error}");
            return ExitCode::from(FAILURE);
        }
    };
    match supervise(Program { path, args }) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("branchpool-agent: {}", chain(&error));
            ExitCode::from(FAILURE)
        }
    }
}
