//! The agent's side of enrolment: gets a certificate, keeps it in memory, and renews it.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use branchpool_tls::watching::{self, Files};
use rcgen::{CertificateParams, KeyPair};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, pem::PemObject},
};
use snafu::{OptionExt, ResultExt, Snafu, ensure};
use time::OffsetDateTime;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tracing::{info, warn};

use super::{Address, CallError, EnrolRequest, call};
use crate::{
    Bundle, BundleError, Fingerprint, bundle, config,
    identity::Identity,
    plan::{self, AgentTrust, Enrol, Held, Standing},
};

const MAX_TOKEN: u64 = 16 << 10;
/// For one attempt: a little longer than the operator takes at most.
const ATTEMPT_TIME: Duration = Duration::from_secs(20);
/// No event tells that the clock was set.
const LOOK_AT_CLOCK: Duration = Duration::from_secs(600);

#[derive(Clone, Debug)]
pub struct Options {
    pub operator: Address,
    /// The bundle in PEM. May be missing at first; followed.
    pub bundle: PathBuf,
    /// Read anew for each attempt.
    pub token: PathBuf,
}

#[derive(Debug, Snafu)]
enum Error {
    #[snafu(display("cannot read the token in {}: {source}", path.display()))]
    Token { path: PathBuf, source: io::Error },

    #[snafu(display("{source}"), context(false))]
    Call { source: CallError },

    #[snafu(display("the operator at {address} did not answer within {} s", ATTEMPT_TIME.as_secs()))]
    Slow { address: Address },

    #[snafu(display("a key and its request could not be made: {source}"))]
    Key { source: rcgen::Error },

    #[snafu(display("the operator's answer holds no certificate"))]
    NoCertificate,

    #[snafu(display("the operator issued a certificate of a CA that {} does not hold", path.display()))]
    Unknown { path: PathBuf },

    #[snafu(display("the certificate that the operator issued is unusable: {source}"))]
    Unusable { source: rustls::Error },

    #[snafu(display(
        "the certificate that the operator issued is due for renewal at once; check this node's clock and the operator's, and whether {} is the operator's present bundle",
        path.display()
    ))]
    Due { path: PathBuf },
}

#[derive(Debug, Snafu)]
enum FileError {
    #[snafu(display("{source}"))]
    Read { source: io::Error },
    #[snafu(display("{source}"), context(false))]
    Bundle { source: BundleError },
}

/// Where an agent stands with its operator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// What the operator goes by when it replaces its CA; `None` before the first certificate.
    pub trust: Option<AgentTrust>,
    /// End of the certificate, in seconds since 1970; 0 before there is one.
    pub expires_at: i64,
    /// Why there is no certificate, or no new one. Nothing secret.
    pub problem: Option<String>,
}

/// An agent's identity, now and later.
#[derive(Clone, Debug)]
pub struct Enrolment {
    /// For its listener; `None` before the first certificate.
    pub server: watch::Receiver<Option<Arc<ServerConfig>>>,
    pub status: watch::Receiver<Status>,
}

impl Enrolment {
    /// Enrols, and keeps enrolled until the receivers are gone. Returns at once. Needs a Tokio runtime.
    pub async fn start(options: Options) -> Result<Self, watching::Error> {
        let bundles = follow_bundle(&options.bundle).await?;
        let tokens = follow_token(&options.token).await?;
        let (server, serving) = watch::channel(None);
        let (status, standing) = watch::channel(Status::default());
        let clerk = Clerk {
            options,
            bundles,
            tokens,
            server,
            status,
            held: None,
            published: None,
            failures: 0,
            attempted: Instant::now(),
        };
        tokio::spawn(clerk.run());
        Ok(Self {
            server: serving,
            status: standing,
        })
    }
}

struct Clerk {
    options: Options,
    bundles: watch::Receiver<Option<Arc<Bundle>>>,
    /// Changes with the token's file, which may cure a failure.
    tokens: watch::Receiver<()>,
    server: watch::Sender<Option<Arc<ServerConfig>>>,
    status: watch::Sender<Status>,
    held: Option<Certificate>,
    /// Since when the certificate is held that is shown, and what is trusted with it.
    published: Option<(Instant, Vec<Fingerprint>)>,
    failures: u32,
    attempted: Instant,
}

struct Certificate {
    identity: Identity,
    issuer: Fingerprint,
    since: Instant,
}

impl Clerk {
    async fn run(mut self) {
        loop {
            let bundle = self.bundles.borrow_and_update().clone();
            self.publish(bundle.as_deref());
            let wait = match (
                plan::enrol(&self.standing(bundle.as_deref()), now()),
                bundle,
            ) {
                (Enrol::Now, Some(bundle)) => {
                    self.attempt(&bundle).await;
                    continue;
                }
                (Enrol::After(wait), _) => wait.min(LOOK_AT_CLOCK),
                (Enrol::Now | Enrol::WithBundle, _) => LOOK_AT_CLOCK,
            };
            tokio::select! {
                changed = self.bundles.changed() => match changed {
                    // A cause of failures may be gone.
                    Ok(()) => self.failures = 0,
                    Err(_) => return,
                },
                Ok(()) = self.tokens.changed(), if self.failures > 0 => self.failures = 0,
                () = tokio::time::sleep(wait) => {}
                () = async { tokio::join!(self.server.closed(), self.status.closed()); } => return,
            }
        }
    }

    fn standing(&self, bundle: Option<&Bundle>) -> Standing {
        Standing {
            signing: bundle.map(Bundle::signing),
            held: self.held.as_ref().map(|held| Held {
                issuer: held.issuer,
                validity: held.identity.validity,
                held: held.since.elapsed(),
            }),
            failures: self.failures,
            since_attempt: self.attempted.elapsed(),
            chance: rand::random(),
        }
    }

    async fn attempt(&mut self, bundle: &Bundle) {
        self.tokens.mark_unchanged();
        let enrolled = match timeout(ATTEMPT_TIME, enrol(&self.options, bundle)).await {
            Ok(enrolled) => enrolled,
            Err(_) => SlowSnafu {
                address: self.options.operator.clone(),
            }
            .fail(),
        };
        self.attempted = Instant::now();
        let outcome = enrolled.and_then(|certificate| {
            self.held = Some(certificate);
            let due = plan::enrol(
                &Standing {
                    failures: 0,
                    ..self.standing(Some(bundle))
                },
                now(),
            );
            let path = &self.options.bundle;
            ensure!(due != Enrol::Now, DueSnafu { path });
            Ok(())
        });
        let problem = outcome.err().map(|error| error.to_string());
        match &problem {
            None => {
                self.failures = 0;
                info!("the operator has issued a certificate; new connections get it");
            }
            Some(problem) => {
                self.failures = self.failures.saturating_add(1);
                warn!(
                    attempts = self.failures,
                    "not enrolled, and tried again: {problem}"
                );
            }
        }
        self.status.send_if_modified(|status| {
            let differs = status.problem != problem;
            status.problem = problem;
            differs
        });
    }

    /// What is held and trusted now, for new connections.
    fn publish(&mut self, bundle: Option<&Bundle>) {
        let (Some(held), Some(bundle)) = (&self.held, bundle) else {
            return;
        };
        let published = (held.since, bundle.ids().to_vec());
        if self.published.as_ref() == Some(&published) {
            return;
        }
        match config::agent_server(&held.identity, bundle) {
            Ok(config) => {
                self.server.send_replace(Some(Arc::new(config)));
                self.status.send_modify(|status| {
                    status.trust = Some(AgentTrust {
                        trusts: bundle.ids().to_vec(),
                        issuer: held.issuer,
                    });
                    status.expires_at = held.identity.validity.not_after;
                });
                self.published = Some(published);
            }
            Err(error) => {
                warn!(%error, "the operator's bundle is not usable; what was in force stays so");
            }
        }
    }
}

/// A new key and its certificate.
async fn enrol(options: &Options, bundle: &Bundle) -> Result<Certificate, Error> {
    let path = options.token.clone();
    let token = tokio::task::spawn_blocking(move || read(&path, MAX_TOKEN))
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::Interrupted.into()))
        .and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other))
        .context(TokenSnafu {
            path: &options.token,
        })?;
    let config = config::enrolling_client(bundle).context(UnusableSnafu)?;
    let key = KeyPair::generate().context(KeySnafu)?;
    let request = EnrolRequest {
        csr: signing_request(&key).context(KeySnafu)?,
    };
    let answer = call::enrol(&options.operator, Arc::new(config), token.trim(), &request).await?;
    let chain = CertificateDer::pem_slice_iter(answer.certificate.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .ok()
        .filter(|chain| !chain.is_empty())
        .context(NoCertificateSnafu)?;
    let issuer = bundle.issuer_of(&chain[0]);
    let issuer = issuer.context(UnknownSnafu {
        path: &options.bundle,
    })?;
    let identity = Identity::new(chain, &key).context(NoCertificateSnafu)?;
    // Also proves that the certificate is of this key.
    config::agent_server(&identity, bundle).context(UnusableSnafu)?;
    Ok(Certificate {
        identity,
        issuer,
        since: Instant::now(),
    })
}

/// With no names: those are the operator's to give.
fn signing_request(key: &KeyPair) -> Result<String, rcgen::Error> {
    CertificateParams::default().serialize_request(key)?.pem()
}

async fn follow_bundle(
    path: &Path,
) -> Result<watch::Receiver<Option<Arc<Bundle>>>, watching::Error> {
    let read_bundle = {
        let path = path.to_owned();
        move || -> Result<Bundle, FileError> {
            let bytes = read(&path, bundle::MAX_BYTES as u64).context(ReadSnafu)?;
            Ok(Bundle::from_pem(&bytes)?)
        }
    };
    let (files, first) = Files::new(&[path], read_bundle)?.load().await;
    if let Err(problem) = &first {
        info!(path = %path.display(), "waiting for the operator's bundle: {problem}");
    }
    let (sender, receiver) = watch::channel(first.ok().map(Arc::new));
    let path = path.to_owned();
    tokio::spawn(async move {
        let take = |bundle: Bundle| {
            sender.send_if_modified(|current| {
                let differs = current.as_deref() != Some(&bundle);
                if differs {
                    info!(path = %path.display(), "the operator's bundle is read");
                    *current = Some(Arc::new(bundle));
                }
                differs
            });
        };
        let complain = |problem: &str| {
            warn!(path = %path.display(), "the operator's bundle cannot be read, what was trusted stays so: {problem}");
        };
        tokio::select! {
            () = files.follow(take, complain) => {}
            () = sender.closed() => {}
        }
    });
    Ok(receiver)
}

async fn follow_token(path: &Path) -> Result<watch::Receiver<()>, watching::Error> {
    let (files, _) = Files::new(&[path], || Ok::<_, io::Error>(()))?.load().await;
    let (sender, receiver) = watch::channel(());
    tokio::spawn(async move {
        tokio::select! {
            () = files.follow(|()| { sender.send_replace(()); }, |_| {}) => {}
            () = sender.closed() => {}
        }
    });
    Ok(receiver)
}

fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::other(format!("it is larger than {most} bytes")));
    }
    Ok(bytes)
}

fn now() -> i64 {
    OffsetDateTime::now_utc().unix_timestamp()
}
