//! Who says what pools there shall be: manifests, or whoever may call the API, an operator above all.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
};

use branchpool_agent::{
    cli::{Common, Run},
    engine::Engine,
    http::{self, Tcp},
    standalone::{self, Following, manifests},
};
use branchpool_agent_api::TrustStatus;
use branchpool_tls::watching;
use branchpool_trust::enrol::{Enrolment, Status};
use tokio::sync::watch;

/// Where an operator finds the API, and the kubelet what it asks, unless something else is given.
const OPERATOR_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 7433);
const HEALTH: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 7434);

pub(super) enum Caller {
    Manifests(Vec<PathBuf>),
    /// Whoever is let in.
    Anyone {
        health: Option<SocketAddr>,
    },
    Operator {
        enrolment: Enrolment,
        health: SocketAddr,
    },
}

/// What goes on as long as the agent runs.
pub(super) enum Upkeep {
    Nothing,
    Manifests(Following),
    Operator(Engine, watch::Receiver<Status>),
}

impl Caller {
    /// Begins to enrol where there is an operator.
    pub(super) async fn of(run: &Run) -> Result<Self, watching::Error> {
        Ok(match run.operator.options() {
            Some(operator) => Self::Operator {
                enrolment: Enrolment::start(operator).await?,
                health: run.health_listen.unwrap_or(HEALTH),
            },
            None => Self::Anyone {
                health: run.health_listen,
            },
        })
    }

    /// Where the API is to be, beside the Unix socket.
    pub(super) fn listen(&self, common: &Common, socket: PathBuf) -> http::Options {
        let (tcp, health) = match self {
            Self::Operator { enrolment, health } => {
                let tcp = Tcp::Tls {
                    address: common.listen.unwrap_or(OPERATOR_LISTEN),
                    config: enrolment.server.clone(),
                };
                (Some(tcp), Some(*health))
            }
            Self::Manifests(_) => (plain(common), None),
            Self::Anyone { health } => (plain(common), *health),
        };
        http::Options {
            socket: Some(socket),
            tcp,
            health,
        }
    }

    /// Before the first answer: a pool that is about to be known must not be called unknown, and a node
    /// without a certificate not ready.
    pub(super) async fn begin(self, engine: &Engine) -> Result<Upkeep, manifests::Error> {
        Ok(match self {
            Self::Manifests(paths) => {
                Upkeep::Manifests(standalone::start(engine.clone(), &paths).await?)
            }
            Self::Anyone { .. } => Upkeep::Nothing,
            Self::Operator { enrolment, .. } => {
                let mut status = enrolment.status;
                report(engine, &status.borrow_and_update());
                Upkeep::Operator(engine.clone(), status)
            }
        })
    }
}

fn plain(common: &Common) -> Option<Tcp> {
    Some(Tcp::Plain {
        address: common.listen?,
        token_file: common.token_file.clone(),
    })
}

impl Upkeep {
    /// Returns when it cannot go on.
    pub(super) async fn run(self) {
        match self {
            Self::Nothing => std::future::pending().await,
            Self::Manifests(following) => following.run().await,
            Self::Operator(engine, mut status) => {
                while status.changed().await.is_ok() {
                    report(&engine, &status.borrow_and_update());
                }
            }
        }
    }
}

fn report(engine: &Engine, status: &Status) {
    let trust = status.trust.as_ref().map(|trust| TrustStatus {
        trusts: trust.trusts.iter().map(ToString::to_string).collect(),
        issuer: trust.issuer.to_string(),
        expires_at: u64::try_from(status.expires_at).unwrap_or_default() * 1000,
    });
    engine.report_operator(trust, status.problem.clone());
}
