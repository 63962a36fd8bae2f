use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const DAY: i64 = 86_400;

fn ca(id: u8, not_before: i64, not_after: i64) -> CaFacts {
    CaFacts {
        id: Fingerprint::from_bytes([id; 32]),
        validity: Validity {
            not_before,
            not_after,
        },
    }
}

fn agent(node: &str, trusts: &[CaFacts], issuer: CaFacts) -> Agent {
    Agent {
        node: node.to_owned(),
        trust: Some(AgentTrust {
            trusts: trusts.iter().map(|ca| ca.id).collect(),
            issuer: issuer.id,
        }),
    }
}

fn unheard(node: &str) -> Agent {
    Agent {
        node: node.to_owned(),
        trust: None,
    }
}

fn waits(nodes: &[&str]) -> Step {
    Step::Keep {
        waiting_for: nodes.iter().map(|node| (*node).to_owned()).collect(),
    }
}

#[test]
fn a_ca_is_replaced_at_two_thirds_of_its_life_or_when_asked() {
    let rotation = Rotation::Steady {
        signing: ca(1, 0, 300),
    };
    assert_eq!(step(&rotation, &[], false, 199), waits(&[]));
    assert_eq!(step(&rotation, &[], false, 200), Step::Introduce);
    assert_eq!(step(&rotation, &[], true, 0), Step::Introduce);
}

#[test]
fn the_next_ca_signs_when_every_agent_trusts_it() {
    let (signing, next) = (ca(1, 0, 300), ca(2, 200, 500));
    let rotation = Rotation::Introducing { signing, next };
    let knows = agent("a", &[signing, next], signing);
    let does_not = agent("b", &[signing], signing);
    let step = |agents: &[Agent], now| step(&rotation, agents, false, now);
    assert_eq!(step(&[knows.clone(), does_not], 250), waits(&["b"]));
    assert_eq!(step(&[knows.clone(), unheard("c")], 250), waits(&["c"]));
    assert_eq!(step(std::slice::from_ref(&knows), 250), Step::Switch);
    // Nobody there may mean that nobody was found.
    assert_eq!(step(&[], 250), waits(&[]));
    // What nobody accepts any more is not waited for.
    assert_eq!(step(&[unheard("c")], 300), Step::Switch);
}

#[test]
fn the_old_ca_goes_when_no_agent_shows_or_needs_it() {
    let (signing, old) = (ca(2, 200, 500), ca(1, 0, 300));
    let rotation = Rotation::Retiring { signing, old };
    let moved = agent("a", &[signing, old], signing);
    let shows_old = agent("b", &[signing, old], old);
    let step = |agents: &[Agent], now| step(&rotation, agents, false, now);
    assert_eq!(step(&[moved.clone(), shows_old], 250), waits(&["b"]));
    assert_eq!(step(&[moved.clone(), unheard("c")], 250), waits(&["c"]));
    // A Pod that came with yesterday's bundle.
    let stale = agent("d", &[old], signing);
    assert_eq!(step(&[moved.clone(), stale], 250), waits(&["d"]));
    assert_eq!(step(&[moved], 250), Step::Retire);
    assert_eq!(step(&[], 250), waits(&[]));
    assert_eq!(step(&[], 300), Step::Retire);
}

#[test]
fn a_next_ca_that_is_over_is_made_anew() {
    let (signing, next) = (ca(1, 0, 900), ca(2, 0, 300));
    let rotation = Rotation::Introducing { signing, next };
    let all = [agent("a", &[signing, next], signing)];
    assert_eq!(step(&rotation, &all, false, 300), Step::Introduce);
}

#[test]
fn an_agent_enrols_when_it_has_nothing_or_the_wrong_thing() {
    let signing = Fingerprint::from_bytes([1; 32]);
    let held = Held {
        issuer: signing,
        validity: Validity {
            not_before: 0,
            not_after: DAY,
        },
        held: Duration::ZERO,
    };
    let standing = Standing {
        signing: Some(signing),
        held: Some(held),
        failures: 0,
        since_attempt: Duration::ZERO,
        chance: 0.0,
    };
    let with = |change: fn(&mut Standing)| {
        let mut standing = standing;
        change(&mut standing);
        standing
    };
    let days = |part: u64| Duration::from_secs(part * 28_800);
    assert_eq!(enrol(&standing, 0), Enrol::After(days(2)));
    assert_eq!(enrol(&standing, 28_800), Enrol::After(days(1)));
    assert_eq!(enrol(&standing, 2 * 28_800), Enrol::Now);
    assert_eq!(enrol(&with(|s| s.signing = None), 0), Enrol::WithBundle);
    assert_eq!(enrol(&with(|s| s.held = None), 0), Enrol::Now);
    let replaced = with(|s| s.signing = Some(Fingerprint::from_bytes([2; 32])));
    assert_eq!(enrol(&replaced, 0), Enrol::Now);
    // A failure puts even that off.
    let failed = Standing {
        failures: 1,
        ..replaced
    };
    assert_eq!(enrol(&failed, 0), Enrol::After(FIRST_PAUSE));
    let waited = Standing {
        since_attempt: FIRST_PAUSE,
        ..failed
    };
    assert_eq!(enrol(&waited, 0), Enrol::Now);
}

#[test]
fn pauses_double_to_their_bound_and_spread() {
    let seconds: Vec<_> = (0..11)
        .map(|failures| pause(failures, 0.0).as_secs_f64())
        .collect();
    let doubled = [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0, 120.0];
    assert_eq!(seconds, doubled);
    assert_eq!(pause(u32::MAX, 1.0), LONGEST_PAUSE.mul_f64(1.5));
}

proptest! {
    /// With a clock that is right, a certificate is due at two thirds of its life and not before.
    #[test]
    fn renewal_is_at_two_thirds(start in 0..10_000_000_i64, life in 3..400 * DAY, at in 0.0..1.5_f64) {
        let leaf = Validity { not_before: start, not_after: start + life };
        #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
        let age = (life as f64 * at) as i64;
        let held = Duration::from_secs(age.unsigned_abs());
        let wait = leaf.renew_in(start + age, held);
        let due = age >= life / 3 * 2;
        prop_assert_eq!(wait.is_zero(), due);
        prop_assert_eq!(leaf.is_due(start + age), due);
        if !due {
            prop_assert_eq!(wait, Duration::from_secs((life / 3 * 2 - age).unsigned_abs()));
        }
    }

    /// However often and far the clock is set, a certificate is renewed before it has been held for its life.
    #[test]
    fn a_clock_that_is_set_puts_no_renewal_off(
        life in 3..400 * DAY,
        clocks in prop::collection::vec((any::<i32>(), 1..10 * DAY), 1..200),
    ) {
        let leaf = Validity { not_before: 0, not_after: life };
        let mut held = Duration::ZERO;
        for (clock, passed) in clocks {
            let wait = leaf.renew_in(i64::from(clock), held);
            prop_assert!(held + wait < Duration::from_secs(life.unsigned_abs()));
            if wait.is_zero() {
                return Ok(());
            }
            held += wait.min(Duration::from_secs(passed.unsigned_abs()));
        }
    }
}

/// A cluster in which everything happens in any order: agents come, go, read bundles late, enrol late and are
/// heard late; the clock is set; the operator decides with what it has heard.
#[derive(Debug)]
struct Cluster {
    rotation: Rotation,
    now: i64,
    made: u8,
    agents: BTreeMap<u8, Member>,
}

#[derive(Clone, Debug)]
struct Member {
    trusts: Vec<Fingerprint>,
    issuer: Option<Fingerprint>,
    /// What the operator has heard last.
    heard: Option<AgentTrust>,
}

#[derive(Clone, Copy, Debug)]
enum Happening {
    Decide { asked: bool },
    Come(u8),
    Go(u8),
    ReadBundle(u8),
    Enrol(u8),
    Hear(u8),
    Forget,
    Clock(i64),
}

const CA_LIFE: i64 = 900 * DAY;

impl Cluster {
    fn new() -> Self {
        Self {
            rotation: Rotation::Steady {
                signing: ca(0, 0, CA_LIFE),
            },
            now: 0,
            made: 0,
            agents: BTreeMap::new(),
        }
    }

    /// First the one that signs.
    fn bundle(&self) -> Vec<CaFacts> {
        match &self.rotation {
            Rotation::Steady { signing } => vec![*signing],
            Rotation::Introducing { signing, next } => vec![*signing, *next],
            Rotation::Retiring { signing, old } => vec![*signing, *old],
        }
    }

    fn happen(&mut self, happening: Happening) {
        let bundle: Vec<_> = self.bundle().iter().map(|ca| ca.id).collect();
        let signing = *self.rotation.signing();
        match happening {
            Happening::Decide { asked } => self.decide(asked),
            Happening::Come(node) => {
                self.agents.entry(node).or_insert(Member {
                    trusts: bundle,
                    issuer: None,
                    heard: None,
                });
            }
            Happening::Go(node) => {
                self.agents.remove(&node);
            }
            Happening::ReadBundle(node) => {
                if let Some(member) = self.agents.get_mut(&node) {
                    member.trusts = bundle;
                }
            }
            Happening::Enrol(node) => {
                if let Some(member) = self.agents.get_mut(&node)
                    && member.trusts.contains(&signing.id)
                {
                    member.issuer = Some(signing.id);
                }
            }
            Happening::Hear(node) => {
                if let Some(member) = self.agents.get_mut(&node) {
                    member.heard = member.issuer.map(|issuer| AgentTrust {
                        trusts: member.trusts.clone(),
                        issuer,
                    });
                }
            }
            Happening::Forget => {
                for member in self.agents.values_mut() {
                    member.heard = None;
                }
            }
            Happening::Clock(now) => self.now = now,
        }
    }

    fn decide(&mut self, asked: bool) {
        let agents: Vec<_> = self
            .agents
            .iter()
            .map(|(node, member)| Agent {
                node: node.to_string(),
                trust: member.heard.clone(),
            })
            .collect();
        let step = step(&self.rotation, &agents, asked, self.now);
        self.rotation = match (step, self.rotation.clone()) {
            (Step::Keep { .. }, rotation) => rotation,
            (
                Step::Introduce,
                Rotation::Steady { signing } | Rotation::Introducing { signing, .. },
            ) => {
                self.made = self.made.wrapping_add(1);
                let next = ca(self.made, self.now, self.now + CA_LIFE);
                Rotation::Introducing { signing, next }
            }
            (Step::Switch, Rotation::Introducing { signing, next }) => {
                self.no_agent_is_shut_out(&next, &signing);
                Rotation::Retiring {
                    signing: next,
                    old: signing,
                }
            }
            (Step::Retire, Rotation::Retiring { signing, old }) => {
                self.no_certificate_is_orphaned(&old);
                Rotation::Steady { signing }
            }
            (step, rotation) => panic!("{step:?} does not fit {rotation:?}"),
        };
    }

    /// From now on the operator shows certificates of `next`: every agent there must accept them, or else the
    /// CA that it does accept is over.
    fn no_agent_is_shut_out(&self, next: &CaFacts, old: &CaFacts) {
        if old.validity.is_over(self.now) {
            return;
        }
        for (node, member) in &self.agents {
            assert!(
                member.trusts.contains(&next.id),
                "agent {node} does not trust the CA that is to sign: {self:#?}"
            );
        }
    }

    /// From now on the operator refuses what `old` has signed: no agent there may show it.
    fn no_certificate_is_orphaned(&self, old: &CaFacts) {
        if old.validity.is_over(self.now) {
            return;
        }
        for (node, member) in &self.agents {
            assert_ne!(
                member.issuer,
                Some(old.id),
                "agent {node} shows a certificate of the CA that goes: {self:#?}"
            );
        }
    }
}

fn happening() -> impl Strategy<Value = Happening> {
    let node = 0..4_u8;
    prop_oneof![
        4 => any::<bool>().prop_map(|asked| Happening::Decide { asked }),
        2 => node.clone().prop_map(Happening::Come),
        1 => node.clone().prop_map(Happening::Go),
        4 => node.clone().prop_map(Happening::ReadBundle),
        4 => node.clone().prop_map(Happening::Enrol),
        4 => node.prop_map(Happening::Hear),
        1 => Just(Happening::Forget),
        1 => (0..2 * CA_LIFE).prop_map(Happening::Clock),
    ]
}

proptest! {
    #[test]
    fn no_replacement_cuts_an_agent_off(happenings in prop::collection::vec(happening(), 0..200)) {
        let mut cluster = Cluster::new();
        for happening in happenings {
            cluster.happen(happening);
            prop_assert!(!cluster.bundle().is_empty());
        }
    }

    /// Whatever happened before, once the agents do their part the replacement comes to its end.
    #[test]
    fn a_replacement_ends_once_agents_do_their_part(
        happenings in prop::collection::vec(happening(), 0..100),
    ) {
        let mut cluster = Cluster::new();
        for happening in happenings {
            cluster.happen(happening);
        }
        cluster.happen(Happening::Come(0));
        for _ in 0..8 {
            for node in 0..4 {
                cluster.happen(Happening::ReadBundle(node));
                cluster.happen(Happening::Enrol(node));
                cluster.happen(Happening::Hear(node));
            }
            cluster.happen(Happening::Decide { asked: false });
        }
        let signing = *cluster.rotation.signing();
        prop_assert!(
            matches!(cluster.rotation, Rotation::Steady { .. }) || signing.validity.is_due(cluster.now),
            "{cluster:#?}"
        );
    }
}
