//! What a listener needs to speak TLS.

use std::sync::Arc;

use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer},
    server::NoServerSessionStorage,
    version::{TLS12, TLS13},
};
use sha2::{Digest, Sha256, Sha384, Sha512};
use x509_parser::{
    certificate::X509Certificate,
    oid_registry::{
        OID_HASH_SHA1, OID_NIST_HASH_SHA256, OID_NIST_HASH_SHA384, OID_NIST_HASH_SHA512,
        OID_PKCS1_MD5WITHRSAENC, OID_PKCS1_SHA1WITHRSA, OID_PKCS1_SHA256WITHRSA,
        OID_PKCS1_SHA384WITHRSA, OID_PKCS1_SHA512WITHRSA, OID_SIG_ECDSA_WITH_SHA256,
        OID_SIG_ECDSA_WITH_SHA384, OID_SIG_ECDSA_WITH_SHA512, Oid,
    },
    signature_algorithm::SignatureAlgorithm,
    x509::AlgorithmIdentifier,
};

/// The name of the protocol in ALPN (PostgreSQL 17 and later ask for it).
const ALPN: &[u8] = b"postgresql";

/// A certificate with its key, ready to be served.
#[derive(Clone, Debug)]
pub struct TlsIdentity {
    /// TLS 1.2 and 1.3. ALPN names `postgresql`; clients without ALPN are served as well.
    pub config: Arc<ServerConfig>,
    /// The hash of the leaf certificate for the channel binding `tls-server-end-point` (RFC 5929).
    /// Empty where that defines none, as for Ed25519 signatures: then SCRAM-SHA-256-PLUS must not be
    /// offered, for libpq would choose it and fail.
    pub endpoint_hash: Vec<u8>,
}

impl TlsIdentity {
    /// Of a chain, leaf first, and the leaf's key. An error when they do not belong together.
    pub(crate) fn new(
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        endpoint_hash: Vec<u8>,
    ) -> Result<Self, rustls::Error> {
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13, &TLS12])?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // As Postgres itself: its clients do not resume sessions.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self {
            config: Arc::new(config),
            endpoint_hash,
        })
    }
}

/// By the hash of the signature algorithm, SHA-256 in place of MD5 and SHA-1; empty when it has none.
pub(crate) fn endpoint_hash(der: &[u8], certificate: &X509Certificate<'_>) -> Vec<u8> {
    match signature_hash(&certificate.signature_algorithm) {
        Some(Hash::Sha256) => Sha256::digest(der).to_vec(),
        Some(Hash::Sha384) => Sha384::digest(der).to_vec(),
        Some(Hash::Sha512) => Sha512::digest(der).to_vec(),
        None => Vec::new(),
    }
}

enum Hash {
    Sha256,
    Sha384,
    Sha512,
}

fn signature_hash(algorithm: &AlgorithmIdentifier<'_>) -> Option<Hash> {
    if let Ok(SignatureAlgorithm::RSASSA_PSS(parameters)) = SignatureAlgorithm::try_from(algorithm)
    {
        return hash_of(parameters.hash_algorithm_oid());
    }
    hash_of(&algorithm.algorithm)
}

/// Of a signature algorithm, or of the hash that RSASSA-PSS names beside itself.
fn hash_of(oid: &Oid<'_>) -> Option<Hash> {
    let known = [
        (OID_PKCS1_MD5WITHRSAENC, Hash::Sha256),
        (OID_PKCS1_SHA1WITHRSA, Hash::Sha256),
        (OID_PKCS1_SHA256WITHRSA, Hash::Sha256),
        (OID_PKCS1_SHA384WITHRSA, Hash::Sha384),
        (OID_PKCS1_SHA512WITHRSA, Hash::Sha512),
        (OID_SIG_ECDSA_WITH_SHA256, Hash::Sha256),
        (OID_SIG_ECDSA_WITH_SHA384, Hash::Sha384),
        (OID_SIG_ECDSA_WITH_SHA512, Hash::Sha512),
        (OID_HASH_SHA1, Hash::Sha256),
        (OID_NIST_HASH_SHA256, Hash::Sha256),
        (OID_NIST_HASH_SHA384, Hash::Sha384),
        (OID_NIST_HASH_SHA512, Hash::Sha512),
    ];
    known
        .into_iter()
        .find_map(|(known, hash)| (known == *oid).then_some(hash))
}
