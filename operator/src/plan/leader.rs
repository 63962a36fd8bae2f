//! Who leads: client-go's rule. A record counts as alive for its duration after the time at which
//! *this* process saw it change, by a clock of its own, so clocks of different machines are never
//! compared. The number of transitions is the epoch that fences an old leader's commands.

use std::time::Duration;

/// How long a record that does not change is believed.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// A leader that could not renew for so long is none any more.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Between two tries.
pub const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// What the coordination Lease says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Empty or absent: nobody.
    pub holder: Option<String>,
    pub transitions: u64,
    pub duration: Duration,
    /// `resourceVersion`: changes with each renewal.
    pub version: String,
}

/// The last record seen, and when (by a monotonic clock) it was first seen so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    pub record: Record,
    pub since: Duration,
}

impl Observation {
    /// The same record again keeps its time.
    pub fn update(old: Option<Self>, record: Record, now: Duration) -> Self {
        match old {
            Some(old) if old.record == record => old,
            _ => Self { record, since: now },
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Write a record with this process as holder, and this number of transitions.
    Take { transitions: u64 },
    /// Write the record anew, as its holder.
    Renew { transitions: u64 },
    /// Somebody else leads.
    Wait,
}

/// What to do with the record. `leading`: the epoch that this process leads in.
pub fn turn(me: &str, leading: Option<u64>, observed: Option<&Observation>, now: Duration) -> Turn {
    let Some(seen) = observed else {
        return Turn::Take { transitions: 1 };
    };
    let record = &seen.record;
    let next = Turn::Take {
        transitions: record.transitions + 1,
    };
    match record.holder.as_deref() {
        None | Some("") => next,
        Some(holder) if holder == me => match leading {
            Some(epoch) if epoch == record.transitions => Turn::Renew { transitions: epoch },
            // Written by this process, and the answer was lost: the next number is surely nobody's.
            _ => next,
        },
        Some(_) if now.saturating_sub(seen.since) >= record.duration => next,
        Some(_) => Turn::Wait,
    }
}

/// Whether a leader has to stop.
pub fn is_over(renewed: Duration, now: Duration) -> bool {
    now.saturating_sub(renewed) >= RENEW_DEADLINE
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn record(holder: &str, transitions: u64, version: &str) -> Record {
        Record {
            holder: Some(holder.to_owned()),
            transitions,
            duration: LEASE_DURATION,
            version: version.to_owned(),
        }
    }

    #[test]
    fn the_first_takes_it_and_renews() {
        assert_eq!(
            turn("a", None, None, secs(0)),
            Turn::Take { transitions: 1 }
        );
        let mine = Observation::update(None, record("a", 1, "1"), secs(0));
        assert_eq!(
            turn("a", Some(1), Some(&mine), secs(2)),
            Turn::Renew { transitions: 1 }
        );
    }

    #[test]
    fn another_waits_until_the_record_stood_still_for_its_duration() {
        let first = Observation::update(None, record("a", 3, "1"), secs(100));
        assert_eq!(turn("b", None, Some(&first), secs(114)), Turn::Wait);
        let renewed = Observation::update(Some(first), record("a", 3, "2"), secs(114));
        assert_eq!(turn("b", None, Some(&renewed), secs(128)), Turn::Wait);
        let unchanged = Observation::update(Some(renewed), record("a", 3, "2"), secs(128));
        assert_eq!(
            turn("b", None, Some(&unchanged), secs(129)),
            Turn::Take { transitions: 4 }
        );
    }

    #[test]
    fn a_record_given_up_is_free_at_once_and_epochs_only_rise() {
        for holder in [None, Some(String::new())] {
            let free = Record {
                holder,
                ..record("", 7, "9")
            };
            let seen = Observation::update(None, free, secs(0));
            assert_eq!(
                turn("b", None, Some(&seen), secs(0)),
                Turn::Take { transitions: 8 }
            );
        }
        let mine = Observation::update(None, record("a", 7, "9"), secs(0));
        assert_eq!(
            turn("a", None, Some(&mine), secs(0)),
            Turn::Take { transitions: 8 },
            "an answer that was lost"
        );
    }

    #[test]
    fn a_leader_that_cannot_renew_stops_before_another_takes_over() {
        assert!(!is_over(secs(50), secs(59)));
        assert!(is_over(secs(50), secs(60)));
        assert!(RENEW_DEADLINE + RETRY_PERIOD < LEASE_DURATION);
    }
}
