//! Addresses and configuration files, as functions of plain values.

use std::net::Ipv4Addr;

use data_encoding::BASE64;
use serde_json::json;

pub(crate) const DNS_ADDRESS: &str = "10.96.0.10";
pub(crate) const API_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
pub(crate) const SERVICES: &str = "10.96.0.0/16";
pub(crate) const PODS: &str = "10.244.0.0/16";
pub(crate) const API_PORT: u16 = 6443;
/// For clients, for peers.
pub(crate) const ETCD_PORTS: [u16; 2] = [2379, 2380];

/// The networks of one cluster among those on this machine. They are of the range for benchmarks,
/// which no one routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Addresses {
    number: u8,
}

impl Addresses {
    pub(crate) fn new(number: u8) -> Self {
        Self { number }
    }

    /// Of the interface that leads from this machine into the cluster's network.
    pub(crate) fn interface(self) -> String {
        format!("branchpool{}", self.number)
    }

    /// This machine, as the cluster sees it.
    pub(crate) fn host(self) -> Ipv4Addr {
        self.at(254)
    }

    /// Where the apiserver is.
    pub(crate) fn control_plane(self) -> Ipv4Addr {
        self.at(1)
    }

    /// Nodes are counted from 1.
    pub(crate) fn node(self, index: u8) -> Ipv4Addr {
        self.at(10 + index)
    }

    fn at(self, last: u8) -> Ipv4Addr {
        Ipv4Addr::new(198, 19, self.number, last)
    }
}

/// The network of a node's Pods.
pub(crate) fn pods_of(index: u8) -> String {
    format!("10.244.{index}.0/24")
}

pub(crate) fn kubeconfig(server: &str, authority: &str, certificate: &str, key: &str) -> String {
    let encode = |text: &str| BASE64.encode(text.as_bytes());
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "branchpool", "cluster": {
            "server": server,
            "certificate-authority-data": encode(authority),
        }}],
        "users": [{"name": "branchpool", "user": {
            "client-certificate-data": encode(certificate),
            "client-key-data": encode(key),
        }}],
        "contexts": [{"name": "branchpool", "context": {"cluster": "branchpool", "user": "branchpool"}}],
        "current-context": "branchpool",
    })
    .to_string()
}

/// Everything that is not the cluster's own machinery, one line a request, without bodies. Of the
/// machinery what the garbage collector does to objects, for that is owing to those who made them.
pub(crate) fn audit_policy() -> String {
    let machinery = [
        "system:apiserver",
        "system:kube-controller-manager",
        "system:kube-scheduler",
        "system:kube-proxy",
    ];
    json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {
                "level": "Metadata",
                "users": ["system:serviceaccount:kube-system:generic-garbage-collector"],
                "verbs": ["get", "update", "patch", "delete", "deletecollection"],
                "resources": [{"group": ""}, {"group": "branchpool.dev"}],
            },
            {"level": "None", "users": machinery},
            {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
            {"level": "None", "nonResourceURLs": ["/*"]},
            {"level": "Metadata"},
        ],
    })
    .to_string()
}

pub(crate) fn kubelet(address: Ipv4Addr, cgroup: &str) -> String {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": "/mnt/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup,
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "nodefs.inodesFree": "1%", "imagefs.available": "1%"},
        "failSwapOn": false,
        "imageGCHighThresholdPercent": 100,
        "makeIPTablesUtilChains": false,
        "resolvConf": "/mnt/resolv.conf",
        "tlsCertFile": "/mnt/kubelet.crt",
        "tlsPrivateKeyFile": "/mnt/kubelet.key",
    })
    .to_string()
}

pub(crate) fn kube_proxy(node: &str) -> String {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": "/mnt/kube-proxy.kubeconfig"},
        "clusterCIDR": PODS,
        // A limit of the whole machine, not of one network.
        "conntrack": {"maxPerCore": 0},
        "healthzBindAddress": "127.0.0.1:10256",
        "hostnameOverride": node,
        "metricsBindAddress": "127.0.0.1:10249",
        "mode": "nftables",
    })
    .to_string()
}

/// `restrict_oom_score_adj`: not every root may protect a process from the OOM killer.
pub(crate) fn containerd() -> &'static str {
    r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
address = "/run/containerd/containerd.sock"

[plugins."io.containerd.internal.v1.opt"]
path = "/var/lib/containerd/opt"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "branchpool.dev/e2e/pause:1"
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "/mnt/cni"

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"#
}

pub(crate) fn cni(index: u8) -> String {
    json!({
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "pods",
                "isGateway": true,
                "hairpinMode": true,
                "ipMasq": false,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": pods_of(index)}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    })
    .to_string()
}
