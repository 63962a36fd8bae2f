//! The operator's own certificates, made by itself and renewed while it runs.

use std::{sync::Arc, time::Duration};

use rustls::{ClientConfig, ServerConfig};
use snafu::{ResultExt, Snafu};
use time::OffsetDateTime;
use tokio::{sync::watch, time::Instant};
use tracing::{error, info};

use crate::{Authority, authority, config, plan::Validity};

/// After a renewal that failed.
const RETRY: Duration = Duration::from_secs(60);
/// No event tells that the clock was set.
const LOOK_AT_CLOCK: Duration = Duration::from_secs(600);

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("{source}"), context(false))]
    Authority { source: authority::Error },
    #[snafu(display("the certificate just made is unusable: {source}"))]
    Unusable { source: rustls::Error },
}

/// What the operator shows, now and later.
#[derive(Clone, Debug)]
pub struct OperatorIdentity {
    /// For its listener: enrolment and the lease API. Clients need no certificate. Always `Some`.
    pub listener: watch::Receiver<Option<Arc<ServerConfig>>>,
    /// For its calls to agents, whose names are `agent_name(node)`.
    pub agents: watch::Receiver<Arc<ClientConfig>>,
}

struct Made {
    server: ServerConfig,
    client: ClientConfig,
    validity: Validity,
    at: Instant,
}

impl OperatorIdentity {
    /// `names`: DNS names of the operator's Service, below `svc` or `cluster.local`; `localhost` does too. Certificates are made
    /// anew when the authority changes, and in time before they expire, until the receivers or the authority's
    /// sender are gone. Needs a Tokio runtime.
    pub fn start(
        mut authority: watch::Receiver<Arc<Authority>>,
        names: Vec<String>,
    ) -> Result<Self, Error> {
        let made = make(&authority.borrow_and_update(), &names)?;
        let (listener, listening) = watch::channel(Some(Arc::new(made.server)));
        let (agents, calling) = watch::channel(Arc::new(made.client));
        tokio::spawn(async move {
            let (mut validity, mut at) = (made.validity, made.at);
            let mut failed = false;
            loop {
                let due =
                    validity.renew_in(OffsetDateTime::now_utc().unix_timestamp(), at.elapsed());
                let wait = if failed {
                    RETRY
                } else {
                    due.min(LOOK_AT_CLOCK)
                };
                let asked = tokio::select! {
                    changed = authority.changed() => match changed {
                        Ok(()) => true,
                        Err(_) => return,
                    },
                    () = tokio::time::sleep(wait) => failed || due <= LOOK_AT_CLOCK,
                    () = async { tokio::join!(listener.closed(), agents.closed()); } => return,
                };
                if !asked {
                    continue;
                }
                let current = Arc::clone(&authority.borrow_and_update());
                match make(&current, &names) {
                    Ok(made) => {
                        (validity, at, failed) = (made.validity, made.at, false);
                        listener.send_replace(Some(Arc::new(made.server)));
                        agents.send_replace(Arc::new(made.client));
                        info!("the operator's certificates are new; new connections get them");
                    }
                    Err(problem) => {
                        failed = true;
                        error!(
                            "the operator's certificates are not renewed, and are tried again in a minute: {problem}"
                        );
                    }
                }
            }
        });
        Ok(Self {
            listener: listening,
            agents: calling,
        })
    }
}

fn make(authority: &Authority, names: &[String]) -> Result<Made, Error> {
    let now = OffsetDateTime::now_utc();
    let server = authority.operator_server(names, now)?;
    let client = authority.operator_client(now)?;
    Ok(Made {
        server: config::operator_server(&server).context(UnusableSnafu)?,
        client: config::operator_client(&client, &authority.bundle()).context(UnusableSnafu)?,
        validity: server.validity,
        at: Instant::now(),
    })
}
