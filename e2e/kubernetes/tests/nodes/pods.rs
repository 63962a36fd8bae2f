use std::{net::SocketAddr, time::Duration};

use branchpool_e2e_kubernetes::{Cluster, Own};
use libtest_mimic::Failed;
use tokio::{io::AsyncReadExt, net::TcpStream};

type Done = Result<(), Failed>;

const AGENT: &str = concat!(
    "docker.io/library/branchpool-agent:",
    env!("CARGO_PKG_VERSION")
);
const EXTENSION: &str = concat!(
    "docker.io/library/branchpool-agent-extension:",
    env!("CARGO_PKG_VERSION")
);
const WAIT: &str = "--timeout=120s";
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// A Pod that runs a script on a node, and what `extra` adds to its container and its spec.
fn pod(
    name: &str,
    image: &str,
    node: Option<&str>,
    script: &str,
    container: &str,
    spec: &str,
) -> String {
    let node = node.map_or(String::new(), |node| {
        format!("  nodeSelector: {{kubernetes.io/hostname: {node}}}\n")
    });
    let script = script.replace('\n', "\n          ");
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{test: {name}}}}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 0
{node}{spec}  containers:
    - name: one
      image: {image}
      imagePullPolicy: IfNotPresent
      command: [bash, -euc]
      args:
        - |
          {script}
{container}"
    )
}

/// Runs a Pod to its end and gives what it printed.
async fn outcome(cluster: &Cluster, name: &str, manifest: &str) -> Result<String, Failed> {
    cluster.apply(manifest).await?;
    let pod = format!("pod/{name}");
    let ended = cluster
        .kubectl(&[
            "wait",
            WAIT,
            "--for=jsonpath={.status.phase}=Succeeded",
            &pod,
        ])
        .await;
    let printed = cluster.kubectl(&["logs", &pod]).await;
    if let Err(error) = ended {
        let described = cluster.kubectl(&["describe", &pod]).await?;
        return Err(format!("{error}\n{printed:?}\n{described}").into());
    }
    remove(cluster, name).await?;
    Ok(printed?.trim().to_owned())
}

async fn start(cluster: &Cluster, name: &str, manifest: &str) -> Done {
    cluster.apply(manifest).await?;
    let pod = format!("pod/{name}");
    cluster
        .kubectl(&["wait", WAIT, "--for=condition=Ready", &pod])
        .await?;
    Ok(())
}

async fn remove(cluster: &Cluster, name: &str) -> Done {
    cluster.kubectl(&["delete", "pod", name, WAIT]).await?;
    Ok(())
}

pub(crate) async fn remove_all(cluster: &Cluster) {
    let rest = ["delete", "pods", "--selector=test", WAIT];
    if let Err(why) = cluster.kubectl(&rest).await {
        println!("what the test left is still there: {why}");
    }
}

async fn nodes(cluster: &Cluster) -> Result<Vec<String>, Failed> {
    let names = cluster
        .kubectl(&[
            "get",
            "nodes",
            "--output=jsonpath={.items[*].metadata.labels.kubernetes\\.io/hostname}",
        ])
        .await?;
    Ok(names.split_whitespace().map(str::to_owned).collect())
}

/// What needs the harness's own hands is not done on a cluster that was given.
fn hands<'a>(cluster: &'a Cluster, what: &str) -> Option<&'a Own> {
    if cluster.own().is_none() {
        println!("skipped on a cluster that was given: {what}");
    }
    cluster.own()
}

pub(crate) async fn every_node_runs_a_pod(cluster: &Cluster) -> Done {
    let nodes = nodes(cluster).await?;
    assert!(nodes.len() >= 2, "two nodes or more, and not {nodes:?}");
    for node in nodes {
        let name = format!("hello-{node}");
        let manifest = pod(
            &name,
            AGENT,
            Some(&node),
            "echo hello from $HOSTNAME",
            "",
            "",
        );
        let printed = outcome(cluster, &name, &manifest).await?;
        assert_eq!(printed, format!("hello from {name}"));
    }
    Ok(())
}

/// A server that answers every connection with its name. The shell's own, as the image has no other.
fn server(name: &str, node: &str, container: &str) -> String {
    let script = "exec perl -MIO::Socket::INET -e '\n\
        my $s = IO::Socket::INET->new(LocalPort => 8000, Listen => 9, ReuseAddr => 1) or die $!;\n\
        while (my $c = $s->accept) { print $c \"$ENV{HOSTNAME}\\n\"; close $c }'";
    pod(name, AGENT, Some(node), script, container, "")
}

/// From each node to a Pod on each, by name and by the Service's address.
pub(crate) async fn services_are_found_and_reached(cluster: &Cluster) -> Done {
    let nodes = nodes(cluster).await?;
    for node in &nodes {
        let name = format!("server-{node}");
        start(cluster, &name, &server(&name, node, "")).await?;
        let service = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec:\n  selector: {{test: {name}}}\n  ports: [{{port: 80, targetPort: 8000}}]\n"
        );
        cluster.apply(&service).await?;
        cluster
            .kubectl(&[
                "wait",
                WAIT,
                "--for=jsonpath={.endpoints[0].addresses[0]}",
                "endpointslice",
                &format!("--selector=kubernetes.io/service-name={name}"),
            ])
            .await?;
    }
    for from in &nodes {
        for to in &nodes {
            // The Service may need a moment to reach the node's rules and the DNS.
            let script = format!(
                "for _ in {{1..100}}; do\n\
                 if exec 3<>/dev/tcp/server-{to}.default.svc.cluster.local/80; then read -r name <&3; echo $name; exit; fi 2>/dev/null\n\
                 sleep 0.1\n\
                 done\n\
                 exit 1"
            );
            let name = format!("client-{from}-{to}");
            let manifest = pod(&name, AGENT, Some(from), &script, "", "");
            let printed = outcome(cluster, &name, &manifest).await?;
            assert_eq!(printed, format!("server-{to}"), "from {from}");
        }
    }
    for node in &nodes {
        let name = format!("server-{node}");
        cluster.kubectl(&["delete", "service", &name]).await?;
        remove(cluster, &name).await?;
    }
    Ok(())
}

pub(crate) async fn a_host_port_is_reached_from_outside(cluster: &Cluster) -> Done {
    let Some(own) = hands(cluster, "this machine may have no way to the nodes") else {
        return Ok(());
    };
    let node = &own.nodes[1];
    let container = "      ports: [{containerPort: 8000, hostPort: 18000}]\n";
    let manifest = server("outside", node.name(), container);
    start(cluster, "outside", &manifest).await?;
    let address = SocketAddr::from((node.address(), 18000));
    let mut answer = String::new();
    let connect = async {
        let mut connection = TcpStream::connect(address).await?;
        connection.read_to_string(&mut answer).await
    };
    tokio::time::timeout(CONNECT_LIMIT, connect).await??;
    assert_eq!(answer, "outside\n");
    remove(cluster, "outside").await
}

pub(crate) async fn a_pod_makes_a_snapshot_on_its_node(cluster: &Cluster) -> Done {
    let Some(own) = hands(
        cluster,
        "its nodes may have no Btrfs at /var/lib/branchpool",
    ) else {
        return Ok(());
    };
    let node = &own.nodes[0];
    let script = "cd /data\n\
        btrfs subvolume create original\n\
        echo unchanged >original/file\n\
        btrfs subvolume snapshot original copy\n\
        echo changed >copy/file\n\
        cat original/file";
    let container = "      securityContext: {privileged: true}\n      \
        volumeMounts: [{name: data, mountPath: /data, mountPropagation: Bidirectional}]\n";
    let spec =
        "  volumes: [{name: data, hostPath: {path: /var/lib/branchpool, type: Directory}}]\n";
    let manifest = pod(
        "snapshot",
        AGENT,
        Some(node.name()),
        script,
        container,
        spec,
    );
    let printed = outcome(cluster, "snapshot", &manifest).await?;
    assert!(printed.ends_with("unchanged"), "{printed}");
    let file = |node: usize| own.nodes[node].path("/var/lib/branchpool/copy/file");
    assert_eq!(std::fs::read_to_string(file(0))?, "changed\n");
    assert!(
        !file(1).exists(),
        "the other node should have a disk of its own"
    );
    Ok(())
}

pub(crate) async fn an_extension_is_one_package_on_top(cluster: &Cluster) -> Done {
    let shown = include_str!("../../../../docs/images.md");
    let containerfile = include_str!("../../../../examples/extension/Containerfile");
    assert!(
        shown.contains(&format!("```dockerfile\n{containerfile}```\n")),
        "docs/images.md does not show examples/extension/Containerfile"
    );
    let script = "cd /tmp\n\
        bin=/usr/lib/postgresql/15/bin\n\
        $bin/initdb --pgdata=data --auth=trust >/dev/null\n\
        $bin/pg_ctl --pgdata=data --wait --log=log --options='-c listen_addresses= -k /tmp' start >/dev/null\n\
        psql --host=/tmp --no-psqlrc -v ON_ERROR_STOP=1 -qAt -c 'CREATE EXTENSION ip4r' \
        -c \"SELECT '10.0.0.0/8'::ip4r >>= '10.1.2.3'::ip4\" postgres\n\
        $bin/pg_ctl --pgdata=data --mode=fast stop >/dev/null";
    let container = "      securityContext: {runAsUser: 999, runAsGroup: 999}\n";
    let manifest = pod("extension", EXTENSION, None, script, container, "");
    let printed = outcome(cluster, "extension", &manifest).await?;
    assert_eq!(printed, "t");
    Ok(())
}

pub(crate) async fn a_node_is_cut_off_and_comes_back(cluster: &Cluster) -> Done {
    let Some(own) = hands(cluster, "its network is not the harness's to cut") else {
        return Ok(());
    };
    let node = &own.nodes[1];
    let kubelet = SocketAddr::from((node.address(), 10250));
    let reached =
        async || tokio::time::timeout(Duration::from_secs(2), TcpStream::connect(kubelet)).await;
    assert!(
        reached().await.is_ok_and(|made| made.is_ok()),
        "the kubelet should be reached"
    );
    node.connect(false).await?;
    assert!(
        !reached().await.is_ok_and(|made| made.is_ok()),
        "it should be cut off"
    );
    node.connect(true).await?;
    tokio::time::timeout(CONNECT_LIMIT, TcpStream::connect(kubelet)).await??;
    Ok(())
}
