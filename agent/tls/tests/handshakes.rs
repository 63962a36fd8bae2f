//! Real handshakes with identities from files and of the node's own, over a TCP connection each.

#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod support;

use std::{fs, path::Path};

use branchpool_tls::{Names, OwnAuthority, OwnError, PairError, follow};
use rustls::{
    CertificateError, ProtocolVersion,
    pki_types::{CertificateDer, pem::PemObject},
};
use support::{Listener, attempt, client, connect, echoes, openssl, patiently, raw};
use tempfile::{TempDir, tempdir};

fn names(more: &[&str]) -> Names {
    Names::of_host("node-1", more.iter().copied()).unwrap()
}

/// A CA's certificate and a pair that it has signed, taken from a state directory of their own.
struct Issued {
    directory: TempDir,
    ca: String,
}

impl Issued {
    async fn new() -> Self {
        let directory = tempdir().unwrap();
        let own = OwnAuthority::open(directory.path(), names(&[]))
            .await
            .unwrap();
        Self {
            ca: own.certificate,
            directory,
        }
    }

    /// One file with certificate and key serves as both.
    fn pair(&self) -> Vec<u8> {
        fs::read(self.directory.path().join("server.pem")).unwrap()
    }
}

/// As a Secret is mounted: `tls.crt` is a link through `..data`, which is swapped as a whole.
fn swap(directory: &Path, version: &str, certificate: &[u8], key: &[u8]) {
    let data = directory.join(version);
    fs::create_dir(&data).unwrap();
    fs::write(data.join("tls.crt"), certificate).unwrap();
    fs::write(data.join("tls.key"), key).unwrap();
    let link = directory.join("..data_tmp");
    std::os::unix::fs::symlink(version, &link).unwrap();
    fs::rename(link, directory.join("..data")).unwrap();
    for name in ["tls.crt", "tls.key"] {
        let path = directory.join(name);
        if !path.is_symlink() {
            std::os::unix::fs::symlink(format!("..data/{name}"), path).unwrap();
        }
    }
}

#[tokio::test]
async fn a_node_of_its_own_is_verified_by_names_and_addresses() {
    let directory = tempdir().unwrap();
    let names = names(&[
        "db.example.com",
        "*.pools.example.com",
        "10.1.2.3",
        "fd00::7",
    ]);
    let own = OwnAuthority::open(directory.path(), names).await.unwrap();
    let listener = Listener::start(own.identities.clone()).await;
    let client = client(&own.certificate);
    for name in [
        "localhost",
        "node-1",
        "db.example.com",
        "a.pools.example.com",
        "127.0.0.1",
        "::1",
        "10.1.2.3",
        "fd00::7",
    ] {
        echoes(&mut connect(&listener, &client, name).await.unwrap()).await;
    }
    for name in [
        "example.com",
        "a.b.pools.example.com",
        "10.1.2.4",
        "fd00::8",
    ] {
        let error = connect(&listener, &client, name).await.unwrap_err();
        assert!(
            error.to_string().contains("not valid for name"),
            "{name}: {error}"
        );
    }
    let stranger = Issued::new().await;
    let error = attempt(&listener, &support::client(&stranger.ca))
        .await
        .unwrap_err();
    let unknown = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
    assert_eq!(error, unknown);
    assert_eq!(
        fs::read_to_string(&own.certificate_path).unwrap(),
        own.certificate
    );
}

#[tokio::test]
async fn alpn_is_offered_and_not_required() {
    let directory = tempdir().unwrap();
    let own = OwnAuthority::open(directory.path(), names(&[]))
        .await
        .unwrap();
    let listener = Listener::start(own.identities.clone()).await;
    for (offered, agreed) in [
        (vec![], None),
        (vec![b"postgresql".to_vec()], Some(&b"postgresql"[..])),
    ] {
        let client = support::client_offering(&own.certificate, offered);
        let stream = connect(&listener, &client, "localhost").await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), agreed);
    }
    let client = support::client_offering(&own.certificate, vec![b"http/1.1".to_vec()]);
    attempt(&listener, &client).await.unwrap_err();
}

#[tokio::test]
async fn tls_1_2_and_1_3_are_spoken_and_1_1_is_not() {
    let directory = tempdir().unwrap();
    let own = OwnAuthority::open(directory.path(), names(&[]))
        .await
        .unwrap();
    let listener = Listener::start(own.identities.clone()).await;
    for (version, spoken) in [
        (&rustls::version::TLS12, ProtocolVersion::TLSv1_2),
        (&rustls::version::TLS13, ProtocolVersion::TLSv1_3),
    ] {
        let client = support::client_of(&own.certificate, &[version], vec![]);
        let stream = connect(&listener, &client, "localhost").await.unwrap();
        assert_eq!(stream.get_ref().1.protocol_version(), Some(spoken));
    }
    let hello = |minor: u8| {
        // ECDHE-ECDSA with AES-128-GCM and with AES-128-CBC, and no compression.
        let suites: &[u8] = &[0, 4, 0xc0, 0x2b, 0xc0, 0x09, 1, 0];
        // Groups x25519 and P-256; points uncompressed; signatures by ECDSA with P-256 and SHA-256.
        let groups: &[u8] = &[0, 10, 0, 6, 0, 4, 0, 29, 0, 23];
        let points: &[u8] = &[0, 11, 0, 2, 1, 0];
        let signatures: &[u8] = &[0, 13, 0, 4, 0, 2, 4, 3];
        let mut body = vec![3, minor];
        body.extend([7; 32]);
        body.push(0);
        body.extend(suites);
        body.extend([0, 24]);
        body.extend([groups, points, signatures].concat());
        let length = |bytes: &[u8]| u8::try_from(bytes.len()).unwrap();
        let mut message = vec![1, 0, 0, length(&body)];
        message.extend(body);
        let mut record = vec![22, 3, 1, 0, length(&message)];
        record.extend(message);
        record
    };
    // A fatal alert (2): protocol_version (70). The same with TLS 1.2 gets a ServerHello (2).
    assert_eq!(raw(&listener, &hello(2)).await, [21, 3, 3, 0, 2, 2, 70]);
    let answer = raw(&listener, &hello(3)).await;
    assert_eq!(
        (answer[..3].as_ref(), answer[5]),
        (&[22, 3, 3][..], 2),
        "{answer:?}"
    );
}

#[tokio::test]
async fn a_new_pair_is_for_new_connections() {
    let (before, after) = (Issued::new().await, Issued::new().await);
    let directory = tempdir().unwrap();
    swap(directory.path(), "..1", &before.pair(), &before.pair());
    let files = ["tls.crt", "tls.key"].map(|name| directory.path().join(name));
    let mut identities = follow(&files[0], &files[1]).await.unwrap();
    let listener = Listener::start(identities.clone()).await;
    let (old, new) = (client(&before.ca), client(&after.ca));
    let mut open = connect(&listener, &old, "localhost").await.unwrap();
    echoes(&mut open).await;
    attempt(&listener, &new).await.unwrap_err();

    let first = identities.borrow_and_update().clone();
    swap(directory.path(), "..2", &after.pair(), &after.pair());
    fs::remove_dir_all(directory.path().join("..1")).unwrap();
    patiently(identities.changed()).await.unwrap();
    assert_ne!(
        identities.borrow_and_update().endpoint_hash,
        first.endpoint_hash
    );
    attempt(&listener, &new).await.unwrap();
    attempt(&listener, &old).await.unwrap_err();
    echoes(&mut open).await;

    // And once more, by the links that were swapped in last.
    swap(directory.path(), "..3", &before.pair(), &before.pair());
    patiently(identities.changed()).await.unwrap();
    attempt(&listener, &old).await.unwrap();
    echoes(&mut open).await;
}

#[tokio::test]
async fn a_bad_new_pair_keeps_the_old() {
    let (before, after) = (Issued::new().await, Issued::new().await);
    let directory = tempdir().unwrap();
    let (certificate, key) = (directory.path().join("c"), directory.path().join("k"));
    fs::write(&certificate, before.pair()).unwrap();
    fs::write(&key, before.pair()).unwrap();
    let mut identities = follow(&certificate, &key).await.unwrap();
    let first = identities.borrow_and_update().endpoint_hash.clone();
    let listener = Listener::start(identities.clone()).await;
    let old = client(&before.ca);

    // Each is bad for long enough to be judged; that it was is seen in the value that comes next.
    let expired = tempdir().unwrap();
    let (expired_certificate, expired_key) = openssl::expired(expired.path());
    let bad: [(&[u8], &[u8]); 4] = [
        (b"", &before.pair()),
        (&before.pair(), b"-----BEGIN PRIVATE KEY-----\n"),
        (&after.pair(), &before.pair()),
        (&expired_certificate, &expired_key),
    ];
    for (new_certificate, new_key) in bad {
        fs::write(&certificate, new_certificate).unwrap();
        fs::write(&key, new_key).unwrap();
        let judged =
            tokio::time::timeout(std::time::Duration::from_millis(500), identities.changed());
        assert!(judged.await.is_err(), "a bad pair was taken");
        assert_eq!(identities.borrow().endpoint_hash, first);
        attempt(&listener, &old).await.unwrap();
    }
    fs::write(&certificate, after.pair()).unwrap();
    fs::write(&key, after.pair()).unwrap();
    patiently(identities.changed()).await.unwrap();
    assert_ne!(identities.borrow_and_update().endpoint_hash, first);
    attempt(&listener, &client(&after.ca)).await.unwrap();
}

#[tokio::test]
async fn the_first_pair_must_be_good_and_says_what_is_wrong() {
    let issued = Issued::new().await;
    let other = Issued::new().await;
    let directory = tempdir().unwrap();
    let (certificate, key) = (directory.path().join("c"), directory.path().join("k"));
    let refused = async || follow(&certificate, &key).await.unwrap_err();

    assert!(matches!(refused().await, PairError::Read { .. }));
    fs::write(&certificate, "text").unwrap();
    fs::write(&key, issued.pair()).unwrap();
    assert!(matches!(refused().await, PairError::NoCertificate { .. }));
    fs::write(&certificate, issued.pair()).unwrap();
    fs::write(&key, &issued.ca).unwrap();
    assert!(matches!(refused().await, PairError::NoKey { .. }));
    fs::write(&key, other.pair()).unwrap();
    let error = refused().await;
    assert!(matches!(error, PairError::Mismatch { .. }), "{error}");
    let (expired, expired_key) = openssl::expired(directory.path());
    fs::write(&certificate, expired).unwrap();
    fs::write(&key, expired_key).unwrap();
    let error = refused().await;
    assert!(matches!(error, PairError::Expired { .. }), "{error}");
}

#[tokio::test]
async fn the_endpoint_hash_is_what_openssl_says() {
    let directory = tempdir().unwrap();
    let files = ["c", "k"].map(|name| directory.path().join(name));
    for (arguments, digest) in [
        ("-newkey rsa:2048 -md5", "sha256"),
        ("-newkey rsa:2048 -sha1", "sha256"),
        ("-newkey rsa:2048 -sha256", "sha256"),
        ("-newkey rsa:2048 -sha384", "sha384"),
        ("-newkey rsa:2048 -sha512", "sha512"),
        (
            "-newkey rsa:2048 -sha384 -sigopt rsa_padding_mode:pss",
            "sha384",
        ),
        (
            "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -sha256",
            "sha256",
        ),
        (
            "-newkey ec -pkeyopt ec_paramgen_curve:P-384 -sha384",
            "sha384",
        ),
        (
            "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -sha512",
            "sha512",
        ),
    ] {
        openssl::make(&files, arguments);
        let identity = follow(&files[0], &files[1]).await.unwrap().borrow().clone();
        let expected = openssl::digest(&files[0], digest);
        assert_eq!(identity.endpoint_hash, expected, "{arguments}");
    }
    openssl::make(&files, "-newkey ed25519");
    let identity = follow(&files[0], &files[1]).await.unwrap().borrow().clone();
    assert!(identity.endpoint_hash.is_empty(), "RFC 5929 defines none");
}

#[tokio::test]
async fn the_ca_is_kept_and_the_server_certificate_as_long_as_it_fits() {
    let directory = tempdir().unwrap();
    let open = async |names| OwnAuthority::open(directory.path(), names).await.unwrap();
    let first = open(names(&["a.example.com"])).await;
    let again = open(names(&["a.example.com"])).await;
    let hash = |own: &OwnAuthority| own.identities.borrow().endpoint_hash.clone();
    assert_eq!(hash(&first), hash(&again));
    let renamed = open(names(&["b.example.com"])).await;
    assert_ne!(hash(&first), hash(&renamed));
    assert_eq!(first.certificate, renamed.certificate);
    let listener = Listener::start(renamed.identities.clone()).await;
    let client = client(&first.certificate);
    connect(&listener, &client, "b.example.com").await.unwrap();
    connect(&listener, &client, "a.example.com")
        .await
        .unwrap_err();
}

#[tokio::test]
async fn whatever_a_kill_leaves_behind_is_completed() {
    let whole = tempdir().unwrap();
    let first = OwnAuthority::open(whole.path(), names(&[])).await.unwrap();
    let order = ["ca.key", "ca.crt", "server.pem"];
    // What is there after a kill: the files up to one, and perhaps that one unfinished.
    for done in 0..=order.len() {
        for unfinished in [false, true] {
            let directory = tempdir().unwrap();
            for name in &order[..done] {
                fs::copy(whole.path().join(name), directory.path().join(name)).unwrap();
            }
            if unfinished && done < order.len() {
                let name = format!(".{}.new", order[done]);
                fs::write(directory.path().join(name), "-----BEGIN").unwrap();
            }
            let own = OwnAuthority::open(directory.path(), names(&[]))
                .await
                .unwrap();
            let listener = Listener::start(own.identities.clone()).await;
            attempt(&listener, &client(&own.certificate)).await.unwrap();
            if done >= 1 {
                // The key is the CA: who trusts its certificate of before trusts what it signs now.
                attempt(&listener, &client(&first.certificate))
                    .await
                    .unwrap();
            }
            let mut left: Vec<_> = fs::read_dir(directory.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            left.sort();
            assert_eq!(left, ["ca.crt", "ca.key", "server.pem"]);
        }
    }
}

#[tokio::test]
async fn a_ca_that_does_not_fit_together_is_not_replaced() {
    let (one, other) = (Issued::new().await, Issued::new().await);
    let at = |name: &str| one.directory.path().join(name);
    fs::copy(other.directory.path().join("ca.crt"), at("ca.crt")).unwrap();
    let open = async || {
        OwnAuthority::open(one.directory.path(), names(&[]))
            .await
            .unwrap_err()
    };
    assert!(matches!(open().await, OwnError::Foreign { .. }));
    fs::remove_file(at("ca.key")).unwrap();
    assert!(matches!(open().await, OwnError::KeyMissing { .. }));
    fs::write(at("ca.key"), "nonsense").unwrap();
    assert!(matches!(open().await, OwnError::Key { .. }));
    assert_eq!(fs::read_to_string(at("ca.crt")).unwrap(), other.ca);
}

/// Tokio's clock stands still and jumps to the next timer when all wait.
#[tokio::test(start_paused = true)]
async fn a_certificate_is_renewed_before_it_expires() {
    let directory = tempdir().unwrap();
    let mut own = OwnAuthority::open(directory.path(), names(&[]))
        .await
        .unwrap();
    let leaf = || {
        let text = fs::read(directory.path().join("server.pem")).unwrap();
        CertificateDer::from_pem_slice(&text).unwrap()
    };
    let first = (
        own.identities.borrow_and_update().endpoint_hash.clone(),
        leaf(),
    );
    let start = tokio::time::Instant::now();
    own.identities.changed().await.unwrap();
    let waited = start.elapsed().as_secs() / 86_400;
    assert!(
        (59..=60).contains(&waited),
        "renewed after {waited} of 90 days"
    );
    let second = (
        own.identities.borrow_and_update().endpoint_hash.clone(),
        leaf(),
    );
    assert_ne!(first.0, second.0);
    assert_ne!(first.1, second.1);
    own.identities.changed().await.unwrap();
}
