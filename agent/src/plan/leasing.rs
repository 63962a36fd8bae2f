//! Handing out: lease, renew, reset, release, expire, forget.

use branchpool_agent_api::{LeasePhase, PoolName};

use super::{
    Action, After, Answer, Entry, LeaseState, LeaseUid, Millis, Node, Now, Pool, PoolUid, Refusal,
    Server, State, StopMode, Token, node::Effects,
};
use crate::storage::ids::{BranchId, EndpointId};

impl Node {
    #[expect(clippy::too_many_arguments, reason = "the fields of one command")]
    pub(super) fn lease(
        &mut self,
        token: Token,
        uid: LeaseUid,
        name: &PoolName,
        ttl: Option<Millis>,
        holder: Option<String>,
        led: bool,
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
        if self.leases.len() >= self.limits.leases as usize && !self.forget_oldest(effects) {
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
            led,
            forget_at: None,
        };
        self.hand_over(id, &uid, effects);
        self.count_idle_from(id, now.mono);
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

    pub(super) fn renew(
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

    pub(super) fn reset(
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
        self.hand_over(id, &uid, effects);
        self.count_idle_from(id, now.mono);
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
        // After it has got the other: without any address it would count as given back.
        effects.unlink(given_up);
        let answer = Answer::Lease {
            uid,
            lease: Box::new(lease),
            created: false,
        };
        // The old branch's end is journalled with the move, and begun after it.
        if let Some(branch) = self.branches.get_mut(&old) {
            branch.endpoint = EndpointId::generate(&mut self.rng);
        }
        self.retire(old, After::Trash, StopMode::Immediate, now, effects);
        effects.commit(Some((token, answer)));
        Ok(())
    }

    pub(super) fn release(
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
        self.lease_times.remove(&(lease.deadline, uid.clone()));
        lease.forget_at = (!lease.led).then(|| now.mono.saturating_add(retain));
        if let Some(forget_at) = lease.forget_at {
            self.lease_times.insert((forget_at, uid.clone()));
        }
        lease.phase = phase;
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

    pub(super) fn forget(
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

    /// Makes room by forgetting the finished lease whose time is up first. `false`: all are bound.
    fn forget_oldest(&mut self, effects: &mut Effects) -> bool {
        let finished = |uid: &LeaseUid| self.leases.get(uid).is_some_and(|lease| !lease.is_bound());
        let oldest = self
            .lease_times
            .iter()
            .find(|(_, uid)| finished(uid))
            .cloned();
        let Some((time, uid)) = oldest else {
            return false;
        };
        self.lease_times.remove(&(time, uid.clone()));
        self.leases.remove(&uid);
        effects.lease_changed(&uid);
        effects.journal(Entry::LeaseGone(uid));
        true
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
