//! The lease controller: events into the machine of `plan::leases`, its actions out.

use std::collections::HashMap;

use branchpool_agent_api::{Client, ClientError, LeaseRequest, RenewRequest, ResetRequest};
use branchpool_crds::{BranchLease, LeasePhase};
use futures_util::StreamExt;
use kube::runtime::events::EventType;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Duration, sleep},
};
use tracing::{debug, info, warn};

use crate::{
    clock,
    cluster::Cluster,
    events::Events,
    follow::{self, Change, Scope},
    hook,
    index::Index,
    metrics::Metrics,
    plan::{
        NodeName, Uid,
        leases::{
            Action, Call, CallError, Event, Failure, LeaseObject, Machine, ObjectRef, Operation,
            Outcome, version,
        },
    },
};

/// What became of a lease that somebody asked for.
pub(crate) type Answer = Result<Box<branchpool_agent_api::Lease>, Failure>;

/// A question of the lease API.
#[derive(Debug)]
pub(crate) struct Question {
    pub(crate) lease: Box<LeaseObject>,
    pub(crate) answer: oneshot::Sender<Answer>,
}

/// Most that may wait for answers at a time.
pub(crate) const QUESTIONS: usize = 1_024;

pub(crate) struct Controller {
    machine: Machine,
    cluster: Cluster,
    index: watch::Receiver<Index>,
    epoch: watch::Receiver<u64>,
    deposed: mpsc::Sender<Option<u64>>,
    events: mpsc::Sender<Event>,
    record: Events,
    metrics: Metrics,
    waiting: HashMap<Uid, Vec<oneshot::Sender<Answer>>>,
}

/// What the controller is given.
pub(crate) struct Parts {
    pub(crate) cluster: Cluster,
    pub(crate) index: watch::Receiver<Index>,
    pub(crate) epoch: watch::Receiver<u64>,
    pub(crate) deposed: mpsc::Sender<Option<u64>>,
    /// The way back to the controller.
    pub(crate) events: mpsc::Sender<Event>,
    pub(crate) record: Events,
    pub(crate) metrics: Metrics,
}

impl Controller {
    pub(crate) fn new(parts: Parts) -> Self {
        Self {
            machine: Machine::default(),
            cluster: parts.cluster,
            index: parts.index,
            epoch: parts.epoch,
            deposed: parts.deposed,
            events: parts.events,
            record: parts.record,
            metrics: parts.metrics,
            waiting: HashMap::new(),
        }
    }

    pub(crate) async fn run(
        mut self,
        mut events: mpsc::Receiver<Event>,
        mut questions: mpsc::Receiver<Question>,
    ) {
        let mut counted_at = 0;
        loop {
            let deadline = self.machine.deadline();
            let event = tokio::select! {
                event = events.recv() => match event {
                    Some(event) => event,
                    None => return,
                },
                Some(question) = questions.recv() => {
                    self.asked(question);
                    continue;
                }
                () = until(deadline) => Event::Tick,
            };
            self.handle(event);
            // Counting looks at every lease.
            let now = clock::now();
            if now >= counted_at + 1_000 || events.is_empty() && now >= counted_at + 100 {
                counted_at = now;
                self.metrics.set_counts(&self.machine.counts());
            }
        }
    }

    fn asked(&mut self, question: Question) {
        let uid = question.lease.id.uid.clone();
        self.waiting
            .entry(uid.clone())
            .or_default()
            .push(question.answer);
        self.handle(Event::Seen(question.lease));
        self.handle(Event::Ask(uid));
    }

    fn handle(&mut self, event: Event) {
        for action in self.machine.handle(event, clock::now()) {
            match action {
                Action::Do(uid, operation) => self.begin(uid, operation),
                Action::Answer(uid, answer) => {
                    for waiting in self.waiting.remove(&uid).unwrap_or_default() {
                        // Who asked may have left.
                        let _left = waiting.send(answer.clone());
                    }
                }
                Action::Warn {
                    lease,
                    reason,
                    note,
                } => {
                    warn!(
                        namespace = lease.namespace,
                        lease = lease.name,
                        reason,
                        "{note}"
                    );
                    self.record
                        .lease(&lease, EventType::Warning, &reason, &note);
                }
                Action::Deposed { epoch } => {
                    warn!(?epoch, "an agent has obeyed a newer leader");
                    // Full: the same is being looked at.
                    let _full = self.deposed.try_send(epoch);
                }
            }
        }
    }

    fn begin(&self, uid: Uid, operation: Operation) {
        let agent = match &operation {
            Operation::Call(node, ..) => self.agent(node),
            _ => None,
        };
        let performer = Performer {
            cluster: self.cluster.clone(),
            agent,
            epoch: *self.epoch.borrow(),
            metrics: self.metrics.clone(),
        };
        let events = self.events.clone();
        tokio::spawn(async move {
            let outcome = performer.perform(operation).await;
            // The controller stops before this does.
            let _stopped = events.send(Event::Done(uid, outcome)).await;
        });
    }

    fn agent(&self, node: &NodeName) -> Option<Client> {
        let index = self.index.borrow();
        index.agents.get(node).map(|agent| agent.client.clone())
    }
}

async fn until(deadline: Option<u64>) {
    match deadline {
        Some(at) => sleep(Duration::from_millis(at.saturating_sub(clock::now()))).await,
        None => std::future::pending().await,
    }
}

struct Performer {
    cluster: Cluster,
    agent: Option<Client>,
    epoch: u64,
    metrics: Metrics,
}

impl Performer {
    async fn perform(&self, operation: Operation) -> Outcome {
        match operation {
            Operation::Call(node, id, call) => self.call(node, &id, call).await,
            Operation::CreateSecret(lease, connection) => {
                let made = self.cluster.create_secret(&lease, &connection).await;
                hook::reached("secret-created");
                Outcome::SecretCreated(made)
            }
            Operation::DeleteSecret { lease, secret } => {
                let deleted = self.cluster.delete_secret(&lease, secret.as_ref()).await;
                hook::reached("secret-deleted");
                Outcome::SecretDeleted(deleted)
            }
            Operation::Patch(lease, status) => {
                let patched = self.cluster.patch_lease(&lease, &status).await;
                if patched.is_ok() {
                    told(&lease, status.phase);
                }
                Outcome::Patched(status, patched)
            }
            Operation::DeleteLease(lease) => {
                Outcome::LeaseDeleted(self.cluster.delete_lease(&lease).await)
            }
            Operation::Confirm(lease) => {
                Outcome::Confirmed(self.cluster.lease_exists(&lease).await)
            }
        }
    }

    async fn call(&self, node: NodeName, id: &str, call: Call) -> Outcome {
        let name = call_name(&call);
        let result = match &self.agent {
            Some(agent) => self.ask(agent, id, &call).await,
            None => Err(CallError::Unreachable("no agent is known there".to_owned())),
        };
        self.metrics.agent_call(name, result.is_ok());
        match &result {
            Ok(_) => {
                debug!(node = %node, lease = id, call = name, "the agent did it");
                hook::reached(name);
            }
            Err(error) => info!(node = %node, lease = id, call = name, ?error, "the agent did not"),
        }
        match (call, result) {
            (Call::Forget, result) => Outcome::Forgotten(node, result.map(|_| ())),
            (_, Ok(Some(lease))) => Outcome::Called(node, Ok(lease)),
            (_, Ok(None)) => Outcome::Called(node, Err(CallError::Unreachable(String::new()))),
            (_, Err(error)) => Outcome::Called(node, Err(error)),
        }
    }

    async fn ask(
        &self,
        agent: &Client,
        id: &str,
        call: &Call,
    ) -> Result<Option<Box<branchpool_agent_api::Lease>>, CallError> {
        let epoch = Some(self.epoch);
        let answer = match call {
            Call::Lease(request) => {
                let request = LeaseRequest {
                    epoch,
                    ..request.clone()
                };
                agent.lease(id, &request).await.map(|(lease, _)| lease)
            }
            Call::Fetch => agent.get_lease(id).await,
            Call::Renew { ttl_seconds } => {
                let request = RenewRequest {
                    ttl_seconds: Some(*ttl_seconds),
                    epoch,
                };
                agent.renew(id, &request).await
            }
            Call::Reset { token } => {
                let request = ResetRequest {
                    token: token.clone(),
                    epoch,
                };
                agent.reset(id, &request).await
            }
            Call::Release => agent.release(id, epoch).await,
            Call::Forget => {
                agent
                    .forget(id, epoch)
                    .await
                    .map_err(|error| refusal(&error))?;
                return Ok(None);
            }
        };
        answer
            .map(|lease| Some(Box::new(lease)))
            .map_err(|error| refusal(&error))
    }
}

fn told(lease: &ObjectRef, phase: LeasePhase) {
    debug!(
        namespace = lease.namespace,
        lease = lease.name,
        ?phase,
        "status written"
    );
    match phase {
        LeasePhase::Pending => hook::reached("pending-written"),
        LeasePhase::Bound => hook::reached("bound-written"),
        LeasePhase::Expired | LeasePhase::Failed | LeasePhase::Lost => {
            hook::reached("end-written");
        }
    }
}

fn call_name(call: &Call) -> &'static str {
    match call {
        Call::Lease(_) => "lease",
        Call::Fetch => "fetch",
        Call::Renew { .. } => "renew",
        Call::Reset { .. } => "reset",
        Call::Release => "release",
        Call::Forget => "forget",
    }
}

pub(crate) fn refusal(error: &ClientError) -> CallError {
    match error.problem() {
        Some(problem) => CallError::Refused {
            reason: problem.reason.clone(),
            message: problem.detail.clone(),
            retry_after: problem.retry_after_ms,
            epoch: problem.epoch,
        },
        None => CallError::Unreachable(error.to_string()),
    }
}

/// Brings the leases of the API server to the controller.
pub(crate) async fn follow_leases(scope: Scope, client: kube::Client, events: mpsc::Sender<Event>) {
    let mut changes = follow::changes(scope.apis(&client), &follow::config());
    while let Some(change) = changes.next().await {
        let event = match change {
            Change::Seen(lease) => match LeaseObject::read(BranchLease::clone(&lease)) {
                Some(object) => Event::Seen(Box::new(object)),
                None => continue,
            },
            Change::Invalid(metadata) => match ObjectRef::read(&metadata) {
                Some(id) => Event::Opaque(id, version(&metadata)),
                None => continue,
            },
            Change::Deleted(metadata) => match metadata.uid {
                Some(uid) => {
                    hook::reached("deletion-seen");
                    Event::Deleted(uid.into())
                }
                None => continue,
            },
            Change::Listed(uids) => Event::Listed(uids),
        };
        // The controller stops before this does.
        let _stopped = events.send(event).await;
    }
}
