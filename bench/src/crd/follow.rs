//! Objects that the bench creates, and what its own watch sees of them. The client is the same for
//! leases and for the floor.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, TryStreamExt as _, future::try_join_all, pin_mut, stream};
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, ResourceExt as _,
    api::{
        ApiResource, DeleteParams, DynamicObject, ListParams, PostParams, WatchEvent, WatchParams,
    },
};
use serde_json::{Value, json};
use snafu::{ResultExt, whatever};
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::timeout,
};

use super::stage::NAMESPACE;
use crate::error::Result;

/// For one object to become as wanted.
const PATIENCE: Duration = Duration::from_mins(1);
/// Below the longest that the API server admits.
pub(super) const WATCH_SECONDS: u32 = 290;
/// Events that wait to be looked at.
pub(super) const WAITING: usize = 1_024;

/// Whether an object is as it is waited for.
pub(super) type Wanted = fn(&DynamicObject) -> bool;

/// Objects of one kind in the bench's namespace.
#[derive(Clone)]
pub(super) struct Kind {
    pub(super) api: Api<DynamicObject>,
    resource: ApiResource,
    spec: Value,
    wanted: Wanted,
}

impl Kind {
    pub(super) fn new(
        client: &kube::Client,
        resource: ApiResource,
        spec: Value,
        wanted: Wanted,
    ) -> Self {
        Self {
            api: Api::namespaced_with(client.clone(), NAMESPACE, &resource),
            resource,
            spec,
            wanted,
        }
    }

    fn object(&self, name: &str) -> DynamicObject {
        DynamicObject::new(name, &self.resource).data(json!({ "spec": self.spec }))
    }

    /// Opens as many connections as requests will be made at a time: a burst is of kept-alive ones.
    pub(super) async fn warm_connections(&self, count: usize) -> Result<()> {
        let limit = ListParams::default().limit(1);
        let requests = (0..count).map(|_| self.api.list_metadata(&limit));
        let lists = try_join_all(requests).await;
        lists.whatever_context("cannot list objects")?;
        Ok(())
    }

    pub(super) async fn create(&self, name: &str) -> Result<()> {
        let object = self.object(name);
        let created = self.api.create(&PostParams::default(), &object).await;
        created.with_whatever_context(|_| format!("cannot create {name}"))?;
        Ok(())
    }

    pub(super) async fn delete(&self, name: &str) -> Result<()> {
        let deleted = self.api.delete(name, &DeleteParams::default()).await;
        deleted.with_whatever_context(|_| format!("cannot delete {name}"))?;
        Ok(())
    }

    /// So many at a time.
    pub(super) async fn delete_all(&self, names: &[String], at_a_time: usize) -> Result<()> {
        stream::iter(names.iter().map(Ok))
            .try_for_each_concurrent(at_a_time, |name| self.delete(name))
            .await
    }

    /// From now on.
    pub(super) async fn watch(&self) -> Result<Watch> {
        let list = self.api.list_metadata(&ListParams::default()).await;
        let list = list.whatever_context("cannot list objects")?;
        let version = list.metadata.resource_version.unwrap_or_default();
        let params = WatchParams::default().timeout(WATCH_SECONDS);
        let (api, wanted) = (self.api.clone(), self.wanted);
        let board = Arc::new(Mutex::new(Board::default()));
        let (opened, open) = oneshot::channel();
        let task = tokio::spawn(follow(
            api,
            params,
            version,
            wanted,
            Arc::clone(&board),
            opened,
        ));
        open.await.whatever_context("the watch was not opened")?;
        Ok(Watch { board, task })
    }
}

#[derive(Default)]
struct Board {
    waiting: HashMap<String, oneshot::Sender<Seen>>,
    /// How often each object was told as it is wanted.
    told: BTreeMap<String, u32>,
    trouble: Option<String>,
}

/// An object as it was wanted, and when.
pub(super) struct Seen {
    pub(super) at: Instant,
    pub(super) object: Box<DynamicObject>,
}

/// Ends when dropped.
pub(super) struct Watch {
    board: Arc<Mutex<Board>>,
    task: JoinHandle<()>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn locked(board: &Mutex<Board>) -> MutexGuard<'_, Board> {
    board.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    /// Creates an object and waits until the watch tells it as wanted. Answers the time between the two.
    pub(super) async fn create(
        &self,
        kind: &Kind,
        name: &str,
    ) -> Result<(Duration, DynamicObject)> {
        let (tell, told) = oneshot::channel();
        locked(&self.board).waiting.insert(name.to_owned(), tell);
        let sent = Instant::now();
        let (created, told) = tokio::join!(kind.create(name), timeout(PATIENCE, told));
        created?;
        let Ok(Ok(seen)) = told else {
            let trouble = locked(&self.board).trouble.take().unwrap_or_default();
            whatever!("{name} did not become as waited for {trouble}")
        };
        Ok((seen.at.duration_since(sent), *seen.object))
    }

    /// Names of those that were told as wanted, all exactly once.
    pub(super) fn told_once(&self) -> Result<Vec<String>> {
        let told = locked(&self.board).told.clone();
        if let Some((name, times)) = told.iter().find(|(_, times)| **times != 1) {
            whatever!("{name} was told {times} times");
        }
        Ok(told.into_keys().collect())
    }
}

async fn follow(
    api: Api<DynamicObject>,
    params: WatchParams,
    version: String,
    wanted: Wanted,
    board: Arc<Mutex<Board>>,
    opened: oneshot::Sender<()>,
) {
    let events = match api.watch(&params, &version).await {
        Ok(events) => events,
        // Nobody is told that it is open.
        Err(error) => return locked(&board).trouble = Some(format!("({error})")),
    };
    pin_mut!(events);
    let _left = opened.send(());
    while let Some(event) = events.next().await {
        let at = Instant::now();
        match event {
            Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) if wanted(&object) => {
                let mut board = locked(&board);
                let name = object.name_any();
                *board.told.entry(name.clone()).or_default() += 1;
                if let Some(waiting) = board.waiting.remove(&name) {
                    let object = Box::new(object);
                    let _left = waiting.send(Seen { at, object });
                }
            }
            Ok(WatchEvent::Error(status)) => {
                locked(&board).trouble = Some(format!("({status:?})"));
            }
            Err(error) => locked(&board).trouble = Some(format!("({error})")),
            Ok(_) => {}
        }
    }
}

/// Counts the Secrets of leases that go, by a watch of their metadata.
pub(super) struct Departures {
    gone: mpsc::Receiver<()>,
    task: JoinHandle<()>,
}

impl Departures {
    pub(super) async fn watch(secrets: Api<Secret>) -> Result<Self> {
        let list = secrets.list_metadata(&ListParams::default()).await;
        let list = list.whatever_context("cannot list Secrets")?;
        let version = list.metadata.resource_version.unwrap_or_default();
        let params = WatchParams::default().timeout(WATCH_SECONDS);
        let (tell, gone) = mpsc::channel(WAITING);
        let task = tokio::spawn(async move {
            let Ok(events) = secrets.watch_metadata(&params, &version).await else {
                return;
            };
            pin_mut!(events);
            while let Some(event) = events.next().await {
                if let Ok(WatchEvent::Deleted(_)) = event {
                    let _left = tell.send(()).await;
                }
            }
        });
        Ok(Self { gone, task })
    }

    /// Waits until so many have gone.
    pub(super) async fn wait(&mut self, count: usize) -> Result<()> {
        let mut seen = 0;
        while seen < count {
            match timeout(PATIENCE, self.gone.recv()).await {
                Ok(Some(())) => seen += 1,
                _ => whatever!("{seen} of {count} Secrets are gone, and no more go"),
            }
        }
        Ok(())
    }
}

impl Drop for Departures {
    fn drop(&mut self) {
        self.task.abort();
    }
}
