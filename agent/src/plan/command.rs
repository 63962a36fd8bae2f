//! What callers ask for: lease, renew, reset, release, forget.

use branchpool_agent_api::{LeasePhase, PoolName, PoolStatus};

use super::{
    Action, After, Entry, LeaseState, LeaseUid, Millis, Node, Now, Pool, PoolSpec, PoolUid, Server,
    State, StopMode, Token, node::Effects,
};
use crate::storage::ids::BranchId;

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
                self.lease(token, uid, &pool, ttl, holder, now, effects)
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

    #[expect(clippy::too_many_arguments, reason = "the fields of one command")]
    fn lease(
        &mut self,
        token: Token,
        uid: LeaseUid,
        name: &PoolName,
        ttl: Option<Millis>,
        holder: Option<String>,
        now: Now,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        if let Some(lease) = self.leases.get(&uid) {
            if lease.pool_name != *name {
                return Err(Refusal::LeaseConflict {
                    uid,
                    pool: lease.pool_name.clone(),
                });
            }
            if !lease.is_bound() {
                return Err(Refusal::LeaseEnded {
                    uid,
                    phase: lease.phase,
                });
            }
            // Journalled once more: the first time may be the one that failed.
            let lease = lease.clone();
            Self::answer_with(token, uid, lease, false, now, effects);
            return Ok(());
        }
        if self.draining {
            return Err(Refusal::Draining);
        }
        if self.leases.len() >= self.limits.leases as usize {
            return Err(Refusal::TooManyLeases {
                most: self.limits.leases,
            });
        }
        let (pool_uid, ttl) = {
            let (pool_uid, pool) = self.pool_named(name)?;
            let ttl = term(ttl, pool)?;
            (pool_uid.clone(), ttl)
        };
        let Some(id) = self.oldest_ready(&pool_uid) else {
            return Err(self.nothing_ready(&pool_uid, now));
        };
        let Some(pool) = self.pools.get(&pool_uid) else {
            return Err(Refusal::PoolUidNotFound { pool: pool_uid });
        };
        let Some(branch) = self.branches.get(&id) else {
            return Err(self.nothing_ready(&pool_uid, now));
        };
        let Some(image) = self.image(&pool_uid, branch.generation) else {
            return Err(self.nothing_ready(&pool_uid, now));
        };
        let end_of_life = now.mono.saturating_add(pool.spec.lease.max_lifetime);
        let deadline = now.mono.saturating_add(ttl).min(end_of_life);
        let lease = LeaseState {
            pool: pool_uid,
            pool_name: pool.spec.name.clone(),
            branch: id,
            endpoint: branch.endpoint,
            generation: branch.generation,
            database: image.database.clone(),
            role: image.role.clone(),
            holder,
            bound_at: now.wall,
            expires_at: now.wall.saturating_add(deadline - now.mono),
            deadline,
            end_of_life,
            phase: LeasePhase::Bound,
            reason: None,
            message: None,
            reset_token: None,
            restarts: 0,
            forget_at: None,
        };
        self.hand_over(id, &uid, effects);
        self.lease_times.insert((deadline, uid.clone()));
        self.leases.insert(uid.clone(), lease.clone());
        Self::answer_with(token, uid, lease, true, now, effects);
        Ok(())
    }

    fn hand_over(&mut self, id: BranchId, uid: &LeaseUid, effects: &mut Effects) {
        let state = State::Leased {
            lease: uid.clone(),
            server: Server::Running,
        };
        self.set_state(id, state, effects);
        if let Some(branch) = self.branches.get(&id) {
            effects.journal(Entry::Branch(id, branch.record()));
        }
        effects.act(Action::HandOver { branch: id });
    }

    /// Journals a lease as it is now and answers with it.
    fn answer_with(
        token: Token,
        uid: LeaseUid,
        lease: LeaseState,
        created: bool,
        now: Now,
        effects: &mut Effects,
    ) {
        effects.lease_changed(&uid);
        effects.journal(Entry::Lease(uid.clone(), Box::new(lease.record(now))));
        let answer = Answer::Lease {
            uid,
            lease: Box::new(lease),
            created,
        };
        effects.commit(Some((token, answer)));
    }

    pub(super) fn pool_named(&self, name: &PoolName) -> Result<(&PoolUid, &Pool), Refusal> {
        self.pools
            .iter()
            .find(|(_, pool)| pool.spec.name == *name && !pool.removed)
            .ok_or_else(|| Refusal::PoolNotFound {
                pool: name.clone(),
                known: self
                    .pools
                    .values()
                    .filter(|pool| !pool.removed)
                    .map(|pool| pool.spec.name.clone())
                    .collect(),
            })
    }

    /// The oldest ready branch of the newest image; an older image serves only while there is none.
    fn oldest_ready(&self, uid: &PoolUid) -> Option<BranchId> {
        let pool = self.pools.get(uid)?;
        if !pool.mixed {
            return pool.ready.values().next().copied();
        }
        let newest = pool.ready.values().find(|id| {
            self.branches
                .get(id)
                .is_some_and(|branch| pool.is_current(branch))
        });
        newest.or_else(|| pool.ready.values().next()).copied()
    }

    fn renew(
        &mut self,
        token: Token,
        uid: LeaseUid,
        ttl: Option<Millis>,
        now: Now,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        let lease = self.bound(&uid)?;
        let (pool, end_of_life, old_deadline) = (&lease.pool, lease.end_of_life, lease.deadline);
        let Some(pool) = self.pools.get(pool) else {
            return Err(Refusal::PoolUidNotFound { pool: pool.clone() });
        };
        let ttl = term(ttl, pool)?;
        if end_of_life <= now.mono {
            return Err(Refusal::LifetimeOver {
                uid,
                most: pool.spec.lease.max_lifetime,
            });
        }
        let deadline = now.mono.saturating_add(ttl).min(end_of_life);
        self.lease_times.remove(&(old_deadline, uid.clone()));
        self.lease_times.insert((deadline, uid.clone()));
        let Some(lease) = self.leases.get_mut(&uid) else {
            return Err(Refusal::LeaseNotFound { uid });
        };
        lease.deadline = deadline;
        lease.expires_at = now.wall.saturating_add(deadline - now.mono);
        let lease = lease.clone();
        Self::answer_with(token, uid, lease, false, now, effects);
        Ok(())
    }

    fn reset(
        &mut self,
        token: Token,
        uid: LeaseUid,
        reset_token: String,
        now: Now,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        let lease = self.bound(&uid)?.clone();
        if lease.reset_token.as_ref() == Some(&reset_token) {
            Self::answer_with(token, uid, lease, false, now, effects);
            return Ok(());
        }
        if self.draining {
            return Err(Refusal::Draining);
        }
        let Some(id) = self.oldest_ready(&lease.pool) else {
            return Err(self.nothing_ready(&lease.pool, now));
        };
        let image = self
            .branches
            .get(&id)
            .and_then(|branch| self.image(&lease.pool, branch.generation));
        let Some(image) = image.cloned() else {
            return Err(self.nothing_ready(&lease.pool, now));
        };
        // The address stays with the lease; the fresh branch's own is given up.
        let Some(branch) = self.branches.get_mut(&id) else {
            return Err(self.nothing_ready(&lease.pool, now));
        };
        let given_up = std::mem::replace(&mut branch.endpoint, lease.endpoint);
        let generation = branch.generation;
        effects.unlink(given_up);
        self.hand_over(id, &uid, effects);
        let old = lease.branch;
        let mut lease = LeaseState {
            branch: id,
            generation,
            database: image.database,
            role: image.role,
            reset_token: Some(reset_token),
            reason: None,
            message: None,
            ..lease
        };
        lease.restarts = 0;
        self.leases.insert(uid.clone(), lease.clone());
        effects.lease_changed(&uid);
        effects.journal(Entry::Lease(uid.clone(), Box::new(lease.record(now))));
        effects.link(lease.endpoint, id);
        let answer = Answer::Lease {
            uid,
            lease: Box::new(lease),
            created: false,
        };
        // The old branch's end is journalled with the move, and begun after it.
        if let Some(branch) = self.branches.get_mut(&old) {
            branch.endpoint = crate::storage::ids::EndpointId::generate(&mut self.rng);
        }
        self.retire(old, After::Trash, StopMode::Immediate, now, effects);
        effects.commit(Some((token, answer)));
        Ok(())
    }

    fn release(
        &mut self,
        token: Token,
        uid: LeaseUid,
        now: Now,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        let Some(lease) = self.leases.get(&uid) else {
            return Err(Refusal::LeaseNotFound { uid });
        };
        if lease.is_bound() {
            self.end_lease(&uid, LeasePhase::Released, None, now, effects);
        }
        let Some(lease) = self.leases.get(&uid).cloned() else {
            return Err(Refusal::LeaseNotFound { uid });
        };
        Self::answer_with(token, uid, lease, false, now, effects);
        Ok(())
    }

    /// Ends a bound lease; its branch goes, its record stays for a while.
    pub(super) fn end_lease(
        &mut self,
        uid: &LeaseUid,
        phase: LeasePhase,
        why: Option<(&str, String)>,
        now: Now,
        effects: &mut Effects,
    ) {
        let Some(lease) = self.leases.get_mut(uid) else {
            return;
        };
        let pool = self.pools.get(&lease.pool);
        let retain = pool.map_or(0, |pool| pool.spec.lease.retain_finished);
        let (delay, mode) = pool.map_or((0, StopMode::Immediate), |pool| {
            (pool.spec.cleanup.start_delay, pool.spec.cleanup.stop_mode)
        });
        let forget_at = now.mono.saturating_add(retain);
        self.lease_times.remove(&(lease.deadline, uid.clone()));
        self.lease_times.insert((forget_at, uid.clone()));
        lease.phase = phase;
        lease.forget_at = Some(forget_at);
        lease.reason = why.as_ref().map(|(reason, _)| (*reason).to_owned());
        lease.message = why.map(|(_, message)| message);
        let (branch, endpoint) = (lease.branch, lease.endpoint);
        effects.lease_changed(uid);
        effects.journal(Entry::Lease(uid.clone(), Box::new(lease.record(now))));
        effects.unlink(endpoint);
        self.retire_after(branch, After::Trash, mode, delay, now, effects);
    }

    pub(super) fn expire_leases(&mut self, now: Now, effects: &mut Effects) {
        while let Some((time, uid)) = self.lease_times.first().cloned() {
            if time > now.mono {
                return;
            }
            self.lease_times.pop_first();
            let Some(lease) = self.leases.get(&uid) else {
                continue;
            };
            if lease.is_bound() {
                let ended = Some((
                    "Expired",
                    "its time ran out; renew a lease before its end".to_owned(),
                ));
                self.end_lease(&uid, LeasePhase::Expired, ended, now, effects);
            } else {
                self.leases.remove(&uid);
                effects.lease_changed(&uid);
                effects.journal(Entry::LeaseGone(uid));
            }
        }
    }

    fn forget(
        &mut self,
        token: Token,
        uid: LeaseUid,
        effects: &mut Effects,
    ) -> Result<(), Refusal> {
        if let Some(lease) = self.leases.get(&uid) {
            if lease.is_bound() {
                return Err(Refusal::StillBound { uid });
            }
            if let Some(forget_at) = lease.forget_at {
                self.lease_times.remove(&(forget_at, uid.clone()));
            }
            self.leases.remove(&uid);
            effects.lease_changed(&uid);
            effects.journal(Entry::LeaseGone(uid));
        }
        effects.commit(Some((token, Answer::Forgotten)));
        Ok(())
    }

    fn bound(&self, uid: &LeaseUid) -> Result<&LeaseState, Refusal> {
        let Some(lease) = self.leases.get(uid) else {
            return Err(Refusal::LeaseNotFound { uid: uid.clone() });
        };
        if !lease.is_bound() {
            return Err(Refusal::LeaseEnded {
                uid: uid.clone(),
                phase: lease.phase,
            });
        }
        Ok(lease)
    }
}

/// The term asked for, or the pool's; never cut in silence.
fn term(asked: Option<Millis>, pool: &Pool) -> Result<Millis, Refusal> {
    let terms = &pool.spec.lease;
    let ttl = asked.unwrap_or(terms.default_ttl);
    if ttl > terms.max_ttl {
        return Err(Refusal::TtlTooLong {
            asked: ttl,
            most: terms.max_ttl,
            field: "ttlSeconds",
        });
    }
    Ok(ttl)
}
