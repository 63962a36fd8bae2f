//! etcd and kube-apiserver: all that a controller needs.

use std::{
    ffi::OsString,
    fmt, fs, io,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::Arc,
};

use hyper::Request;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::Value;
use snafu::{ResultExt, Snafu};
use tokio::process::Command;

use crate::{
    pki::{self, Pki},
    plan, ports,
    process::{self, Program},
    programs::Programs,
    script,
    space::{self, Space},
    state::{self, State},
};

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(transparent)]
    Script { source: script::Error },
    #[snafu(transparent)]
    State { source: state::Error },
    #[snafu(transparent)]
    Space { source: space::Error },
    #[snafu(transparent)]
    Process { source: process::Error },
    #[snafu(transparent)]
    Pki { source: pki::Error },
    #[snafu(display("cannot get a port of the loopback address"))]
    Port { source: io::Error },
    #[snafu(display("cannot make a client from {}", path.display()))]
    Kubeconfig {
        path: PathBuf,
        source: kube::config::KubeconfigError,
    },
    #[snafu(display("cannot make a client"))]
    Client { source: kube::Error },
    #[snafu(display("cannot read the audit log {}", path.display()))]
    ReadAudit { path: PathBuf, source: io::Error },
    #[snafu(display("a line of the audit log is no JSON: {line}"))]
    Audit {
        line: String,
        source: serde_json::Error,
    },
}

/// An apiserver of its own, with administrator's rights, until it is dropped.
#[derive(Debug)]
pub struct Api {
    pub etcd: Program,
    pub apiserver: Program,
    client: Handle,
    kubeconfig: PathBuf,
    programs: Programs,
    pub(crate) pki: Arc<Pki>,
    pub(crate) server: String,
    pub(crate) space: Arc<Space>,
    /// Dropped behind everything that uses it.
    pub(crate) state: State,
}

/// A client, which prints nothing of itself.
pub(crate) struct Handle(pub(crate) Client);

impl fmt::Debug for Handle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Client")
    }
}

/// Where etcd and the apiserver listen.
pub(crate) struct Endpoints {
    pub(crate) apiserver: (Ipv4Addr, u16),
    pub(crate) etcd: u16,
    pub(crate) etcd_peers: u16,
}

impl Api {
    /// Starts one on ports of the loopback address. Needs root. The first time on a machine the
    /// programs are built, which takes minutes.
    pub async fn start() -> Result<Self, Error> {
        let programs = Programs::ready(&Programs::API).await?;
        let state = State::bound()?;
        let setup = space::Plan {
            lock: &state.lock()?,
            network: false,
            setup: "",
            environment: Vec::new(),
            log: &state.logs().join("space.log"),
        };
        let space = Arc::new(Space::start(setup).await?);
        let port = || ports::reserve().context(PortSnafu);
        let endpoints = Endpoints {
            apiserver: (Ipv4Addr::LOCALHOST, port()?),
            etcd: port()?,
            etcd_peers: port()?,
        };
        let mut api = Self::new(programs, state, space, &endpoints).await?;
        match api.run().await {
            Ok(()) => Ok(api),
            Err(error) => {
                api.keep_logs();
                Err(error)
            }
        }
    }

    pub(crate) async fn new(
        programs: Programs,
        state: State,
        space: Arc<Space>,
        endpoints: &Endpoints,
    ) -> Result<Self, Error> {
        let pki = Pki::new(&state.path("pki"))?;
        let (address, port) = endpoints.apiserver;
        let server = format!("https://{address}:{port}");
        let text = pki.kubeconfig(&server, "admin", Some("system:masters"))?;
        let kubeconfig = pki.write("admin.kubeconfig", &text)?;
        let client = Handle(client(&kubeconfig).await?);
        let logs = state.logs();
        let etcd = Program::new(
            "etcd",
            &space,
            programs.path("etcd"),
            etcd_arguments(&state, endpoints),
            &logs,
        );
        let apiserver = Program::new(
            "kube-apiserver",
            &space,
            programs.path("kube-apiserver"),
            apiserver_arguments(&state, &pki, endpoints)?,
            &logs,
        );
        Ok(Self {
            etcd,
            apiserver,
            client,
            kubeconfig,
            programs,
            pki: Arc::new(pki),
            server,
            space,
            state,
        })
    }

    /// Starts what does not run, and waits until the apiserver is ready.
    pub async fn run(&mut self) -> Result<(), Error> {
        self.etcd.start()?;
        self.apiserver.start()?;
        let client = self.client();
        let ready = async || {
            let request = Request::get("/readyz")
                .body(Vec::new())
                .expect("a path should make a request");
            client.request_text(request).await.is_ok()
        };
        Ok(self.apiserver.ready(ready).await?)
    }

    /// Kills the apiserver and starts it again; objects stay.
    pub async fn restart(&mut self) -> Result<(), Error> {
        self.apiserver.kill().await?;
        self.run().await
    }

    /// With administrator's rights.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// With administrator's rights.
    pub fn client(&self) -> Client {
        self.client.0.clone()
    }

    /// A kubeconfig of a user and, if given, a group, who have the rights that RBAC gives them.
    pub fn kubeconfig_of(&self, user: &str, group: Option<&str>) -> Result<PathBuf, Error> {
        let text = self.pki.kubeconfig(&self.server, user, group)?;
        let file = format!("{}.kubeconfig", user.replace([':', '/'], "-"));
        Ok(self.pki.write(&file, &text)?)
    }

    /// kubectl with administrator's rights.
    pub fn kubectl(&self) -> Command {
        kubectl(&self.programs, &self.kubeconfig)
    }

    /// kube-controller-manager with these of its controllers, as `garbage-collector-controller`; it
    /// does not run yet. The first time on a machine it is built.
    pub async fn controller_manager(&self, controllers: &[&str]) -> Result<Program, Error> {
        let name = "kube-controller-manager";
        Programs::ready(&[name]).await?;
        let arguments = vec![
            flag("controllers", controllers.join(",")),
            flag("root-ca-file", self.pki.path("ca.crt")),
            flag(
                "service-account-private-key-file",
                self.pki.path("tokens.key"),
            ),
            flag("use-service-account-credentials", "true"),
        ];
        self.controller(name, arguments)
    }

    /// A program with an account of its own at the apiserver.
    pub(crate) fn controller(&self, name: &str, rest: Vec<OsString>) -> Result<Program, Error> {
        let kubeconfig = self.kubeconfig_of(&format!("system:{name}"), None)?;
        let port = ports::reserve().context(PortSnafu)?;
        let mut arguments = vec![
            flag("kubeconfig", kubeconfig),
            flag("leader-elect", "false"),
            flag("bind-address", "127.0.0.1"),
            flag("secure-port", port.to_string()),
        ];
        arguments.extend(rest);
        let path = self.programs.path(name);
        Ok(Program::new(
            name,
            &self.space,
            path,
            arguments,
            &self.logs(),
        ))
    }

    pub fn programs(&self) -> &Programs {
        &self.programs
    }

    /// One JSON object a line for each request that was answered, without those of the cluster's own
    /// machinery, but with what its garbage collector asks about objects. It is written before the
    /// answer is sent.
    pub fn audit_log(&self) -> PathBuf {
        audit_log(&self.state)
    }

    /// What the audit log holds now.
    pub fn audit_events(&self) -> Result<Vec<Value>, Error> {
        let path = self.audit_log();
        let text = fs::read_to_string(&path).context(ReadAuditSnafu { path })?;
        text.lines()
            .map(|line| serde_json::from_str(line).context(AuditSnafu { line }))
            .collect()
    }

    /// Where the programs write their logs.
    pub fn logs(&self) -> PathBuf {
        self.state.logs()
    }

    /// From now on the logs outlive this; so they do after a panic.
    pub fn keep_logs(&mut self) {
        self.state.keep_logs();
    }
}

pub(crate) fn kubectl(programs: &Programs, kubeconfig: &Path) -> Command {
    let mut command = Command::new(programs.path("kubectl"));
    command.env("KUBECONFIG", kubeconfig);
    command
}

/// A client with the rights of a kubeconfig.
pub(crate) async fn client(path: &Path) -> Result<Client, Error> {
    let config = Kubeconfig::read_from(path).context(KubeconfigSnafu { path })?;
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(config, &options)
        .await
        .context(KubeconfigSnafu { path })?;
    Client::try_from(config).context(ClientSnafu)
}

fn audit_log(state: &State) -> PathBuf {
    state.logs().join("audit.log")
}

/// `--name=value`.
pub(crate) fn flag(name: &str, value: impl AsRef<std::ffi::OsStr>) -> OsString {
    let mut flag = OsString::from(format!("--{name}="));
    flag.push(value);
    flag
}

fn etcd_arguments(state: &State, endpoints: &Endpoints) -> Vec<OsString> {
    let clients = format!("http://127.0.0.1:{}", endpoints.etcd);
    let peers = format!("http://127.0.0.1:{}", endpoints.etcd_peers);
    vec![
        flag("data-dir", state.path("etcd")),
        flag("listen-client-urls", &clients),
        flag("advertise-client-urls", &clients),
        flag("listen-peer-urls", &peers),
        flag("initial-advertise-peer-urls", &peers),
        flag("initial-cluster", format!("default={peers}")),
        flag("log-level", "warn"),
        // A test's data is not worth waiting for the disk.
        "--unsafe-no-fsync".into(),
    ]
}

fn apiserver_arguments(
    state: &State,
    pki: &Pki,
    endpoints: &Endpoints,
) -> Result<Vec<OsString>, Error> {
    let (address, port) = endpoints.apiserver;
    let names = [
        "localhost",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
    ];
    let serving = pki.server(
        "kube-apiserver",
        &names,
        &[address, Ipv4Addr::LOCALHOST, plan::API_ADDRESS],
    )?;
    let (certificate, key) = pki.keep("kube-apiserver", &serving)?;
    let kubelets = pki.client("kube-apiserver-kubelet-client", Some("system:masters"))?;
    let (kubelet_certificate, kubelet_key) = pki.keep("kubelet-client", &kubelets)?;
    let policy = pki.write("audit-policy.json", &plan::audit_policy())?;
    let authority = pki.path("ca.crt");
    let tokens = pki.path("tokens.key");
    let mut arguments = vec![
        flag(
            "etcd-servers",
            format!("http://127.0.0.1:{}", endpoints.etcd),
        ),
        flag("bind-address", address.to_string()),
        flag("secure-port", port.to_string()),
        flag("cert-dir", state.path("pki")),
        flag("tls-cert-file", certificate),
        flag("tls-private-key-file", key),
        flag("client-ca-file", &authority),
        flag("kubelet-certificate-authority", &authority),
        flag("kubelet-client-certificate", kubelet_certificate),
        flag("kubelet-client-key", kubelet_key),
        flag("kubelet-preferred-address-types", "InternalIP"),
        flag(
            "service-account-issuer",
            "https://kubernetes.default.svc.cluster.local",
        ),
        flag("service-account-key-file", pki.path("tokens.pub")),
        flag("service-account-signing-key-file", &tokens),
        flag("service-cluster-ip-range", plan::SERVICES),
        flag("authorization-mode", "Node,RBAC"),
        flag("enable-admission-plugins", "NodeRestriction"),
        flag("allow-privileged", "true"),
        flag("audit-policy-file", policy),
        flag("audit-log-path", audit_log(state)),
        flag("profiling", "false"),
    ];
    if address.is_loopback() {
        // The Service `kubernetes` may have no loopback address behind it, and none is used there.
        arguments.push(flag(
            "advertise-address",
            plan::Addresses::new(0).control_plane().to_string(),
        ));
        arguments.push(flag("endpoint-reconciler-type", "none"));
    }
    Ok(arguments)
}
