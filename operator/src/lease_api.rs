//! `POST /v1/namespaces/{namespace}/pools/{pool}/leases`: a lease in one request, with its connection in
//! the answer.
//!
//! The object comes first, so names, quotas, rules and terminating namespaces are the API server's.
//! The object's name is the key of a retry: the same user gets the same lease again.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    Json, Router,
    body::to_bytes,
    extract::{Path, Request, State},
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{AUTHORIZATION, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
    routing::post,
};
use branchpool_agent_api::{Problem, problem::PROBLEM_MEDIA_TYPE};
use branchpool_crds::{BranchLease, BranchLeaseSpec};
use k8s_openapi::api::authentication::v1::UserInfo;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::{Api, api::PostParams, core::ObjectMeta};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::{
    sync::{Semaphore, mpsc, oneshot, watch},
    time::timeout,
};

use crate::{
    cluster::{Cluster, describe},
    leases::Question,
    plan::leases::LeaseObject,
    trust::review,
};

const MAX_BODY: usize = 64 << 10;
/// Who is who, and may do what, is believed for so long.
const BELIEVED: Duration = Duration::from_secs(10);
const REMEMBERED: usize = 4_096;
/// Requests at a time; more are turned away.
const AT_ONCE: usize = 512;
/// A lease that waits longer for its branch goes on waiting without its caller.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Who asked for a lease, so that nobody else gets its connection by its name.
const ASKED_BY: &str = "branchpool.dev/asked-by";

/// Where questions go while this replica leads.
pub(crate) type Leading = watch::Receiver<Option<mpsc::Sender<Question>>>;

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Body {
    /// Of the object.
    name: String,
    #[serde(default)]
    ttl: Option<String>,
    #[serde(default)]
    priority: Option<String>,
    #[serde(default)]
    holder: Option<String>,
    /// `None`, which is the default here, or `Create`.
    #[serde(default)]
    connection_secret: Option<String>,
}

/// What is answered; times are milliseconds since 1970.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Granted {
    name: String,
    uid: String,
    host: String,
    port: u16,
    database: String,
    user: String,
    password: Option<String>,
    uri: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    ca: Option<String>,
    bound_at: u64,
    expires_at: u64,
}

struct Desk {
    cluster: Cluster,
    leading: Leading,
    places: Semaphore,
    users: Mutex<HashMap<[u8; 32], (Instant, UserInfo)>>,
    allowed: Mutex<HashMap<([u8; 32], String), Instant>>,
}

pub(crate) fn router(cluster: Cluster, leading: Leading) -> Router {
    let desk = Desk {
        cluster,
        leading,
        places: Semaphore::new(AT_ONCE),
        users: Mutex::default(),
        allowed: Mutex::default(),
    };
    Router::new()
        .route(
            "/v1/namespaces/{namespace}/pools/{pool}/leases",
            post(lease),
        )
        .with_state(Arc::new(desk))
}

async fn lease(
    State(desk): State<Arc<Desk>>,
    Path((namespace, pool)): Path<(String, String)>,
    request: Request,
) -> Response {
    match desk.answer(&namespace, &pool, request).await {
        Ok(granted) => (StatusCode::CREATED, Json(granted)).into_response(),
        Err(problem) => refused(&problem),
    }
}

fn refused(problem: &Problem) -> Response {
    let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, Json(problem)).into_response();
    let media_type = HeaderValue::from_static(PROBLEM_MEDIA_TYPE);
    response.headers_mut().insert(CONTENT_TYPE, media_type);
    response
}

impl Desk {
    async fn answer(
        &self,
        namespace: &str,
        pool: &str,
        request: Request,
    ) -> Result<Granted, Problem> {
        let Ok(_place) = self.places.try_acquire() else {
            return Err(Problem::new(
                503,
                "TooManyRequests",
                format!("{AT_ONCE} requests are under way, which is the most: ask again"),
            )
            .with_retry_after_ms(1_000));
        };
        let Some(questions) = self.leading.borrow().clone() else {
            return Err(Problem::new(
                503,
                "NotLeading",
                "another replica of the operator leads now: ask again, on a new connection",
            )
            .with_retry_after_ms(500));
        };
        let token = bearer(request.headers())?;
        let key: [u8; 32] = Sha256::digest(&token).into();
        let user = self.user(key, &token).await?;
        self.allow(key, &user, namespace).await?;
        let body = to_bytes(request.into_body(), MAX_BODY).await.map_err(|_| {
            Problem::new(
                413,
                "BodyTooLarge",
                format!("a body has at most {MAX_BODY} bytes"),
            )
        })?;
        let body: Body = serde_json::from_slice(&body)
            .map_err(|error| Problem::new(400, "MalformedJson", error.to_string()))?;
        let name = user.username.clone().unwrap_or_default();
        let object = self.object(namespace, pool, &body, &name).await?;
        let wait = self.ask(&questions, object);
        let answer = timeout(LONGEST_WAIT, wait).await.map_err(|_| {
            Problem::new(
                503,
                "Queued",
                format!(
                    "no branch became ready within {} s; the lease {} waits on: ask again with the same name",
                    LONGEST_WAIT.as_secs(),
                    body.name
                ),
            )
            .with_retry_after_ms(1_000)
        })??;
        let entries = crate::plan::secret::entries(&answer);
        Ok(Granted {
            name: body.name,
            uid: answer.uid.split('.').next().unwrap_or_default().to_owned(),
            uri: entries.get("uri").cloned().unwrap_or_default(),
            host: answer.host,
            port: answer.port,
            database: answer.database,
            user: answer.user,
            password: answer.password,
            ca: answer.ca,
            bound_at: answer.bound_at,
            expires_at: answer.expires_at,
        })
    }

    async fn user(&self, key: [u8; 32], token: &str) -> Result<UserInfo, Problem> {
        let known = lock(&self.users).get(&key).cloned();
        if let Some((since, user)) = known
            && since.elapsed() < BELIEVED
        {
            return Ok(user);
        }
        let status = review(&self.cluster.client(), token, None).await;
        let status = status.map_err(|error| unavailable("review the token", &error))?;
        if status.authenticated != Some(true) {
            return Err(Problem::new(
                401,
                "Unauthorized",
                "the API server does not know the token: send one of the cluster as bearer token",
            ));
        }
        let user = status.user.unwrap_or_default();
        let mut users = lock(&self.users);
        if users.len() >= REMEMBERED {
            users.retain(|_, (since, _)| since.elapsed() < BELIEVED);
        }
        if users.len() < REMEMBERED {
            users.insert(key, (Instant::now(), user.clone()));
        }
        Ok(user)
    }

    /// Whether the user may create leases there.
    async fn allow(&self, key: [u8; 32], user: &UserInfo, namespace: &str) -> Result<(), Problem> {
        let at = (key, namespace.to_owned());
        let known = lock(&self.allowed).get(&at).copied();
        if known.is_some_and(|since| since.elapsed() < BELIEVED) {
            return Ok(());
        }
        let api: Api<SubjectAccessReview> = Api::all(self.cluster.client());
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: user.username.clone(),
                uid: user.uid.clone(),
                groups: user.groups.clone(),
                extra: user.extra.clone(),
                resource_attributes: Some(ResourceAttributes {
                    group: Some(branchpool_crds::GROUP.to_owned()),
                    resource: Some("branchleases".to_owned()),
                    verb: Some("create".to_owned()),
                    namespace: Some(namespace.to_owned()),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let answer = api.create(&PostParams::default(), &review).await;
        let answer = answer.map_err(|error| unavailable("review the access", &error))?;
        if !answer.status.is_some_and(|status| status.allowed) {
            return Err(Problem::new(
                403,
                "Forbidden",
                format!(
                    "{} may not create branchleases in namespace {namespace}: bind a role that allows it",
                    user.username.as_deref().unwrap_or("the user")
                ),
            ));
        }
        let mut allowed = lock(&self.allowed);
        if allowed.len() >= REMEMBERED {
            allowed.retain(|_, since| since.elapsed() < BELIEVED);
        }
        if allowed.len() < REMEMBERED {
            allowed.insert(at, Instant::now());
        }
        Ok(())
    }

    /// The object of this name, made now or by an earlier try of the same user.
    async fn object(
        &self,
        namespace: &str,
        pool: &str,
        body: &Body,
        user: &str,
    ) -> Result<LeaseObject, Problem> {
        let api: Api<BranchLease> = Api::namespaced(self.cluster.client(), namespace);
        let wanted = wanted(pool, body, user)?;
        let error = match self.cluster.create("lease_create", &api, &wanted).await {
            Ok(made) => return read(made),
            Err(error) => error,
        };
        match error {
            kube::Error::Api(status) if status.code == 409 && status.reason == "AlreadyExists" => {}
            kube::Error::Api(status) if matches!(status.code, 400 | 403 | 404 | 422) => {
                return Err(Problem::new(
                    status.code,
                    "LeaseRefused",
                    status.message.clone(),
                ));
            }
            error => return Err(unavailable("create the lease", &error)),
        }
        let found = api.get(&body.name).await;
        let found = found.map_err(|error| unavailable("read the lease", &error))?;
        let annotations = found.metadata.annotations.as_ref();
        let theirs = annotations
            .and_then(|all| all.get(ASKED_BY))
            .map(String::as_str);
        if theirs != Some(user) || found.spec.pool_ref != wanted.spec.pool_ref {
            return Err(Problem::new(
                409,
                "NameTaken",
                format!(
                    "a BranchLease {} is there that this user did not ask for in this pool: choose another name",
                    body.name
                ),
            ));
        }
        read(found)
    }

    async fn ask(
        &self,
        questions: &mpsc::Sender<Question>,
        object: LeaseObject,
    ) -> Result<Box<branchpool_agent_api::Lease>, Problem> {
        let (answer, answered) = oneshot::channel();
        let question = Question {
            lease: Box::new(object),
            answer,
        };
        let gone = || {
            Problem::new(503, "NotLeading", "the operator stops: ask again")
                .with_retry_after_ms(500)
        };
        questions.send(question).await.map_err(|_| gone())?;
        let answer = answered.await.map_err(|_| gone())?;
        answer.map_err(|failure| Problem::new(409, &failure.reason, failure.message))
    }
}

fn wanted(pool: &str, body: &Body, user: &str) -> Result<BranchLease, Problem> {
    let mut spec = json!({
        "poolRef": {"name": pool},
        "connectionSecret": body.connection_secret.as_deref().unwrap_or("None"),
    });
    let fields = [
        ("ttl", &body.ttl),
        ("priority", &body.priority),
        ("holder", &body.holder),
    ];
    for (field, value) in fields {
        if let Some(value) = value {
            spec[field] = json!(value);
        }
    }
    let spec: BranchLeaseSpec = serde_json::from_value(spec)
        .map_err(|error| Problem::new(422, "InvalidField", error.to_string()))?;
    let mut lease = BranchLease::new(&body.name, spec);
    lease.metadata = ObjectMeta {
        annotations: Some(BTreeMap::from([(ASKED_BY.to_owned(), user.to_owned())])),
        ..lease.metadata
    };
    Ok(lease)
}

fn read(lease: BranchLease) -> Result<LeaseObject, Problem> {
    LeaseObject::read(lease)
        .ok_or_else(|| Problem::new(500, "Unexpected", "the API server's answer has no UID"))
}

fn bearer(headers: &HeaderMap) -> Result<String, Problem> {
    let header = headers.get(AUTHORIZATION);
    let text = header.and_then(|header| header.to_str().ok());
    let token = text
        .and_then(|text| text.strip_prefix("Bearer "))
        .map(str::trim);
    match token {
        Some(token) if !token.is_empty() => Ok(token.to_owned()),
        _ => Err(Problem::new(
            401,
            "Unauthorized",
            "a bearer token of the cluster is needed: kubectl create token makes one",
        )),
    }
}

fn unavailable(what: &str, error: &kube::Error) -> Problem {
    let detail = format!("the API server did not {what}: {}", describe(error));
    Problem::new(503, "ClusterUnavailable", detail).with_retry_after_ms(1_000)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
