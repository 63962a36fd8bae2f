//! A node: containerd, kubelet and kube-proxy in namespaces of their own.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::Arc,
};

use snafu::{ResultExt, Snafu};
use tokio::{net::UnixStream, process::Command};

use crate::{
    cgroup, network,
    pki::{self, Pki, write_private},
    plan::{self, Addresses},
    process::{self, Program},
    programs::Programs,
    space::{self, Space},
};

const SETUP: &str = include_str!("node.sh");
const SOCKET: &str = "/run/containerd/containerd.sock";
/// Of the Btrfs filesystem at /var/lib/branchpool; its file is sparse.
const DISK: &str = "16G";

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(transparent)]
    Space { source: space::Error },
    #[snafu(transparent)]
    Process { source: process::Error },
    #[snafu(transparent)]
    Network { source: network::Error },
    #[snafu(transparent)]
    Cgroup { source: cgroup::Error },
    #[snafu(transparent)]
    Pki { source: pki::Error },
    #[snafu(display("cannot write {}", path.display()))]
    Write { path: PathBuf, source: io::Error },
    #[snafu(display("cannot open the image {}", path.display()))]
    Image { path: PathBuf, source: io::Error },
}

/// One of the nodes, which ends when it is dropped.
#[derive(Debug)]
pub struct Node {
    pub kubelet: Program,
    pub kube_proxy: Program,
    pub containerd: Program,
    name: String,
    index: u8,
    address: Ipv4Addr,
    control_plane: Arc<Space>,
    space: Arc<Space>,
}

/// What all nodes of a cluster have in common.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) programs: Programs,
    pub(crate) pki: Arc<Pki>,
    pub(crate) server: String,
    pub(crate) addresses: Addresses,
    pub(crate) control_plane: Arc<Space>,
    pub(crate) lock: File,
    /// Of the cluster.
    pub(crate) directory: PathBuf,
    pub(crate) logs: PathBuf,
    pub(crate) cgroup: String,
    /// How many there are.
    pub(crate) nodes: u8,
}

impl Node {
    /// Everything but the programs that need the apiserver; `index` counts from 1.
    pub(crate) async fn prepare(common: &Common, index: u8) -> Result<Self, Error> {
        let name = format!("node-{index}");
        let address = common.addresses.node(index);
        let directory = common.directory.join(&name);
        configure(common, &name, index, &directory)?;
        cgroup::make(&common.cgroup, &name)?;
        let logs = common.logs.join(&name);
        make(&logs)?;
        let setup = space::Plan {
            lock: &common.lock,
            network: true,
            setup: SETUP,
            environment: vec![
                ("NODE", name.as_ref()),
                ("STATE", directory.as_ref()),
                ("PROGRAMS", common.programs.directory().as_ref()),
                ("DISK", DISK.as_ref()),
            ],
            log: &logs.join("space.log"),
        };
        let space = Arc::new(Space::start(setup).await?);
        network::join_node(
            &common.control_plane,
            &space,
            common.addresses,
            index,
            common.nodes,
        )
        .await?;
        let program = |program: &str, path: &str, arguments: Vec<OsString>| {
            Program::new(program, &space, path.into(), arguments, &logs)
        };
        let mut node = Self {
            containerd: program(
                "containerd",
                "containerd",
                vec!["--config=/mnt/containerd.toml".into()],
            ),
            kubelet: program(
                "kubelet",
                "/mnt/bin/kubelet",
                vec![
                    "--config=/mnt/kubelet.json".into(),
                    "--kubeconfig=/mnt/kubelet.kubeconfig".into(),
                    format!("--hostname-override={name}").into(),
                    format!("--node-ip={address}").into(),
                ],
            ),
            kube_proxy: program(
                "kube-proxy",
                "/mnt/bin/kube-proxy",
                vec!["--config=/mnt/kube-proxy.json".into()],
            ),
            name,
            index,
            address,
            control_plane: Arc::clone(&common.control_plane),
            space,
        };
        node.run_containerd().await?;
        Ok(node)
    }

    /// Starts what does not run.
    pub async fn run(&mut self) -> Result<(), Error> {
        self.run_containerd().await?;
        self.kubelet.start()?;
        Ok(self.kube_proxy.start()?)
    }

    async fn run_containerd(&mut self) -> Result<(), Error> {
        self.containerd.start()?;
        let socket = self.space.path(SOCKET);
        let ready = async || UnixStream::connect(&socket).await.is_ok();
        Ok(self.containerd.ready(ready).await?)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reached from this machine as well.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// A command on the node, as root, without a Pod around it.
    pub fn command(&self, program: &str) -> Command {
        self.space.command(program)
    }

    /// A path that leads from here to what `path` is on the node.
    pub fn path(&self, path: &str) -> PathBuf {
        self.space.path(path)
    }

    pub(crate) fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// Takes the node off the network, as a broken cable would; `true` heals it.
    pub async fn connect(&self, connected: bool) -> Result<(), Error> {
        Ok(network::connect(&self.control_plane, self.index, connected).await?)
    }

    /// Gives the node the images of an archive.
    pub async fn import(&self, archive: &Path) -> Result<(), Error> {
        let file = File::open(archive).context(ImageSnafu { path: archive })?;
        let mut command = self.command("ctr");
        command
            .args(["--namespace", "k8s.io", "images", "import", "-"])
            .stdin(file);
        space::run(command).await?;
        Ok(())
    }
}

fn configure(common: &Common, name: &str, index: u8, directory: &Path) -> Result<(), Error> {
    make(directory)?;
    make(&directory.join("cni"))?;
    let address = common.addresses.node(index);
    let (certificate, key) = common.pki.server(name, &[name], &[address])?;
    let user = format!("system:node:{name}");
    let kubelet = common
        .pki
        .kubeconfig(&common.server, &user, Some("system:nodes"))?;
    let proxy = common
        .pki
        .kubeconfig(&common.server, "system:kube-proxy", None)?;
    let cgroup = format!("/{}/{name}", common.cgroup);
    for (file, text) in [
        ("ca.crt", common.pki.authority()),
        ("kubelet.crt", &certificate),
        ("kubelet.key", &key),
        ("kubelet.kubeconfig", &kubelet),
        ("kubelet.json", &plan::kubelet(address, &cgroup)),
        ("kube-proxy.kubeconfig", &proxy),
        ("kube-proxy.json", &plan::kube_proxy(name)),
        ("containerd.toml", plan::containerd()),
        ("cni/pods.conflist", &plan::cni(index)),
        ("resolv.conf", ""),
    ] {
        let path = directory.join(file);
        write_private(&path, text).context(WriteSnafu { path })?;
    }
    Ok(())
}

fn make(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).context(WriteSnafu { path })
}
