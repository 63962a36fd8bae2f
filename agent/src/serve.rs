//! The agent below its supervisor: preflight, engine, API, and an orderly end.

use std::{
    io::IsTerminal, path::Path, process::ExitCode, thread::available_parallelism, time::Duration,
};

use branchpool_agent::{
    cli::{Common, Listen, LogFormat, Run, Standalone},
    engine::{self, Config, Engine},
    gateway::{self, Certificate, Gateway},
    http::{ListenError, Server, Tcp},
    plan::{Limits, Reach},
    preflight,
    standalone::manifests,
    storage::{
        Layout, layout,
        loopfile::{self, LoopFile},
    },
};
use branchpool_supervisor::client::{self, Supervisor};
use branchpool_tls::watching;
use data_encoding::HEXLOWER;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sha2::{Digest, Sha256};
use snafu::{ResultExt, Snafu};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;

use crate::caller::Caller;

#[derive(Debug, Snafu)]
enum Error {
    #[snafu(display("{source}"), context(false))]
    Preflight { source: preflight::Error },
    #[snafu(display("{source}"), context(false))]
    LoopFile { source: loopfile::Error },
    #[snafu(display("{source}"), context(false))]
    Layout { source: layout::Error },
    #[snafu(display("{source}"), context(false))]
    Engine { source: engine::Error },
    #[snafu(display("{source}"), context(false))]
    Listen { source: ListenError },
    #[snafu(display("{source}"), context(false))]
    Gateway { source: gateway::Error },
    #[snafu(display("{source}"), context(false))]
    Manifests { source: manifests::Error },
    #[snafu(
        display("the operator's CA cannot be followed: {source}"),
        context(false)
    )]
    Follow { source: watching::Error },
    #[snafu(
        display("the connection to the supervisor is unusable: {source}"),
        context(false)
    )]
    Supervisor { source: client::Error },
    #[snafu(display("the runtime could not be set up: {source}"))]
    Runtime { source: std::io::Error },
    #[snafu(display("the supervisor is gone; start the agent again"))]
    SupervisorLost,
    #[snafu(display("{what} ended abnormally"))]
    Ended { what: &'static str },
}

impl Error {
    /// 64 to 78 tell the supervisor that a new try would end the same.
    fn exit_code(&self) -> u8 {
        match self {
            Self::Preflight { source } => source.exit_code(),
            Self::LoopFile { .. }
            | Self::Layout { .. }
            | Self::Listen { .. }
            | Self::Gateway { .. }
            | Self::Manifests { .. }
            | Self::Follow { .. } => 78,
            Self::Engine { source } => source.exit_code(),
            Self::SupervisorLost | Self::Supervisor { .. } => 69,
            Self::Runtime { .. } | Self::Ended { .. } => 1,
        }
    }
}

pub(super) fn standalone(options: Standalone) -> ExitCode {
    in_runtime(options.common.log_format, async move {
        // Before anything is made: a manifest that cannot be read is the likeliest mistake.
        manifests::read(&options.manifests)?;
        let (root, loop_file) = if let Some(root) = options.root {
            (root, None)
        } else {
            let (data, size) = (options.data_dir.clone(), options.size);
            let mounted = tokio::task::spawn_blocking(move || {
                LoopFile::mount(&data.join("btrfs.img"), size, &data.join("root"))
            });
            let file = mounted
                .await
                .map_err(|_| Error::Ended { what: "mounting" })??;
            (file.mount_point().to_owned(), Some(file))
        };
        let served = serve(&root, options.common, Caller::Manifests(options.manifests)).await;
        if let Some(file) = loop_file
            && let Err(problem) = tokio::task::spawn_blocking(move || file.unmount())
                .await
                .map_err(|_| Error::Ended { what: "unmounting" })?
        {
            warn!("{problem}");
        }
        served
    })
}

pub(super) fn run(options: Run) -> ExitCode {
    in_runtime(options.common.log_format, async move {
        let caller = Caller::of(&options).await?;
        serve(&options.root, options.common, caller).await
    })
}

fn in_runtime(format: LogFormat, work: impl Future<Output = Result<(), Error>>) -> ExitCode {
    start_log(format);
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context(RuntimeSnafu);
    let result = runtime.and_then(|runtime| {
        let result = runtime.block_on(work);
        // What still blocks must not hold up the end.
        runtime.shutdown_timeout(Duration::from_secs(1));
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            error!("{problem}");
            ExitCode::from(problem.exit_code())
        }
    }
}

fn start_log(format: LogFormat) {
    let filter =
        EnvFilter::try_from_env("BRANCHPOOL_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    match format {
        LogFormat::Text => builder.with_target(false).init(),
        LogFormat::Json => builder.json().init(),
    }
}

/// Each branch takes some descriptors.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // The sampler watches what is left, whatever the limit is.
    let _refused = setrlimit(Resource::Nofile, raised);
}

async fn serve(root: &Path, common: Common, caller: Caller) -> Result<(), Error> {
    let mut terminate = Terminations::new().context(RuntimeSnafu)?;
    let found = look_around(root, &common).await?;
    let layout = Layout::new(root, &common.run_dir)?;
    layout.create()?;
    let socket = layout.agent_socket();
    let listen = caller.listen(&common, socket.clone());
    let open_api = matches!(
        listen.tcp,
        Some(Tcp::Plain {
            token_file: None,
            ..
        })
    );
    // Before any server is started: an address that cannot be had ends the agent. Callers wait in
    // the backlog.
    let server = Server::bind(&listen).await?;
    let node = host_name();
    let gateway = match gateway_options(&common) {
        Some(options) => Some(Gateway::bind(options, &layout, &node).await?),
        None => None,
    };
    let cores = u32::try_from(available_parallelism().map_or(1, usize::from)).unwrap_or(1);
    let engine = Engine::start(Config {
        name: common.name.unwrap_or_else(|| node.clone()),
        cgroup_name: cgroup_name(root),
        layout: layout.clone(),
        supervisor: Supervisor::from_env()?,
        installations: found.installations,
        disk_user: found.disk_user,
        uid_base: common.uid_base,
        limits: Limits {
            slots: common.max_branches,
            ..Limits::default()
        },
        build_time_limit: common.build_timeout,
        log_cap: common.log_cap,
        sql: common.sql.limits(),
        open_api,
        reach: gateway.as_ref().map_or(Reach::Socket, Gateway::reach),
        default_concurrency: cores + 1,
    })
    .await?;
    let upkeep = caller.begin(&engine).await?;
    info!(
        socket = %socket.display(),
        tcp = ?server.tcp_address(),
        health = ?server.health_address(),
        gateway = ?gateway.as_ref().map(Gateway::address),
        "serving"
    );

    let (stop_serving, stopped) = watch::channel(());
    let until = |mut stopped: watch::Receiver<()>| async move {
        let _asked_or_dropped = stopped.changed().await;
    };
    let serving = tokio::spawn(server.serve(engine.clone(), until(stopped.clone())));
    let gateway = match gateway {
        Some(gateway) => {
            let tls = gateway.identities(&layout, &node).await?;
            let (directory, metrics) = engine.gateway();
            let serving = gateway.serve(directory, metrics, tls, until(stopped));
            Some(tokio::spawn(serving))
        }
        None => None,
    };
    let mut upkeep = tokio::spawn(upkeep.run());
    let outcome = tokio::select! {
        () = terminate.next() => Ok(()),
        () = engine.supervisor_lost() => Err(Error::SupervisorLost),
        _ = &mut upkeep => Err(Error::Ended { what: "keeping up with manifests or operator" }),
    };
    upkeep.abort();
    if let Err(Error::SupervisorLost) = outcome {
        return outcome;
    }
    info!("stopping: leases are kept for the next start; a second signal stops at once");
    tokio::select! {
        drained = engine.drain(common.stop_timeout) => {
            if !drained {
                warn!("not everything could be stopped in time; the next start goes on with it");
                engine.kill_all().await;
            }
        }
        () = terminate.next() => {
            warn!("stopping at once");
            engine.kill_all().await;
        }
    }
    drop(stop_serving);
    // The server ends its watches and lets requests finish, within a bound of its own, and so does the
    // gateway.
    let _ended = serving.await;
    if let Some(gateway) = gateway {
        let _ended = gateway.await;
    }
    outcome
}

async fn look_around(root: &Path, common: &Common) -> Result<preflight::Found, Error> {
    let (root, bindirs, user) = (
        root.to_owned(),
        common.postgres_bindirs.clone(),
        common.postgres_user.clone(),
    );
    let checked =
        tokio::task::spawn_blocking(move || preflight::check(&root, &bindirs, &user)).await;
    let found = checked.map_err(|_| Error::Ended { what: "preflight" })??;
    for warning in &found.warnings {
        warn!("{warning}");
    }
    Ok(found)
}

fn gateway_options(common: &Common) -> Option<gateway::Options> {
    let Listen(address) = common.gateway;
    let certificate = match (&common.tls_cert, &common.tls_key) {
        (Some(certificate), Some(key)) => Certificate::Files {
            certificate: certificate.clone(),
            key: key.clone(),
            authority: common.tls_ca.clone(),
        },
        _ => Certificate::Own,
    };
    Some(gateway::Options {
        address: address?,
        host: common.gateway_host.clone(),
        certificate,
        plaintext: common.gateway_plaintext,
    })
}

/// SIGTERM and SIGINT alike.
struct Terminations {
    term: Signal,
    int: Signal,
}

impl Terminations {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// The same root has the same cgroups again after a restart, and two roots never share any.
fn cgroup_name(root: &Path) -> String {
    let path = std::fs::canonicalize(root).unwrap_or_else(|_| root.to_owned());
    HEXLOWER.encode(&Sha256::digest(path.as_os_str().as_encoded_bytes())[..6])
}
