//! From connecting to the first row: through the gateway on a branch that was leased just now, and
//! straight to a server with the same settings.

use std::{
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;
use snafu::{ResultExt, whatever};
use tokio::time::sleep;

use crate::{
    agent::Agent,
    checks,
    error::Result,
    gateway::{
        client::{Session, Target},
        leases::Leased,
        servers::Direct,
    },
    options::Options,
    report::{Ratio, Table, median, milliseconds},
};

/// One of so many samples is thrown away, from the first on.
const WARMUP_SHARE: u32 = 10;

/// In milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Sample {
    first_row: f64,
    handshake: f64,
    client_hash: f64,
}

impl Sample {
    fn rest(&self) -> f64 {
        self.first_row - self.handshake
    }
}

/// The new settings of a leased server come some time after the lease: they must not hit the next pair.
const SETTLE: Duration = Duration::from_millis(100);

type Value = fn(&Sample) -> f64;

#[derive(Debug, Serialize)]
pub(crate) struct Connects {
    gateway: Vec<Sample>,
    direct: Vec<Sample>,
    ratio: Ratio,
    ratio_handshake: Ratio,
    ratio_rest: Ratio,
}

/// Uses up a full pool, and waits until it is full again.
pub(crate) async fn measure(agent: &Agent, direct: &Direct, options: &Options) -> Result<Connects> {
    let (mut gateway, mut straight) = (Vec::new(), Vec::new());
    let mut taken = Vec::new();
    for number in 0..options.branches {
        if number % 2 == 0 {
            straight.push(sample_direct(direct).await?);
            gateway.push(sample_gateway(agent, number, &mut taken).await?);
        } else {
            gateway.push(sample_gateway(agent, number, &mut taken).await?);
            straight.push(sample_direct(direct).await?);
        }
        sleep(SETTLE).await;
    }
    for lease in taken {
        lease.release(agent).await?;
    }
    agent.wait_calm().await?;
    let warmups = options.branches.div_ceil(WARMUP_SHARE) as usize;
    let (gateway, direct) = (gateway.split_off(warmups), straight.split_off(warmups));
    let ratio = |value: Value| Ratio::of(gateway.iter().map(value), direct.iter().map(value));
    Ok(Connects {
        ratio: ratio(|sample| sample.first_row),
        ratio_handshake: ratio(|sample| sample.handshake),
        ratio_rest: ratio(Sample::rest),
        gateway,
        direct,
    })
}

async fn sample_gateway(agent: &Agent, number: u32, taken: &mut Vec<Leased>) -> Result<Sample> {
    let lease = Leased::take(agent, &format!("connect-{number}")).await?;
    let sample = connect(&lease.target, &lease.sockets, Backend::Warm).await?;
    taken.push(lease);
    Ok(sample)
}

async fn sample_direct(direct: &Direct) -> Result<Sample> {
    connect(&direct.target, &direct.sockets, Backend::Fresh).await
}

/// The process that has to be behind a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backend {
    /// Older than the connection.
    Warm,
    Fresh,
}

async fn connect(target: &Target, sockets: &Path, wanted: Backend) -> Result<Sample> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default().as_secs_f64();
    let started = Instant::now();
    let (mut session, login) = Session::open(target).await?;
    let row = session.first_row("SELECT 1").await?;
    let first_row = started.elapsed();
    if row != "1" {
        whatever!("SELECT 1 was answered with {row}");
    }
    let of_backend = "SELECT extract(epoch FROM backend_start) FROM pg_stat_activity WHERE pid = pg_backend_pid()";
    let age: f64 = session
        .first_row(of_backend)
        .await?
        .parse()
        .whatever_context("a backend's start is no number")?;
    let backend = if age < now {
        Backend::Warm
    } else {
        Backend::Fresh
    };
    if backend != wanted {
        whatever!("a {wanted:?} backend was wanted, and a {backend:?} one answered");
    }
    // The same server by both ways, and it has the source's rows.
    let identity = "SELECT extract(epoch FROM pg_postmaster_start_time()) || ' ' || count(*) || ' ' || sum(id) FROM items";
    let (seen, there) = (
        session.first_row(identity).await?,
        checks::ask(sockets, identity).await?,
    );
    if there != [seen.as_str()] || !seen.ends_with(" 100000 5000050000") {
        whatever!("the connection shows {seen}, the server's socket {there:?}");
    }
    Ok(Sample {
        first_row: milliseconds(first_row),
        handshake: milliseconds(login.handshake),
        client_hash: milliseconds(login.client_hash),
    })
}

impl Connects {
    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new(
            "Connect to first row, median ms",
            &["", "gateway", "direct TCP", "ratio [min-max]"],
        );
        let of =
            |samples: &[Sample], value: Value| format!("{:.2}", median(samples.iter().map(value)));
        let rows: [(&str, Value, Option<Ratio>); 4] = [
            ("in all", |sample| sample.first_row, Some(self.ratio)),
            (
                "SCRAM",
                |sample| sample.handshake,
                Some(self.ratio_handshake),
            ),
            ("its client's hash", |sample| sample.client_hash, None),
            ("all but SCRAM", Sample::rest, Some(self.ratio_rest)),
        ];
        for (name, value, ratio) in rows {
            table.row(&[
                name.to_owned(),
                of(&self.gateway, value),
                of(&self.direct, value),
                ratio.map(|ratio| ratio.to_string()).unwrap_or_default(),
            ]);
        }
        table
    }
}
