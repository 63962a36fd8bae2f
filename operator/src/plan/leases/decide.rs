//! The next step of a lease, from what is known about it now.

use branchpool_agent_api::{LeasePhase as Phase, LeaseRequest};
use branchpool_crds::{BranchLeaseStatus, LeasePhase};

use super::{
    Call, LeaseObject, Operation, PoolTerms,
    entry::{Entry, Failure, Place, Presence, condition},
    fleet::Fleet,
    names::Standing,
    object::millis,
    status,
};
use crate::plan::{Millis, NodeName, SECOND};

/// How long a node may be silent before its leases say so; shorter cuts heal unseen.
const SILENCE_SHOWN_AFTER: Millis = 10 * SECOND;
/// A node that cannot be asked has ended its lease by itself this long after its time, surely.
const EXPIRY_MARGIN: Millis = 30 * SECOND;
/// What a renewal may differ from what is in force without being one.
const SAME_TIME: Millis = SECOND;
/// Where the pool cannot be asked.
pub(super) const DEFAULT_ADMISSION_WAIT: Millis = 300 * SECOND;
const DEFAULT_RETENTION: Millis = 3_600 * SECOND;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Next {
    Do(Operation),
    /// Wait in the pool's queue, at most until then.
    Queue {
        until: Millis,
    },
    /// Nothing before this time, unless something happens.
    At(Millis),
    Idle,
    /// Nothing is left of it.
    Drop,
}

/// What a decision is made with.
pub(super) struct Context<'a> {
    pub(super) fleet: &'a Fleet,
    pub(super) pool: Option<&'a PoolTerms>,
    pub(super) listed: bool,
    pub(super) settled: bool,
    /// What the Secret under its name is to it.
    pub(super) secret: Standing,
    pub(super) now: Millis,
}

impl Entry {
    pub(super) fn decide(&self, context: &Context<'_>) -> Next {
        if self.busy.is_some() {
            return Next::Idle;
        }
        if context.now < self.retry_at {
            return Next::At(self.retry_at);
        }
        match &self.presence {
            Presence::Opaque(_) => Next::Idle,
            Presence::Unknown if self.records.is_empty() => Next::Drop,
            // What nobody named is not the operator's.
            Presence::Unknown => match self.id() {
                Some(id) if context.listed => Next::Do(Operation::Confirm(id)),
                _ => Next::Idle,
            },
            Presence::Missing(id) => Next::Do(Operation::Confirm(id.clone())),
            Presence::Gone(_) => self.clean_up(context),
            Presence::Live(object) if object.deleting => self.clean_up(context),
            Presence::Live(object) if object.status.phase.is_finished() => {
                self.finished(object, context)
            }
            Presence::Live(object) => self
                .stray(context)
                .unwrap_or_else(|| self.going_on(object, context)),
        }
    }

    /// A second branch, of a call whose answer was lost.
    fn stray(&self, context: &Context<'_>) -> Option<Next> {
        let home = self.home()?;
        let mut strays = self.records.iter().filter(|(node, _)| *node != home);
        let (node, record) = strays.find(|(node, _)| context.fleet.is_synced(node))?;
        Some(Next::Do(if record.phase == Phase::Bound {
            self.call(node, Call::Release)
        } else {
            self.call(node, Call::Forget)
        }))
    }

    fn going_on(&self, object: &LeaseObject, context: &Context<'_>) -> Next {
        if let Some(failure) = &self.failure {
            return self.end(object, LeasePhase::Failed, failure, context);
        }
        match &self.place {
            Place::Home(node) => self.at_home(object, node, context),
            Place::Assigned(node) => Next::Do(self.call(node, Call::Lease(request(object)))),
            Place::Nowhere => self.homeless(object, context),
        }
    }

    fn homeless(&self, object: &LeaseObject, context: &Context<'_>) -> Next {
        if let Some(failure) = refused_spec(object, context.pool) {
            return self.end(object, LeasePhase::Failed, &failure, context);
        }
        let wait = context
            .pool
            .map_or(DEFAULT_ADMISSION_WAIT, |pool| pool.admission_wait);
        let until = object.created.saturating_add(wait);
        if context.settled && context.now >= until && wait > 0 {
            let failure = status::admission_timeout(object, context.pool, wait);
            return self.end(object, LeasePhase::Failed, &failure, context);
        }
        Next::Queue { until }
    }

    fn at_home(&self, object: &LeaseObject, node: &NodeName, context: &Context<'_>) -> Next {
        if context.fleet.is_gone(node) {
            let failure = status::node_gone(node);
            return self.end(object, LeasePhase::Lost, &failure, context);
        }
        if !context.fleet.is_synced(node) {
            return self.silent(object, node, context);
        }
        match self.records.get(node) {
            Some(record) if record.phase == Phase::Bound => {
                if object.status.phase == LeasePhase::Bound {
                    self.bound(object, node, record, context)
                } else {
                    self.binding(object, node, context)
                }
            }
            Some(record) => {
                let (phase, failure) = status::ended(record);
                self.end(object, phase, &failure, context)
            }
            None if self.lost => {
                let failure = status::branch_gone(node);
                self.end(object, LeasePhase::Lost, &failure, context)
            }
            // Without a record there would be nothing to find its Secret by.
            None => Next::Do(self.call(node, Call::Fetch)),
        }
    }

    /// The agent has handed out the branch; the connection is to be written.
    fn binding(&self, object: &LeaseObject, node: &NodeName, context: &Context<'_>) -> Next {
        let Some(answer) = &self.credentials else {
            // Asked again it gives the same answer, with the password.
            return Next::Do(self.call(node, Call::Lease(request(object))));
        };
        if object.wants_secret {
            match context.secret {
                Standing::Its(_) => {}
                Standing::UnderWay => return Next::Idle,
                Standing::Unclear | Standing::NotIts | Standing::Perhaps => {
                    return Next::Do(Operation::CreateSecret(object.id.clone(), answer.clone()));
                }
            }
        }
        Next::Do(patch(object, status::bound(object, node, answer)))
    }

    fn bound(
        &self,
        object: &LeaseObject,
        node: &NodeName,
        record: &branchpool_agent_api::Lease,
        context: &Context<'_>,
    ) -> Next {
        if object.wants_secret && !matches!(context.secret, Standing::Its(_)) {
            // Its deletion was begun, for a reason that is none any more.
            return self.binding(object, node, context);
        }
        if let Some(next) = self.reset(object, node, record, context) {
            return next;
        }
        if let Some(next) = self.renew(object, node, record, context) {
            return next;
        }
        if self.asked && self.credentials.is_none() {
            return Next::Do(self.call(node, Call::Lease(request(object))));
        }
        let mut wanted = status::bound(object, node, record);
        if let Some((generation, Some(failure))) = &self.renewal
            && *generation == object.generation
        {
            wanted.conditions.push(status::not_renewed(object, failure));
        } else if object.generation == object.status.observed_generation {
            // Nothing was asked since: what a renewal was told stays.
            let told = condition(&object.status.conditions, status::RENEWED);
            wanted.conditions.extend(told.cloned());
        }
        patch_if_changed(object, wanted).map_or(Next::Idle, Next::Do)
    }

    fn reset(
        &self,
        object: &LeaseObject,
        node: &NodeName,
        record: &branchpool_agent_api::Lease,
        context: &Context<'_>,
    ) -> Option<Next> {
        let token = object.reset_token.as_ref()?;
        if record.observed_reset_token.as_ref() == Some(token) {
            return None;
        }
        // A leader that forgot it keeps the answer: a token is answered once.
        if object.status.observed_reset_token.as_ref() == Some(token) {
            return None;
        }
        let waits = self.reset_waits.as_deref();
        let ready = context.fleet.has_ready(node, &object.pool, context.now);
        if let Some(why) = waits
            && !ready
        {
            let wanted = status::resetting(object, node, record, why);
            let retry = context
                .fleet
                .next_try(&object.pool, context.now)
                .map_or(Next::Idle, Next::At);
            return Some(patch_if_changed(object, wanted).map_or(retry, Next::Do));
        }
        Some(Next::Do(self.call(
            node,
            Call::Reset {
                token: token.clone(),
            },
        )))
    }

    fn renew(
        &self,
        object: &LeaseObject,
        node: &NodeName,
        record: &branchpool_agent_api::Lease,
        context: &Context<'_>,
    ) -> Option<Next> {
        if object.generation == object.status.observed_generation {
            return None;
        }
        let answered = self.renewal.as_ref().map(|(generation, _)| *generation);
        if answered == Some(object.generation) {
            return None;
        }
        let ttl = object
            .ttl
            .or_else(|| context.pool.map(|pool| pool.default_ttl))?;
        // A time in the future counts as now.
        let renewed = object.renew_time.unwrap_or(0).min(context.now);
        let wanted = record.bound_at.max(renewed).saturating_add(ttl);
        if wanted.abs_diff(record.expires_at) < SAME_TIME {
            return None;
        }
        let left = wanted.saturating_sub(context.now).div_ceil(SECOND).max(1);
        Some(Next::Do(self.call(node, Call::Renew { ttl_seconds: left })))
    }

    fn silent(&self, object: &LeaseObject, node: &NodeName, context: &Context<'_>) -> Next {
        let Some(since) = context.fleet.silent_since(node) else {
            return Next::Idle;
        };
        if object.status.phase != LeasePhase::Bound {
            return Next::Idle;
        }
        let expires = object.status.expiration_time.as_ref().map_or(0, millis);
        let surely_over = expires.saturating_add(EXPIRY_MARGIN);
        if context.now >= surely_over {
            let failure = status::expired();
            return self.end(object, LeasePhase::Expired, &failure, context);
        }
        let shown = since.saturating_add(SILENCE_SHOWN_AFTER);
        if context.now < shown {
            return Next::At(shown);
        }
        if !context.settled {
            return Next::Idle;
        }
        let wanted = status::unreachable(object, node);
        patch_if_changed(object, wanted).map_or(Next::At(surely_over), Next::Do)
    }

    /// First the Secret goes, then the status says so: a finished lease has none.
    fn end(
        &self,
        object: &LeaseObject,
        phase: LeasePhase,
        why: &Failure,
        context: &Context<'_>,
    ) -> Next {
        if let Some(next) = self.rid_of_secret(&object.id, context) {
            return next;
        }
        Next::Do(patch(
            object,
            status::finished(object, phase, why, context.now),
        ))
    }

    fn finished(&self, object: &LeaseObject, context: &Context<'_>) -> Next {
        if let Some(next) = self.next_record(context) {
            return next;
        }
        let retention = context
            .pool
            .map_or(DEFAULT_RETENTION, |pool| pool.retain_finished);
        let ended = condition(&object.status.conditions, status::READY)
            .map_or(object.created, |ready| millis(&ready.last_transition_time));
        let until = ended.saturating_add(retention);
        if context.now >= until && context.settled {
            return Next::Do(Operation::DeleteLease(object.id.clone()));
        }
        Next::At(until)
    }

    fn clean_up(&self, context: &Context<'_>) -> Next {
        let bound = self
            .records
            .iter()
            .find(|(node, record)| record.phase == Phase::Bound && context.fleet.is_synced(node));
        if let Some((node, _)) = bound {
            return Next::Do(self.call(node, Call::Release));
        }
        if let Place::Assigned(node) = &self.place
            && context.fleet.is_synced(node)
            && !self.records.contains_key(node)
        {
            // The answer to the call may have been lost.
            return Next::Do(self.call(node, Call::Fetch));
        }
        if let Some(next) = self.id().and_then(|id| self.rid_of_secret(&id, context)) {
            return next;
        }
        if let Some(next) = self.next_record(context) {
            return next;
        }
        let gone = matches!(self.presence, Presence::Gone(_));
        if self.records.is_empty() && gone {
            Next::Drop
        } else {
            Next::Idle
        }
    }

    /// What agents still have of a lease that is over, whose Secret is gone.
    fn next_record(&self, context: &Context<'_>) -> Option<Next> {
        let mut records = self.records.iter();
        let (node, record) = records.find(|(node, _)| context.fleet.is_synced(node))?;
        Some(Next::Do(if record.phase == Phase::Bound {
            self.call(node, Call::Release)
        } else {
            self.call(node, Call::Forget)
        }))
    }

    /// The agents' records outlive the Secret: a leader that forgot all learns of it from them.
    fn rid_of_secret(&self, lease: &super::ObjectRef, context: &Context<'_>) -> Option<Next> {
        if !self.may_have_secret {
            return None;
        }
        let secret = match &context.secret {
            Standing::NotIts => return None,
            // Woken when that changes.
            Standing::UnderWay | Standing::Unclear => return Some(Next::Idle),
            Standing::Its(secret) => secret.clone(),
            Standing::Perhaps => None,
        };
        let lease = lease.clone();
        Some(Next::Do(Operation::DeleteSecret { lease, secret }))
    }
}

fn request(object: &LeaseObject) -> LeaseRequest {
    LeaseRequest {
        pool: object.pool.clone(),
        ttl_seconds: object.ttl.map(|ttl| ttl.div_ceil(SECOND).max(1)),
        holder: object.holder.clone(),
        epoch: None,
    }
}

fn refused_spec(object: &LeaseObject, pool: Option<&PoolTerms>) -> Option<Failure> {
    if object.from_lease {
        return Some(Failure::new(
            "NotSupported",
            "this version makes no branches of branches: take spec.from out of a new lease",
        ));
    }
    let (asked, most) = (object.ttl?, pool?.max_ttl);
    (asked > most).then(|| {
        Failure::new(
            "TTLTooLong",
            format!(
                "a term of {} s was asked for, and the pool's lease.maxTTL allows {} s: create a lease with a shorter ttl, or raise maxTTL",
                asked / SECOND,
                most / SECOND
            ),
        )
    })
}

fn patch(object: &LeaseObject, status: BranchLeaseStatus) -> Operation {
    let status = status::with_times(status, &object.status);
    Operation::Patch(object.id.clone(), Box::new(status))
}

pub(super) fn patch_if_changed(
    object: &LeaseObject,
    status: BranchLeaseStatus,
) -> Option<Operation> {
    let status = status::with_times(status, &object.status);
    (status != object.status).then(|| Operation::Patch(object.id.clone(), Box::new(status)))
}
