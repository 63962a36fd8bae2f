//! A CA of the node's own, for where nobody else issues certificates.
//!
//! Its key is made once and is what clients trust by way of `ca.crt`. Each step leaves a state from which
//! the next start goes on: a key without a certificate signs one, and a server's certificate that is
//! missing, for other names or nearly over is issued anew.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration as StdDuration,
};

use rcgen::{KeyPair, PublicKeyData};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use snafu::{ResultExt, Snafu, ensure};
use time::{Duration, OffsetDateTime};
use tokio::sync::watch;
use tracing::{error, info};
use x509_parser::{certificate::X509Certificate, prelude::FromDer};

use crate::{
    Identities, TlsIdentity,
    ca::{self, Ca, Leaf, Usage},
    identity::endpoint_hash,
    names::Names,
    pem,
    store::{self, Reach, Store},
};

const CA_KEY: &str = "ca.key";
const CA_CERTIFICATE: &str = "ca.crt";
/// Key and certificate in one file, so that they cannot part.
const SERVER: &str = "server.pem";

const CA_TERM: Duration = Duration::days(3650);
const SERVER_TERM: Duration = Duration::days(90);
/// Before the end of a server's certificate; clocks may be set and the machine may sleep meanwhile.
const RENEW_BEFORE: Duration = Duration::days(30);
/// After a renewal that failed, as on a full disk.
const RETRY: StdDuration = StdDuration::from_secs(3600);

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(transparent)]
    Store { source: store::Error },

    #[snafu(display(
        "{} is there without {CA_KEY} beside it; put the key back, or remove the file for a new CA, which all clients must then be given",
        path.display()
    ))]
    KeyMissing { path: PathBuf },

    #[snafu(display(
        "{} is not of the key {CA_KEY} beside it; put the right one back, or remove both for a new CA, which all clients must then be given",
        path.display()
    ))]
    Foreign { path: PathBuf },

    #[snafu(display(
        "{} holds no private key in PEM ({source}); put it back, or remove it and {CA_CERTIFICATE} for a new CA, which all clients must then be given",
        path.display()
    ))]
    Key { path: PathBuf, source: rcgen::Error },

    #[snafu(display("a certificate could not be made: {source}"))]
    Issue { source: rcgen::Error },

    #[snafu(transparent)]
    Authority { source: ca::Error },

    #[snafu(display("the certificate just made is unusable: {source}"))]
    Unusable { source: rustls::Error },

    #[snafu(display("the making of certificates was interrupted"))]
    Interrupted,
}

/// What a node with a CA of its own has to show.
#[derive(Debug)]
pub struct OwnAuthority {
    /// Of the CA, in PEM; this is what clients are to trust.
    pub certificate: String,
    /// The file that holds it, readable by everyone.
    pub certificate_path: PathBuf,
    /// The server's certificate, and those that take its place before it expires.
    pub identities: Identities,
}

impl OwnAuthority {
    /// Opens the CA in `directory`, which is made when it is missing, and sees to a server's certificate
    /// for `names` for as long as there are receivers. One process at a time. Needs a Tokio runtime.
    pub async fn open(directory: &Path, names: Names) -> Result<Self, Error> {
        let directory = directory.to_owned();
        let opened = blocking(move || {
            let office = Office {
                store: Store::open(&directory)?,
                names,
            };
            let server = office.server(Wanted::AsGoodAs, OffsetDateTime::now_utc())?;
            let authority = office.authority(OffsetDateTime::now_utc())?;
            Ok((office, server, authority.certificate_pem().to_owned()))
        });
        let (office, server, certificate) = opened.await?;
        let certificate_path = office.store.path(CA_CERTIFICATE);
        let (sender, identities) = watch::channel(server.identity);
        tokio::spawn(renew(office, sender, server.renew_in));
        Ok(Self {
            certificate,
            certificate_path,
            identities,
        })
    }
}

async fn renew(office: Office, sender: watch::Sender<Arc<TlsIdentity>>, mut renew_in: StdDuration) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(renew_in) => {}
            () = sender.closed() => return,
        }
        let (at_work, now) = (office.clone(), OffsetDateTime::now_utc());
        renew_in = match blocking(move || at_work.server(Wanted::Anew, now)).await {
            Ok(server) => {
                info!("the server's certificate was renewed; new connections get it");
                sender.send_replace(server.identity);
                server.renew_in
            }
            Err(problem) => {
                error!(
                    "the server's certificate is not renewed, and is tried again in an hour: {problem}"
                );
                RETRY
            }
        };
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| Error::Interrupted)?
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// The one that is there, if it is for the same names and lasts.
    AsGoodAs,
    Anew,
}

#[derive(Clone, Debug)]
struct Office {
    store: Store,
    names: Names,
}

struct ServerCertificate {
    identity: Arc<TlsIdentity>,
    renew_in: StdDuration,
}

impl Office {
    fn server(&self, wanted: Wanted, now: OffsetDateTime) -> Result<ServerCertificate, Error> {
        let authority = self.authority(now)?;
        if wanted == Wanted::AsGoodAs
            && let Some(text) = self.store.read(SERVER)?
            && let Some(server) = self.still_good(&text, &authority, now)
        {
            return Ok(server);
        }
        let text = self.issue(&authority, now)?;
        self.store.write(SERVER, Reach::Owner, text.as_bytes())?;
        served(text.as_bytes(), now).map_err(|source| Error::Unusable { source })
    }

    fn authority(&self, now: OffsetDateTime) -> Result<Ca, Error> {
        let found = self.store.read(CA_CERTIFICATE)?;
        let key = self.authority_key(found.is_some())?;
        if let Some(text) = found
            && self.lasts(&text, &key, now)?
        {
            return Ok(Ca::of(key, &String::from_utf8_lossy(&text))?);
        }
        let ca = Ca::certify(key, CA_TERM, None, now)?;
        let text = ca.certificate_pem().as_bytes();
        self.store.write(CA_CERTIFICATE, Reach::Everyone, text)?;
        Ok(ca)
    }

    fn authority_key(&self, certified: bool) -> Result<KeyPair, Error> {
        if let Some(text) = self.store.read(CA_KEY)? {
            let path = self.store.path(CA_KEY);
            return KeyPair::from_pem(&String::from_utf8_lossy(&text)).context(KeySnafu { path });
        }
        let path = self.store.path(CA_CERTIFICATE);
        ensure!(!certified, KeyMissingSnafu { path });
        let key = KeyPair::generate().context(IssueSnafu)?;
        let text = key.serialize_pem();
        self.store.write(CA_KEY, Reach::Owner, text.as_bytes())?;
        Ok(key)
    }

    /// Whether the CA's certificate outlives the next server's. One that does not is signed again by
    /// the same key, so that clients with the old one go on.
    fn lasts(&self, text: &[u8], key: &KeyPair, now: OffsetDateTime) -> Result<bool, Error> {
        let Some(chain) = chain(text) else {
            return Ok(false);
        };
        let Ok((_, certificate)) = X509Certificate::from_der(&chain[0]) else {
            return Ok(false);
        };
        let path = self.store.path(CA_CERTIFICATE);
        let own = key.subject_public_key_info();
        ensure!(certificate.public_key().raw == own, ForeignSnafu { path });
        Ok(valid_for(&certificate, now, SERVER_TERM))
    }

    fn still_good(
        &self,
        text: &[u8],
        authority: &Ca,
        now: OffsetDateTime,
    ) -> Option<ServerCertificate> {
        let chain = chain(text)?;
        let (_, certificate) = X509Certificate::from_der(&chain[0]).ok()?;
        let fits = valid_for(&certificate, now, RENEW_BEFORE)
            && Names::of_certificate(&certificate).as_ref() == Some(&self.names)
            && ca::is_signed_by(&chain[0], authority.certificate());
        fits.then(|| served(text, now).ok()).flatten()
    }

    /// A new key and its certificate, in PEM.
    fn issue(&self, authority: &Ca, now: OffsetDateTime) -> Result<String, Error> {
        let key = KeyPair::generate().context(IssueSnafu)?;
        let leaf = Leaf {
            common_name: "branchpool node",
            names: self.names.subject_alt_names().context(IssueSnafu)?,
            usage: Usage::Server,
            term: SERVER_TERM,
        };
        let certificate = authority.issue(&key, leaf, now)?;
        Ok(key.serialize_pem() + &certificate.pem())
    }
}

fn valid_for(certificate: &X509Certificate<'_>, now: OffsetDateTime, span: Duration) -> bool {
    let validity = certificate.validity();
    validity.not_before.to_datetime() <= now && now + span < validity.not_after.to_datetime()
}

fn chain(text: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    pem::chain(text, Path::new(SERVER)).ok()
}

/// Key and certificate of one text, as they are served.
fn served(text: &[u8], now: OffsetDateTime) -> Result<ServerCertificate, rustls::Error> {
    let unreadable = |what: &str| rustls::Error::General(format!("{what} cannot be read back"));
    let key = PrivateKeyDer::from_pem_slice(text).map_err(|_| unreadable("the key"))?;
    let chain = chain(text).ok_or_else(|| unreadable("the certificate"))?;
    let (hash, renew_at) = {
        let (_, leaf) =
            X509Certificate::from_der(&chain[0]).map_err(|_| unreadable("the certificate"))?;
        let end = leaf.validity().not_after.to_datetime();
        (endpoint_hash(&chain[0], &leaf), end - RENEW_BEFORE)
    };
    Ok(ServerCertificate {
        identity: Arc::new(TlsIdentity::new(chain, key, hash)?),
        renew_in: StdDuration::try_from(renew_at - now).unwrap_or_default(),
    })
}
