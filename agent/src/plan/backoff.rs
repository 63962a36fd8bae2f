//! Waiting longer after each failure, up to a bound, for ever.

use super::Millis;

/// Delays that double from `first` to `most`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backoff {
    first: Millis,
    most: Millis,
}

/// A branch that could not be made: the pool tries again, never faster than this.
pub(super) const WARMING: Backoff = Backoff {
    first: 500,
    most: 60_000,
};
/// A golden image that could not be built: scripts seldom heal by themselves, a full disk may.
pub(super) const GOLDEN: Backoff = Backoff {
    first: 10_000,
    most: 300_000,
};
/// A leased server that does not come up: someone waits for it.
pub(super) const RESTART: Backoff = Backoff {
    first: 250,
    most: 30_000,
};
/// A stop, rename or deletion that failed.
pub(super) const CLEANUP: Backoff = Backoff {
    first: 1_000,
    most: 60_000,
};

impl Backoff {
    /// Delay after the `failures`-th failure in a row, counted from 1.
    pub(super) fn after(self, failures: u32) -> Millis {
        let doublings = failures.saturating_sub(1).min(20);
        self.first.saturating_mul(1 << doublings).min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_its_bound() {
        let delays: Vec<_> = (1..=9).map(|n| WARMING.after(n)).collect();
        assert_eq!(
            delays,
            [
                500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000
            ]
        );
        assert_eq!(WARMING.after(u32::MAX), 60_000);
    }
}
