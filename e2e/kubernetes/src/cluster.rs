//! A cluster with whole nodes, or the one of a kubeconfig that is given.

use std::{
    io::{self, Seek, Write},
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
};

use kube::Client;
use snafu::{ResultExt, Snafu};
use tokio::process::Command;

use crate::{
    Api,
    api::{self, Endpoints, Handle},
    cgroup,
    images::Images,
    network,
    node::{self, Node},
    pki,
    plan::{self, Addresses},
    process::{self, Program},
    programs::Programs,
    script,
    space::{self, Space},
    state::{self, State},
};

/// Names the kubeconfig of a cluster of the user's own.
pub const GIVEN: &str = "E2E_KUBECONFIG";

/// Images that every cluster has.
const IMAGES: [&str; 2] = ["pause", "coredns"];
const COREDNS: &str = include_str!("coredns.yaml");
const WAIT: &str = "--timeout=180s";

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)))]
pub enum Error {
    #[snafu(transparent)]
    Api { source: api::Error },
    #[snafu(transparent)]
    Node { source: node::Error },
    #[snafu(transparent)]
    Network { source: network::Error },
    #[snafu(transparent)]
    Pki { source: pki::Error },
    #[snafu(transparent)]
    Process { source: process::Error },
    #[snafu(transparent)]
    Script { source: script::Error },
    #[snafu(transparent)]
    Space { source: space::Error },
    #[snafu(transparent)]
    State { source: state::Error },
    #[snafu(transparent)]
    Cgroup { source: cgroup::Error },
    #[snafu(display("cannot keep the caller's descriptors from the cluster"))]
    Descriptors {
        source: branchpool_sys::process::Error,
    },
    #[snafu(display("cannot give kubectl a manifest"))]
    Manifest { source: io::Error },
}

/// What a cluster has beside its control plane.
#[derive(Clone, Debug)]
pub struct Options {
    pub nodes: u8,
    /// Names of images that scripts/build-images makes, for every node.
    pub images: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nodes: 2,
            images: Vec::new(),
        }
    }
}

/// A cluster that tests run against.
#[derive(Debug)]
pub struct Cluster {
    kubeconfig: PathBuf,
    client: Handle,
    programs: Programs,
    own: Option<Own>,
}

/// The parts of a cluster that was made here, for tests that break them.
#[derive(Debug)]
pub struct Own {
    /// Counted from 0, while their names count from 1.
    pub nodes: Vec<Node>,
    pub controller_manager: Program,
    pub scheduler: Program,
    /// Ends behind all others.
    pub api: Api,
    cgroup: String,
}

impl Cluster {
    /// The cluster that `E2E_KUBECONFIG` names, otherwise one of its own, which is gone when the value
    /// is dropped. Needs root. The first time on a machine programs and images are built.
    pub async fn start(options: Options) -> Result<Self, Error> {
        match std::env::var_os(GIVEN).filter(|path| !path.is_empty()) {
            Some(path) => Self::given(path.into()).await,
            None => Ok(Self::from_own(Own::start(State::bound, options).await?)),
        }
    }

    async fn given(kubeconfig: PathBuf) -> Result<Self, Error> {
        Ok(Self {
            client: Handle(api::client(&kubeconfig).await?),
            programs: Programs::ready(&["kubectl", "helm"]).await?,
            kubeconfig,
            own: None,
        })
    }

    fn from_own(own: Own) -> Self {
        Self {
            kubeconfig: own.api.kubeconfig().to_owned(),
            client: Handle(own.api.client()),
            programs: own.api.programs().clone(),
            own: Some(own),
        }
    }

    /// The harness's hands on the cluster; none when it was given.
    pub fn own(&self) -> Option<&Own> {
        self.own.as_ref()
    }

    /// The harness's hands on the cluster; none when it was given.
    pub fn own_mut(&mut self) -> Option<&mut Own> {
        self.own.as_mut()
    }

    /// With administrator's rights.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// With administrator's rights.
    pub fn client(&self) -> Client {
        self.client.0.clone()
    }

    /// A command of `bin`, such as kubectl or helm, with administrator's rights.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.path(program));
        command.env("KUBECONFIG", &self.kubeconfig);
        command
    }

    /// Runs kubectl to its end and gives what it printed. A failure has what it complained of.
    pub async fn kubectl(&self, arguments: &[&str]) -> Result<String, Error> {
        let mut command = self.command("kubectl");
        command.args(arguments).stdin(Stdio::null());
        Ok(space::run(command).await?)
    }

    /// `kubectl apply` of the manifests in `yaml`.
    pub async fn apply(&self, yaml: &str) -> Result<String, Error> {
        apply(self.command("kubectl"), yaml).await
    }
}

impl Own {
    pub(crate) async fn start(
        state: impl FnOnce() -> Result<State, state::Error>,
        options: Options,
    ) -> Result<Self, Error> {
        let programs = Programs::ready(&[]).await?;
        let names: Vec<_> = IMAGES
            .iter()
            .copied()
            .chain(options.images.iter().map(String::as_str))
            .collect();
        let images = Images::ready(&names).await?;
        let (mut api, addresses) = control_plane(state()?, programs).await?;
        let cgroup = api.state.cgroup()?;
        let archives = names.iter().map(|name| images.archive(name)).collect();
        let mut controller_manager = api.controller_manager(&["*"]).await?;
        let mut scheduler = api.controller("kube-scheduler", Vec::new())?;
        let common = node::Common {
            programs: api.programs().clone(),
            pki: Arc::clone(&api.pki),
            server: api.server.clone(),
            addresses,
            control_plane: Arc::clone(&api.space),
            lock: api.state.lock()?,
            directory: api.state.path(""),
            logs: api.state.logs(),
            cgroup: cgroup.clone(),
            nodes: options.nodes,
        };
        let started = async {
            let (nodes, ()) = tokio::try_join!(prepare_nodes(common, archives), async {
                api.run().await?;
                controller_manager.start()?;
                scheduler.start()?;
                Ok(())
            })?;
            Ok::<_, Error>(nodes)
        };
        let started = started.await;
        if started.is_err() {
            api.keep_logs();
        }
        let mut own = Self {
            nodes: started?,
            controller_manager,
            scheduler,
            api,
            cgroup,
        };
        match own.complete().await {
            Ok(()) => Ok(own),
            Err(error) => {
                own.api.keep_logs();
                Err(error)
            }
        }
    }

    /// Runs the nodes' programs, and the DNS of the cluster.
    async fn complete(&mut self) -> Result<(), Error> {
        for node in &mut self.nodes {
            node.run().await?;
        }
        apply(self.api.kubectl(), COREDNS).await?;
        for node in &self.nodes {
            let name = format!("node/{}", node.name());
            // The first waits until it has registered; kubectl does that for one object only.
            for condition in ["create", "condition=Ready"] {
                let mut command = self.api.kubectl();
                command.args(["wait", WAIT, &format!("--for={condition}"), &name]);
                space::run(command).await?;
            }
        }
        let mut command = self.api.kubectl();
        command.args([
            "rollout",
            "status",
            WAIT,
            "--namespace=kube-system",
            "deployment/coredns",
        ]);
        space::run(command).await?;
        Ok(())
    }

    /// Leaves the cluster running when this process ends.
    pub(crate) async fn detach(mut self) -> Result<(), Error> {
        let spaces: Vec<_> = self
            .nodes
            .iter()
            .map(Node::space)
            .chain([&self.api.space])
            .map(Arc::clone)
            .collect();
        let pids: Vec<_> = spaces.iter().map(|space| space.pid()).collect();
        self.api.state.detach(&pids)?;
        for space in spaces {
            space.detach().await?;
        }
        Ok(())
    }

    /// From now on the logs outlive the cluster; so they do after a panic.
    pub fn keep_logs(&mut self) {
        self.api.keep_logs();
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // A process that is frozen does not die.
        if let Err(error) = cgroup::thaw_all(&self.cgroup) {
            eprintln!("{}", branchpool_sys::chain(&error));
        }
    }
}

async fn prepare_nodes(common: node::Common, archives: Vec<PathBuf>) -> Result<Vec<Node>, Error> {
    let prepare = async |index| {
        let node = Node::prepare(&common, index).await?;
        for archive in &archives {
            node.import(archive).await?;
        }
        Ok(node)
    };
    futures_util::future::try_join_all((1..=common.nodes).map(prepare)).await
}

/// The space of the control plane, joined to this machine, and an apiserver that does not run yet.
async fn control_plane(state: State, programs: Programs) -> Result<(Api, Addresses), Error> {
    let plan = space::Plan {
        lock: &state.lock()?,
        network: true,
        setup: "",
        environment: Vec::new(),
        log: &state.logs().join("control-plane.log"),
    };
    let space = Arc::new(Space::start(plan).await?);
    let addresses = network::join_host(&space).await?;
    let endpoints = Endpoints {
        apiserver: (addresses.control_plane(), plan::API_PORT),
        etcd: plan::ETCD_PORTS[0],
        etcd_peers: plan::ETCD_PORTS[1],
    };
    let api = Api::new(programs, state, space, &endpoints).await?;
    Ok((api, addresses))
}

async fn apply(mut kubectl: Command, yaml: &str) -> Result<String, Error> {
    let mut file = tempfile::tempfile().context(ManifestSnafu)?;
    file.write_all(yaml.as_bytes()).context(ManifestSnafu)?;
    file.rewind().context(ManifestSnafu)?;
    kubectl
        .args(["apply", "--server-side", "--filename=-"])
        .stdin(file);
    Ok(space::run(kubectl).await?)
}
