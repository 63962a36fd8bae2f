//! A server that echoes, clients that trust one CA, and the `openssl` program.

pub(crate) mod openssl;

use std::{future::Future, net::SocketAddr, sync::Arc, time::Duration};

use branchpool_tls::Identities;
use rustls::{
    ClientConfig, RootCertStore, SupportedProtocolVersion,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
    version::{TLS12, TLS13},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

/// Longer than anything here takes, so that a hang fails instead of hanging the run.
const PATIENCE: Duration = Duration::from_mins(1);

pub(crate) async fn patiently<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what)
        .await
        .expect("should not hang")
}

/// Accepts with the identity of the moment and echoes what comes.
pub(crate) struct Listener {
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl Listener {
    pub(crate) async fn start(identities: Identities) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let config = identities.borrow().config.clone();
                tokio::spawn(echo(TlsAcceptor::from(config), stream));
            }
        });
        Self { address, accepting }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn echo(acceptor: TlsAcceptor, stream: TcpStream) -> std::io::Result<()> {
    let (mut read, mut write) = tokio::io::split(acceptor.accept(stream).await?);
    tokio::io::copy(&mut read, &mut write).await?;
    write.shutdown().await
}

pub(crate) fn client(ca: &str) -> TlsConnector {
    client_offering(ca, vec![])
}

pub(crate) fn client_offering(ca: &str, alpn: Vec<Vec<u8>>) -> TlsConnector {
    client_of(ca, &[&TLS13, &TLS12], alpn)
}

pub(crate) fn client_of(
    ca: &str,
    versions: &[&'static SupportedProtocolVersion],
    alpn: Vec<Vec<u8>>,
) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(ca.as_bytes()).unwrap())
        .unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = alpn;
    TlsConnector::from(Arc::new(config))
}

/// A connection to the listener, verified as one to `name`.
pub(crate) async fn connect(
    listener: &Listener,
    client: &TlsConnector,
    name: &str,
) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(listener.address).await.unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    patiently(client.connect(name, stream)).await
}

/// A handshake with `localhost` and an echo.
pub(crate) async fn attempt(
    listener: &Listener,
    client: &TlsConnector,
) -> Result<(), rustls::Error> {
    match connect(listener, client, "localhost").await {
        Ok(mut stream) => {
            echoes(&mut stream).await;
            Ok(())
        }
        Err(error) => Err(error
            .downcast::<rustls::Error>()
            .expect("should fail in TLS, not below it")),
    }
}

pub(crate) async fn echoes(stream: &mut TlsStream<TcpStream>) {
    let mut answer = [0; 4];
    patiently(async {
        stream.write_all(b"ping").await.unwrap();
        stream.read_exact(&mut answer).await.unwrap();
    })
    .await;
    assert_eq!(&answer, b"ping");
}

/// How the listener's answer to these bytes begins.
pub(crate) async fn raw(listener: &Listener, bytes: &[u8]) -> [u8; 7] {
    let mut stream = TcpStream::connect(listener.address).await.unwrap();
    let mut answer = [0; 7];
    patiently(async {
        stream.write_all(bytes).await.unwrap();
        stream.read_exact(&mut answer).await.unwrap();
    })
    .await;
    answer
}
