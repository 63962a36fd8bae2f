//! Making a CA, and signing certificates with it.

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, NameConstraints, PublicKeyData, SanType, SerialNumber,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use sha2::{Digest, Sha256};
use snafu::{ResultExt, Snafu, ensure};
use time::{Duration, OffsetDateTime};
use x509_parser::{certificate::X509Certificate, prelude::FromDer, time::ASN1Time};

/// Of every certificate made here: others' clocks may be behind.
pub const BACKDATED: Duration = Duration::hours(1);

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display("no private key in PEM: {source}"))]
    Key { source: rcgen::Error },
    #[snafu(display("no certificate in PEM"))]
    Certificate,
    #[snafu(display("the certificate is not of the key"))]
    Foreign,
    #[snafu(display("the certificate is not a CA's"))]
    NotAuthority,
    #[snafu(display("a certificate could not be made: {source}"))]
    Issue { source: rcgen::Error },
}

/// A CA: its key and its certificate.
#[derive(Debug)]
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    pem: String,
}

/// What a certificate is to say beside its key.
#[derive(Debug)]
pub struct Leaf<'a> {
    pub common_name: &'a str,
    pub names: Vec<SanType>,
    pub usage: Usage,
    /// From now; it starts [`BACKDATED`].
    pub term: Duration,
}

/// Which side of a connection a certificate is for; it does for that one alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usage {
    Server,
    Client,
}

impl Ca {
    /// With a new key.
    pub fn make(
        term: Duration,
        constraints: Option<NameConstraints>,
        now: OffsetDateTime,
    ) -> Result<Self, Error> {
        let key = KeyPair::generate().context(IssueSnafu)?;
        Self::certify(key, term, constraints, now)
    }

    /// With a new certificate of this key. The same key always makes the same name, so that a certificate
    /// signed anew takes the old one's place; keys differ in it, so that CAs can be trusted side by side.
    pub fn certify(
        key: KeyPair,
        term: Duration,
        constraints: Option<NameConstraints>,
        now: OffsetDateTime,
    ) -> Result<Self, Error> {
        let digest = Sha256::digest(key.subject_public_key_info());
        let id = u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]]);
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name = common_name(&format!("branchpool CA {id:08x}"));
        parameters.serial_number = Some(SerialNumber::from(now.unix_timestamp().unsigned_abs()));
        parameters.not_before = now - BACKDATED;
        parameters.not_after = now + term;
        parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        parameters.name_constraints = constraints;
        let certificate = parameters.self_signed(&key).context(IssueSnafu)?;
        Ok(Self {
            issuer: Issuer::new(parameters, key),
            pem: certificate.pem(),
            certificate: certificate.into(),
        })
    }

    /// From the PEM texts of both.
    pub fn from_pem(key: &str, certificate: &str) -> Result<Self, Error> {
        let key = KeyPair::from_pem(key).context(KeySnafu)?;
        Self::of(key, certificate)
    }

    /// From a key and the PEM text of its certificate.
    pub fn of(key: KeyPair, certificate: &str) -> Result<Self, Error> {
        let der = CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(|_| Error::Certificate)?;
        {
            let (_, parsed) = X509Certificate::from_der(&der).map_err(|_| Error::Certificate)?;
            let own = key.subject_public_key_info();
            ensure!(parsed.public_key().raw == own, ForeignSnafu);
            ensure!(parsed.is_ca(), NotAuthoritySnafu);
        }
        Ok(Self {
            issuer: Issuer::from_ca_cert_der(&der, key).context(IssueSnafu)?,
            certificate: der,
            pem: certificate.to_owned(),
        })
    }

    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    pub fn certificate_pem(&self) -> &str {
        &self.pem
    }

    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Signs for a public key.
    pub fn issue(
        &self,
        key: &impl PublicKeyData,
        leaf: Leaf<'_>,
        now: OffsetDateTime,
    ) -> Result<rcgen::Certificate, Error> {
        let mut parameters = CertificateParams::default();
        parameters.subject_alt_names = leaf.names;
        parameters.distinguished_name = common_name(leaf.common_name);
        parameters.not_before = now - BACKDATED;
        parameters.not_after = now + leaf.term;
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        parameters.extended_key_usages = vec![match leaf.usage {
            Usage::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Usage::Client => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        parameters.use_authority_key_identifier_extension = true;
        parameters.signed_by(key, &self.issuer).context(IssueSnafu)
    }
}

/// From when until when a certificate is valid; `None` when it is no certificate.
pub fn validity(certificate: &CertificateDer<'_>) -> Option<(OffsetDateTime, OffsetDateTime)> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let at = |time: &ASN1Time| time.to_datetime();
    let validity = parsed.validity();
    Some((at(&validity.not_before), at(&validity.not_after)))
}

/// Whether the key of `authority` has signed `certificate`.
pub fn is_signed_by(certificate: &CertificateDer<'_>, authority: &CertificateDer<'_>) -> bool {
    let parsed = (
        X509Certificate::from_der(certificate),
        X509Certificate::from_der(authority),
    );
    let (Ok((_, certificate)), Ok((_, authority))) = parsed else {
        return false;
    };
    certificate
        .verify_signature(Some(authority.public_key()))
        .is_ok()
}

fn common_name(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}
