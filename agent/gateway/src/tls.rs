//! The identity that the gateway shows. Files, reloading and authorities are others' business.

pub use branchpool_tls::TlsIdentity;

/// The protocol's name in ALPN.
pub const ALPN: &[u8] = b"postgresql";
