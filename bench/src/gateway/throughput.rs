//! pgbench through the gateway, through pgbouncer, through a bare copying loop, and straight to the
//! servers.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use serde::Serialize;
use snafu::{OptionExt, ResultExt, whatever};
use tokio::process::Command;

use crate::{
    agent::{Agent, DATABASE, ROLE},
    checks,
    error::Result,
    gateway::{
        client::Target,
        leases::Leased,
        servers::{Copy, Direct, Pgbouncer},
    },
    machine::Machine,
    options::Options,
    report::{Ratio, Table, median},
};

/// pgbench's own measure: 100,000 accounts each.
const SCALE: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Script {
    SelectOnly,
    TpcB,
}

/// What is compared, and with how many clients.
pub(crate) type Workload = (Script, u32);

pub(crate) const WORKLOADS: [Workload; 4] = [
    (Script::SelectOnly, 1),
    (Script::SelectOnly, 8),
    (Script::SelectOnly, 32),
    (Script::TpcB, 8),
];
/// Where commits reach the disk.
pub(crate) const DURABLE: [Workload; 1] = [(Script::TpcB, 8)];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Way {
    Gateway,
    Pgbouncer,
    Copy,
    /// To the socket of the branch that is behind gateway and pgbouncer.
    Unix,
    /// To a server of the same settings on a snapshot of its own.
    Tcp,
}

#[derive(Debug, Serialize)]
struct Measured {
    way: Way,
    /// Transactions per second, one for each round.
    tps: Vec<f64>,
}

#[derive(Debug, Serialize)]
struct Compared {
    script: Script,
    clients: u32,
    ways: Vec<Measured>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Throughput {
    tuning: &'static str,
    scale: u32,
    workloads: Vec<Compared>,
}

/// Where pgbench is sent.
#[derive(Debug)]
struct Course {
    way: Way,
    host: PathBuf,
    target: Target,
    /// Of TPC-B, for the account at the end.
    transactions: u64,
}

impl Course {
    fn tcp(way: Way, target: &Target) -> Self {
        Self {
            way,
            host: PathBuf::from("127.0.0.1"),
            target: target.clone(),
            transactions: 0,
        }
    }
}

pub(crate) async fn measure(
    agent: &Agent,
    direct: &Direct,
    machine: &Machine,
    options: &Options,
    workloads: &[Workload],
) -> Result<Throughput> {
    let lease = Leased::take(agent, "throughput").await?;
    let unix = Target {
        port: 5432,
        user: ROLE.to_owned(),
        password: String::new(),
        database: DATABASE.to_owned(),
    };
    let mut courses = vec![
        Course::tcp(Way::Gateway, &lease.target),
        Course {
            way: Way::Unix,
            host: lease.sockets.clone(),
            target: unix.clone(),
            transactions: 0,
        },
        Course::tcp(Way::Tcp, &direct.target),
    ];
    for course in [&courses[1], &courses[2]] {
        let scale = SCALE.to_string();
        let arguments = ["--initialize", "--quiet", "--scale", &scale];
        pgbench(course, &arguments, options).await?;
    }
    let pgbouncer = match Pgbouncer::program() {
        Some(program) => Some(Pgbouncer::start(&program, &lease.sockets, machine).await?),
        None => None,
    };
    if let Some(pgbouncer) = &pgbouncer {
        courses.insert(1, Course::tcp(Way::Pgbouncer, &pgbouncer.target));
    }
    let copy = Copy::start(&lease.sockets, machine).await?;
    let through_copy = Target {
        port: copy.port,
        ..unix
    };
    courses.push(Course::tcp(Way::Copy, &through_copy));
    let mut compared = Vec::new();
    for &(script, clients) in workloads {
        compared.push(compare(&mut courses, script, clients, options).await?);
    }
    copy.stop().await?;
    if let Some(pgbouncer) = pgbouncer {
        pgbouncer.stop().await?;
    }
    account(&courses, &lease.sockets, &direct.sockets).await?;
    lease.release(agent).await?;
    Ok(Throughput {
        tuning: options.tuning,
        scale: SCALE,
        workloads: compared,
    })
}

/// Rounds in which each way has its turn; the order is another in each.
async fn compare(
    courses: &mut [Course],
    script: Script,
    clients: u32,
    options: &Options,
) -> Result<Compared> {
    let mut ways: Vec<Measured> = courses
        .iter()
        .map(|course| Measured {
            way: course.way,
            tps: Vec::new(),
        })
        .collect();
    for round in 0..options.warmups + options.pairs {
        for turn in 0..courses.len() {
            let at = if round % 2 == 0 {
                (turn + round / 2) % courses.len()
            } else {
                (2 * courses.len() - 1 - turn - (round / 2) % courses.len()) % courses.len()
            };
            let (tps, transactions) = run(&courses[at], script, clients, options).await?;
            if script == Script::TpcB {
                courses[at].transactions += transactions;
            }
            eprintln!(
                "gateway {script:?} {clients} {round}: {:?} {tps:.0} tps",
                courses[at].way
            );
            if round >= options.warmups {
                ways[at].tps.push(tps);
            }
        }
    }
    Ok(Compared {
        script,
        clients,
        ways,
    })
}

/// Transactions per second, and in all.
async fn run(
    course: &Course,
    script: Script,
    clients: u32,
    options: &Options,
) -> Result<(f64, u64)> {
    let script = match script {
        Script::SelectOnly => "select-only",
        Script::TpcB => "tpcb-like",
    };
    let (clients, threads) = (clients.to_string(), clients.min(2).to_string());
    let seconds = options.seconds.to_string();
    let arguments = [
        "--no-vacuum",
        "--protocol=prepared",
        "--builtin",
        script,
        "--client",
        &clients,
        "--jobs",
        &threads,
        "--time",
        &seconds,
    ];
    let text = pgbench(course, &arguments, options).await?;
    let number = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.split_whitespace().next())
    };
    if let Some(failed) = number("number of failed transactions: ").filter(|count| *count != "0") {
        whatever!("pgbench counts {failed} failed transactions");
    }
    let transactions = number("number of transactions actually processed: ")
        .and_then(|count| count.parse().ok())
        .filter(|count| *count > 0);
    let tps = number("tps = ").and_then(|tps| tps.parse().ok());
    Ok((
        tps.with_whatever_context(|| format!("pgbench tells no speed: {text}"))?,
        transactions.with_whatever_context(|| format!("pgbench did nothing: {text}"))?,
    ))
}

async fn pgbench(course: &Course, arguments: &[&str], options: &Options) -> Result<String> {
    let program = format!("/usr/lib/postgresql/{}/bin/pgbench", options.major);
    let target = &course.target;
    let output = Command::new(&program)
        .args(arguments)
        .env("PGHOST", &course.host)
        .env("PGPORT", target.port.to_string())
        .env("PGUSER", &target.user)
        .env("PGPASSWORD", &target.password)
        .env("PGDATABASE", &target.database)
        .env("PGSSLMODE", "disable")
        .env("PGGSSENCMODE", "disable")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .with_whatever_context(|_| format!("cannot run {program}"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        whatever!("pgbench to {:?} failed: {errors}", course.way);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Every transaction that pgbench counted is in the tables of the server that it was sent to.
async fn account(courses: &[Course], branch: &Path, direct: &Path) -> Result<()> {
    for (sockets, on_direct) in [(branch, false), (direct, true)] {
        let of_server = courses
            .iter()
            .filter(|course| (course.way == Way::Tcp) == on_direct);
        let counted: u64 = of_server.map(|course| course.transactions).sum();
        let sql = "SELECT count(*), sum(delta) = (SELECT sum(abalance) FROM pgbench_accounts), \
                   sum(delta) = (SELECT sum(bbalance) FROM pgbench_branches) FROM pgbench_history";
        let found = checks::ask(sockets, sql).await?;
        if found != [counted.to_string().as_str(), "t", "t"] {
            whatever!("pgbench counts {counted} TPC-B transactions, the server says {found:?}");
        }
    }
    Ok(())
}

impl Compared {
    fn tps(&self, way: Way) -> Option<&[f64]> {
        let measured = self.ways.iter().find(|measured| measured.way == way);
        measured.map(|measured| measured.tps.as_slice())
    }

    /// Of the gateway to another way, paired by round.
    fn ratio(&self, to: Way) -> Option<Ratio> {
        let (gateway, other) = (self.tps(Way::Gateway)?, self.tps(to)?);
        Some(Ratio::of(gateway.iter().copied(), other.iter().copied()))
    }
}

impl Throughput {
    pub(crate) fn table(&self) -> Table {
        let ways = [Way::Gateway, Way::Pgbouncer, Way::Copy, Way::Unix, Way::Tcp];
        let mut head = vec![String::new(), "clients".to_owned()];
        head.extend(ways.map(|way| format!("{way:?}")));
        head.extend(ways[1..].iter().map(|way| format!("to {way:?}")));
        let title = format!(
            "pgbench, prepared, {}: median transactions per second, gateway to the others",
            self.tuning
        );
        let mut table = Table::new(&title, &head);
        for compared in &self.workloads {
            let mut row = vec![
                format!("{:?}", compared.script),
                compared.clients.to_string(),
            ];
            for way in ways {
                let tps = compared.tps(way).map(|tps| median(tps.iter().copied()));
                row.push(tps.map_or("absent".to_owned(), |tps| format!("{tps:.0}")));
            }
            for &way in &ways[1..] {
                let ratio = compared.ratio(way).map(|ratio| ratio.to_string());
                row.push(ratio.unwrap_or_else(|| "absent".to_owned()));
            }
            table.row(&row);
        }
        table
    }
}
