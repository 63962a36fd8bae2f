//! The operator's CA: kept in a Secret of its own namespace, told to agents in a `ConfigMap` of theirs,
//! replaced step by step. What the steps are is decided in `branchpool_trust::plan`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use branchpool_trust::{
    Authority, authority,
    enrol::{PodToken, Refusal, Reviewed, Reviewer},
    plan::{Agent, AgentTrust, Rotation, Step, step},
};
use k8s_openapi::{
    ByteString,
    api::{
        authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus},
        core::v1::{ConfigMap, Secret},
    },
};
use kube::{Api, Client, ResourceExt, api::PostParams, core::ObjectMeta};
use snafu::Snafu;
use time::OffsetDateTime;
use tokio::{
    sync::{Mutex, watch},
    time::sleep,
};
use tracing::{info, warn};

use crate::{cluster::describe, index::Index};

/// Secret and `ConfigMap`.
const NAME: &str = "branchpool-ca";
/// Entry of the `ConfigMap`.
const BUNDLE: &str = "ca.crt";
/// Audience of agents' tokens.
const AUDIENCE: &str = "branchpool-operator";
/// On the Secret: somebody wants the CA replaced before its time. The value is theirs.
const REPLACE: &str = "branchpool.dev/replace-ca";
/// No event tells that a certificate is due.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// No event tells that another replica has replaced the CA.
const FOLLOW_EVERY: Duration = Duration::from_secs(5);
/// Between two steps every replica takes up the first, for it serves and signs as well.
const STEPS_APART: Duration = Duration::from_secs(10);

#[derive(Debug, Snafu)]
pub(crate) enum Error {
    #[snafu(
        display(
            "the CA in Secret {NAME} is unusable: {source}; restore the Secret, or delete it for a new CA, which agents then have to enrol with"
        ),
        context(false)
    )]
    Authority { source: authority::Error },
    #[snafu(
        display("the CA cannot be read or kept: {}", describe(source)),
        context(false)
    )]
    Cluster {
        #[snafu(source(from(kube::Error, Box::new)))]
        source: Box<kube::Error>,
    },
}

/// Keeps the CA where all replicas find it.
pub(crate) struct Keeper {
    secrets: Api<Secret>,
    config_maps: Api<ConfigMap>,
    current: watch::Sender<Arc<Authority>>,
    /// One step at a time.
    turn: Mutex<()>,
}

impl Keeper {
    /// With the CA that is there, or a new one.
    pub(crate) async fn open(
        client: &Client,
        namespace: &str,
        agent_namespace: &str,
    ) -> Result<Arc<Self>, Error> {
        let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
        let config_maps = Api::namespaced(client.clone(), agent_namespace);
        let authority = match secrets.get_opt(NAME).await? {
            Some(secret) => Authority::load(&entries(&secret))?,
            None => make(&secrets).await?,
        };
        let keeper = Self {
            secrets,
            config_maps,
            current: watch::Sender::new(Arc::new(authority)),
            turn: Mutex::new(()),
        };
        keeper.publish().await?;
        Ok(Arc::new(keeper))
    }

    pub(crate) fn authority(&self) -> watch::Receiver<Arc<Authority>> {
        self.current.subscribe()
    }

    /// Takes up what another replica has kept, for ever.
    pub(crate) async fn follow(self: Arc<Self>) {
        loop {
            sleep(FOLLOW_EVERY).await;
            let _turn = self.turn.lock().await;
            if let Err(error) = self.read().await {
                warn!("the CA was not looked at: {error}");
            }
        }
    }

    /// Replaces what is due, for ever: the leader's work.
    pub(crate) async fn rotate(self: Arc<Self>, mut index: watch::Receiver<Index>) {
        loop {
            let agents = agents(&index.borrow_and_update());
            let stepped = {
                let _turn = self.turn.lock().await;
                self.step(&agents).await
            };
            match stepped {
                Ok(true) => sleep(STEPS_APART).await,
                Ok(false) => {}
                Err(error) => {
                    warn!("the CA was not replaced, and is tried again in a minute: {error}");
                }
            }
            let rotation = self.current.borrow().rotation();
            let under_way = !matches!(rotation, Rotation::Steady { .. });
            tokio::select! {
                () = sleep(LOOK_AGAIN) => {}
                () = others(&mut index, &agents), if under_way => {}
            }
        }
    }

    async fn read(&self) -> Result<Option<Secret>, Error> {
        let Some(secret) = self.secrets.get_opt(NAME).await? else {
            return Ok(None);
        };
        let found = entries(&secret);
        if self.current.borrow().save() != found {
            self.current
                .send_replace(Arc::new(Authority::load(&found)?));
            info!("the CA is another one now");
        }
        Ok(Some(secret))
    }

    /// Answers whether it made a step.
    async fn step(&self, agents: &[Agent]) -> Result<bool, Error> {
        let Some(mut secret) = self.read().await? else {
            return Ok(false);
        };
        let current = Arc::clone(&self.current.borrow());
        let now = OffsetDateTime::now_utc();
        let asked = secret.annotations().contains_key(REPLACE);
        let next = step(&current.rotation(), agents, asked, now.unix_timestamp());
        if let Step::Keep { waiting_for } = next {
            if !waiting_for.is_empty() {
                info!(
                    ?waiting_for,
                    "the next step of replacing the CA waits for agents"
                );
            }
            self.publish().await?;
            return Ok(false);
        }
        if next == Step::Introduce {
            // In the same write, so that what was asked for is done once.
            secret.annotations_mut().remove(REPLACE);
        }
        info!(step = ?next, "replacing the CA");
        let Some(authority) = current.after(&next, now)? else {
            return Ok(false);
        };
        // Kept before anybody sees it; with its resourceVersion, so that two leaders keep one.
        secret.data = Some(data(&authority));
        self.secrets
            .replace(NAME, &PostParams::default(), &secret)
            .await?;
        self.current.send_replace(Arc::new(authority));
        self.publish().await?;
        Ok(true)
    }

    /// The bundle, to where agents read it.
    async fn publish(&self) -> Result<(), Error> {
        let bundle = self.current.borrow().bundle_pem();
        let wanted = BTreeMap::from([(BUNDLE.to_owned(), bundle)]);
        let params = PostParams::default();
        match self.config_maps.get_opt(NAME).await? {
            Some(found) if found.data.as_ref() == Some(&wanted) => {}
            Some(mut found) => {
                found.data = Some(wanted);
                self.config_maps.replace(NAME, &params, &found).await?;
            }
            None => {
                let map = ConfigMap {
                    metadata: named(),
                    data: Some(wanted),
                    ..ConfigMap::default()
                };
                self.config_maps.create(&params, &map).await?;
            }
        }
        Ok(())
    }
}

fn named() -> ObjectMeta {
    ObjectMeta {
        name: Some(NAME.to_owned()),
        ..ObjectMeta::default()
    }
}

fn data(authority: &Authority) -> BTreeMap<String, ByteString> {
    let entries = authority.save().into_iter();
    entries
        .map(|(name, value)| (name, ByteString(value)))
        .collect()
}

fn entries(secret: &Secret) -> BTreeMap<String, Vec<u8>> {
    let data = secret.data.iter().flatten();
    data.map(|(name, value)| (name.clone(), value.0.clone()))
        .collect()
}

/// A new CA, or the one of a replica that was faster.
async fn make(secrets: &Api<Secret>) -> Result<Authority, Error> {
    let authority = Authority::make(OffsetDateTime::now_utc())?;
    let secret = Secret {
        metadata: named(),
        data: Some(data(&authority)),
        type_: Some("Opaque".to_owned()),
        ..Secret::default()
    };
    match secrets.create(&PostParams::default(), &secret).await {
        Ok(_) => {
            info!("made a CA");
            Ok(authority)
        }
        Err(kube::Error::Api(status)) if status.code == 409 => {
            let found = secrets.get(NAME).await?;
            Ok(Authority::load(&entries(&found))?)
        }
        Err(error) => Err(error.into()),
    }
}

/// Waits until agents say something else about their trust.
async fn others(index: &mut watch::Receiver<Index>, known: &[Agent]) {
    let others = |index: &Index| agents(index) != known;
    if index.wait_for(others).await.is_err() {
        // The writer ends with the leadership, and this with it.
        std::future::pending::<()>().await;
    }
}

/// None before all are known: a step is not to be taken on the word of some.
fn agents(index: &Index) -> Vec<Agent> {
    if !index.discovered {
        return Vec::new();
    }
    let present = index.agents.values().filter(|agent| agent.present);
    present
        .map(|agent| Agent {
            node: agent.pod.node.to_string(),
            trust: agent
                .node
                .as_ref()
                .and_then(|node| node.trust.as_ref())
                .and_then(|trust| AgentTrust::parse(&trust.trusts, &trust.issuer)),
        })
        .collect()
}

/// Asks the API server whose a token is.
#[derive(Clone)]
pub(crate) struct PodReviewer {
    pub(crate) client: Client,
    /// User name of the agents' account.
    pub(crate) account: String,
}

pub(crate) async fn review(
    client: &Client,
    token: &str,
    audiences: Option<Vec<String>>,
) -> Result<TokenReviewStatus, kube::Error> {
    let api: Api<TokenReview> = Api::all(client.clone());
    let review = TokenReview {
        spec: TokenReviewSpec {
            token: Some(token.to_owned()),
            audiences,
        },
        ..TokenReview::default()
    };
    let answer = api.create(&PostParams::default(), &review).await?;
    Ok(answer.status.unwrap_or_default())
}

impl Reviewer for PodReviewer {
    async fn review(&self, token: &PodToken) -> Result<Reviewed, Refusal> {
        let audiences = Some(vec![AUDIENCE.to_owned()]);
        let status = review(&self.client, token.reveal(), audiences).await;
        let status = status.map_err(|error| {
            Refusal::Unavailable(format!(
                "the API server did not review the token: {}",
                describe(&error)
            ))
        })?;
        let denied = |why: &str| Refusal::Denied(why.to_owned());
        let for_us = status
            .audiences
            .iter()
            .flatten()
            .any(|audience| audience == AUDIENCE);
        if status.authenticated != Some(true) || !for_us {
            return Err(denied("the token is expired, or for another audience"));
        }
        let user = status.user.unwrap_or_default();
        if user.username.as_deref() != Some(&*self.account) {
            return Err(denied("the token is of another account than the agents'"));
        }
        let extra = user.extra.unwrap_or_default();
        let of = |what: &str| {
            let values = extra.get(&format!("authentication.kubernetes.io/{what}"))?;
            values.first().cloned()
        };
        let (Some(node), Some(pod_uid)) = (of("node-name"), of("pod-uid")) else {
            return Err(denied(
                "the token is not of a Pod on a node: it has to be a projected one",
            ));
        };
        Ok(Reviewed { node, pod_uid })
    }
}
