//! A cluster's API with the definitions, and the part of the operator: what its status says is written by the
//! tests.

use std::{
    path::{Path, PathBuf},
    process::{Output, Stdio},
};

use branchpool_crds::{BranchLease, BranchNode, BranchPool};
use branchpool_e2e_kubernetes::Api as Server;
use futures_util::{TryStreamExt, pin_mut};
use k8s_openapi::{
    api::{
        core::v1::{Namespace, Secret},
        rbac::v1::{Role, RoleBinding},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, ObjectMeta, Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use tokio::{
    process::{Child, Command},
    time::timeout,
};

use crate::pty::PATIENCE;

pub(crate) struct Cluster {
    pub(crate) server: Server,
    pub(crate) client: Client,
    directory: tempfile::TempDir,
}

impl Cluster {
    /// Without the definitions.
    pub(crate) async fn start() -> Self {
        let server = Server::start().await.unwrap();
        let client = server.client();
        let directory = tempfile::tempdir().unwrap();
        Self {
            server,
            client,
            directory,
        }
    }

    pub(crate) async fn install_definitions(&self) {
        let definitions: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        for definition in branchpool_crds::crds() {
            let name = definition.name_any();
            definitions
                .create(&PostParams::default(), &definition)
                .await
                .unwrap();
            let established = kube::runtime::conditions::is_crd_established();
            let waiting =
                kube::runtime::wait::await_condition(definitions.clone(), &name, established);
            timeout(PATIENCE, waiting).await.unwrap().unwrap();
        }
    }

    pub(crate) async fn namespace(&self, name: &str) {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let namespace = Namespace {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            ..Namespace::default()
        };
        namespaces
            .create(&PostParams::default(), &namespace)
            .await
            .unwrap();
    }

    pub(crate) async fn pool(&self, namespace: &str, name: &str) {
        let pool: BranchPool = serde_json::from_value(json!({
            "apiVersion": "branchpool.dev/v1alpha1",
            "kind": "BranchPool",
            "metadata": {"name": name},
            "spec": {"postgres": {"version": 15}, "source": {"sql": {"scripts": [{"name": "a", "sql": "SELECT 1"}]}}},
        }))
        .unwrap();
        let pools: Api<BranchPool> = Api::namespaced(self.client.clone(), namespace);
        pools.create(&PostParams::default(), &pool).await.unwrap();
        let status = json!({"status": {
            "ready": 3, "warming": 1, "leased": 2, "desired": 4, "generation": 5,
            "source": {"phase": "Sealed"},
            "conditions": [condition("True", "AllWell", "")],
        }});
        pools
            .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
            .await
            .unwrap();
    }

    pub(crate) async fn node(&self, name: &str, ready: &str) {
        let nodes: Api<BranchNode> = Api::all(self.client.clone());
        let node = json!({
            "apiVersion": "branchpool.dev/v1alpha1", "kind": "BranchNode", "metadata": {"name": name},
        });
        let node: BranchNode = serde_json::from_value(node).unwrap();
        nodes.create(&PostParams::default(), &node).await.unwrap();
        let status = json!({"status": {
            "agentVersion": "0.1.0", "branches": 7, "leases": 2, "allocatableBranches": 40,
            "conditions": [condition(ready, "NotMounted", "nothing is mounted")],
        }});
        nodes
            .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
            .await
            .unwrap();
    }

    /// What docs/install.md says that a user needs.
    pub(crate) async fn grant(&self, namespace: &str, user: &str) {
        let rule = |group: &str, resource: &str, verbs: &[&str]| json!({"apiGroups": [group], "resources": [resource], "verbs": verbs});
        let role: Role = serde_json::from_value(json!({
            "metadata": {"name": "lease"},
            "rules": [
                rule("branchpool.dev", "branchleases", &["create", "delete", "get", "list", "patch", "watch"]),
                rule("branchpool.dev", "branchpools", &["get"]),
                rule("", "secrets", &["get"]),
            ],
        }))
        .unwrap();
        let binding: RoleBinding = serde_json::from_value(json!({
            "metadata": {"name": "lease"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "lease"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
        }))
        .unwrap();
        let roles: Api<Role> = Api::namespaced(self.client.clone(), namespace);
        roles.create(&PostParams::default(), &role).await.unwrap();
        let bindings: Api<RoleBinding> = Api::namespaced(self.client.clone(), namespace);
        bindings
            .create(&PostParams::default(), &binding)
            .await
            .unwrap();
    }

    pub(crate) fn leases(&self, namespace: &str) -> Api<BranchLease> {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub(crate) async fn names(&self, namespace: &str) -> Vec<String> {
        let list = self
            .leases(namespace)
            .list(&ListParams::default())
            .await
            .unwrap();
        list.items.iter().map(ResourceExt::name_any).collect()
    }

    /// The lease, once it is as it should be.
    pub(crate) async fn until(
        &self,
        namespace: &str,
        name: &str,
        is_so: impl Fn(&BranchLease) -> bool,
    ) -> BranchLease {
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let states = watcher(self.leases(namespace), config).applied_objects();
        pin_mut!(states);
        let found = async {
            loop {
                let lease = states.try_next().await.unwrap().unwrap();
                if is_so(&lease) {
                    return lease;
                }
            }
        };
        timeout(PATIENCE, found)
            .await
            .unwrap_or_else(|_| panic!("{namespace}/{name} does not become so"))
    }

    pub(crate) async fn say(&self, lease: &BranchLease, status: Value) {
        let leases = self.leases(&lease.namespace().unwrap());
        let mut status = status;
        status["observedGeneration"] = lease.metadata.generation.into();
        let patch = Patch::Merge(json!({"status": status}));
        leases
            .patch_status(&lease.name_any(), &PatchParams::default(), &patch)
            .await
            .unwrap();
    }

    pub(crate) async fn queue(&self, lease: &BranchLease, position: u32) {
        let status = json!({
            "phase": "Pending",
            "queuePosition": position,
            "conditions": [condition("False", "Queued", "all branches are leased")],
        });
        self.say(lease, status).await;
    }

    /// Secret first, as the operator does.
    pub(crate) async fn bind(&self, lease: &BranchLease, seconds: i64) {
        let secret: Secret = serde_json::from_value(json!({
            "metadata": {"name": lease.name_any(), "labels": {"branchpool.dev/lease-uid": lease.uid()}},
            "type": "servicebinding.io/postgresql",
            "immutable": true,
            "stringData": {
                "host": "10.0.0.7", "port": "7432", "database": "app", "username": "app_owner.abc",
                "password": "s3cret", "sslmode": "verify-full", "sslrootcert": "ca.crt", "ca.crt": "PEM of a CA",
                "uri": "postgresql://app_owner.abc:s3cret@10.0.0.7:7432/app?sslmode=require",
            },
        }))
        .unwrap();
        let secrets: Api<Secret> =
            Api::namespaced(self.client.clone(), &lease.namespace().unwrap());
        secrets
            .create(&PostParams::default(), &secret)
            .await
            .unwrap();
        let now = Timestamp::now();
        let mut status = term(now, seconds);
        let bound = json!({
            "phase": "Bound", "queuePosition": null, "boundTime": now.to_string(), "branch": "branch-1",
            "host": "10.0.0.7", "port": 7432, "database": "app", "user": "app_owner.abc",
            "binding": {"name": lease.name_any()},
            "conditions": [condition("True", "Bound", "")],
        });
        status
            .as_object_mut()
            .unwrap()
            .extend(bound.as_object().unwrap().clone());
        self.say(lease, status).await;
    }

    /// As the operator answers a renewal.
    pub(crate) async fn renew(&self, lease: &BranchLease, seconds: i64) {
        self.say(lease, term(Timestamp::now(), seconds)).await;
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        command(arguments, self.server.kubeconfig())
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    pub(crate) async fn run(&self, arguments: &[&str]) -> Output {
        finish(self.command(arguments).spawn().unwrap()).await
    }

    /// What a command prints that must succeed.
    pub(crate) async fn printed(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments).await;
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Exit code and error of a command that must fail.
    pub(crate) async fn refused(&self, arguments: &[&str]) -> (i32, String) {
        refusal(self.run(arguments).await)
    }
}

pub(crate) fn refusal(output: Output) -> (i32, String) {
    assert!(!output.status.success(), "{output:?}");
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

/// With what would lead elsewhere around it.
pub(crate) fn command(arguments: &[&str], kubeconfig: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-branch"));
    command
        .args(arguments)
        .env("KUBECONFIG", kubeconfig)
        .env("HOME", "/nonexistent")
        .env("USER", "tester")
        .env("PGHOST", "nowhere.invalid")
        .env_remove("BRANCHPOOL_SERVER")
        .env_remove("KUBERNETES_SERVICE_HOST")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

pub(crate) async fn finish(child: Child) -> Output {
    let output = timeout(PATIENCE, child.wait_with_output()).await;
    output.expect("should not hang").unwrap()
}

fn term(now: Timestamp, seconds: i64) -> Value {
    let end = Timestamp::from_second(now.as_second() + seconds).unwrap();
    json!({"expirationTime": end.to_string()})
}

pub(crate) fn condition(status: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": "Ready", "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    })
}
