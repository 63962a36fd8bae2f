//! Health and metrics, and whether the served custom resources are of this version.

use std::net::SocketAddr;

use axum::{
    Router,
    extract::State,
    http::{HeaderValue, StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{Api, Client};
use snafu::{ResultExt, Snafu};
use tokio::{net::TcpListener, sync::watch};
use tracing::{info, warn};

use crate::{
    cluster::describe,
    metrics::Metrics,
    plan::schema::{Comparison, compare},
};

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display(
        "health and metrics cannot be served at {address} ({source}): free the address, or choose another with --metrics-listen"
    ))]
    Bind {
        address: SocketAddr,
        source: std::io::Error,
    },
}

#[derive(Clone, Debug)]
struct Shared {
    metrics: Metrics,
    ready: watch::Receiver<bool>,
}

/// Serves until the task is dropped. `ready`: the API server was reached.
pub(crate) async fn health(
    address: SocketAddr,
    metrics: Metrics,
    ready: watch::Receiver<bool>,
) -> Result<tokio::task::JoinHandle<()>, Error> {
    let listener = TcpListener::bind(address)
        .await
        .context(BindSnafu { address })?;
    let router = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readiness))
        .route("/metrics", get(numbers))
        .with_state(Shared { metrics, ready });
    Ok(tokio::spawn(async move {
        // Ends with an error only when the listener breaks, and then the probes say so.
        let _ended = axum::serve(listener, router).await;
    }))
}

async fn readiness(State(shared): State<Shared>) -> Response {
    if *shared.ready.borrow() {
        "ready\n".into_response()
    } else {
        let why = "the API server was not reached yet\n";
        (StatusCode::SERVICE_UNAVAILABLE, why).into_response()
    }
}

async fn numbers(State(shared): State<Shared>) -> Response {
    let mut response = shared.metrics.text().into_response();
    response.headers_mut().insert(
        CONTENT_TYPE,
        HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8"),
    );
    response
}

/// Says so when the cluster serves an older schema, whose API server drops new fields in silence.
pub(crate) async fn check_schemas(client: Client, metrics: &Metrics) {
    let api: Api<CustomResourceDefinition> = Api::all(client);
    let mut older = 0;
    for ours in branchpool_crds::crds() {
        let name = ours.metadata.name.clone().unwrap_or_default();
        let served = match api.get_opt(&name).await {
            Ok(Some(served)) => served,
            Ok(None) => {
                older += 1;
                warn!(
                    crd = name,
                    "the cluster does not have this custom resource: install the chart's CRDs"
                );
                continue;
            }
            Err(error) => {
                warn!(
                    crd = name,
                    error = describe(&error),
                    "the served schema could not be compared"
                );
                continue;
            }
        };
        let version = |crd: &CustomResourceDefinition| {
            let version = crd.spec.versions.first();
            serde_json::to_value(version).unwrap_or_default()
        };
        match compare(&version(&ours), &version(&served)) {
            Comparison::Same => info!(crd = name, "the served schema is this version's"),
            Comparison::Older(missing) => {
                older += 1;
                warn!(
                    crd = name,
                    "the cluster serves an older schema, without {}: fields are dropped in silence until the chart's CRDs are upgraded",
                    missing.join(", ")
                );
            }
            Comparison::Different => warn!(
                crd = name,
                "the cluster serves another schema than this version's: see that chart and operator are of one version"
            ),
        }
    }
    metrics.older_schemas.set(older);
}
