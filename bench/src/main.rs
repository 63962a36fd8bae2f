//! Measures the real agent beside the bare calls that its work cannot do without. The two take turns
//! in one run, and every sample is checked before it counts.

mod account;
mod agent;
mod burst;
mod checks;
mod copy_floor;
mod crd;
mod error;
mod floor;
mod gateway;
mod http_floor;
mod lease;
mod machine;
mod options;
mod process;
mod refill;
mod report;
mod sql;
mod workshop;

use std::{ffi::OsString, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use serde::Serialize;
use snafu::{ResultExt, whatever};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::timeout,
};

use crate::{
    error::Result,
    machine::Machine,
    options::{Arguments, Options},
    report::Table,
};

/// Measures hand-out and refill beside a bare loop of the same system calls, the gateway beside direct
/// connections and pgbouncer, what refused logins and SQL over HTTP take, and leases through Kubernetes
/// beside a bare custom resource
#[derive(Debug, Parser)]
#[command(name = "branchpool-bench", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// All of the others, one after the other
    All(Arguments),
    /// Fill an empty pool; the floor makes as many branches with bare system calls
    Refill(Arguments),
    /// Lease all branches at once; the floor answers the same requests with a constant
    Lease(Arguments),
    /// Connect, run pgbench and stay idle through the gateway, beside direct connections, pgbouncer and
    /// a bare loop that copies
    Gateway(Arguments),
    /// Log in and be refused, for each of the reasons in turn
    Refusals(Arguments),
    /// Query over HTTP, beside a session for each query and one that is kept
    Sql(Arguments),
    /// Take leases through a real API server until they are Bound; the floor creates bare custom
    /// resources
    Crd(Arguments),
    /// Join a control group and become a program
    #[command(hide = true)]
    Enter {
        group: PathBuf,
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    #[command(hide = true)]
    Floor,
    #[command(hide = true)]
    HttpFloor { socket: PathBuf, answer: PathBuf },
    #[command(hide = true)]
    CopyFloor { port: u16, socket: PathBuf },
}

#[derive(Clone, Copy, Debug)]
enum Part {
    Refill,
    Lease,
    Gateway,
    Refusals,
    Sql,
    Crd,
}

impl Part {
    const ALL: [Self; 6] = [
        Self::Refill,
        Self::Lease,
        Self::Gateway,
        Self::Refusals,
        Self::Sql,
        Self::Crd,
    ];
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::All(arguments) => measure(arguments, &Part::ALL),
        Command::Refill(arguments) => measure(arguments, &[Part::Refill]),
        Command::Lease(arguments) => measure(arguments, &[Part::Lease]),
        Command::Gateway(arguments) => measure(arguments, &[Part::Gateway]),
        Command::Refusals(arguments) => measure(arguments, &[Part::Refusals]),
        Command::Sql(arguments) => measure(arguments, &[Part::Sql]),
        Command::Crd(arguments) => measure(arguments, &[Part::Crd]),
        Command::Enter {
            group,
            program,
            args,
        } => process::enter(&group, &program, &args).map(|never| match never {}),
        Command::Floor => floor::run(),
        Command::HttpFloor { socket, answer } => serve_floor(socket, answer),
        Command::CopyFloor { port, socket } => copy_floor::serve(port, &socket),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve_floor(socket: PathBuf, answer: PathBuf) -> Result<()> {
    // As the agent's.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .whatever_context("cannot make a runtime")?;
    runtime.block_on(http_floor::serve(socket, answer))
}

fn measure(arguments: Arguments, parts: &[Part]) -> Result<()> {
    let options = arguments.settle()?;
    // Mounts of this process end with it, however it ends.
    branchpool_sys::namespace::private_mounts().whatever_context("cannot make mounts private")?;
    // One thread: clients take as little as may be of the machine that they measure.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .whatever_context("cannot make a runtime")?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt()).whatever_context("no signals")?;
        let mut terminate = signal(SignalKind::terminate()).whatever_context("no signals")?;
        let work = async {
            for part in parts {
                match part {
                    Part::Refill => run_refill(&options).await?,
                    Part::Lease => run_lease(&options).await?,
                    Part::Gateway => run_gateway(&options).await?,
                    Part::Refusals => run_refusals(&options).await?,
                    Part::Sql => run_sql(&options).await?,
                    Part::Crd => run_crd(&options).await?,
                }
            }
            Ok(())
        };
        tokio::select! {
            done = timeout(options.time_limit, work) => match done {
                Ok(done) => done,
                Err(_) => whatever!("given up after {} s", options.time_limit.as_secs()),
            },
            _ = interrupt.recv() => whatever!("interrupted"),
            _ = terminate.recv() => whatever!("interrupted"),
        }
    })
}

async fn run_refill(options: &Options) -> Result<()> {
    let machine = Machine::prepare(options.size)?;
    let samples = refill::measure(&machine, options).await?;
    let table = samples.table(options);
    finish(
        "refill",
        &machine,
        options,
        &refill::CHECKS,
        &samples,
        &[table],
    )
}

async fn run_lease(options: &Options) -> Result<()> {
    let machine = Machine::prepare(options.size)?;
    let samples = lease::measure(&machine, options).await?;
    let table = samples.table(options);
    finish(
        "lease",
        &machine,
        options,
        &lease::CHECKS,
        &samples,
        &[table],
    )
}

async fn run_gateway(options: &Options) -> Result<()> {
    let machine = Machine::prepare(options.size)?;
    let samples = gateway::measure(&machine, options).await?;
    let tables = samples.tables();
    finish(
        "gateway",
        &machine,
        options,
        &gateway::CHECKS,
        &samples,
        &tables,
    )
}

async fn run_refusals(options: &Options) -> Result<()> {
    let machine = Machine::prepare(options.size)?;
    let samples = gateway::refusals::measure(&machine, options).await?;
    let table = samples.table();
    finish(
        "refusals",
        &machine,
        options,
        &gateway::refusals::CHECKS,
        &samples,
        &[table],
    )
}

async fn run_sql(options: &Options) -> Result<()> {
    let machine = Machine::prepare(options.size)?;
    let samples = sql::measure(&machine, options).await?;
    let table = samples.table();
    finish("sql", &machine, options, &sql::CHECKS, &samples, &[table])
}

async fn run_crd(options: &Options) -> Result<()> {
    let mut machines = Vec::new();
    for _ in 0..crd::NODES {
        machines.push(Machine::prepare(options.size)?);
    }
    let samples = crd::measure(&machines, options).await?;
    let tables = samples.tables(options);
    finish(
        "crd",
        &machines[0],
        options,
        &crd::CHECKS,
        &samples,
        &tables,
    )
}

fn finish(
    name: &str,
    machine: &Machine,
    options: &Options,
    checks: &[&str],
    samples: &impl Serialize,
    tables: &[Table],
) -> Result<()> {
    let path = report::write(name, machine, options, checks, samples)?;
    for table in tables {
        println!("{table}");
    }
    println!(
        "  {} pairs, load {:.1}; raw samples: {}",
        options.pairs,
        report::load(),
        path.display()
    );
    Ok(())
}
