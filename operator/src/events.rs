//! Events for people, about what is out of the ordinary; each costs the API server a write, so a few
//! may wait and more are dropped.

use branchpool_crds::{BranchLease, BranchPool};
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client, Resource,
    runtime::events::{Event, EventType, Recorder, Reporter},
};
use tokio::sync::mpsc;
use tracing::debug;

use crate::{cluster::describe, plan::leases::ObjectRef};

const WAITING: usize = 256;
const NOTE_LIMIT: usize = 1_000;

/// Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    queue: mpsc::Sender<(Event, ObjectReference)>,
}

impl Events {
    /// `instance`: which replica reports.
    pub(crate) fn start(client: Client, instance: &str) -> Self {
        let (queue, mut waiting) = mpsc::channel::<(Event, ObjectReference)>(WAITING);
        let reporter = Reporter {
            controller: "branchpool-operator".to_owned(),
            instance: Some(instance.to_owned()),
        };
        let recorder = Recorder::new(client, reporter);
        tokio::spawn(async move {
            while let Some((event, about)) = waiting.recv().await {
                if let Err(error) = recorder.publish(&event, &about).await {
                    debug!(error = describe(&error), "an Event was not written");
                }
            }
        });
        Self { queue }
    }

    pub(crate) fn lease(&self, lease: &ObjectRef, kind: EventType, reason: &str, note: &str) {
        self.about(reference::<BranchLease>(lease), kind, reason, note);
    }

    pub(crate) fn pool(&self, pool: &ObjectRef, kind: EventType, reason: &str, note: &str) {
        self.about(reference::<BranchPool>(pool), kind, reason, note);
    }

    fn about(&self, about: ObjectReference, kind: EventType, reason: &str, note: &str) {
        let event = Event {
            type_: kind,
            reason: reason.to_owned(),
            note: Some(note.chars().take(NOTE_LIMIT).collect()),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        if self.queue.try_send((event, about)).is_err() {
            debug!(reason, "an Event was dropped: too many wait");
        }
    }
}

fn reference<K: Resource<DynamicType = ()>>(object: &ObjectRef) -> ObjectReference {
    ObjectReference {
        api_version: Some(K::api_version(&()).into_owned()),
        kind: Some(K::kind(&()).into_owned()),
        name: Some(object.name.clone()),
        namespace: Some(object.namespace.clone()),
        uid: Some(object.uid.to_string()),
        ..ObjectReference::default()
    }
}
