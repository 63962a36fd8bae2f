//! The CAs that are trusted, as PEM: first the one that signs.

use std::fmt;

use rustls::{
    RootCertStore,
    pki_types::{
        CertificateDer,
        pem::{self, PemObject},
    },
};
use snafu::{ResultExt, Snafu, ensure};

use crate::Fingerprint;

/// Two while one is replaced; more come from nobody.
const MAX_CERTIFICATES: usize = 8;
/// Most bytes of a bundle.
pub(crate) const MAX_BYTES: usize = 64 << 10;

#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)))]
pub enum BundleError {
    #[snafu(display("it is larger than {MAX_BYTES} bytes"))]
    TooLarge,
    #[snafu(display("it is not proper PEM: {source}"))]
    Pem { source: pem::Error },
    #[snafu(display("it holds no certificate"))]
    Empty,
    #[snafu(display("it holds more than {MAX_CERTIFICATES} certificates"))]
    TooMany,
    #[snafu(display("one of its certificates cannot be used as a CA: {source}"))]
    Unusable { source: rustls::Error },
}

/// At least one CA.
#[derive(Clone, PartialEq, Eq)]
pub struct Bundle {
    certificates: Vec<CertificateDer<'static>>,
    ids: Vec<Fingerprint>,
}

impl Bundle {
    pub fn from_pem(text: &[u8]) -> Result<Self, BundleError> {
        ensure!(text.len() <= MAX_BYTES, TooLargeSnafu);
        let certificates = CertificateDer::pem_slice_iter(text)
            .take(MAX_CERTIFICATES + 1)
            .collect::<Result<Vec<_>, _>>()
            .context(PemSnafu)?;
        ensure!(!certificates.is_empty(), EmptySnafu);
        ensure!(certificates.len() <= MAX_CERTIFICATES, TooManySnafu);
        let ids = certificates.iter().map(Fingerprint::of).collect();
        let bundle = Self { certificates, ids };
        bundle.try_roots()?;
        Ok(bundle)
    }

    /// First the one that signs.
    pub fn ids(&self) -> &[Fingerprint] {
        &self.ids
    }

    pub fn signing(&self) -> Fingerprint {
        self.ids[0]
    }

    /// The CA that has signed a certificate, if it is one of these.
    pub(crate) fn issuer_of(&self, certificate: &CertificateDer<'_>) -> Option<Fingerprint> {
        let has_signed = |authority: &&CertificateDer<'_>| {
            branchpool_tls::ca::is_signed_by(certificate, authority)
        };
        self.certificates
            .iter()
            .find(has_signed)
            .map(Fingerprint::of)
    }

    pub(crate) fn roots(&self) -> RootCertStore {
        self.try_roots()
            .expect("a bundle's certificates should be usable, as when it was made")
    }

    fn try_roots(&self) -> Result<RootCertStore, BundleError> {
        let mut roots = RootCertStore::empty();
        for certificate in &self.certificates {
            roots.add(certificate.clone()).context(UnusableSnafu)?;
        }
        Ok(roots)
    }
}

impl fmt::Debug for Bundle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Bundle").field(&self.ids).finish()
    }
}
