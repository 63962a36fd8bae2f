//! Writes to the API server: few at a time, and with errors that say what comes next.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Instant};

use branchpool_agent_api::Lease;
use branchpool_crds::{BranchLease, BranchLeaseStatus};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client, Resource,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
    core::{ObjectMeta, Status},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;
use tokio::sync::{Semaphore, SemaphorePermit};
use tracing::debug;

use crate::{
    metrics::Metrics,
    plan::{
        Uid,
        leases::{Existence, ObjectRef, WriteError},
        secret,
    },
};

/// Name of a Secret that no admission policy of ours lets through.
const PROBE: &str = "branchpool-guard-probe";

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct Cluster {
    client: Client,
    writes: Arc<Semaphore>,
    metrics: Metrics,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Cluster").finish_non_exhaustive()
    }
}

/// What an API server's refusal comes to. Its message is not for logs: it may quote the object.
#[derive(Debug)]
enum Refusal<'a> {
    Status(&'a Status),
    Transport,
}

fn refusal(error: &kube::Error) -> Refusal<'_> {
    match error {
        kube::Error::Api(status) => Refusal::Status(status),
        _ => Refusal::Transport,
    }
}

/// A short text for logs: code and reason of a status, the error itself where none came.
pub(crate) fn describe(error: &kube::Error) -> String {
    match refusal(error) {
        Refusal::Status(status) => format!("{} {}", status.code, status.reason),
        Refusal::Transport => error.to_string(),
    }
}

impl Cluster {
    pub(crate) fn new(client: Client, writes: u32, metrics: Metrics) -> Self {
        Self {
            client,
            writes: Arc::new(Semaphore::new(writes as usize)),
            metrics,
        }
    }

    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    async fn turn(&self) -> SemaphorePermit<'_> {
        let permit = self.writes.acquire().await;
        permit.expect("the semaphore should never be closed")
    }

    /// One write, counted and timed.
    async fn write<T>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, kube::Error> {
        let _turn = self.turn().await;
        let started = Instant::now();
        let result = call.await;
        self.metrics
            .api_write(what, result.is_ok(), started.elapsed().as_secs_f64());
        if let Err(error) = &result {
            debug!(
                what,
                error = describe(error),
                "the API server refused a write"
            );
        }
        result
    }

    /// The status of an object, if it is still the one with this UID. Answers the new
    /// `resourceVersion`.
    pub(crate) async fn patch_status<K, S>(
        &self,
        what: &'static str,
        api: &Api<K>,
        name: &str,
        uid: &str,
        status: &S,
    ) -> Result<u64, kube::Error>
    where
        K: Resource + Clone + DeserializeOwned + fmt::Debug,
        S: Serialize,
    {
        let patch = serde_json::from_value(json!([
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "add", "path": "/status", "value": status},
        ]));
        let patch = Patch::Json::<()>(patch.map_err(kube::Error::SerdeError)?);
        let params = PatchParams::default();
        let patched = self
            .write(what, api.patch_status(name, &params, &patch))
            .await?;
        let version = patched.meta().resource_version.as_deref();
        Ok(version.and_then(|text| text.parse().ok()).unwrap_or(0))
    }

    pub(crate) async fn create<K>(
        &self,
        what: &'static str,
        api: &Api<K>,
        object: &K,
    ) -> Result<K, kube::Error>
    where
        K: Resource + Clone + DeserializeOwned + Serialize + fmt::Debug,
    {
        let params = PostParams::default();
        self.write(what, api.create(&params, object)).await
    }

    pub(crate) async fn delete<K>(
        &self,
        what: &'static str,
        api: &Api<K>,
        name: &str,
        uid: Option<&str>,
    ) -> Result<(), kube::Error>
    where
        K: Resource + Clone + DeserializeOwned + fmt::Debug,
    {
        let params = DeleteParams {
            preconditions: uid.map(|uid| Preconditions {
                uid: Some(uid.to_owned()),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        self.write(what, api.delete(name, &params)).await?;
        Ok(())
    }

    fn leases(&self, namespace: &str) -> Api<BranchLease> {
        Api::namespaced(self.client(), namespace)
    }

    fn secrets(&self, namespace: &str) -> Api<Secret> {
        Api::namespaced(self.client(), namespace)
    }

    pub(crate) async fn patch_lease(
        &self,
        lease: &ObjectRef,
        status: &BranchLeaseStatus,
    ) -> Result<u64, WriteError> {
        let api = self.leases(&lease.namespace);
        self.patch_status(
            "lease_status",
            &api,
            &lease.name,
            lease.uid.as_str(),
            status,
        )
        .await
        .map_err(|error| match refusal(&error) {
            // The test of the UID failed: another object has the name.
            Refusal::Status(status) if matches!(status.code, 404 | 422) => WriteError::NotFound,
            _ => WriteError::Later(describe(&error)),
        })
    }

    pub(crate) async fn delete_lease(&self, lease: &ObjectRef) -> Result<(), WriteError> {
        let api = self.leases(&lease.namespace);
        self.delete("lease_delete", &api, &lease.name, Some(lease.uid.as_str()))
            .await
            .map_err(|error| gone_or_later(&error))
    }

    /// By a live read.
    pub(crate) async fn lease_exists(&self, lease: &ObjectRef) -> Result<Existence, WriteError> {
        let api = self.leases(&lease.namespace);
        let found = api.get_metadata_opt(&lease.name).await;
        let found = found.map_err(|error| WriteError::Later(describe(&error)))?;
        let uid = found.and_then(|found| found.metadata.uid);
        Ok(if uid.as_deref() == Some(lease.uid.as_str()) {
            Existence::Exists
        } else {
            Existence::Gone
        })
    }

    /// A Secret of an older lease of the same name is replaced; any other is left alone.
    pub(crate) async fn create_secret(
        &self,
        lease: &ObjectRef,
        connection: &Lease,
    ) -> Result<Uid, WriteError> {
        let api = self.secrets(&lease.namespace);
        let wanted = secret_of(lease, connection);
        for _ in 0..2 {
            let error = match self.create("secret_create", &api, &wanted).await {
                Ok(made) => return Ok(made.metadata.uid.unwrap_or_default().into()),
                Err(error) => error,
            };
            match refusal(&error) {
                Refusal::Status(status) if status.code == 409 => {
                    self.clear_name(&api, &lease.name).await?;
                }
                Refusal::Status(status) if status.code == 403 => {
                    return Err(forbidden(lease, status));
                }
                _ => return Err(gone_or_later(&error)),
            }
        }
        Err(WriteError::Later(
            "the Secret's name is taken again and again".to_owned(),
        ))
    }

    /// Deletes the Secret of the name, if it is a lease's: the admission policy looks at what it is,
    /// which the operator may not read. So the policy has to be there.
    async fn clear_name(&self, api: &Api<Secret>, name: &str) -> Result<(), WriteError> {
        if !self.is_guarded(api).await? {
            return Err(WriteError::Foreign(format!(
                "a Secret {name} is there, and no admission policy keeps the operator from deleting what is not a lease's: delete the Secret, or install the chart's policy"
            )));
        }
        match self.delete("secret_delete", api, name, None).await {
            Ok(()) => Ok(()),
            Err(error) => match refusal(&error) {
                Refusal::Status(status) if status.code == 404 => Ok(()),
                Refusal::Status(status) if matches!(status.code, 403 | 422) => {
                    Err(WriteError::Foreign(format!(
                        "a Secret {name} is there that is not a lease's: delete it, or give the lease another name"
                    )))
                }
                _ => Err(WriteError::Later(describe(&error))),
            },
        }
    }

    /// Whether a Secret that is not a lease's is refused, by a dry run.
    async fn is_guarded(&self, api: &Api<Secret>) -> Result<bool, WriteError> {
        let foreign = Secret {
            metadata: ObjectMeta {
                name: Some(PROBE.to_owned()),
                ..ObjectMeta::default()
            },
            type_: Some("Opaque".to_owned()),
            ..Secret::default()
        };
        let dry = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        match self.write("secret_probe", api.create(&dry, &foreign)).await {
            Ok(_) => Ok(false),
            Err(error) => match refusal(&error) {
                Refusal::Status(status) if matches!(status.code, 403 | 422) => Ok(true),
                Refusal::Status(status) if status.code == 409 => Ok(false),
                _ => Err(WriteError::Later(describe(&error))),
            },
        }
    }

    pub(crate) async fn delete_secret(
        &self,
        lease: &ObjectRef,
        secret: Option<&Uid>,
    ) -> Result<(), WriteError> {
        let api = self.secrets(&lease.namespace);
        let uid = secret.map(Uid::as_str);
        if uid.is_none() && !self.is_guarded(&api).await? {
            // What a former leader made cannot be told from a user's own.
            return Err(WriteError::Foreign(
                "no admission policy is there".to_owned(),
            ));
        }
        self.delete("secret_delete", &api, &lease.name, uid)
            .await
            .map_err(|error| match refusal(&error) {
                Refusal::Status(status) if matches!(status.code, 404 | 409) => WriteError::NotFound,
                Refusal::Status(status) if matches!(status.code, 403 | 422) => {
                    WriteError::Foreign("it is not a lease's".to_owned())
                }
                _ => WriteError::Later(describe(&error)),
            })
    }
}

fn gone_or_later(error: &kube::Error) -> WriteError {
    match refusal(error) {
        Refusal::Status(status) if matches!(status.code, 404 | 409) => WriteError::NotFound,
        _ => WriteError::Later(describe(error)),
    }
}

fn forbidden(lease: &ObjectRef, status: &Status) -> WriteError {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let terminating = causes
        .into_iter()
        .any(|cause| cause.reason == "NamespaceTerminating");
    let (reason, message) = if terminating {
        (
            "NamespaceTerminating",
            format!("namespace {} is being deleted", lease.namespace),
        )
    } else if status.message.contains("exceeded quota") {
        (
            "QuotaExceeded",
            format!(
                "a quota of namespace {} admits no further Secret: raise it, or release leases",
                lease.namespace
            ),
        )
    } else {
        (
            "SecretForbidden",
            format!(
                "the operator may not create Secrets in namespace {}: bind its role there, or see the policies of the cluster",
                lease.namespace
            ),
        )
    };
    WriteError::Final { reason, message }
}

fn secret_of(lease: &ObjectRef, connection: &Lease) -> Secret {
    let data = secret::entries(connection)
        .into_iter()
        .map(|(key, value)| (key.to_owned(), ByteString(value.into_bytes())));
    let labels = [
        (secret::LEASE_LABEL, lease.uid.as_str()),
        (secret::MANAGED_BY_LABEL, secret::MANAGED_BY),
    ];
    let labels: BTreeMap<_, _> = labels
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    Secret {
        metadata: ObjectMeta {
            name: Some(lease.name.clone()),
            namespace: Some(lease.namespace.clone()),
            labels: Some(labels),
            ..ObjectMeta::default()
        },
        type_: Some(secret::SECRET_TYPE.to_owned()),
        immutable: Some(true),
        data: Some(data.collect()),
        string_data: None,
    }
}
