//! How holders reach branches: a link in the run directory and, on a node with a gateway, the
//! endpoint's entry there.

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::symlink,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use branchpool_gateway::{
    Activity, Branch, Directory, Facts, Guest, State, Unavailable, Verifier, scram::ITERATIONS,
};
use tokio::{sync::oneshot, time::timeout};

use super::{
    files,
    world::{Clock, millis},
};
use crate::{
    credentials,
    plan::{LinkChange, Millis, PoolUid, Reach, Use},
    storage::{
        Layout,
        ids::{BranchId, EndpointId, NodeKey},
    },
};

/// Milliseconds by which a time may differ when it is taken from one clock to another twice.
const CLOCKS_DIFFER: Millis = 5;

/// Longest that the stop of a branch waits for the gateway to let go of it.
const CLOSING: Duration = Duration::from_secs(5);

/// Longest that somebody waits for a suspended server.
const WAKE_TIME: Duration = Duration::from_secs(30);

/// What is to become of a preconnected session.
#[derive(Debug)]
pub(super) enum Release {
    Close,
    /// The gateway offers it to the branch's first client.
    Offer(Arc<Branch>),
}

#[derive(Debug)]
pub(super) struct Addresses {
    layout: Layout,
    key: NodeKey,
    directory: Directory,
    reach: Reach,
    places: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    endpoints: HashMap<EndpointId, Endpoint>,
    branches: HashMap<BranchId, Place>,
    sessions: HashMap<BranchId, oneshot::Sender<Release>>,
}

#[derive(Debug)]
struct Endpoint {
    verifier: Verifier,
    leads_to: Option<BranchId>,
}

/// A branch as the gateway has it.
#[derive(Debug)]
struct Place {
    branch: Arc<Branch>,
    /// The one that leads to it, or is to.
    endpoint: EndpointId,
}

impl Addresses {
    pub(super) fn new(layout: Layout, key: NodeKey, reach: Reach) -> Self {
        Self {
            directory: Directory::new(credentials::salt_key(&key)),
            layout,
            key,
            reach,
            places: Mutex::default(),
        }
    }

    pub(super) fn directory(&self) -> &Directory {
        &self.directory
    }

    /// What there is to be fed.
    fn gateway(&self) -> Option<&Directory> {
        match self.reach {
            Reach::Socket => None,
            Reach::Gateway { .. } => Some(&self.directory),
        }
    }

    pub(super) fn reach(&self) -> &Reach {
        &self.reach
    }

    /// What the holder of this endpoint's lease proves itself with; `None` without a gateway.
    pub(super) fn password(&self, endpoint: &EndpointId) -> Option<String> {
        self.gateway()
            .is_some()
            .then(|| credentials::password(&self.key, endpoint))
    }

    /// Start-up parameters that the pool's clients were seen to send.
    pub(super) fn profile(&self, pool: &PoolUid) -> Vec<(String, String)> {
        let learned = self
            .gateway()
            .and_then(|gateway| gateway.profile(pool.as_str()));
        learned.unwrap_or_default()
    }

    pub(super) fn forget_pool(&self, pool: &PoolUid) {
        if let Some(gateway) = self.gateway() {
            gateway.forget_pool(pool.as_str());
        }
    }

    /// Makes ready what a lease of the branch will need, some milliseconds of CPU time. Blocks.
    pub(super) fn prepare(
        &self,
        endpoint: EndpointId,
        branch: BranchId,
        pool: &PoolUid,
        role: &str,
        database: &str,
    ) {
        let Some(gateway) = self.gateway() else {
            return;
        };
        let is_ready = self.places().branches.get(&branch).is_some_and(|place| {
            place.endpoint == endpoint && place.branch.state() != State::Ended
        });
        if is_ready {
            return;
        }
        let salt = gateway.salt(role, endpoint.as_str());
        let password = credentials::password(&self.key, &endpoint);
        let verifier = Verifier::derive(&password, salt, ITERATIONS);
        let made = Branch::new(Facts {
            pool: pool.to_string(),
            role: role.to_owned(),
            database: database.to_owned(),
            verifier: verifier.clone(),
            socket_dir: self.layout.branch_socket_dir(&branch),
        });
        let mut places = self.places();
        let leads_to = None;
        places
            .endpoints
            .insert(endpoint, Endpoint { verifier, leads_to });
        places.branches.insert(
            branch,
            Place {
                branch: made,
                endpoint,
            },
        );
    }

    pub(super) fn apply(&self, change: &LinkChange) {
        let (result, endpoint) = match change {
            LinkChange::Point { endpoint, branch } => {
                let target = self.layout.endpoint_target(branch);
                let linked = point(&self.layout.endpoint(endpoint), &target);
                self.lead(endpoint, branch);
                (linked, endpoint)
            }
            LinkChange::Remove { endpoint } => {
                self.close(endpoint);
                (
                    files::absent(fs::remove_file(self.layout.endpoint(endpoint))),
                    endpoint,
                )
            }
        };
        if let Err(error) = result {
            tracing::error!(%endpoint, %error, "the address could not be changed; is the run directory writable?");
        }
    }

    fn lead(&self, endpoint: &EndpointId, id: &BranchId) {
        let Some(gateway) = self.gateway() else {
            return;
        };
        let replaced = {
            let mut places = self.places();
            let Places {
                endpoints,
                branches,
                ..
            } = &mut *places;
            let (Some(entry), Some(place)) = (endpoints.get_mut(endpoint), branches.get_mut(id))
            else {
                tracing::error!(%endpoint, branch = %id, "the gateway does not know the branch; reset the lease");
                return;
            };
            entry.leads_to = Some(*id);
            if place.endpoint != *endpoint {
                place.endpoint = *endpoint;
                place.branch.set_verifier(entry.verifier.clone());
            }
            gateway
                .insert(endpoint.as_str(), Arc::clone(&place.branch))
                .filter(|replaced| !Arc::ptr_eq(replaced, &place.branch))
        };
        if let Some(replaced) = replaced {
            replaced.end();
        }
    }

    fn close(&self, endpoint: &EndpointId) {
        let Some(gateway) = self.gateway() else {
            return;
        };
        let removed = gateway.remove(endpoint.as_str());
        let mut places = self.places();
        let leads_to = places
            .endpoints
            .remove(endpoint)
            .and_then(|entry| entry.leads_to);
        // A branch that has got another endpoint is not meant.
        let moved = leads_to
            .and_then(|branch| places.branches.get(&branch))
            .is_some_and(|place| place.endpoint != *endpoint);
        drop(places);
        if let Some(removed) = removed.filter(|_| !moved) {
            removed.end();
        }
    }

    /// The server takes connections again.
    pub(super) fn serving(&self, id: &BranchId) {
        let _known = self.set_state(id, State::Serving);
    }

    /// Clients are told that the server is on its way back.
    pub(super) fn restarting(&self, id: &BranchId) {
        let _known = self.set_state(id, State::Restarting);
    }

    /// Clients wait for the server, which is stopped.
    pub(super) fn asleep(&self, id: &BranchId) -> Option<Arc<Branch>> {
        self.set_state(id, State::Suspended)
    }

    fn set_state(&self, id: &BranchId, state: State) -> Option<Arc<Branch>> {
        let branch = self.branch(id)?;
        branch.set_state(state);
        Some(branch)
    }

    fn branch(&self, id: &BranchId) -> Option<Arc<Branch>> {
        let places = self.places();
        places
            .branches
            .get(id)
            .map(|place| Arc::clone(&place.branch))
    }

    /// As [`Addresses::asleep`], unless the branch was used after `unused_since`.
    pub(super) fn fall_asleep(
        &self,
        id: &BranchId,
        unused_since: Millis,
        clock: Clock,
    ) -> Option<Arc<Branch>> {
        let branch = self.asleep(id)?;
        // After nobody can come in any more. The two readings of the clocks differ by a little.
        let last = self.used(id, clock).last;
        if last.is_some_and(|last| last > unused_since + CLOCKS_DIFFER) {
            branch.set_state(State::Serving);
            return None;
        }
        Some(branch)
    }

    /// For a session that does not come through the gateway, on a node that has one: waits for a server
    /// that is suspended.
    pub(super) async fn enter(&self, id: &BranchId) -> Result<Option<Guest>, Unavailable> {
        match self.branch(id) {
            Some(branch) => branch.admit(WAKE_TIME).await.map(Some),
            None => Ok(None),
        }
    }

    /// `None` without a gateway.
    pub(super) fn activity(&self, id: &BranchId) -> Option<Activity> {
        self.branch(id).map(|branch| branch.activity())
    }

    pub(super) fn used(&self, id: &BranchId, clock: Clock) -> Use {
        let Some(activity) = self.activity(id) else {
            return Use {
                open: false,
                last: None,
            };
        };
        let since = |time: SystemTime| time.elapsed().unwrap_or_default();
        Use {
            open: activity.connections > 0,
            last: activity
                .last_client_byte
                .map(|time| clock.now().mono.saturating_sub(millis(since(time)))),
        }
    }

    /// The branch goes: nobody may be connected to it any more.
    pub(super) async fn forget(&self, id: &BranchId) {
        let place = {
            let mut places = self.places();
            places.sessions.remove(id);
            places.branches.remove(id)
        };
        let Some(place) = place else { return };
        place.branch.end();
        let closed = timeout(CLOSING, place.branch.closed()).await;
        if closed.is_err() {
            tracing::warn!(branch = %id, "a connection of the gateway is still open; the branch is stopped under it");
        }
    }

    pub(super) fn hold_session(&self, id: BranchId, session: oneshot::Sender<Release>) {
        self.places().sessions.insert(id, session);
    }

    /// Gives the branch's session to the gateway, if there is one.
    pub(super) fn offer_session(&self, id: &BranchId) {
        let mut places = self.places();
        let Some(branch) = places
            .branches
            .get(id)
            .map(|place| Arc::clone(&place.branch))
        else {
            return;
        };
        if let Some(session) = places.sessions.remove(id) {
            let _ended_meanwhile = session.send(Release::Offer(branch));
        }
    }

    pub(super) fn close_session(&self, id: &BranchId) {
        let session = self.places().sessions.remove(id);
        if let Some(session) = session {
            let _ended_meanwhile = session.send(Release::Close);
        }
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// By rename, so that the address leads somewhere at any time.
fn point(link: &Path, target: &Path) -> io::Result<()> {
    let new = link.with_extension("new");
    files::absent(fs::remove_file(&new))?;
    symlink(target, &new)?;
    fs::rename(&new, link)
}
