//! Objects of the API server as they come, change and go.
//!
//! An object that cannot be decoded, as one of a newer version, is told as such and stops nothing
//! else. Watches end after some minutes by themselves, so one that a load balancer swallowed is
//! noticed.

use std::{collections::BTreeSet, fmt::Debug};

use futures_util::{
    StreamExt,
    future::ready,
    stream::{BoxStream, SelectAll},
};
use kube::{
    Api, Client, Resource,
    core::{DeserializeGuard, NamespaceResourceScope, ObjectMeta},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event},
    },
};
use serde::de::DeserializeOwned;
use tracing::warn;

use crate::plan::Uid;

/// Below the five minutes after which load balancers drop idle connections.
const WATCH_SECONDS: u32 = 180;

#[derive(Debug)]
pub(crate) enum Change<K> {
    Seen(Box<K>),
    /// It exists, and this version cannot decode it.
    Invalid(Box<ObjectMeta>),
    Deleted(Box<ObjectMeta>),
    /// Exactly these exist, over all namespaces that are followed.
    Listed(BTreeSet<Uid>),
}

/// Where objects are followed.
#[derive(Clone, Debug)]
pub(crate) enum Scope {
    All,
    Namespaces(Vec<String>),
}

impl Scope {
    pub(crate) fn new(namespaces: Vec<String>) -> Self {
        if namespaces.is_empty() {
            Self::All
        } else {
            Self::Namespaces(namespaces)
        }
    }

    pub(crate) fn holds(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::Namespaces(names) => names.iter().any(|name| name == namespace),
        }
    }

    pub(crate) fn apis<K>(&self, client: &Client) -> Vec<Api<K>>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        match self {
            Self::All => vec![Api::all(client.clone())],
            Self::Namespaces(names) => names
                .iter()
                .map(|name| Api::namespaced(client.clone(), name))
                .collect(),
        }
    }
}

pub(crate) fn config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}

/// What one namespace holds.
#[derive(Default)]
struct Held {
    uids: BTreeSet<Uid>,
    listing: BTreeSet<Uid>,
    complete: bool,
}

/// Changes for ever. Errors are logged and tried again, with a pause that grows.
pub(crate) fn changes<K>(
    apis: Vec<Api<DeserializeGuard<K>>>,
    config: &watcher::Config,
) -> BoxStream<'static, Change<K>>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut held: Vec<Held> = apis.iter().map(|_| Held::default()).collect();
    let streams = apis.into_iter().enumerate().map(|(index, api)| {
        let stream = watcher::watcher(api, config.clone()).default_backoff();
        stream.map(move |event| (index, event)).boxed()
    });
    let streams: SelectAll<_> = streams.collect();
    streams
        .filter_map(move |(index, event)| ready(taken(&mut held, index, event)))
        .boxed()
}

fn taken<K>(
    held: &mut [Held],
    index: usize,
    event: Result<Event<DeserializeGuard<K>>, watcher::Error>,
) -> Option<Change<K>>
where
    K: Resource<DynamicType = ()>,
{
    let here = &mut held[index];
    match event {
        Err(error) => {
            warn!(
                kind = %K::kind(&()),
                error = short(&error),
                "the watch broke; it is opened again"
            );
            None
        }
        Ok(Event::Init) => {
            here.listing.clear();
            None
        }
        Ok(Event::InitApply(object)) => {
            here.listing.extend(uid(&object));
            Some(change(object))
        }
        Ok(Event::InitDone) => {
            here.uids = std::mem::take(&mut here.listing);
            here.complete = true;
            let all = held.iter().flat_map(|held| held.uids.iter().cloned());
            let all = all.collect();
            held.iter()
                .all(|held| held.complete)
                .then_some(Change::Listed(all))
        }
        Ok(Event::Apply(object)) => {
            here.uids.extend(uid(&object));
            Some(change(object))
        }
        Ok(Event::Delete(object)) => {
            if let Some(uid) = uid(&object) {
                here.uids.remove(&uid);
            }
            Some(Change::Deleted(Box::new(metadata(&object).clone())))
        }
    }
}

fn short(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => crate::cluster::describe(error),
        watcher::Error::WatchError(status) => format!("{} {}", status.code, status.reason),
        watcher::Error::NoResourceVersion => "no resourceVersion".to_owned(),
    }
}

fn metadata<K: Resource>(object: &DeserializeGuard<K>) -> &ObjectMeta {
    match &object.0 {
        Ok(object) => object.meta(),
        Err(invalid) => &invalid.metadata,
    }
}

fn uid<K: Resource>(object: &DeserializeGuard<K>) -> Option<Uid> {
    metadata(object).uid.as_deref().map(Uid::from)
}

fn change<K: Resource<DynamicType = ()>>(object: DeserializeGuard<K>) -> Change<K> {
    match object.0 {
        Ok(object) => Change::Seen(Box::new(object)),
        Err(invalid) => {
            let name = invalid.metadata.name.as_deref().unwrap_or_default();
            let namespace = invalid.metadata.namespace.as_deref().unwrap_or_default();
            warn!(
                kind = %K::kind(&()), namespace, name,
                "an object cannot be decoded by this version and is left alone: {}", invalid.error
            );
            Change::Invalid(Box::new(invalid.metadata))
        }
    }
}
