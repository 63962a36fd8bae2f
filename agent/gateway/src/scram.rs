//! The server's side of SCRAM-SHA-256 and SCRAM-SHA-256-PLUS (RFC 5802, 7677), without IO.

use bytes::Buf;
use data_encoding::BASE64;
use hmac::{Hmac, KeyInit, Mac};
use rand::Rng;
use sha2::{Digest, Sha256};
use snafu::{OptionExt, Snafu, ensure};
use subtle::{Choice, ConstantTimeEq};

/// Iterations of a verifier. pgjdbc refuses fewer; unknown users are answered with this number,
/// so a verifier with another one can be told from them.
pub const ITERATIONS: u32 = 4096;
/// Length of a salt, in bytes: that of Postgres, since some answers are relayed from it.
pub const SALT_LENGTH: usize = 16;

/// Name of the mechanism without channel binding.
pub const PLAIN: &str = "SCRAM-SHA-256";
/// Name of the mechanism with channel binding.
pub const PLUS: &str = "SCRAM-SHA-256-PLUS";

/// Random part of the server's nonce, in bytes; Postgres takes as many.
const NONCE_LENGTH: usize = 18;
const BINDING_TYPE: &str = "tls-server-end-point";

type Key = [u8; 32];

/// Why an exchange failed. A client is told no more than [`Error::Denied`] or a broken protocol.
#[derive(Debug, PartialEq, Eq, Snafu)]
pub enum Error {
    #[snafu(display("malformed SCRAM message: {detail}"))]
    Malformed { detail: &'static str },

    #[snafu(display("the client selected an authentication mechanism that was not offered"))]
    UnknownMechanism,

    #[snafu(display("SCRAM channel binding negotiation error"))]
    BindingNegotiation,

    #[snafu(display("SCRAM channel binding check failed"))]
    BindingMismatch,

    #[snafu(display("password authentication failed"))]
    Denied,
}

/// What a password is checked against. The password cannot be read back from it.
#[derive(Clone)]
pub struct Verifier {
    salt: [u8; SALT_LENGTH],
    iterations: u32,
    stored_key: Key,
    server_key: Key,
    /// Whether a password exists at all.
    known: Choice,
}

impl std::fmt::Debug for Verifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Verifier").finish_non_exhaustive()
    }
}

impl Verifier {
    /// Takes about a millisecond for [`ITERATIONS`]. Make it before it is needed, with the salt
    /// of [`crate::Directory::salt`].
    pub fn derive(password: &str, salt: [u8; SALT_LENGTH], iterations: u32) -> Self {
        // Like Postgres: a password that cannot be prepared is taken as it is.
        let prepared = stringprep::saslprep(password).unwrap_or(password.into());
        let mut salted = Key::default();
        pbkdf2::pbkdf2_hmac::<Sha256>(prepared.as_bytes(), &salt, iterations, &mut salted);
        Self {
            salt,
            iterations,
            stored_key: Sha256::digest(hmac(&salted, &[b"Client Key"])).into(),
            server_key: hmac(&salted, &[b"Server Key"]),
            known: Choice::from(1),
        }
    }

    /// Looks like a verifier to a client; no password fits.
    pub(crate) fn mock(salt: [u8; SALT_LENGTH]) -> Self {
        Self {
            salt,
            iterations: ITERATIONS,
            stored_key: rand::random(),
            server_key: rand::random(),
            known: Choice::from(0),
        }
    }
}

/// Mechanism and data in the body of a `SASLInitialResponse`; `None` when it is malformed.
pub fn initial_response(body: &[u8]) -> Option<(&str, &[u8])> {
    let end = body.iter().position(|byte| *byte == 0)?;
    let mechanism = str::from_utf8(&body[..end]).ok()?;
    let mut rest = &body[end + 1..];
    let length = usize::try_from(rest.try_get_i32().ok()?).ok()?;
    (length == rest.len()).then_some((mechanism, rest))
}

/// What the transport offers to bind to: the `tls-server-end-point` hash of the certificate.
pub type Binding<'a> = Option<&'a [u8]>;

/// The mechanisms to offer, best first.
pub fn mechanisms(binding: Binding<'_>) -> &'static [&'static str] {
    match binding {
        Some(_) => &[PLUS, PLAIN],
        None => &[PLAIN],
    }
}

/// A server nonce: printable, without commas.
pub(crate) fn nonce() -> String {
    let mut bytes = [0; NONCE_LENGTH];
    rand::rng().fill_bytes(&mut bytes);
    BASE64.encode(&bytes)
}

/// An exchange that waits for the client's proof.
pub struct Challenge {
    verifier: Verifier,
    /// The bytes of the client's first message behind its header.
    client_first_bare: String,
    server_first: String,
    nonce: String,
    /// What `c=` has to be.
    binding: String,
}

impl std::fmt::Debug for Challenge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Challenge").finish_non_exhaustive()
    }
}

impl Challenge {
    /// Answers the client's first message. `server_nonce` is the server's part of the nonce.
    pub fn new(
        mechanism: &str,
        client_first: &[u8],
        verifier: Verifier,
        binding: Binding<'_>,
        server_nonce: &str,
    ) -> Result<Self, Error> {
        let plus = match (mechanism, binding) {
            (PLAIN, _) => false,
            (PLUS, Some(_)) => true,
            _ => return UnknownMechanismSnafu.fail(),
        };
        let client_first = text(client_first)?;
        let (flag, rest) = split(client_first)?;
        match flag {
            "n" if !plus => {}
            // The client could bind, and believes that the server cannot.
            "y" if !plus && binding.is_none() => {}
            flag if plus && flag.strip_prefix("p=") == Some(BINDING_TYPE) => {}
            _ => return BindingNegotiationSnafu.fail(),
        }
        let (authorization, bare) = split(rest)?;
        let detail = "authorization identity is not supported";
        ensure!(authorization.is_empty(), MalformedSnafu { detail });
        let client_nonce = client_nonce(bare)?;

        let header = &client_first[..client_first.len() - bare.len()];
        let mut bound = header.as_bytes().to_vec();
        if plus {
            bound.extend_from_slice(binding.unwrap_or_default());
        }
        let nonce = format!("{client_nonce}{server_nonce}");
        let salt = BASE64.encode(&verifier.salt);
        let server_first = format!("r={nonce},s={salt},i={}", verifier.iterations);
        Ok(Self {
            client_first_bare: bare.to_owned(),
            server_first,
            nonce,
            binding: BASE64.encode(&bound),
            verifier,
        })
    }

    /// The message to send.
    pub fn message(&self) -> &str {
        &self.server_first
    }

    /// Checks the client's proof; returns the server's own, to be sent.
    pub fn finish(&self, client_final: &[u8]) -> Result<String, Error> {
        let client_final = text(client_final)?;
        let detail = "the proof is missing";
        let (unproven, proof) = client_final
            .rsplit_once(",p=")
            .context(MalformedSnafu { detail })?;
        let mut attributes = unproven.split(',');
        let detail = "the channel binding is missing";
        let binding = attributes
            .next()
            .and_then(|attribute| attribute.strip_prefix("c="))
            .context(MalformedSnafu { detail })?;
        ensure!(binding == self.binding, BindingMismatchSnafu);
        let nonce = attributes
            .next()
            .and_then(|attribute| attribute.strip_prefix("r="));
        let detail = "nonce does not match";
        ensure!(nonce == Some(&self.nonce), MalformedSnafu { detail });
        let detail = "the proof has a wrong form";
        let proof: Key = BASE64
            .decode(proof.as_bytes())
            .ok()
            .and_then(|proof| proof.try_into().ok())
            .context(MalformedSnafu { detail })?;

        let signed: [&[u8]; 5] = [
            self.client_first_bare.as_bytes(),
            b",",
            self.server_first.as_bytes(),
            b",",
            unproven.as_bytes(),
        ];
        let signature = hmac(&self.verifier.stored_key, &signed);
        let mut client_key = proof;
        for (byte, mask) in client_key.iter_mut().zip(signature) {
            *byte ^= mask;
        }
        let stored_key: Key = Sha256::digest(client_key).into();
        let server_signature = hmac(&self.verifier.server_key, &signed);
        let proven = stored_key.ct_eq(&self.verifier.stored_key) & self.verifier.known;
        ensure!(bool::from(proven), DeniedSnafu);
        Ok(format!("v={}", BASE64.encode(&server_signature)))
    }
}

/// The nonce of a client's first message without its header. Postgres takes the user from the
/// start-up packet, and so is it here.
fn client_nonce(bare: &str) -> Result<&str, Error> {
    let (user, rest) = split(bare)?;
    let detail = "a mandatory extension is not supported";
    ensure!(!user.starts_with("m="), MalformedSnafu { detail });
    let detail = "the user name is missing";
    ensure!(user.starts_with("n="), MalformedSnafu { detail });
    let nonce = rest.split(',').next().unwrap_or_default();
    let detail = "the nonce is missing or has characters that are not printable";
    nonce
        .strip_prefix("r=")
        .filter(|nonce| !nonce.is_empty() && nonce.bytes().all(|byte| byte.is_ascii_graphic()))
        .context(MalformedSnafu { detail })
}

fn text(message: &[u8]) -> Result<&str, Error> {
    let detail = "it is not UTF-8";
    str::from_utf8(message)
        .ok()
        .context(MalformedSnafu { detail })
}

fn split(message: &str) -> Result<(&str, &str), Error> {
    let detail = "an attribute is missing";
    message.split_once(',').context(MalformedSnafu { detail })
}

pub(crate) fn hmac(key: &[u8], parts: &[&[u8]]) -> Key {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(key).expect("HMAC should take a key of any length");
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 7677.
    const CLIENT_FIRST: &str = "n,,n=user,r=rOprNGfwEbeRWgbNEkqO";
    const SERVER_NONCE: &str = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0";
    const CLIENT_FINAL: &str = "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";

    fn verifier() -> Verifier {
        let salt = BASE64.decode(b"W22ZaJ0SNY7soEsUEjb6gQ==").unwrap();
        Verifier::derive("pencil", salt.try_into().unwrap(), ITERATIONS)
    }

    fn challenge(client_first: &str, binding: Binding<'_>) -> Result<Challenge, Error> {
        let mechanism = if client_first.starts_with('p') {
            PLUS
        } else {
            PLAIN
        };
        let first = client_first.as_bytes();
        Challenge::new(mechanism, first, verifier(), binding, SERVER_NONCE)
    }

    fn malformed<T: std::fmt::Debug>(result: Result<T, Error>) -> bool {
        matches!(result.unwrap_err(), Error::Malformed { .. })
    }

    #[test]
    fn the_example_of_the_standard() {
        let challenge = challenge(CLIENT_FIRST, None).unwrap();
        assert_eq!(
            challenge.message(),
            "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
        );
        assert_eq!(
            challenge.finish(CLIENT_FINAL.as_bytes()).unwrap(),
            "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
        );
    }

    #[test]
    fn a_wrong_proof_is_denied() {
        let challenge = challenge(CLIENT_FIRST, None).unwrap();
        let wrong = CLIENT_FINAL.replace("p=d", "p=e");
        assert_eq!(challenge.finish(wrong.as_bytes()), Err(Error::Denied));
    }

    #[test]
    fn a_right_proof_for_a_mock_is_denied() {
        let mut verifier = verifier();
        verifier.known = Choice::from(0);
        let first = CLIENT_FIRST.as_bytes();
        let challenge = Challenge::new(PLAIN, first, verifier, None, SERVER_NONCE).unwrap();
        assert_eq!(
            challenge.finish(CLIENT_FINAL.as_bytes()),
            Err(Error::Denied)
        );
    }

    #[test]
    fn the_nonce_has_to_come_back() {
        let challenge = challenge(CLIENT_FIRST, None).unwrap();
        let other = CLIENT_FINAL.replace("%hv", "%hw");
        assert!(malformed(challenge.finish(other.as_bytes())));
        let cut = CLIENT_FINAL.replace("$k0", "$k");
        assert!(malformed(challenge.finish(cut.as_bytes())));
    }

    #[test]
    fn proofs_of_another_length_are_malformed() {
        let challenge = challenge(CLIENT_FIRST, None).unwrap();
        let unproven = CLIENT_FINAL.split(",p=").next().unwrap();
        for proof in ["", "AAAA", "no base64", &"A".repeat(88)] {
            let message = format!("{unproven},p={proof}");
            assert!(malformed(challenge.finish(message.as_bytes())));
        }
    }

    #[test]
    fn binding_flags() {
        let bound: Binding<'_> = Some(b"hash");
        let flag = |flag: &str, binding| challenge(&format!("{flag},,n=,r=abc"), binding);
        flag("n", None).unwrap();
        flag("n", bound).unwrap();
        flag("y", None).unwrap();
        flag("p=tls-server-end-point", bound).unwrap();
        let negotiation = Error::BindingNegotiation;
        // The client believes that there is no channel binding: somebody took it from the list.
        assert_eq!(flag("y", bound).unwrap_err(), negotiation);
        assert_eq!(flag("p=tls-unique", bound).unwrap_err(), negotiation);
        assert_eq!(flag("x", None).unwrap_err(), negotiation);
        assert_eq!(
            flag("p=tls-server-end-point", None).unwrap_err(),
            Error::UnknownMechanism
        );
    }

    #[test]
    fn mechanism_and_flag_agree() {
        let new = |mechanism, first: &str| {
            Challenge::new(mechanism, first.as_bytes(), verifier(), Some(b"h"), "s").unwrap_err()
        };
        let negotiation = Error::BindingNegotiation;
        assert_eq!(new(PLUS, "n,,n=,r=abc"), negotiation);
        assert_eq!(new(PLAIN, "p=tls-server-end-point,,n=,r=abc"), negotiation);
        assert_eq!(new("PLAIN", "n,,n=,r=abc"), Error::UnknownMechanism);
    }

    #[test]
    fn what_is_bound_has_to_be_the_certificate() {
        let challenge = challenge("p=tls-server-end-point,,n=,r=abc", Some(b"hash")).unwrap();
        let finish = |bound: &[u8]| {
            let binding = BASE64.encode(bound);
            let proof = BASE64.encode(&[0; 32]);
            let message = format!("c={binding},r=abc{SERVER_NONCE},p={proof}");
            challenge.finish(message.as_bytes()).unwrap_err()
        };
        assert_eq!(finish(b"p=tls-server-end-point,,hash"), Error::Denied);
        let mismatch = Error::BindingMismatch;
        assert_eq!(finish(b"p=tls-server-end-point,,other"), mismatch);
        assert_eq!(finish(b"n,,"), mismatch);
    }

    #[test]
    fn malformed_first_messages() {
        for message in [
            "",
            "n",
            "n,",
            "n,,",
            "n,a=other,n=,r=abc",
            "n,,m=x,n=,r=abc",
            "n,,x=,r=abc",
            "n,,n=",
            "n,,n=,r=",
            "n,,n=,r=a b",
        ] {
            assert!(malformed(challenge(message, None)), "{message}");
        }
        let result = Challenge::new(PLAIN, b"n,,n=\xff,r=abc", verifier(), None, "s");
        assert!(malformed(result));
    }

    #[test]
    fn initial_responses() {
        let read = |body: &'static [u8]| initial_response(body);
        assert_eq!(read(b"A\0\0\0\0\x02xy"), Some(("A", &b"xy"[..])));
        for broken in [
            &b""[..],
            b"A",
            b"A\0",
            b"A\0\0\0",
            b"A\0\xff\xff\xff\xff",
            b"A\0\0\0\0\x03xy",
            b"A\0\0\0\0\x01xy",
            b"\xff\0\0\0\0\0",
        ] {
            assert_eq!(initial_response(broken), None, "{broken:?}");
        }
    }

    #[test]
    fn nothing_secret_is_shown() {
        assert_eq!(format!("{:?}", verifier()), "Verifier { .. }");
    }
}
