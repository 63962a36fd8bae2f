//! A branch of a fresh Postgres, behind a gateway.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    os::unix::fs::chown,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{Arc, OnceLock},
    time::Duration,
};

use branchpool_gateway::{
    ALPN, Branch, CancelKey, Directory, Facts, Limits, Metrics, Options, Server, Session,
    TlsIdentity, Verifier, scram::ITERATIONS,
};
use bytes::BytesMut;
use postgres_protocol::message::{backend::Message, frontend};
use prometheus_client::{encoding::text::encode, registry::Registry};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    sync::{oneshot, watch},
    task::JoinHandle,
};
use tokio_rustls::rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};

pub(crate) const ROLE: &str = "app";
pub(crate) const DATABASE: &str = "shop";
pub(crate) const ENDPOINT: &str = "abcdefghij234";
pub(crate) const USER: &str = "app.abcdefghij234";
pub(crate) const PASSWORD: &str = "open sesame";

const BIN: &str = "/usr/lib/postgresql/15/bin";
const SOCKET: &str = branchpool_gateway::SOCKET_NAME;
const PATIENCE: Duration = Duration::from_secs(30);

/// A data directory with the pool's role and database, made once for the program. Kept among
/// what is built, since nobody would remove it at the program's end.
fn template() -> &'static Path {
    static TEMPLATE: OnceLock<PathBuf> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gateway");
        let _ = fs::remove_dir_all(&kept);
        // Made where the servers' user may go.
        let made = make_template();
        succeed(Command::new("cp").arg("-a").args([made.path(), &kept]));
        kept
    })
}

fn make_template() -> TempDir {
    let template = tempfile::Builder::new()
        .prefix("gateway-")
        .tempdir()
        .unwrap();
    let data = template.path().join("data");
    let (uid, gid) = postgres_user();
    fs::create_dir(&data).unwrap();
    for path in [template.path(), &data] {
        chown(path, Some(uid), Some(gid)).unwrap();
    }
    let mut initdb = as_postgres("initdb");
    let arguments = [
        "--no-sync",
        "--username=postgres",
        "--encoding=UTF8",
        "--locale=C",
    ];
    succeed(initdb.args(arguments).arg("--pgdata").arg(&data));
    fs::write(
        template.path().join("hba"),
        format!("local all {ROLE},postgres peer map=bp\nlocal all all scram-sha-256\n"),
    )
    .unwrap();
    fs::write(
        template.path().join("ident"),
        format!("bp root {ROLE}\nbp root postgres\n"),
    )
    .unwrap();
    let mut single = as_postgres("postgres");
    single.args(["--single", "-D"]).arg(&data).arg("postgres");
    let mut child = single
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let sql = format!(
        "CREATE ROLE {ROLE} LOGIN CREATEROLE CREATEDB\nCREATE DATABASE {DATABASE} OWNER {ROLE}\n"
    );
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), sql.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    template
}

fn postgres_user() -> (u32, u32) {
    let id = |flag: &str| {
        let output = succeed(Command::new("id").args([flag, "postgres"]));
        String::from_utf8(output.stdout)
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    };
    (id("-u"), id("-g"))
}

fn as_postgres(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args([
            "--reuid=postgres",
            "--regid=postgres",
            "--clear-groups",
            "--",
        ])
        .arg(format!("{BIN}/{program}"))
        .current_dir("/");
    command
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {error}");
    output
}

/// A server of its own, stopped when dropped.
pub(crate) struct Postgres {
    directory: TempDir,
    child: Child,
}

impl Postgres {
    pub(crate) async fn start() -> Self {
        let template = template();
        let directory = tempfile::Builder::new()
            .prefix("gateway-")
            .tempdir()
            .unwrap();
        succeed(
            Command::new("cp")
                .arg("-a")
                .arg(template.join("."))
                .arg(directory.path()),
        );
        let child = Self::spawn(directory.path());
        let mut server = Self { directory, child };
        server.wait().await;
        server
    }

    fn spawn(directory: &Path) -> Child {
        let setting = |name: &str, file: &str| format!("{name}={}", directory.join(file).display());
        let mut command = as_postgres("postgres");
        command.arg("-D").arg(directory.join("data"));
        for setting in [
            setting("hba_file", "hba"),
            setting("ident_file", "ident"),
            setting("unix_socket_directories", ""),
            "listen_addresses=".to_owned(),
            "fsync=off".to_owned(),
            "shared_buffers=8MB".to_owned(),
        ] {
            command.arg("-c").arg(setting);
        }
        let log = fs::File::create(directory.join("log")).unwrap();
        command.stdout(Stdio::null()).stderr(log).spawn().unwrap()
    }

    async fn wait(&mut self) {
        let ready = async {
            while open(self.socket_dir(), "postgres", "postgres", &[])
                .await
                .is_err()
            {
                if let Some(status) = self.child.try_wait().unwrap() {
                    let log = fs::read_to_string(self.directory.path().join("log")).unwrap();
                    panic!("the server ended with {status}: {log}");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, ready).await.unwrap();
    }

    pub(crate) async fn restart(&mut self) {
        self.child = Self::spawn(self.directory.path());
        self.wait().await;
    }

    pub(crate) fn socket_dir(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs statements as superuser, past the gateway.
    pub(crate) async fn sql(&self, sql: &str) -> String {
        let output = tokio::process::Command::new("psql")
            .args([
                "-XAtq",
                "-U",
                "postgres",
                "-d",
                DATABASE,
                "-v",
                "ON_ERROR_STOP=1",
                "-c",
                sql,
                "-h",
            ])
            .arg(self.socket_dir())
            .output()
            .await
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{sql}: {error}");
        String::from_utf8(output.stdout)
            .unwrap()
            .trim_end()
            .to_owned()
    }

    /// Kills every process of the server.
    pub(crate) fn kill(&mut self) {
        let pid = self.pid();
        let children = format!("/proc/{pid}/task/{pid}/children");
        let signal = |pid: &str| {
            let _ = Command::new("kill").args(["-KILL", pid]).status();
        };
        // Stopped first, so that it does not see its children end.
        let _ = Command::new("kill")
            .args(["-STOP", &pid.to_string()])
            .status();
        let children = fs::read_to_string(children).unwrap();
        children.split_whitespace().for_each(signal);
        signal(&pid.to_string());
        self.child.wait().unwrap();
    }

    pub(crate) fn stop(&mut self, signal: &str) {
        let pid = self.pid().to_string();
        let _ = Command::new("kill").args([signal, &pid]).status();
        self.child.wait().unwrap();
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.stop("-QUIT");
        }
    }
}

/// Opens a session on the socket, trusted as who the test runs as.
pub(crate) async fn open(
    socket_dir: &Path,
    role: &str,
    database: &str,
    profile: &[(&str, &str)],
) -> Result<Session, String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut stream = UnixStream::connect(socket_dir.join(SOCKET))
        .await
        .map_err(failed)?;
    let mut message = BytesMut::new();
    let own = [("user", role), ("database", database)];
    frontend::startup_message(own.into_iter().chain(profile.iter().copied()), &mut message)
        .map_err(failed)?;
    stream.write_all(&message).await.map_err(failed)?;
    let mut buffer = BytesMut::new();
    let mut parameters = BTreeMap::new();
    let mut cancel_key = None;
    loop {
        match Message::parse(&mut buffer).map_err(failed)? {
            None => {
                if stream.read_buf(&mut buffer).await.map_err(failed)? == 0 {
                    return Err("closed".to_owned());
                }
            }
            Some(Message::ParameterStatus(body)) => {
                let name = body.name().map_err(failed)?.to_owned();
                parameters.insert(name, body.value().map_err(failed)?.to_owned());
            }
            Some(Message::BackendKeyData(body)) => {
                cancel_key = Some(CancelKey {
                    process_id: body.process_id(),
                    secret: body.secret_key(),
                });
            }
            Some(Message::ReadyForQuery(_)) => break,
            Some(Message::ErrorResponse(_)) => return Err("refused".to_owned()),
            Some(_) => {}
        }
    }
    let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
    Ok(Session {
        stream,
        buffer,
        profile: profile.iter().map(owned).collect(),
        parameters,
        cancel_key: cancel_key.ok_or("no cancel key")?,
        notices: Vec::new(),
        at_hand_over: None,
    })
}

/// An authority and a certificate for `localhost`.
pub(crate) struct Certificates {
    pub(crate) identity: Arc<TlsIdentity>,
    pub(crate) authority: String,
}

impl Certificates {
    pub(crate) fn new() -> Self {
        let authority_key = KeyPair::generate().unwrap();
        let mut authority = CertificateParams::new(Vec::new()).unwrap();
        authority
            .distinguished_name
            .push(DnType::CommonName, "Authority of a test");
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority_certificate = authority.self_signed(&authority_key).unwrap();
        let issuer = Issuer::new(authority, authority_key);
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let leaf = leaf.signed_by(&key, &issuer).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], key)
            .unwrap();
        config.alpn_protocols = vec![ALPN.to_vec()];
        Self {
            identity: Arc::new(TlsIdentity {
                config: Arc::new(config),
                endpoint_hash: Sha256::digest(leaf.der()).to_vec(),
            }),
            authority: authority_certificate.pem(),
        }
    }
}

/// A gateway on a port of its own.
pub(crate) struct Gateway {
    pub(crate) address: SocketAddr,
    pub(crate) directory: Directory,
    pub(crate) authority: PathBuf,
    pub(crate) identity: watch::Sender<Arc<TlsIdentity>>,
    pub(crate) stop: Option<oneshot::Sender<()>>,
    pub(crate) served: JoinHandle<()>,
    registry: Registry,
    _files: TempDir,
}

impl Gateway {
    pub(crate) async fn start() -> Self {
        Self::with(Limits::default(), true).await
    }

    pub(crate) async fn with(limits: Limits, plaintext_allowed: bool) -> Self {
        let certificates = Certificates::new();
        let files = TempDir::new().unwrap();
        let authority = files.path().join("ca.crt");
        fs::write(&authority, &certificates.authority).unwrap();
        let (identity, tls) = watch::channel(certificates.identity);
        let server = Server::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = server.local_addr();
        let directory = Directory::new([7; 32]);
        let metrics = Metrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let options = Options {
            tls: Some(tls),
            plaintext_allowed,
            limits,
            metrics,
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let served = tokio::spawn(server.serve(directory.clone(), options, async {
            let _ = stopped.await;
        }));
        Self {
            address,
            directory,
            authority,
            identity,
            stop: Some(stop),
            served,
            registry,
            _files: files,
        }
    }

    /// Leads [`ENDPOINT`] to the server.
    pub(crate) fn lease(&self, server: &Postgres) -> Arc<Branch> {
        self.lease_at(server.socket_dir())
    }

    pub(crate) fn lease_at(&self, socket_dir: &Path) -> Arc<Branch> {
        let salt = self.directory.salt(ROLE, ENDPOINT);
        let branch = Branch::new(Facts {
            pool: "pool".to_owned(),
            role: ROLE.to_owned(),
            database: DATABASE.to_owned(),
            verifier: Verifier::derive(PASSWORD, salt, ITERATIONS),
            socket_dir: socket_dir.to_owned(),
        });
        self.directory.insert(ENDPOINT, Arc::clone(&branch));
        branch
    }

    /// A lease with a preconnected session; the session's process id is returned.
    pub(crate) async fn warm_lease(
        &self,
        server: &Postgres,
        profile: &[(&str, &str)],
    ) -> (Arc<Branch>, i32) {
        let branch = self.lease(server);
        let session = open(server.socket_dir(), ROLE, DATABASE, profile)
            .await
            .unwrap();
        let process_id = session.cancel_key.process_id;
        branch.offer_session(session).unwrap();
        (branch, process_id)
    }

    /// psql as [`USER`]; what `settings` says goes first.
    pub(crate) async fn psql(&self, settings: &str, sql: &str) -> Result<String, String> {
        let port = self.address.port();
        let authority = self.authority.display();
        let url = format!(
            "host=localhost hostaddr=127.0.0.1 port={port} user={USER} dbname={DATABASE} sslrootcert={authority} connect_timeout=20 {settings}"
        );
        let output = tokio::process::Command::new("psql")
            .args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-d", &url, "-c", sql])
            .env("PGPASSWORD", PASSWORD)
            .output()
            .await
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap().trim_end().to_owned();
        if output.status.success() {
            Ok(text(output.stdout))
        } else {
            Err(text(output.stderr))
        }
    }

    /// A series' value.
    pub(crate) fn metric(&self, series: &str) -> u64 {
        let mut text = String::new();
        encode(&mut text, &self.registry).unwrap();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().unwrap())
    }
}

/// Waits for what is not announced.
pub(crate) async fn eventually(mut holds: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait)
        .await
        .expect("it should have come to hold");
}
