//! When certificates are replaced. Pure: values in, decisions out. Times are seconds since 1970.
//!
//! A CA is replaced in steps: the next one joins the bundle; when every agent trusts it, it signs; when every
//! agent shows a certificate of it, the old one leaves the bundle.

use std::time::Duration;

use crate::Fingerprint;

/// From when until when a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    pub not_before: i64,
    pub not_after: i64,
}

impl Validity {
    /// Two thirds of the life.
    fn fresh_for(self) -> i64 {
        self.not_after.saturating_sub(self.not_before).max(0) / 3 * 2
    }

    /// Two thirds of the life are over.
    pub fn is_due(self, now: i64) -> bool {
        now >= self.not_before.saturating_add(self.fresh_for())
    }

    pub fn is_over(self, now: i64) -> bool {
        now >= self.not_after
    }

    /// Until a certificate is to be renewed; zero when it is due. `held`: how long it has been held, by a
    /// clock that nobody sets, so that a clock that was set back puts nothing off.
    pub fn renew_in(self, now: i64, held: Duration) -> Duration {
        let fresh = self.fresh_for();
        let by_clock = self.not_before.saturating_add(fresh).saturating_sub(now);
        let seconds = u64::try_from(by_clock.clamp(0, fresh)).unwrap_or_default();
        let life = Duration::from_secs(u64::try_from(fresh).unwrap_or_default());
        Duration::from_secs(seconds).min(life.saturating_sub(held))
    }
}

/// A CA, as far as decisions about it go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaFacts {
    pub id: Fingerprint,
    pub validity: Validity,
}

/// Where the replacement of a CA stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rotation {
    Steady {
        signing: CaFacts,
    },
    /// The next one is trusted where that is known already, and signs nothing yet.
    Introducing {
        signing: CaFacts,
        next: CaFacts,
    },
    /// The old one signs nothing more; what it signed is still shown.
    Retiring {
        signing: CaFacts,
        old: CaFacts,
    },
}

impl Rotation {
    pub fn signing(&self) -> &CaFacts {
        match self {
            Self::Steady { signing }
            | Self::Introducing { signing, .. }
            | Self::Retiring { signing, .. } => signing,
        }
    }
}

/// What an agent says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentTrust {
    /// The CAs that it accepts the operator's certificate of.
    pub trusts: Vec<Fingerprint>,
    /// The CA of the certificate that it shows.
    pub issuer: Fingerprint,
}

impl AgentTrust {
    /// From the texts in an agent's status. What is no fingerprint is left out, as unknown CAs are; `None` when
    /// the issuer is none.
    pub fn parse(trusts: &[String], issuer: &str) -> Option<Self> {
        Some(Self {
            trusts: trusts.iter().filter_map(|id| id.parse().ok()).collect(),
            issuer: issuer.parse().ok()?,
        })
    }
}

/// An agent that counts: its Pod exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agent {
    pub node: String,
    /// `None` when it has not been heard: it may still trust the old CA alone.
    pub trust: Option<AgentTrust>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Keep {
        /// Nodes whose agents hold up the replacement; empty when there is none under way.
        waiting_for: Vec<String>,
    },
    /// Make a CA and add it to the bundle, in the place of a next one that is over.
    Introduce,
    /// Let the next CA sign.
    Switch,
    /// Take the old CA out of the bundle.
    Retire,
}

/// What to do about the CA now. `asked`: somebody wants it replaced before its time. A list of agents that is
/// empty, or that could not be had and is therefore empty, moves nothing: a CA that is over is left all the
/// same, because nothing that it signed is valid any more.
pub fn step(rotation: &Rotation, agents: &[Agent], asked: bool, now: i64) -> Step {
    match rotation {
        Rotation::Steady { signing } if asked || signing.validity.is_due(now) => Step::Introduce,
        Rotation::Steady { .. } => Step::Keep {
            waiting_for: Vec::new(),
        },
        Rotation::Introducing { next, .. } if next.validity.is_over(now) => Step::Introduce,
        Rotation::Introducing { signing, next } => {
            let trusts_next = |trust: &AgentTrust| trust.trusts.contains(&next.id);
            go_on(signing, agents, trusts_next, now, Step::Switch)
        }
        Rotation::Retiring { signing, old } => {
            let has_moved = |trust: &AgentTrust| {
                trust.issuer == signing.id && trust.trusts.contains(&signing.id)
            };
            go_on(old, agents, has_moved, now, Step::Retire)
        }
    }
}

fn go_on(
    leaving: &CaFacts,
    agents: &[Agent],
    is_ready: impl Fn(&AgentTrust) -> bool,
    now: i64,
    step: Step,
) -> Step {
    let waiting_for: Vec<_> = agents
        .iter()
        .filter(|agent| !agent.trust.as_ref().is_some_and(&is_ready))
        .map(|agent| agent.node.clone())
        .collect();
    let all_ready = !agents.is_empty() && waiting_for.is_empty();
    if all_ready || leaving.validity.is_over(now) {
        step
    } else {
        Step::Keep { waiting_for }
    }
}

/// An agent's own certificate, as far as its renewal goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub issuer: Fingerprint,
    pub validity: Validity,
    /// Since it was issued, by a clock that nobody sets.
    pub held: Duration,
}

/// What an agent knows when it decides whether to enrol.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Standing {
    /// The first CA of the bundle, which is the one that signs; `None` before there is a bundle.
    pub signing: Option<Fingerprint>,
    pub held: Option<Held>,
    /// Attempts in a row that led to no certificate, or to one that is due at once.
    pub failures: u32,
    pub since_attempt: Duration,
    /// From 0 to 1, so that agents which failed together do not come back together.
    pub chance: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enrol {
    Now,
    /// Unless something happens before.
    After(Duration),
    /// There is nothing to check the operator's certificate with.
    WithBundle,
}

pub fn enrol(standing: &Standing, now: i64) -> Enrol {
    let Some(signing) = standing.signing else {
        return Enrol::WithBundle;
    };
    let renew_in = match standing.held {
        Some(held) if held.issuer == signing => held.validity.renew_in(now, held.held),
        _ => Duration::ZERO,
    };
    let pause = pause(standing.failures, standing.chance).saturating_sub(standing.since_attempt);
    match renew_in.max(pause) {
        Duration::ZERO => Enrol::Now,
        wait => Enrol::After(wait),
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(120);

/// Doubles with each failure, and is up to half as long again.
fn pause(failures: u32, chance: f64) -> Duration {
    if failures == 0 {
        return Duration::ZERO;
    }
    let doubled = FIRST_PAUSE.saturating_mul(1 << (failures - 1).min(16));
    doubled
        .min(LONGEST_PAUSE)
        .mul_f64(1.0 + chance.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
