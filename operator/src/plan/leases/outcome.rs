//! What came of operations.

use branchpool_agent_api::{Lease, LeasePhase as Phase, problem::reason};
use branchpool_crds::LeasePhase;

use super::{
    Action, CallError, Existence, Machine, ObjectRef, Outcome, WriteError,
    entry::{Doing, Failure, Place, Presence, condition},
    status,
};
use crate::plan::{Millis, NodeName, SECOND, Uid};

/// A node that did not answer is asked again after this, unless its watch is there sooner.
const PAUSE: Millis = SECOND;
/// An object that a live read found and the watch did not bring yet.
const WATCH_LAGS: Millis = 10 * SECOND;

impl Machine {
    pub(super) fn done(&mut self, uid: &Uid, outcome: Outcome, now: Millis) {
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        let doing = entry.busy.take();
        self.touched.insert(uid.clone());
        match outcome {
            Outcome::Called(node, Ok(lease)) => self.called(uid, doing, node, lease),
            Outcome::Called(node, Err(error)) => self.refused(uid, doing, &node, error, now),
            Outcome::Forgotten(node, result) => self.forgotten(uid, &node, result, now),
            Outcome::SecretCreated(result) => self.secret_created(uid, result, now),
            Outcome::SecretDeleted(result) => self.secret_deleted(uid, &result, now),
            Outcome::Patched(status, Ok(version)) => {
                let mut warning = None;
                if let Presence::Live(object) = &mut entry.presence {
                    if status.phase != object.status.phase {
                        warning = warn(&object.id, &status);
                    }
                    object.status = *status;
                    object.version = object.version.max(version);
                }
                entry.written();
                entry.succeeded();
                self.actions.extend(warning);
                if let Some(object) = self.entries[uid].live() {
                    let (id, status) = (object.id.clone(), object.status.clone());
                    self.status_known(&id, &status);
                }
            }
            Outcome::Patched(_, Err(error)) | Outcome::LeaseDeleted(Err(error)) => {
                self.not_written(uid, &error, now);
            }
            // The watch brings the deletion.
            Outcome::LeaseDeleted(Ok(())) | Outcome::Confirmed(Ok(Existence::Exists)) => {
                entry.retry_at = now + WATCH_LAGS;
            }
            Outcome::Confirmed(Ok(Existence::Gone)) => self.gone(uid),
            Outcome::Confirmed(Err(_)) => entry.back_off(now),
        }
    }

    fn called(&mut self, uid: &Uid, doing: Option<Doing>, node: NodeName, lease: Box<Lease>) {
        let entry = self.entry(uid);
        entry.succeeded();
        let record = Lease {
            password: None,
            ca: None,
            // The watch does not tell these.
            connections: None,
            last_used_at: None,
            ..(*lease).clone()
        };
        entry.records.insert(node.clone(), record);
        entry.lost = false;
        match doing {
            Some(Doing::Lease) if lease.phase == Phase::Bound => {
                entry.place = Place::Home(node);
                entry.credentials = Some(lease);
            }
            Some(Doing::Fetch) if entry.place == Place::Assigned(node.clone()) => {
                entry.place = Place::Home(node);
            }
            Some(Doing::Renew(generation)) => entry.renewal = Some((generation, None)),
            Some(Doing::Reset) => entry.reset_waits = None,
            _ => {}
        }
    }

    fn refused(
        &mut self,
        uid: &Uid,
        doing: Option<Doing>,
        node: &NodeName,
        error: CallError,
        now: Millis,
    ) {
        let entry = self.entry(uid);
        let (why, message, retry_after, epoch) = match error {
            CallError::Unreachable(_) => {
                if entry.place == Place::Assigned(node.clone()) {
                    // Perhaps it was done. The agent's next snapshot tells.
                    entry.place = Place::Nowhere;
                    self.give_up(node, uid, now + PAUSE);
                } else {
                    entry.back_off(now);
                }
                return;
            }
            CallError::Refused {
                reason,
                message,
                retry_after,
                epoch,
            } => (reason, message, retry_after.unwrap_or(PAUSE), epoch),
        };
        if why == reason::STALE_EPOCH {
            entry.back_off(now);
            self.actions.push(Action::Deposed { epoch });
            return;
        }
        let failure = Failure::new(why.clone(), message);
        match (doing, why.as_str()) {
            (_, reason::LEASE_NOT_FOUND) => {
                entry.records.remove(node);
                match &entry.place {
                    Place::Assigned(at) if at == node => entry.place = Place::Nowhere,
                    Place::Home(at) if at == node => entry.lost = true,
                    _ => {}
                }
                self.give_up(node, uid, 0);
            }
            (_, "LeaseEnded") => {
                entry.credentials = None;
                entry.place = Place::Home(node.clone());
                // Asked for anew, the record says how. One of a lease that is gone is only to be forgotten.
                if entry.live().is_some() {
                    entry.records.remove(node);
                }
            }
            (Some(Doing::Lease), reason::INVALID_FIELD | "LeaseConflict") => {
                entry.failure = Some(failure);
            }
            (Some(Doing::Lease), _) if entry.place == Place::Assigned(node.clone()) => {
                entry.place = Place::Nowhere;
                self.give_up(node, uid, now + retry_after);
            }
            (Some(Doing::Renew(generation)), reason::INVALID_FIELD | "LifetimeOver") => {
                let word = if why == reason::INVALID_FIELD {
                    "TTLTooLong"
                } else {
                    "LifetimeOver"
                };
                entry.renewal = Some((generation, Some(Failure::new(word, failure.message))));
            }
            (Some(Doing::Reset), reason::NO_BRANCH_READY) => {
                entry.reset_waits = Some(failure.message);
                if let Some(pool) = entry.live().map(|object| object.pool.clone()) {
                    self.fleet.pause(node, &pool, now + retry_after);
                }
            }
            _ => entry.back_off(now),
        }
    }

    /// Its branch is not counted on any more.
    fn give_up(&mut self, node: &NodeName, uid: &Uid, until: Millis) {
        let freed = self.fleet.give_up(node, uid, until);
        self.queues.dirty.extend(freed);
    }

    fn forgotten(
        &mut self,
        uid: &Uid,
        node: &NodeName,
        result: Result<(), CallError>,
        now: Millis,
    ) {
        let entry = self.entry(uid);
        match result {
            Ok(()) => {
                entry.succeeded();
                entry.records.remove(node);
                self.give_up(node, uid, 0);
            }
            Err(CallError::Refused { reason: why, .. }) if why == "StillBound" => {
                entry.records.remove(node);
                entry.back_off(now);
            }
            Err(CallError::Refused {
                reason: why, epoch, ..
            }) if why == reason::STALE_EPOCH => {
                entry.back_off(now);
                self.actions.push(Action::Deposed { epoch });
            }
            Err(_) => entry.back_off(now),
        }
    }

    fn secret_created(&mut self, uid: &Uid, result: Result<Uid, WriteError>, now: Millis) {
        let entry = self.entry(uid);
        let Some(id) = entry.id() else { return };
        match result {
            Ok(secret) => {
                entry.succeeded();
                entry.written();
                self.names.created(&id, secret);
            }
            Err(WriteError::Foreign(message)) => {
                entry.failure = Some(Failure::new("SecretNameConflict", message));
                self.names.absent(&id);
            }
            Err(WriteError::Final { reason, message }) => {
                entry.failure = Some(Failure::new(reason, message));
                self.names.unknown(&id);
            }
            Err(WriteError::NotFound | WriteError::Later(_)) => {
                entry.back_off(now);
                self.names.unknown(&id);
            }
        }
        self.touch_name(&id);
    }

    fn secret_deleted(&mut self, uid: &Uid, result: &Result<(), WriteError>, now: Millis) {
        let entry = self.entry(uid);
        let Some(id) = entry.id() else { return };
        match result {
            // A foreign one of the name is none of ours.
            Ok(()) | Err(WriteError::NotFound | WriteError::Foreign(_)) => {
                entry.succeeded();
                self.names.absent(&id);
            }
            Err(WriteError::Final { .. } | WriteError::Later(_)) => {
                entry.back_off(now);
                self.names.unknown(&id);
            }
        }
        self.touch_name(&id);
    }

    fn not_written(&mut self, uid: &Uid, error: &WriteError, now: Millis) {
        let entry = self.entry(uid);
        match error {
            WriteError::NotFound => {
                if let Some(id) = entry.live().map(|object| object.id.clone()) {
                    self.missing(id);
                }
            }
            WriteError::Foreign(_) | WriteError::Final { .. } | WriteError::Later(_) => {
                entry.back_off(now);
            }
        }
    }
}

/// An Event for who looks at the lease, where it did not end as its holder meant it to.
fn warn(id: &ObjectRef, status: &branchpool_crds::BranchLeaseStatus) -> Option<Action> {
    if !matches!(status.phase, LeasePhase::Failed | LeasePhase::Lost) {
        return None;
    }
    let ready = condition(&status.conditions, status::READY)?;
    Some(Action::Warn {
        lease: id.clone(),
        reason: ready.reason.clone(),
        note: ready.message.clone(),
    })
}
