//! Getting a lease from the operator, and waiting for what it says.

use std::time::Duration;

use branchpool_crds::{BranchLease, BranchPool, GROUP, VERSION};
use futures_util::{Stream, StreamExt, pin_mut};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::{
    connect::Cluster,
    error::{
        ApiSnafu, ClusterError, FinishedSnafu, GoneSnafu, NoAnswerSnafu, NoPoolSnafu,
        NotReadySnafu, failed, is_forbidden, is_not_found,
    },
    lease::{Progress, progress},
};
use crate::{
    error::{CliError, CodeSnafu},
    progress::Progress as Line,
    signals::{self, Signals},
};

/// Who set a field, as the server keeps it.
pub(super) const MANAGER: &str = "kubectl-branch";
/// How long the operator may take to say something at all.
const ANSWER: Duration = Duration::from_secs(10);
/// A load balancer may cut what is silent for longer, and say nothing.
const WATCH_SECONDS: u32 = 200;

pub(super) struct Request {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) pool: String,
    /// Further fields of the spec.
    pub(super) spec: Value,
}

/// The lease, bound. One that is not bound in time, or while a signal comes, is deleted again.
pub(super) async fn obtain(
    cluster: &Cluster,
    request: &Request,
    wait: Duration,
    signals: &mut Signals,
) -> Result<BranchLease, CliError> {
    let leases: Api<BranchLease> = cluster.api(&request.namespace);
    check_pool(cluster, &request.namespace, &request.pool).await?;
    let outcome = tokio::select! {
        outcome = create_and_wait(&leases, request, wait) => outcome,
        signal = signals.next() => {
            give_back(&leases, &request.name, None).await;
            let code = signals::exit_code(signal.as_raw());
            return CodeSnafu { code }.fail();
        }
    };
    Ok(outcome?)
}

/// A mistyped name is told at once: the operator would wait for the pool to come. Who may not read pools goes
/// without.
pub(super) async fn check_pool(
    cluster: &Cluster,
    namespace: &str,
    name: &str,
) -> Result<(), ClusterError> {
    let pools: Api<BranchPool> = cluster.api(namespace);
    match pools.get(name).await {
        Err(error) if is_not_found(&error) => Err(no_pool(&pools, namespace, name).await),
        Err(error) if !is_forbidden(&error) => Err(failed(format!("read pool {name}"))(error)),
        Ok(_) | Err(_) => Ok(()),
    }
}

pub(super) async fn no_pool(pools: &Api<BranchPool>, namespace: &str, name: &str) -> ClusterError {
    let known = match pools.list_metadata(&ListParams::default().limit(20)).await {
        Ok(list) if !list.items.is_empty() => {
            let names: Vec<_> = list.items.iter().map(ResourceExt::name_any).collect();
            format!("pools there: {}", names.join(", "))
        }
        _ => "list all with: kubectl branch pools -A".to_owned(),
    };
    NoPoolSnafu {
        namespace,
        name,
        known,
    }
    .build()
}

async fn create_and_wait(
    leases: &Api<BranchLease>,
    request: &Request,
    wait: Duration,
) -> Result<BranchLease, ClusterError> {
    let started = Instant::now();
    let created = create(leases, request).await?;
    let uid = created.uid();
    let bound = wait_until_bound(leases, request, started, wait).await;
    if matches!(
        bound,
        Err(ClusterError::NotReady { .. } | ClusterError::NoAnswer { .. })
    ) {
        give_back(leases, &request.name, uid).await;
    }
    bound
}

/// By apply, which alone can ask for unknown fields to be refused and is the same when it is sent again.
async fn create(leases: &Api<BranchLease>, request: &Request) -> Result<BranchLease, ClusterError> {
    let mut spec = json!({"poolRef": {"name": request.pool}});
    if let (Some(spec), Some(more)) = (spec.as_object_mut(), request.spec.as_object()) {
        spec.extend(more.clone());
    }
    let object = json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "BranchLease",
        "metadata": {"name": request.name, "namespace": request.namespace},
        "spec": spec,
    });
    let parameters = PatchParams::apply(MANAGER).validation_strict();
    leases
        .patch(&request.name, &parameters, &Patch::Apply(object))
        .await
        .map_err(failed(format!("create lease {}", request.name)))
}

async fn wait_until_bound(
    leases: &Api<BranchLease>,
    request: &Request,
    started: Instant,
    wait: Duration,
) -> Result<BranchLease, ClusterError> {
    let pool = format!("{}/{}", request.namespace, request.pool);
    let mut line = Line::new();
    let mut why = None;
    let states = follow(leases, &request.name);
    pin_mut!(states);
    loop {
        // Whoever does not want to wait still wants an answer.
        let patience = if why.is_some() {
            wait
        } else {
            wait.max(ANSWER)
        };
        let Ok(state) = timeout_at(started + patience, states.next()).await else {
            return match why {
                Some(why) => NotReadySnafu {
                    pool,
                    waited: wait,
                    why,
                }
                .fail(),
                None => NoAnswerSnafu { waited: patience }.fail(),
            };
        };
        let lease = state_of(state, &request.name)?;
        match progress(&lease) {
            Progress::Bound => return Ok(lease),
            Progress::Finished(phase, why) => {
                return FinishedSnafu {
                    name: &request.name,
                    phase: format!("{phase:?}"),
                    why,
                }
                .fail();
            }
            Progress::Unanswered => line.show(&format!("{pool}: asking the operator")),
            Progress::Waiting(now) => {
                line.show(&format!("{pool}: {now}"));
                why = Some(now);
            }
        }
    }
}

/// The lease once `is_done` says so of it; the last state after `patience`.
pub(super) async fn settle(
    leases: &Api<BranchLease>,
    name: &str,
    patience: Duration,
    is_done: impl Fn(&BranchLease) -> bool,
) -> Result<BranchLease, ClusterError> {
    let deadline = Instant::now() + patience;
    let mut line = Line::new();
    let states = follow(leases, name);
    pin_mut!(states);
    while let Ok(state) = timeout_at(deadline, states.next()).await {
        let lease = state_of(state, name)?;
        if is_done(&lease) {
            return Ok(lease);
        }
        line.show(&format!("lease {name}: asking the operator"));
    }
    NoAnswerSnafu { waited: patience }.fail()
}

type State = Result<Option<BranchLease>, watcher::Error>;

/// The lease as it is and as it becomes; over broken connections, with growing pauses.
fn follow(leases: &Api<BranchLease>, name: &str) -> impl Stream<Item = State> + use<> {
    let config = watcher::Config::default()
        .fields(&format!("metadata.name={name}"))
        .timeout(WATCH_SECONDS);
    watcher(leases.clone(), config)
        .default_backoff()
        .scan(false, |seen, event| {
            std::future::ready(Some(state(seen, event)))
        })
        .filter_map(std::future::ready)
}

/// `None` for events that tell nothing of the object. `seen`: whether the list that is being read has it.
fn state(
    seen: &mut bool,
    event: Result<watcher::Event<BranchLease>, watcher::Error>,
) -> Option<State> {
    match event {
        Ok(watcher::Event::Init) => *seen = false,
        Ok(watcher::Event::InitApply(lease)) => {
            *seen = true;
            return Some(Ok(Some(lease)));
        }
        // Deleted while no watch was open.
        Ok(watcher::Event::InitDone) if !*seen => return Some(Ok(None)),
        Ok(watcher::Event::Apply(lease)) => return Some(Ok(Some(lease))),
        Ok(watcher::Event::Delete(_)) => return Some(Ok(None)),
        Err(error) if is_final(&error) => return Some(Err(error)),
        Ok(watcher::Event::InitDone) | Err(_) => {}
    }
    None
}

/// What trying again does not mend.
fn is_final(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(error) | watcher::Error::WatchStartFailed(error) => {
            matches!(error, kube::Error::Api(status) if [401, 403, 404].contains(&status.code))
        }
        _ => false,
    }
}

fn state_of(state: Option<State>, name: &str) -> Result<BranchLease, ClusterError> {
    match state {
        Some(Ok(Some(lease))) => Ok(lease),
        Some(Ok(None)) | None => GoneSnafu { name }.fail(),
        Some(Err(
            watcher::Error::InitialListFailed(error) | watcher::Error::WatchStartFailed(error),
        )) => Err(failed(format!("watch lease {name}"))(error)),
        Some(Err(error)) => ApiSnafu {
            action: format!("watch lease {name}"),
            message: error.to_string(),
        }
        .fail(),
    }
}

/// With its UID only that very lease. What cannot be deleted ends by its own term.
async fn give_back(leases: &Api<BranchLease>, name: &str, uid: Option<String>) {
    let preconditions = uid.map(|uid| Preconditions {
        uid: Some(uid),
        resource_version: None,
    });
    let parameters = DeleteParams {
        preconditions,
        ..DeleteParams::default()
    };
    let deleted = tokio::time::timeout(ANSWER, leases.delete(name, &parameters)).await;
    match deleted {
        Ok(Err(error)) if !is_not_found(&error) => {
            eprintln!("warning: {}", failed(format!("delete lease {name}"))(error));
        }
        Ok(_) => {}
        Err(_) => eprintln!("warning: the API server did not answer the deletion of lease {name}"),
    }
}
