//! How long logins take that are refused, by why they are: whoever may not come in is not to learn the
//! reason from the time.

use serde::Serialize;
use snafu::whatever;

use crate::{
    agent::{Agent, Endpoint},
    error::Result,
    gateway::{
        client::{Session, Target},
        leases::Leased,
    },
    machine::Machine,
    options::Options,
    report::{Latencies, Table, median, milliseconds},
};

pub(crate) const CHECKS: [&str; 4] = [
    "each login is refused with 28P01, and the lease's own password is let in before and after",
    "the right passwords of the leases that are over are sent",
    "each round has one login of every kind, and begins with another one",
    "no process, branch or tombstone is left at the end",
];

/// Logins of each kind, for each pair of the run.
const EACH: usize = 100;

/// Why a login is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Why {
    WrongPassword,
    UnknownEndpoint,
    Released,
    Expired,
    /// A user name that cannot be one.
    NoEndpoint,
    /// A role that is not the pool's, of an endpoint that leads nowhere.
    OtherRoleUnknownEndpoint,
    /// The same of a lease: its branch is asked.
    OtherRole,
}

impl Why {
    const fn text(self) -> &'static str {
        match self {
            Self::WrongPassword => "wrong password",
            Self::UnknownEndpoint => "unknown endpoint",
            Self::Released => "released lease",
            Self::Expired => "expired lease",
            Self::NoEndpoint => "no endpoint in the name",
            Self::OtherRoleUnknownEndpoint => "other role, unknown endpoint",
            Self::OtherRole => "other role, its branch is asked",
        }
    }
}

#[derive(Debug, Serialize)]
struct Refused {
    why: Why,
    /// In milliseconds, without what the client computes.
    milliseconds: Vec<f64>,
    latencies: Latencies,
    /// Of the medians, this one's to that of wrong passwords.
    ratio: f64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Samples {
    kinds: Vec<Refused>,
}

pub(crate) async fn measure(machine: &Machine, options: &Options) -> Result<Samples> {
    // One lease that goes on, and two that are over.
    let options = &Options {
        branches: options.branches.min(3),
        max_branches: options.branches.min(3),
        ..options.clone()
    };
    let mut agent = Agent::start(machine, options, Endpoint::Gateway).await?;
    agent.refill(options).await?;
    agent.wait_calm().await?;
    let samples = refuse(&agent, options).await?;
    agent.empty(options).await?;
    agent.stop(machine.root()).await?;
    Ok(samples)
}

async fn refuse(agent: &Agent, options: &Options) -> Result<Samples> {
    let lease = Leased::take(agent, "refused").await?;
    let expired = Leased::take_for(agent, "expired", Some(1)).await?;
    let released = Leased::take(agent, "released").await?;
    let gone = released.target.clone();
    released.release(agent).await?;
    let expired = expired.expire(agent).await?;
    let kinds = kinds(&lease.target, gone, expired)?;
    let mut samples = vec![Vec::new(); kinds.len()];
    let (rounds, warmups) = (options.pairs * EACH, options.warmups * EACH / 10);
    Session::open(&lease.target).await?;
    for round in 0..warmups + rounds {
        for turn in 0..kinds.len() {
            let kind = (round + turn) % kinds.len();
            let took = Session::refused(&kinds[kind].1).await?;
            if round >= warmups {
                samples[kind].push(milliseconds(took));
            }
        }
    }
    Session::open(&lease.target).await?;
    lease.release(agent).await?;
    let base = median(samples[0].iter().copied());
    let kinds = kinds
        .into_iter()
        .zip(samples)
        .map(|((why, _), milliseconds)| Refused {
            why,
            latencies: Latencies::of(milliseconds.iter().copied()),
            ratio: median(milliseconds.iter().copied()) / base,
            milliseconds,
        });
    Ok(Samples {
        kinds: kinds.collect(),
    })
}

/// Wrong passwords come first; every user name is as long as any other.
fn kinds(bound: &Target, released: Target, expired: Target) -> Result<Vec<(Why, Target)>> {
    let Some((role, endpoint)) = bound.user.rsplit_once('.') else {
        whatever!("{} names no endpoint", bound.user)
    };
    let other_role = "x".repeat(role.len());
    let nowhere = "a".repeat(endpoint.len());
    let with = |user: String| Target {
        user,
        password: "x".repeat(bound.password.len()),
        ..bound.clone()
    };
    Ok(vec![
        (Why::WrongPassword, with(bound.user.clone())),
        (Why::UnknownEndpoint, with(format!("{role}.{nowhere}"))),
        (Why::Released, released),
        (Why::Expired, expired),
        (Why::NoEndpoint, with("x".repeat(bound.user.len()))),
        (
            Why::OtherRoleUnknownEndpoint,
            with(format!("{other_role}.{nowhere}")),
        ),
        (Why::OtherRole, with(format!("{other_role}.{endpoint}"))),
    ])
}

impl Samples {
    pub(crate) fn table(&self) -> Table {
        let logins = self.kinds.first().map_or(0, |kind| kind.milliseconds.len());
        let title = format!("Refused logins, {logins} of each kind, ms without the client's hash");
        let mut table = Table::new(&title, &["", "median", "p95", "median to the first"]);
        for kind in &self.kinds {
            table.row(&[
                kind.why.text().to_owned(),
                format!("{:.3}", kind.latencies.p50),
                format!("{:.3}", kind.latencies.p95),
                format!("{:.3}", kind.ratio),
            ]);
        }
        table
    }
}
