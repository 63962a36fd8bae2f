//! The `ConfigMap`s that pools name: one watch each, while a pool names it.

use std::collections::{BTreeMap, BTreeSet};

use branchpool_crds::{BranchPoolSpec, ConfigMap as Scripts, Source};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    runtime::{WatchStreamExt, watcher},
};
use tokio::{sync::mpsc, task::JoinHandle};

use super::{Notice, state::PoolFacts};

/// Namespace and name.
pub(crate) type Key = (String, String);

#[derive(Clone, Debug)]
pub(crate) enum Content {
    Absent,
    Present(BTreeMap<String, String>),
    /// Code and reason of the API server.
    Unreadable(String),
}

struct Followed {
    content: Option<Content>,
    task: JoinHandle<()>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(super) struct Sources {
    client: Client,
    notices: mpsc::Sender<Notice>,
    followed: BTreeMap<Key, Followed>,
}

/// Why a pool's source cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// It is being read.
    Unknown,
    Reason(&'static str, String),
}

impl Sources {
    pub(super) fn new(client: Client, notices: mpsc::Sender<Notice>) -> Self {
        Self {
            client,
            notices,
            followed: BTreeMap::new(),
        }
    }

    pub(super) fn take(&mut self, key: &Key, content: Content) {
        if let Some(followed) = self.followed.get_mut(key) {
            followed.content = Some(content);
        }
    }

    /// Follows exactly what these pools name.
    pub(super) fn want<'a>(&mut self, pools: impl Iterator<Item = &'a PoolFacts>) {
        let wanted: BTreeSet<Key> = pools.filter_map(key_of).collect();
        self.followed.retain(|key, _| wanted.contains(key));
        for key in wanted {
            let (client, notices) = (self.client.clone(), self.notices.clone());
            self.followed
                .entry(key.clone())
                .or_insert_with(|| Followed {
                    content: None,
                    task: tokio::spawn(follow(client, key, notices)),
                });
        }
    }

    /// The pool's spec as agents take it: scripts instead of references.
    pub(super) fn resolve(&self, pool: &PoolFacts) -> Result<BranchPoolSpec, Trouble> {
        let mut spec = pool.spec.clone();
        let Some(key) = key_of(pool) else {
            return Ok(spec);
        };
        let name = &key.1;
        let content = self.followed.get(&key).and_then(|it| it.content.as_ref());
        let data = match content {
            None => return Err(Trouble::Unknown),
            Some(Content::Present(data)) => data,
            Some(Content::Absent) => {
                return Err(Trouble::Reason(
                    "ConfigMapNotFound",
                    format!(
                        "there is no ConfigMap {name} in namespace {}, which spec.source.sql.configMapRef names: create it",
                        key.0
                    ),
                ));
            }
            Some(Content::Unreadable(why)) => {
                return Err(Trouble::Reason(
                    "ConfigMapForbidden",
                    format!(
                        "the ConfigMap {name} cannot be read ({why}): allow the operator to list and watch configmaps in namespace {}",
                        key.0
                    ),
                ));
            }
        };
        let map = Scripts {
            namespace: key.0.clone(),
            name: name.clone(),
            data: data.clone(),
        };
        if let Source::Sql(source) = &mut spec.source {
            let named: Vec<_> = map.scripts().collect();
            if named.is_empty() {
                return Err(Trouble::Reason(
                    "ConfigMapEmpty",
                    format!("the ConfigMap {name} has no entry whose name ends in .sql: add one"),
                ));
            }
            source.config_map_ref = None;
            source.scripts.splice(0..0, named);
        }
        Ok(spec)
    }
}

fn key_of(pool: &PoolFacts) -> Option<Key> {
    let Source::Sql(source) = &pool.spec.source else {
        return None;
    };
    let reference = source.config_map_ref.as_ref()?;
    Some((pool.id.namespace.clone(), reference.name.clone()))
}

async fn follow(client: Client, key: Key, notices: mpsc::Sender<Notice>) {
    let api: Api<ConfigMap> = Api::namespaced(client, &key.0);
    let mut stream = watcher::watch_object(api, &key.1).default_backoff().boxed();
    while let Some(found) = stream.next().await {
        let content = match found {
            Ok(Some(map)) => Content::Present(map.data.unwrap_or_default()),
            Ok(None) => Content::Absent,
            Err(
                watcher::Error::InitialListFailed(kube::Error::Api(status))
                | watcher::Error::WatchStartFailed(kube::Error::Api(status)),
            ) if status.code == 403 => Content::Unreadable("403 Forbidden".to_owned()),
            // It is tried again; what was read stays in force.
            Err(_) => continue,
        };
        let notice = Notice::Source(key.clone(), content);
        if notices.send(notice).await.is_err() {
            return;
        }
    }
}
