//! What callers ask for, what they are answered, and why they are refused.

use branchpool_agent_api::{LeasePhase, PoolName, PoolStatus};

use super::{
    Action, Entry, LeaseState, LeaseUid, Millis, Node, Now, PoolSpec, PoolUid, Token, node::Effects,
};

/// A validated request.
#[derive(Clone, Debug)]
pub enum Command {
    Lease {
        uid: LeaseUid,
        pool: PoolName,
        ttl: Option<Millis>,
        holder: Option<String>,
        epoch: Option<u64>,
    },
    Renew {
        uid: LeaseUid,
        ttl: Option<Millis>,
        epoch: Option<u64>,
    },
    Reset {
        uid: LeaseUid,
        reset_token: String,
        epoch: Option<u64>,
    },
    Release {
        uid: LeaseUid,
        epoch: Option<u64>,
    },
    /// Drops the record of a lease that has ended.
    Forget {
        uid: LeaseUid,
        epoch: Option<u64>,
    },
    Apply {
        spec: Box<PoolSpec>,
        body: serde_json::Value,
        epoch: Option<u64>,
    },
    Remove {
        pool: PoolUid,
        epoch: Option<u64>,
    },
}

/// What a command that succeeded led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Lease {
        uid: LeaseUid,
        lease: Box<LeaseState>,
        created: bool,
    },
    Forgotten,
    Pool(Box<PoolStatus>),
    Removed,
}

/// Why a command was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    PoolNotFound {
        pool: PoolName,
        known: Vec<PoolName>,
    },
    PoolUidNotFound {
        pool: PoolUid,
    },
    LeaseNotFound {
        uid: LeaseUid,
    },
    /// The lease exists, and is of another pool.
    LeaseConflict {
        uid: LeaseUid,
        pool: PoolName,
    },
    /// The lease has ended; a new one needs a new uid.
    LeaseEnded {
        uid: LeaseUid,
        phase: LeasePhase,
    },
    StillBound {
        uid: LeaseUid,
    },
    /// Nothing is ready now.
    NoBranchReady {
        pool: PoolName,
        why: String,
        retry_after: Millis,
    },
    TtlTooLong {
        asked: Millis,
        most: Millis,
        field: &'static str,
    },
    LifetimeOver {
        uid: LeaseUid,
        most: Millis,
    },
    TooManyLeases {
        most: u32,
    },
    StaleEpoch {
        given: u64,
        current: u64,
    },
    /// A newer desired state of the pool is in force.
    StaleGeneration {
        pool: PoolName,
        given: u64,
        current: u64,
    },
    /// Another pool of this name is there.
    NameTaken {
        pool: PoolName,
        by: PoolUid,
    },
    Draining,
    JournalFailed {
        detail: String,
    },
}

impl Node {
    pub(super) fn command(
        &mut self,
        token: Token,
        command: Command,
        now: Now,
        effects: &mut Effects,
    ) {
        if let Err(refusal) = self.try_command(token, command, now, effects) {
            effects.act(Action::Reply {
                token,
                answer: Err(refusal),
            });
        }
    }

    fn try_command(
        &mut self,
        token: Token,
        command: Command,
        now: Now,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        match command {
            Command::Lease {
                uid,
                pool,
                ttl,
                holder,
                epoch,
            } => {
                self.check_epoch(epoch, effects)?;
                let led = epoch.is_some();
                self.lease(token, uid, &pool, ttl, holder, led, now, effects)
            }
            Command::Renew { uid, ttl, epoch } => {
                self.check_epoch(epoch, effects)?;
                self.renew(token, uid, ttl, now, effects)
            }
            Command::Reset {
                uid,
                reset_token,
                epoch,
            } => {
                self.check_epoch(epoch, effects)?;
                self.reset(token, uid, reset_token, now, effects)
            }
            Command::Release { uid, epoch } => {
                self.check_epoch(epoch, effects)?;
                self.release(token, uid, now, effects)
            }
            Command::Forget { uid, epoch } => {
                self.check_epoch(epoch, effects)?;
                self.forget(token, uid, effects)
            }
            Command::Apply { spec, body, epoch } => {
                self.check_epoch(epoch, effects)?;
                self.apply(token, *spec, body, now, effects)
            }
            Command::Remove { pool, epoch } => {
                self.check_epoch(epoch, effects)?;
                self.remove(token, &pool, effects)
            }
        }
    }

    /// A leader that was replaced must not give orders any more.
    fn check_epoch(&mut self, epoch: Option<u64>, effects: &mut Effects) -> Result<(), Refusal> {
        let Some(given) = epoch else { return Ok(()) };
        if given < self.epoch {
            return Err(Refusal::StaleEpoch {
                given,
                current: self.epoch,
            });
        }
        if given > self.epoch {
            self.epoch = given;
            effects.journal(Entry::Epoch(given));
        }
        Ok(())
    }
}
