//! The paths and what each does.

use std::{convert::Infallible, sync::Arc};

use axum::{
    Router,
    body::Body,
    extract::{Path, Request, State, rejection::PathRejection},
    http::{
        HeaderValue, StatusCode, Uri,
        header::{CACHE_CONTROL, CONTENT_TYPE},
    },
    response::{IntoResponse, Response},
    routing::{get, post, put},
};
use branchpool_agent_api::{LeaseList, PoolList, PoolName, Problem, WatchEvent, problem::reason};
use branchpool_trust::serve::stopped;
use bytes::Bytes;
use futures_util::stream;
use tokio::sync::watch;

use super::{
    Service, Subscription,
    answer::{Refusal, json},
    input::{self, LEASE_BODY_LIMIT, POOL_BODY_LIMIT},
    sql,
};

pub(super) type Answer = Result<Response, Refusal>;
pub(super) type Segment = Result<Path<String>, PathRejection>;

/// One for all requests.
pub(super) type Shared<S> = State<Arc<Context<S>>>;

/// What handlers get: the engine, and word of the server's stop.
#[derive(Debug)]
pub(super) struct Context<S> {
    pub(super) service: S,
    pub(super) stopping: watch::Receiver<bool>,
}

pub(super) fn router<S: Service>(context: Context<S>) -> Router {
    let lease = get(get_lease::<S>)
        .put(put_lease::<S>)
        .delete(delete_lease::<S>);
    Router::new()
        .route("/healthz", get(health))
        .route("/readyz", get(readiness::<S>))
        .route("/metrics", get(metrics::<S>))
        .route("/v1/node", get(node::<S>))
        .route("/v1/pools", get(pools::<S>))
        .route(
            "/v1/pools/{uid}",
            put(put_pool::<S>).delete(delete_pool::<S>),
        )
        // One router cannot call a segment by two names: this `uid` is the namespace.
        .route("/v1/pools/{uid}/{name}", get(pool::<S>))
        .route("/v1/leases", get(leases::<S>))
        .route("/v1/leases/{uid}", lease)
        .route("/v1/leases/{uid}/renew", post(renew::<S>))
        .route("/v1/leases/{uid}/reset", post(reset::<S>))
        .route("/v1/leases/{uid}/forget", post(forget::<S>))
        .route("/v1/leases/{uid}/sql", post(sql::of_lease::<S>))
        .route(sql::NEON_PATH, post(sql::as_neon::<S>))
        .route("/v1/watch", get(watch_changes::<S>))
        .with_state(Arc::new(context))
}

async fn health(uri: Uri) -> Answer {
    input::no_query(&uri)?;
    Ok("ok\n".into_response())
}

async fn readiness<S: Service>(State(context): Shared<S>, uri: Uri) -> Answer {
    input::no_query(&uri)?;
    match context.service.readiness() {
        Ok(()) => Ok("ready\n".into_response()),
        Err(why) => Err(Problem::new(503, "NotReady", why).into()),
    }
}

async fn metrics<S: Service>(State(context): Shared<S>, uri: Uri) -> Answer {
    input::no_query(&uri)?;
    let mut response = context.service.metrics().into_response();
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8"),
    );
    Ok(response)
}

async fn node<S: Service>(State(context): Shared<S>, uri: Uri) -> Answer {
    input::no_query(&uri)?;
    Ok(json(StatusCode::OK, &context.service.node()))
}

async fn pools<S: Service>(State(context): Shared<S>, uri: Uri) -> Answer {
    input::no_query(&uri)?;
    let pools = context.service.pools();
    Ok(json(StatusCode::OK, &PoolList { pools }))
}

async fn pool<S: Service>(
    State(context): Shared<S>,
    path: Result<Path<(String, String)>, PathRejection>,
    uri: Uri,
) -> Answer {
    let Path((namespace, name)) = path.map_err(|rejection| bad_path(&rejection))?;
    input::no_query(&uri)?;
    let wanted = PoolName::new(namespace, name);
    input::pool_name(&wanted)?;
    let pools = context.service.pools();
    if let Some(pool) = pools.iter().find(|pool| pool.name == wanted) {
        return Ok(json(StatusCode::OK, pool));
    }
    let names = pools.iter().map(|pool| &pool.name);
    Err(Problem::pool_not_found(&wanted, names).into())
}

async fn put_pool<S: Service>(State(context): Shared<S>, uid: Segment, request: Request) -> Answer {
    let uid = checked_uid(uid)?;
    input::no_query(request.uri())?;
    let desired = input::json(request, POOL_BODY_LIMIT).await?;
    let status = context.service.apply_pool(uid, desired).await?;
    Ok(json(StatusCode::OK, &status))
}

async fn delete_pool<S: Service>(
    State(context): Shared<S>,
    uid: Segment,
    request: Request,
) -> Answer {
    let uid = checked_uid(uid)?;
    let epoch = input::epoch(request.uri())?;
    input::no_body(&request)?;
    context.service.remove_pool(uid, epoch).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn leases<S: Service>(State(context): Shared<S>, uri: Uri) -> Answer {
    input::no_query(&uri)?;
    let leases = context.service.leases();
    Ok(json(StatusCode::OK, &LeaseList { leases }))
}

async fn get_lease<S: Service>(State(context): Shared<S>, uid: Segment, uri: Uri) -> Answer {
    let uid = checked_uid(uid)?;
    input::no_query(&uri)?;
    match context.service.get_lease(&uid) {
        Some(lease) => Ok(json(StatusCode::OK, &lease)),
        None => Err(Problem::new(
            404,
            reason::LEASE_NOT_FOUND,
            format!("there is no lease {uid}; GET /v1/leases lists those there are"),
        )
        .into()),
    }
}

async fn put_lease<S: Service>(
    State(context): Shared<S>,
    uid: Segment,
    request: Request,
) -> Answer {
    let uid = checked_uid(uid)?;
    input::no_query(request.uri())?;
    let request = input::json(request, LEASE_BODY_LIMIT).await?;
    let (lease, created) = context.service.lease(uid, request).await?;
    let status = if created {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok(json(status, &lease))
}

async fn delete_lease<S: Service>(
    State(context): Shared<S>,
    uid: Segment,
    request: Request,
) -> Answer {
    let uid = checked_uid(uid)?;
    let epoch = input::epoch(request.uri())?;
    input::no_body(&request)?;
    let lease = context.service.release(uid, epoch).await?;
    Ok(json(StatusCode::OK, &lease))
}

async fn renew<S: Service>(State(context): Shared<S>, uid: Segment, request: Request) -> Answer {
    let uid = checked_uid(uid)?;
    input::no_query(request.uri())?;
    let request = input::json_or_default(request, LEASE_BODY_LIMIT).await?;
    let lease = context.service.renew(uid, request).await?;
    Ok(json(StatusCode::OK, &lease))
}

async fn reset<S: Service>(State(context): Shared<S>, uid: Segment, request: Request) -> Answer {
    let uid = checked_uid(uid)?;
    input::no_query(request.uri())?;
    let request = input::json(request, LEASE_BODY_LIMIT).await?;
    let lease = context.service.reset(uid, request).await?;
    Ok(json(StatusCode::OK, &lease))
}

async fn forget<S: Service>(State(context): Shared<S>, uid: Segment, request: Request) -> Answer {
    let uid = checked_uid(uid)?;
    let epoch = input::epoch(request.uri())?;
    input::no_body(&request)?;
    context.service.forget(uid, epoch).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn watch_changes<S: Service>(State(context): Shared<S>, uri: Uri) -> Answer {
    let since = input::since(&uri)?;
    let subscription = context.service.subscribe(since)?;
    let mut response = Response::new(lines(subscription, context.stopping.clone()));
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/x-ndjson"),
    );
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// One event a line, until the log is closed or the server stops.
fn lines(subscription: Subscription, stopping: watch::Receiver<bool>) -> Body {
    let state = (subscription, stopping);
    Body::from_stream(stream::unfold(state, async |(mut events, mut stopping)| {
        let event = tokio::select! {
            biased;
            event = events.next() => event?,
            () = stopped(&mut stopping) => return None,
        };
        let line = line(&event)?;
        Some((Ok::<_, Infallible>(line), (events, stopping)))
    }))
}

fn line(event: &WatchEvent) -> Option<Bytes> {
    let mut line = serde_json::to_vec(event).ok()?;
    line.push(b'\n');
    Some(Bytes::from(line))
}

pub(super) fn checked_uid(uid: Segment) -> Result<String, Problem> {
    let Path(uid) = uid.map_err(|rejection| bad_path(&rejection))?;
    input::uid(&uid)?;
    Ok(uid)
}

fn bad_path(rejection: &PathRejection) -> Problem {
    Problem::new(400, "BadPath", rejection.body_text())
}
