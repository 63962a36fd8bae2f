//! An API server, and people with kubectl.

use std::{fs, path::PathBuf, process::Stdio, time::Duration};

use branchpool_e2e_kubernetes::Api;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::AsyncWriteExt,
    process::Command,
    time::{Instant, sleep},
};

use crate::helm::{self, NAMESPACE, chart};

/// The server takes some moments to serve what it was told.
const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) struct Server {
    api: Api,
}

impl Server {
    /// With the namespaces that the tests use: nothing here removes one.
    pub(crate) async fn start() -> Self {
        let server = Self {
            api: Api::start().await.unwrap(),
        };
        for name in [NAMESPACE, "branchpool-agents", "review", "review-agents"] {
            server
                .kubectl(&["create", "namespace", name])
                .await
                .unwrap();
        }
        server
    }

    pub(crate) fn helm(&self, arguments: &[&str]) {
        let output = self.run_helm(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }

    pub(crate) fn helm_refused(&self, arguments: &[&str]) -> String {
        let output = self.run_helm(arguments);
        assert!(!output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    fn run_helm(&self, arguments: &[&str]) -> std::process::Output {
        let mut all = arguments.to_vec();
        all.extend(["--namespace", NAMESPACE]);
        if arguments[0] != "uninstall" {
            all.extend(["--set", "agent.createNamespace=false"]);
        }
        helm::helm_with(self.api.kubeconfig(), &all)
    }

    /// The chart as it would have been before the field `priority` came.
    pub(crate) fn older_chart() -> TempDir {
        let directory = tempfile::tempdir().unwrap();
        let copied = std::process::Command::new("cp")
            .arg("-rT")
            .arg(chart())
            .arg(directory.path())
            .status();
        assert!(copied.unwrap().success());
        let path = directory.path().join("files/crds/branchleases.yaml");
        let mut definition = helm::objects(&fs::read_to_string(&path).unwrap()).remove(0);
        let properties = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties";
        let properties = definition
            .pointer_mut(properties)
            .unwrap()
            .as_object_mut()
            .unwrap();
        properties.remove("priority").unwrap();
        // JSON is YAML.
        fs::write(&path, definition.to_string()).unwrap();
        directory
    }

    pub(crate) async fn kubectl(&self, arguments: &[&str]) -> Result<String, String> {
        self.admin().run(arguments).await
    }

    pub(crate) fn admin(&self) -> User {
        self.with(self.api.kubeconfig().to_owned())
    }

    pub(crate) fn user(&self, name: &str) -> User {
        self.with(
            self.api
                .kubeconfig_of(name, Some("system:authenticated"))
                .unwrap(),
        )
    }

    fn with(&self, kubeconfig: PathBuf) -> User {
        User {
            kubectl: self.api.programs().path("kubectl"),
            kubeconfig,
        }
    }

    pub(crate) async fn create_lease(&self, name: &str) {
        let lease = json!({
            "apiVersion": "branchpool.dev/v1alpha1", "kind": "BranchLease",
            "metadata": {"name": name, "namespace": "default"}, "spec": {"poolRef": {"name": "app"}},
        });
        self.repeat(async || self.admin().create(&lease).await)
            .await;
    }

    pub(crate) async fn set_priority(&self, name: &str, priority: &str) {
        let patch = json!({"spec": {"priority": priority}}).to_string();
        let arguments = ["patch", "branchlease", name, "--type=merge", "-p", &patch];
        self.kubectl(&arguments).await.unwrap();
    }

    pub(crate) async fn priority(&self, name: &str) -> String {
        let arguments = [
            "get",
            "branchlease",
            name,
            "-o",
            "jsonpath={.spec.priority}",
        ];
        self.kubectl(&arguments).await.unwrap()
    }

    pub(crate) async fn until_explained(&self, field: &str) {
        self.repeat(async || self.kubectl(&["explain", field]).await)
            .await;
    }

    /// The server reads policies some moments after they are made.
    pub(crate) async fn until_fenced(&self, user: &User) {
        let probe = secret("default", "probe", "Opaque", &json!({}));
        self.repeat(
            async || match user.apply(&probe, &["create", "--dry-run=server"]).await {
                Err(refused) if refused.contains("the operator may write Secrets") => Ok(refused),
                other => Err(format!("{other:?}")),
            },
        )
        .await;
    }

    async fn repeat(&self, attempt: impl AsyncFn() -> Result<String, String>) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match attempt().await {
                Ok(_) => return,
                Err(why) => assert!(Instant::now() < deadline, "{why}"),
            }
            sleep(Duration::from_millis(200)).await;
        }
    }
}

pub(crate) struct User {
    kubectl: PathBuf,
    kubeconfig: PathBuf,
}

impl User {
    /// What it printed, or why not.
    pub(crate) async fn run(&self, arguments: &[&str]) -> Result<String, String> {
        self.feed(arguments, "").await
    }

    pub(crate) async fn create(&self, object: &Value) -> Result<String, String> {
        self.apply(object, &["create"]).await
    }

    pub(crate) async fn apply(&self, object: &Value, verb: &[&str]) -> Result<String, String> {
        let arguments = [verb, &["-f", "-"]].concat();
        self.feed(&arguments, &object.to_string()).await
    }

    async fn feed(&self, arguments: &[&str], input: &str) -> Result<String, String> {
        let home = tempfile::tempdir().unwrap();
        let mut child = Command::new(&self.kubectl)
            .args(arguments)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", home.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut to = child.stdin.take().unwrap();
        // It may have ended without reading.
        let _ = to.write_all(input.as_bytes()).await;
        drop(to);
        let output = child.wait_with_output().await.unwrap();
        if output.status.success() {
            Ok(String::from_utf8(output.stdout).unwrap())
        } else {
            Err(String::from_utf8(output.stderr).unwrap())
        }
    }
}

pub(crate) fn secret(namespace: &str, name: &str, kind: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret", "type": kind,
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "data": {"a": "Yg=="},
    })
}
