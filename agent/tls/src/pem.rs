//! Certificate and key as PEM text, checked before anyone is served with them.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::pki_types::{
    CertificateDer, PrivateKeyDer,
    pem::{self, PemObject},
};
use sha2::{Digest, Sha256};
use snafu::{ResultExt, Snafu, ensure};
use time::OffsetDateTime;
use x509_parser::{certificate::X509Certificate, prelude::FromDer};

use crate::{
    identity::{TlsIdentity, endpoint_hash},
    watching,
};

/// Most bytes of a file with a certificate or a key.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Why a certificate with its key cannot be served.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)))]
pub enum Error {
    #[snafu(display("cannot read {}: {source}", path.display()))]
    Read { path: PathBuf, source: io::Error },

    #[snafu(display(
        "{} is larger than {MAX_FILE_BYTES} bytes, so it is no certificate or key in PEM",
        path.display()
    ))]
    TooLarge { path: PathBuf },

    #[snafu(display("{} is not proper PEM: {source}; write the file anew", path.display()))]
    Pem { path: PathBuf, source: pem::Error },

    #[snafu(display(
        "{} holds no certificate; it must hold the server's certificate in PEM, then those that sign it",
        path.display()
    ))]
    NoCertificate { path: PathBuf },

    #[snafu(display(
        "{} holds no private key that can be read; it must hold one in PEM, without a pass phrase ({source})",
        path.display()
    ))]
    NoKey { path: PathBuf, source: pem::Error },

    #[snafu(display("the first certificate in {} is not X.509: {detail}", path.display()))]
    NotX509 { path: PathBuf, detail: String },

    #[snafu(display(
        "the certificate in {} expired at {at}; replace it and its key",
        path.display()
    ))]
    Expired { path: PathBuf, at: OffsetDateTime },

    #[snafu(display(
        "the certificate in {} is not valid before {at}; check it and the machine's clock",
        path.display()
    ))]
    NotYetValid { path: PathBuf, at: OffsetDateTime },

    #[snafu(display(
        "the key in {} does not fit the certificate in {}: {source}; they must be made as a pair",
        key.display(),
        certificate.display()
    ))]
    Mismatch {
        certificate: PathBuf,
        key: PathBuf,
        source: rustls::Error,
    },

    #[snafu(transparent)]
    Watch { source: watching::Error },
}

/// What two files hold.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) identity: Arc<TlsIdentity>,
    /// Of the files' texts, by which a change is told.
    pub(crate) fingerprint: [u8; 32],
}

/// Both files, as one identity, at the time `now`.
pub(crate) fn load(certificate: &Path, key: &Path, now: OffsetDateTime) -> Result<Pair, Error> {
    let chain_text = read(certificate)?;
    let key_text = read(key)?;
    let chain = chain(&chain_text, certificate)?;
    let key_der = PrivateKeyDer::from_pem_slice(&key_text).context(NoKeySnafu { path: key })?;
    let hash = {
        let leaf = parse(&chain[0], certificate)?;
        check_validity(&leaf, now, certificate)?;
        endpoint_hash(&chain[0], &leaf)
    };
    let identity =
        TlsIdentity::new(chain, key_der, hash).context(MismatchSnafu { certificate, key })?;
    let mut digest = Sha256::new_with_prefix(&chain_text);
    digest.update(&key_text);
    Ok(Pair {
        identity: Arc::new(identity),
        fingerprint: digest.finalize().into(),
    })
}

/// The certificates of a text, leaf first; at least one.
pub(crate) fn chain(text: &[u8], path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let chain = CertificateDer::pem_slice_iter(text)
        .collect::<Result<Vec<_>, _>>()
        .context(PemSnafu { path })?;
    ensure!(!chain.is_empty(), NoCertificateSnafu { path });
    Ok(chain)
}

pub(crate) fn parse<'a>(der: &'a [u8], path: &Path) -> Result<X509Certificate<'a>, Error> {
    match X509Certificate::from_der(der) {
        Ok((_, certificate)) => Ok(certificate),
        Err(error) => {
            let detail = error.to_string();
            NotX509Snafu { path, detail }.fail()
        }
    }
}

fn check_validity(
    leaf: &X509Certificate<'_>,
    now: OffsetDateTime,
    path: &Path,
) -> Result<(), Error> {
    let validity = leaf.validity();
    let at = validity.not_after.to_datetime();
    ensure!(now <= at, ExpiredSnafu { path, at });
    let at = validity.not_before.to_datetime();
    ensure!(now >= at, NotYetValidSnafu { path, at });
    Ok(())
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let file = File::open(path).context(ReadSnafu { path })?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .context(ReadSnafu { path })?;
    ensure!(bytes.len() as u64 <= MAX_FILE_BYTES, TooLargeSnafu { path });
    Ok(bytes)
}
