//! `make cluster` and `make cluster-down`.

use std::{
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
};

use branchpool_e2e_kubernetes::{Options, cluster, detached, script, space, state};
use clap::{Parser, Subcommand};
use snafu::Snafu;
use tokio::process::Command;

const NAMESPACE: &str = "branchpool-system";
/// Postgres loads its first image, which is the longest of what is waited for.
const WAIT: &str = "--timeout=5m";

#[derive(Debug, Parser)]
#[command(about = "A Kubernetes of its own on this machine")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
    /// Of the cluster; several can run side by side
    #[arg(long, global = true, default_value = "cluster", value_parser = name)]
    name: String,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Start it, install the chart and a sample pool, and leave it running
    Up {
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=9))]
        nodes: u8,
        /// Leave it without Branchpool
        #[arg(long)]
        empty: bool,
        /// Also give the nodes this image of scripts/build-images; may be given several times
        #[arg(long = "image", value_name = "NAME")]
        images: Vec<String>,
    },
    /// End it and remove all that it was
    Down,
}

#[derive(Debug, Snafu)]
enum Error {
    #[snafu(transparent)]
    Cluster { source: cluster::Error },
    #[snafu(transparent)]
    State { source: state::Error },
    #[snafu(transparent)]
    Script { source: script::Error },
    #[snafu(display("{what} failed; the cluster runs, `make cluster-down` removes it: {source}"))]
    Install {
        what: &'static str,
        source: space::Error,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.verb {
        Verb::Up {
            nodes,
            empty,
            images,
        } => up(&cli.name, Options { nodes, images }, empty).await,
        Verb::Down => down(&cli.name),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cluster: {error}");
            ExitCode::FAILURE
        }
    }
}

fn name(text: &str) -> Result<String, &'static str> {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if !text.is_empty() && text.bytes().all(is_plain) {
        Ok(text.to_owned())
    } else {
        Err("a name has lower-case letters, digits and dashes")
    }
}

async fn up(name: &str, mut options: Options, empty: bool) -> Result<(), Error> {
    if !empty {
        options
            .images
            .extend(["operator", "agent"].map(str::to_owned));
    }
    let kubeconfig = detached::start(name, options).await?;
    let programs = branchpool_e2e_kubernetes::Programs::ready(&["kubectl", "helm"]).await?;
    if !empty {
        let tools = Tools {
            programs: programs.clone(),
            kubeconfig: kubeconfig.clone(),
        };
        tools.install().await?;
    }
    println!("\nThe cluster runs until `make cluster-down`. To use it:\n");
    println!("    export KUBECONFIG={}", kubeconfig.display());
    println!("    export PATH=\"{}:$PATH\"", path(&programs));
    println!("    kubectl get nodes");
    if !empty {
        println!("    kubectl get branchpools");
        println!("    kubectl branch lease app --wait 1m -- psql -c 'SELECT * FROM notes'");
    }
    Ok(())
}

/// Where kubectl and helm are, and, beside this program, kubectl-branch, which was built for the agent's image.
fn path(programs: &branchpool_e2e_kubernetes::Programs) -> String {
    let kubernetes = programs.directory().display().to_string();
    let own = std::env::current_exe().ok();
    let own = own.as_deref().and_then(Path::parent);
    own.map_or(kubernetes.clone(), |own| {
        format!("{kubernetes}:{}", own.display())
    })
}

fn down(name: &str) -> Result<(), Error> {
    if detached::remove(name)? {
        println!("the cluster is gone");
    } else {
        println!("there was no cluster");
    }
    Ok(())
}

struct Tools {
    programs: branchpool_e2e_kubernetes::Programs,
    kubeconfig: PathBuf,
}

impl Tools {
    async fn install(&self) -> Result<(), Error> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut helm = self.command("helm");
        helm.args(["upgrade", "--install", "branchpool"])
            .arg(root.join("charts/branchpool"))
            .args([
                "--namespace",
                NAMESPACE,
                "--create-namespace",
                "--wait",
                WAIT,
            ]);
        run("helm", helm).await?;
        let mut apply = self.command("kubectl");
        apply
            .args(["apply", "--server-side", "--filename"])
            .arg(root.join("examples/quickstart"));
        run("kubectl apply", apply).await?;
        let mut wait = self.command("kubectl");
        wait.args([
            "wait",
            WAIT,
            "--for=condition=Ready",
            "branchpools",
            "--all",
        ]);
        run("the first filling of the sample pool", wait).await
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.path(program));
        command
            .env("KUBECONFIG", &self.kubeconfig)
            .stdin(Stdio::null());
        command
    }
}

async fn run(what: &'static str, command: Command) -> Result<(), Error> {
    match space::run(command).await {
        Ok(_) => Ok(()),
        Err(source) => Err(Error::Install { what, source }),
    }
}
