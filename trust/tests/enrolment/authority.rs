//! How the CA is kept, and what it does not sign.

use branchpool_trust::{Authority, OperatorIdentity, authority::Error, plan::Step};
use rcgen::{
    BasicConstraints, CertificateParams, IsCa, KeyPair, PKCS_ECDSA_P384_SHA384, PKCS_ED25519,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use time::Duration;
use tokio::sync::watch;
use x509_parser::{certificate::X509Certificate, prelude::FromDer};

use crate::support::{Operator, now, showing};

fn request(key: &KeyPair, change: impl FnOnce(&mut CertificateParams)) -> String {
    let mut parameters = CertificateParams::default();
    change(&mut parameters);
    parameters.serialize_request(key).unwrap().pem().unwrap()
}

#[test]
fn every_state_is_read_back_as_it_was_kept() {
    let mut authority = Authority::make(now()).unwrap();
    for step in [Step::Introduce, Step::Introduce, Step::Switch, Step::Retire] {
        authority = authority.after(&step, now()).unwrap().unwrap();
        let kept = Authority::load(&authority.save()).unwrap();
        assert_eq!(kept.rotation(), authority.rotation());
        assert_eq!(kept.bundle_pem(), authority.bundle_pem());
        assert_eq!(kept.save(), authority.save());
        // It signs as before.
        let key = KeyPair::generate().unwrap();
        kept.certify_agent(&request(&key, |_| {}), "node-1", now())
            .unwrap();
    }
    let nothing = Step::Keep {
        waiting_for: vec![],
    };
    assert!(authority.after(&nothing, now()).unwrap().is_none());
    let out_of_step = authority.after(&Step::Retire, now()).unwrap_err();
    assert!(matches!(out_of_step, Error::OutOfStep { .. }));
}

#[test]
fn what_does_not_fit_together_is_not_loaded() {
    let one = Authority::make(now()).unwrap();
    let entries = one.save();
    let other = Authority::make(now()).unwrap().save();
    let with = |entry: &str, text: &[u8]| {
        let mut entries = entries.clone();
        entries.insert(entry.to_owned(), text.to_vec());
        Authority::load(&entries).unwrap_err().to_string()
    };
    let says = with("ca.key", &other["ca.key"]);
    assert!(says.contains("not of the key"), "{says}");
    assert!(with("ca.crt", b"nonsense").contains("ca.crt"));
    assert!(with("ca.key", b"nonsense").contains("private key"));
    assert!(with("next.crt", &other["ca.crt"]).contains("next.key"));
    assert!(with("old.crt", b"nonsense").contains("old.crt"));
    let mut both = one.after(&Step::Introduce, now()).unwrap().unwrap().save();
    both.insert("old.crt".into(), other["ca.crt"].clone());
    assert!(
        Authority::load(&both)
            .unwrap_err()
            .to_string()
            .contains("old.crt")
    );
    let mut without = entries.clone();
    without.remove("ca.key");
    assert!(
        Authority::load(&without)
            .unwrap_err()
            .to_string()
            .contains("ca.key")
    );
}

#[test]
fn only_the_key_is_taken_from_a_request() {
    let authority = Authority::make(now()).unwrap();
    for algorithm in [
        &rcgen::PKCS_ECDSA_P256_SHA256,
        &PKCS_ECDSA_P384_SHA384,
        &PKCS_ED25519,
    ] {
        let key = KeyPair::generate_for(algorithm).unwrap();
        let greedy = request(&key, |parameters| {
            *parameters = CertificateParams::new(vec!["operator.branchpool".into()]).unwrap();
            parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            parameters.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        });
        let issued = authority.certify_agent(&greedy, "node-1", now()).unwrap();
        let der = CertificateDer::from_pem_slice(issued.as_bytes()).unwrap();
        let (_, certificate) = X509Certificate::from_der(&der).unwrap();
        let names = certificate.subject_alternative_name().unwrap().unwrap();
        let names: Vec<_> = names
            .value
            .general_names
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(names, ["DNSName(node-1.agent.branchpool)"]);
        assert!(!certificate.is_ca());
        let usage = certificate.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.server_auth && !usage.client_auth && !usage.any);
        assert_eq!(
            certificate.public_key().raw,
            rcgen::PublicKeyData::subject_public_key_info(&key)
        );
    }
}

#[test]
fn nothing_outlives_its_ca() {
    let then = now() - Duration::days(5 * 365) + Duration::hours(5);
    let authority = Authority::make(then).unwrap();
    let key = KeyPair::generate().unwrap();
    let issued = authority
        .certify_agent(&request(&key, |_| {}), "node-1", now())
        .unwrap();
    let der = CertificateDer::from_pem_slice(issued.as_bytes()).unwrap();
    let (_, end) = branchpool_tls::ca::validity(&der).unwrap();
    assert!(end <= now() + Duration::hours(5));
    let late = now() + Duration::hours(6);
    let refused = authority.certify_agent(&request(&key, |_| {}), "node-1", late);
    assert!(matches!(refused, Err(Error::Over)));
}

#[tokio::test]
async fn its_certificates_are_for_names_in_the_cluster_only() {
    // The operator's own listener under a name of the world: no client believes it.
    let operator = Operator::new();
    let (_sender, current) = watch::channel(operator.authority());
    let world = OperatorIdentity::start(current, vec!["example.com".into()]).unwrap();
    let tcp = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = tcp.local_addr().unwrap();
    let (_stop, stopping) = watch::channel(false);
    let answer = |_| async { axum::response::Response::default() };
    let listener = branchpool_trust::TlsListener::new(tcp, world.listener);
    tokio::spawn(branchpool_trust::serve::serve(listener, answer, stopping));
    let config = showing(&operator.bundle(), None).borrow().clone();
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let name = "example.com".try_into().unwrap();
    let error = tokio_rustls::TlsConnector::from(config)
        .connect(name, stream)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("NameConstraint"), "{error}");
}
