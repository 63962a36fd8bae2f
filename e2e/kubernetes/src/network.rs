//! One bridge that joins the control plane, the nodes and this machine.

use std::{io, process::Stdio};

use snafu::{ResultExt, Snafu, ensure};
use tokio::{io::AsyncWriteExt, process::Command};

use crate::{
    plan::{Addresses, pods_of},
    space::Space,
};

const BRIDGE: &str = "cluster";

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("cannot run ip: is iproute2 installed? `scripts/setup cluster` sees to it"))]
    Run { source: io::Error },
    #[snafu(display("ip failed: {message}; it was told:\n{commands}"))]
    Failed { message: String, commands: String },
    #[snafu(display(
        "there is no room for another cluster: each has an interface branchpool0 to branchpool255"
    ))]
    Full,
}

/// Makes the bridge in the control plane's network and joins this machine's to it. The interface on
/// this side goes when the network on the other side does, so its name is what tells which numbers are
/// taken, on the whole machine.
pub(crate) async fn join_host(control_plane: &Space) -> Result<Addresses, Error> {
    for number in 0..=u8::MAX {
        let addresses = Addresses::new(number);
        let (interface, pid) = (addresses.interface(), control_plane.pid());
        let link = format!("link add {interface} type veth peer name host netns {pid}");
        match ip(Command::new("ip"), &link).await {
            Ok(()) => {}
            Err(Error::Failed { message, .. }) if message.contains("File exists") => continue,
            Err(error) => return Err(error),
        }
        let outside = format!(
            "addr add {}/24 dev {interface}\nlink set {interface} up",
            addresses.host()
        );
        let inside = format!(
            "link set lo up\n\
             link add {BRIDGE} type bridge\n\
             addr add {}/24 dev {BRIDGE}\n\
             link set {BRIDGE} up\n\
             link set host master {BRIDGE} up",
            addresses.control_plane()
        );
        ip(control_plane.network_command("ip"), &inside).await?;
        ip(Command::new("ip"), &outside).await?;
        return Ok(addresses);
    }
    FullSnafu.fail()
}

/// Joins a node's network to the bridge. `nodes`: how many there are; each knows the way to the Pods of
/// all others, and so does the control plane.
pub(crate) async fn join_node(
    control_plane: &Space,
    node: &Space,
    addresses: Addresses,
    index: u8,
    nodes: u8,
) -> Result<(), Error> {
    let (address, gateway) = (addresses.node(index), addresses.control_plane());
    let port = port_of(index);
    let outside = format!(
        "link add {port} type veth peer name eth0 netns {}\n\
         link set {port} master {BRIDGE} up\n\
         route add {} via {address} dev {BRIDGE}",
        node.pid(),
        pods_of(index),
    );
    let routes = (1..=nodes).filter(|other| *other != index).map(|other| {
        format!(
            "route add {} via {} dev eth0",
            pods_of(other),
            addresses.node(other)
        )
    });
    let inside: Vec<_> = [
        "link set lo up".to_owned(),
        format!("addr add {address}/24 dev eth0"),
        "link set eth0 up".to_owned(),
        format!("route add default via {gateway} dev eth0"),
    ]
    .into_iter()
    .chain(routes)
    .collect();
    let inside = inside.join("\n");
    ip(control_plane.network_command("ip"), &outside).await?;
    ip(node.network_command("ip"), &inside).await
}

/// Takes a node off the bridge, as a broken cable would, or puts it back.
pub(crate) async fn connect(
    control_plane: &Space,
    index: u8,
    connected: bool,
) -> Result<(), Error> {
    let port = port_of(index);
    let command = if connected {
        format!("link set {port} master {BRIDGE}")
    } else {
        format!("link set {port} nomaster")
    };
    ip(control_plane.network_command("ip"), &command).await
}

fn port_of(index: u8) -> String {
    format!("node{index}")
}

/// Runs `ip` with commands, one a line.
async fn ip(mut command: Command, commands: &str) -> Result<(), Error> {
    let mut child = command
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context(RunSnafu)?;
    let mut input = child.stdin.take().expect("the input should be a pipe");
    // One that has ended already says why.
    let _ = input.write_all(commands.as_bytes()).await;
    drop(input);
    let output = child.wait_with_output().await.context(RunSnafu)?;
    let message = String::from_utf8_lossy(&output.stderr);
    let message = message.trim();
    ensure!(output.status.success(), FailedSnafu { message, commands });
    Ok(())
}
