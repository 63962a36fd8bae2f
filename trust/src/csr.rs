//! What is taken from a certificate signing request: its key, and nothing else.

use rcgen::{
    PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PublicKeyData,
    SubjectPublicKeyInfo,
};
use rustls::pki_types::{CertificateSigningRequestDer, pem::PemObject};
use snafu::{OptionExt, Snafu, ensure};
use x509_parser::{certification_request::X509CertificationRequest, prelude::FromDer};

/// A request for one of these keys has some 300 bytes.
pub(crate) const MAX_BYTES: usize = 4 << 10;

#[derive(Debug, Snafu)]
pub enum CsrError {
    #[snafu(display("the request is larger than {MAX_BYTES} bytes"))]
    TooLarge,
    #[snafu(display("the request is not one certificate signing request (PKCS #10) in PEM"))]
    Form,
    #[snafu(display("the request is not signed by its own key"))]
    Signature,
    #[snafu(display("the key must be of ECDSA with P-256 or P-384, or of Ed25519"))]
    KeyType,
}

/// The key of a request whose sender has proved to hold the private one.
pub(crate) fn public_key(pem: &str) -> Result<SubjectPublicKeyInfo, CsrError> {
    ensure!(pem.len() <= MAX_BYTES, TooLargeSnafu);
    let mut found = CertificateSigningRequestDer::pem_slice_iter(pem.as_bytes());
    let der = found.next().and_then(Result::ok).context(FormSnafu)?;
    ensure!(found.next().is_none(), FormSnafu);
    let parsed = X509CertificationRequest::from_der(&der).ok();
    let (rest, request) = parsed.context(FormSnafu)?;
    ensure!(rest.is_empty(), FormSnafu);
    let spki = request.certification_request_info.subject_pki.raw;
    let key = SubjectPublicKeyInfo::from_der(spki)
        .ok()
        .context(KeyTypeSnafu)?;
    let allowed = [
        &PKCS_ECDSA_P256_SHA256,
        &PKCS_ECDSA_P384_SHA384,
        &PKCS_ED25519,
    ];
    ensure!(allowed.contains(&key.algorithm()), KeyTypeSnafu);
    // After the key's type: no time goes to signatures of huge keys.
    ensure!(request.verify_signature().is_ok(), SignatureSnafu);
    Ok(key)
}
