//! What each side shows, and what it wants to see.

use std::sync::Arc;

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
    client::{Resumption, danger::HandshakeSignatureValid, verify_server_name},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        NoServerSessionStorage, ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    version::{TLS12, TLS13},
};

use crate::{Bundle, OPERATOR_NAME, identity::Identity};

const ALPN: &[u8] = b"http/1.1";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// An agent's: clients must show that they are the operator.
pub(crate) fn agent_server(identity: &Identity, bundle: &Bundle) -> Result<ServerConfig, Error> {
    let verifier = OperatorOnly::new(bundle).map_err(|error| Error::General(error.to_string()))?;
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_single_cert(identity.chain.clone(), identity.key())?;
    Ok(served(config))
}

/// The operator's, for whoever comes: agents that have no certificate yet, and users.
pub(crate) fn operator_server(identity: &Identity) -> Result<ServerConfig, Error> {
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13, &TLS12])?
        .with_no_client_auth()
        .with_single_cert(identity.chain.clone(), identity.key())?;
    Ok(served(config))
}

/// A session that is resumed is not verified again, so a CA that was dropped would live on in it.
fn served(mut config: ServerConfig) -> ServerConfig {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config
}

/// The operator's towards agents.
pub(crate) fn operator_client(identity: &Identity, bundle: &Bundle) -> Result<ClientConfig, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(bundle.roots())
        .with_client_auth_cert(identity.chain.clone(), identity.key())?;
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// An agent's towards the operator: its token says who it is.
pub(crate) fn enrolling_client(bundle: &Bundle) -> Result<ClientConfig, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(bundle.roots())
        .with_no_client_auth();
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// A client's certificate that a CA of the bundle has signed, for a client, with the operator's name.
#[derive(Debug)]
struct OperatorOnly {
    chain: Arc<dyn ClientCertVerifier>,
    name: ServerName<'static>,
}

impl OperatorOnly {
    fn new(bundle: &Bundle) -> Result<Self, VerifierBuilderError> {
        let roots = Arc::new(bundle.roots());
        let chain = WebPkiClientVerifier::builder_with_provider(roots, provider()).build()?;
        let name = ServerName::try_from(OPERATOR_NAME).expect("the operator's name should be one");
        Ok(Self { chain, name })
    }
}

impl ClientCertVerifier for OperatorOnly {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self
            .chain
            .verify_client_cert(end_entity, intermediates, now)?;
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_name(&parsed, &self.name)
            .map_err(|_| CertificateError::ApplicationVerificationFailure)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}
