//! An operator's side for tests: a real CA and a real enrolment server on a loopback port. Only who holds which
//! token is made up. The agent's tests use it too.

#![allow(dead_code, reason = "each test program uses its part")]

use std::{
    collections::HashMap,
    fs,
    future::Future,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use branchpool_agent_api::client::{Client, Target, Tls};
use branchpool_tls::ca::{Ca, Leaf, Usage};
use branchpool_trust::{
    Authority, OperatorIdentity, TlsListener, agent_name,
    enrol::{self, PodToken, Refusal, Reviewed, Reviewer},
    plan::Step,
    serve::serve,
};
use rcgen::{KeyPair, SanType};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivatePkcs8KeyDer, pem::PemObject},
};
use time::OffsetDateTime;
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tower::ServiceExt;

/// Longer than anything here takes, so that a hang fails instead of hanging the run.
const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("should not hang")
}

/// Knows tokens of Pods by heart.
#[derive(Clone, Default)]
pub(crate) struct Register {
    tokens: Arc<Mutex<HashMap<String, Result<Reviewed, Refusal>>>>,
    reviews: Arc<Mutex<usize>>,
}

impl Register {
    pub(crate) fn pod(&self, token: &str, node: &str) {
        let reviewed = Reviewed {
            node: node.to_owned(),
            pod_uid: format!("uid-on-{node}"),
        };
        self.tokens
            .lock()
            .unwrap()
            .insert(token.to_owned(), Ok(reviewed));
    }

    pub(crate) fn refuse(&self, token: &str, refusal: Refusal) {
        let mut tokens = self.tokens.lock().unwrap();
        tokens.insert(token.to_owned(), Err(refusal));
    }

    pub(crate) fn reviews(&self) -> usize {
        *self.reviews.lock().unwrap()
    }
}

impl Reviewer for Register {
    async fn review(&self, token: &PodToken) -> Result<Reviewed, Refusal> {
        *self.reviews.lock().unwrap() += 1;
        let tokens = self.tokens.lock().unwrap();
        let unknown = || Err(Refusal::Denied("this is no token of an agent's Pod".into()));
        tokens.get(token.reveal()).cloned().unwrap_or_else(unknown)
    }
}

pub(crate) fn now() -> OffsetDateTime {
    OffsetDateTime::now_utc()
}

/// The CA, and the operator's own certificates.
pub(crate) struct Operator {
    pub(crate) register: Register,
    pub(crate) identity: OperatorIdentity,
    authorities: watch::Sender<Arc<Authority>>,
}

impl Operator {
    pub(crate) fn new() -> Self {
        let (authorities, current) = watch::channel(Arc::new(Authority::make(now()).unwrap()));
        Self {
            register: Register::default(),
            identity: OperatorIdentity::start(current, vec!["localhost".into()]).unwrap(),
            authorities,
        }
    }

    pub(crate) fn authority(&self) -> Arc<Authority> {
        Arc::clone(&self.authorities.borrow())
    }

    pub(crate) fn bundle(&self) -> String {
        self.authority().bundle_pem()
    }

    /// As from a `ConfigMap` that is mounted.
    pub(crate) fn write_bundle(&self, path: &Path) {
        let new = path.with_extension("new");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&new, self.bundle()).unwrap();
        fs::rename(new, path).unwrap();
    }

    /// Puts a step in force, and waits until the operator shows what follows from it.
    pub(crate) async fn take(&mut self, step: &Step) {
        let next = self.authority().after(step, now()).unwrap().unwrap();
        self.identity.agents.mark_unchanged();
        self.authorities.send_replace(Arc::new(next));
        in_time(self.identity.agents.changed()).await.unwrap();
    }

    pub(crate) async fn serve(&self) -> Serving {
        self.serve_at("127.0.0.1:0".parse().unwrap()).await
    }

    pub(crate) async fn serve_at(&self, address: SocketAddr) -> Serving {
        let tcp = TcpListener::bind(address).await.unwrap();
        let address = tcp.local_addr().unwrap();
        let router = enrol::router(self.register.clone(), self.authorities.subscribe());
        let answer = move |request| {
            let router = router.clone();
            async move { router.oneshot(request).await.unwrap() }
        };
        let (stop, stopping) = watch::channel(false);
        let listener = TlsListener::new(tcp, self.identity.listener.clone());
        Serving {
            address,
            stop,
            task: tokio::spawn(serve(listener, answer, stopping)),
        }
    }

    /// The operator's client of a node's agent.
    pub(crate) fn client(&self, agent: SocketAddr, node: &str) -> Client {
        client_with(agent, node, self.identity.agents.clone())
    }

    /// A certificate that the CA did sign, and the operator would not.
    pub(crate) fn forge(&self, name: &str, usage: Usage, ends_in: time::Duration) -> Forged {
        let entries = self.authority().save();
        let text = |entry: &str| String::from_utf8(entries[entry].clone()).unwrap();
        let ca = Ca::from_pem(&text("ca.key"), &text("ca.crt")).unwrap();
        let key = KeyPair::generate().unwrap();
        let leaf = Leaf {
            common_name: "forged",
            names: vec![SanType::DnsName(name.try_into().unwrap())],
            usage,
            term: ends_in,
        };
        let certificate = ca.issue(&key, leaf, now()).unwrap();
        Forged {
            certificate: certificate.into(),
            key,
        }
    }
}

pub(crate) struct Forged {
    certificate: CertificateDer<'static>,
    key: KeyPair,
}

/// A client that trusts the operator's CA and shows this, or nothing.
pub(crate) fn showing(bundle: &str, shown: Option<Forged>) -> watch::Receiver<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match shown {
        None => builder.with_no_client_auth(),
        Some(forged) => {
            let key = PrivatePkcs8KeyDer::from(forged.key.serialize_der());
            let chain = vec![forged.certificate];
            builder.with_client_auth_cert(chain, key.into()).unwrap()
        }
    };
    watch::channel(Arc::new(config)).1
}

/// A server that shows this to everybody.
pub(crate) fn served(forged: Forged) -> watch::Receiver<Option<Arc<ServerConfig>>> {
    let key = PrivatePkcs8KeyDer::from(forged.key.serialize_der());
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![forged.certificate], key.into())
        .unwrap();
    watch::channel(Some(Arc::new(config))).1
}

pub(crate) fn client_with(
    agent: SocketAddr,
    node: &str,
    config: watch::Receiver<Arc<ClientConfig>>,
) -> Client {
    let tls = Tls::new(agent.to_string(), &agent_name(node).unwrap(), config).unwrap();
    Client::new(Target::Tls(tls))
}

/// The operator's listener.
pub(crate) struct Serving {
    pub(crate) address: SocketAddr,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Serving {
    pub(crate) fn url(&self) -> String {
        format!("https://localhost:{}", self.address.port())
    }

    pub(crate) async fn stop(self) {
        self.stop.send_replace(true);
        in_time(self.task).await.unwrap();
    }
}

/// An agent's files, and its enrolment.
pub(crate) struct Agent {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) enrolment: enrol::Enrolment,
}

impl Agent {
    /// With its token, and with the operator's bundle.
    pub(crate) async fn enrolled(operator: &Operator, at: &Serving, node: &str) -> Self {
        let token = format!("token-of-{node}");
        operator.register.pod(&token, node);
        let mut agent = Self::start(&at.url()).await;
        fs::write(agent.token(), &token).unwrap();
        operator.write_bundle(&agent.bundle());
        agent.wait(|status| status.trust.is_some()).await;
        agent
    }

    /// With no files.
    pub(crate) async fn start(url: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let options = enrol::Options {
            operator: url.parse().unwrap(),
            // Not even its directory is there.
            bundle: directory.path().join("mounted/ca.crt"),
            token: directory.path().join("token"),
        };
        Self {
            enrolment: enrol::Enrolment::start(options).await.unwrap(),
            directory,
        }
    }

    pub(crate) fn bundle(&self) -> std::path::PathBuf {
        self.directory.path().join("mounted/ca.crt")
    }

    pub(crate) fn token(&self) -> std::path::PathBuf {
        self.directory.path().join("token")
    }

    pub(crate) async fn wait(
        &mut self,
        wanted: impl FnMut(&enrol::Status) -> bool,
    ) -> enrol::Status {
        in_time(self.enrolment.status.wait_for(wanted))
            .await
            .unwrap()
            .clone()
    }

    /// What the operator hears of it.
    pub(crate) fn report(&self, node: &str) -> branchpool_trust::plan::Agent {
        branchpool_trust::plan::Agent {
            node: node.to_owned(),
            trust: self.enrolment.status.borrow().trust.clone(),
        }
    }
}
