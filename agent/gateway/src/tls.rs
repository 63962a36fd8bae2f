//! The identity that the gateway shows. Files, reloading and authorities are others' business.

use std::{fmt, sync::Arc};

use tokio_rustls::rustls::ServerConfig;

/// The protocol's name in ALPN.
pub const ALPN: &[u8] = b"postgresql";

/// A certificate with what belongs to it. A new one takes effect for new connections.
pub struct TlsIdentity {
    /// TLS 1.2 or newer; `alpn_protocols` has to hold [`ALPN`] alone.
    pub config: Arc<ServerConfig>,
    /// Channel binding `tls-server-end-point` (RFC 5929): the hash of the certificate's DER by the
    /// hash of its signature algorithm, SHA-256 where that is MD5 or SHA-1. Empty where none is
    /// defined, as for Ed25519: then channel binding is not offered.
    pub endpoint_hash: Vec<u8>,
}

impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsIdentity").finish_non_exhaustive()
    }
}
