//! Work that nobody waits for, kept apart in time from work that somebody does.

use std::time::Duration;

use tokio::{sync::watch, time::timeout};

/// Counts callers that wait for an answer, so that what would slow them down can go after them.
#[derive(Debug)]
pub(super) struct Precedence {
    waiting: watch::Sender<usize>,
}

/// A caller that waits, until dropped.
#[derive(Debug)]
pub(super) struct Waiting<'a>(&'a Precedence);

impl Precedence {
    pub(super) fn new() -> Self {
        Self {
            waiting: watch::Sender::new(0),
        }
    }

    pub(super) fn enter(&self) -> Waiting<'_> {
        self.waiting.send_if_modified(|waiting| {
            *waiting += 1;
            false
        });
        Waiting(self)
    }

    /// Resolves when nobody waits, at once if that is so, and after `limit` in any case: a stream of
    /// callers without a gap must not keep others away for ever.
    pub(super) async fn yield_to_waiting(&self, limit: Duration) {
        let mut waiting = self.waiting.subscribe();
        let _late = timeout(limit, waiting.wait_for(|waiting| *waiting == 0)).await;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        // Wakes nobody but at the end.
        self.0.waiting.send_if_modified(|waiting| {
            *waiting -= 1;
            *waiting == 0
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_waits_goes_first_but_not_for_ever() {
        let precedence = Precedence::new();
        let limit = Duration::from_millis(50);
        let start = Instant::now();
        precedence.yield_to_waiting(limit).await;
        assert_eq!(start.elapsed(), Duration::ZERO);

        let first = precedence.enter();
        let second = precedence.enter();
        let leave = async {
            drop(first);
            tokio::time::sleep(Duration::from_millis(3)).await;
            drop(second);
        };
        tokio::join!(precedence.yield_to_waiting(limit), leave);
        assert_eq!(start.elapsed(), Duration::from_millis(3));

        let _stays = precedence.enter();
        precedence.yield_to_waiting(limit).await;
        assert_eq!(start.elapsed(), Duration::from_millis(53));
    }
}
