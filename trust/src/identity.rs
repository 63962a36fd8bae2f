//! A certificate with its key, in memory.

use std::fmt;

use branchpool_tls::ca;
use rcgen::KeyPair;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::plan::Validity;

/// Its key is shown to nobody, and written nowhere.
pub(crate) struct Identity {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    pub(crate) validity: Validity,
}

impl Identity {
    /// `None` when the leaf is no certificate.
    pub(crate) fn new(chain: Vec<CertificateDer<'static>>, key: &KeyPair) -> Option<Self> {
        let validity = validity(chain.first()?)?;
        Some(Self {
            chain,
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            validity,
        })
    }

    pub(crate) fn key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key()
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Identity")
            .field("validity", &self.validity)
            .finish_non_exhaustive()
    }
}

pub(crate) fn validity(certificate: &CertificateDer<'_>) -> Option<Validity> {
    let (not_before, not_after) = ca::validity(certificate)?;
    Some(Validity {
        not_before: not_before.unix_timestamp(),
        not_after: not_after.unix_timestamp(),
    })
}
