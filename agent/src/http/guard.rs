//! Who may ask: the owner of the Unix socket, whoever has the token, or, on a loopback address
//! without a token, programs of this machine but not web pages open on it.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    net::IpAddr,
    path::{Path, PathBuf},
};

use axum::http::{
    HeaderMap, Request, Uri,
    header::{AUTHORIZATION, HOST, ORIGIN},
    uri::Authority,
};
use branchpool_agent_api::Problem;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use snafu::{ResultExt, Snafu, ensure};

use super::sql::NEON_PATH;

const MAX_TOKEN_BYTES: usize = 4096;

#[derive(Debug, Snafu)]
pub enum TokenError {
    #[snafu(display(
        "the token file {} cannot be read ({source}); it must hold the bearer token",
        path.display()
    ))]
    Read { path: PathBuf, source: io::Error },

    #[snafu(display(
        "the token file {} must hold one token of 16 to {MAX_TOKEN_BYTES} printable ASCII characters without spaces; make one with `openssl rand -hex 32`",
        path.display()
    ))]
    Form { path: PathBuf },
}

#[derive(Clone, Debug)]
pub(super) enum Guard {
    /// The file's mode has decided already, or the client's certificate.
    Open,
    /// Whoever comes gets what the kubelet and a collector of metrics ask.
    Health,
    LoopbackHost,
    Token(Token),
}

impl Guard {
    pub(super) fn check<B>(&self, request: &Request<B>) -> Result<(), Problem> {
        match self {
            Self::Open => Ok(()),
            Self::Health => match request.uri().path() {
                "/healthz" | "/readyz" | "/metrics" => Ok(()),
                _ => Err(Problem::new(
                    404,
                    "NoSuchPath",
                    "this address serves /healthz, /readyz and /metrics alone",
                )),
            },
            Self::LoopbackHost => check_local(request.uri(), request.headers()),
            // The kubelet asks these without credentials, and they tell nothing.
            Self::Token(_) if matches!(request.uri().path(), "/healthz" | "/readyz") => Ok(()),
            // What it sends is checked against the leases' own passwords.
            Self::Token(_) if request.uri().path() == NEON_PATH => Ok(()),
            Self::Token(token) => token.check(request.headers()),
        }
    }
}

/// A name that resolves to this machine lets a web page's scripts come here as if to its own
/// origin; the Host header still holds that name. A plain cross-site form post holds an Origin.
fn check_local(uri: &Uri, headers: &HeaderMap) -> Result<(), Problem> {
    let mut hosts = headers.get_all(HOST).iter();
    let host = hosts.next().and_then(|host| host.to_str().ok());
    let (Some(host), None) = (host, hosts.next()) else {
        return Err(Problem::new(
            400,
            "BadHost",
            "the request must have one Host header",
        ));
    };
    let in_uri = uri.authority().map(Authority::as_str);
    if !is_loopback(host) || in_uri.is_some_and(|host| !is_loopback(host)) {
        return Err(Problem::new(
            403,
            "HostRefused",
            "without a token only loopback names are answered; use http://localhost or http://127.0.0.1, or start the agent with a token file",
        ));
    }
    let origin = headers.get(ORIGIN).map(HeaderMapValue::as_bytes);
    let own = format!("http://{host}");
    if origin.is_some_and(|origin| origin != own.as_bytes()) {
        return Err(Problem::new(
            403,
            "OriginRefused",
            "requests from pages of other origins are not answered",
        ));
    }
    Ok(())
}

type HeaderMapValue = axum::http::HeaderValue;

/// `host` or `host:port` is this machine whatever a resolver says.
fn is_loopback(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    if authority.as_str().contains('@') {
        return false;
    }
    let name = authority.host();
    let has_port = authority.as_str().len() > name.len();
    if has_port && authority.port_u16().is_none() {
        return false;
    }
    let address = name
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(name);
    name.eq_ignore_ascii_case("localhost")
        || address
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// A bearer token, kept as a tag under a key of this process and compared in constant time.
#[derive(Clone)]
pub(super) struct Token {
    key: [u8; 32],
    tag: Vec<u8>,
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Token(…)")
    }
}

impl Token {
    /// Reads the file; white space around the token is not part of it.
    pub(super) fn read(path: &Path) -> Result<Self, TokenError> {
        let mut text = String::new();
        File::open(path)
            .and_then(|file| {
                file.take(MAX_TOKEN_BYTES as u64 + 2)
                    .read_to_string(&mut text)
            })
            .context(ReadSnafu { path })?;
        let token = text.trim();
        let length_fits = (16..=MAX_TOKEN_BYTES).contains(&token.len());
        let printable = token.bytes().all(|byte| byte.is_ascii_graphic());
        ensure!(length_fits && printable, FormSnafu { path });
        Ok(Self::new(token))
    }

    fn new(token: &str) -> Self {
        let key: [u8; 32] = rand::random();
        let tag = mac(&key, token.as_bytes()).finalize().into_bytes().to_vec();
        Self { key, tag }
    }

    fn check(&self, headers: &HeaderMap) -> Result<(), Problem> {
        let presented = headers.get(AUTHORIZATION).map(HeaderMapValue::as_bytes);
        let token = presented.and_then(|value| {
            let (scheme, token) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
        });
        let right =
            token.is_some_and(|token| mac(&self.key, token).verify_slice(&self.tag).is_ok());
        if right {
            return Ok(());
        }
        Err(Problem::new(
            401,
            "Unauthorized",
            match presented {
                None => {
                    "this address wants the header Authorization: Bearer TOKEN, with the token of the agent's token file"
                }
                Some(_) => "the bearer token is not the agent's; see its token file",
            },
        ))
    }
}

fn mac(key: &[u8; 32], data: &[u8]) -> Hmac<Sha256> {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(key).expect("HMAC should take a key of any length");
    mac.update(data);
    mac
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_loopback() {
        for host in [
            "localhost",
            "LOCALHOST:1",
            "127.0.0.1:8080",
            "127.9.9.9",
            "[::1]:80",
            "[::1]",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            "example.com",
            "localhost.example.com",
            "127.0.0.1.example.com",
            "evil@localhost",
            "10.0.0.1",
            "0.0.0.0",
            "[::]",
            "localhost:x",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn only_the_right_token_passes() {
        let token = Token::new("correct-horse-battery");
        let check = |value: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(value) = value {
                headers.insert(AUTHORIZATION, value.parse().unwrap());
            }
            token.check(&headers).map_err(|problem| problem.status)
        };
        assert_eq!(check(Some("Bearer correct-horse-battery")), Ok(()));
        assert_eq!(check(Some("bearer correct-horse-battery")), Ok(()));
        for wrong in [
            None,
            Some(""),
            Some("Bearer "),
            Some("Bearer correct-horse-batter"),
            Some("Bearer correct-horse-battery2"),
            Some("Basic correct-horse-battery"),
        ] {
            assert_eq!(check(wrong), Err(401), "{wrong:?}");
        }
        assert!(!format!("{token:?}").contains("horse"));
    }

    #[test]
    fn token_files_must_hold_a_token() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        assert!(matches!(Token::read(&path), Err(TokenError::Read { .. })));
        for bad in [
            "",
            "\n",
            "short",
            "sixteen letters and spaces",
            &"x".repeat(4097),
        ] {
            std::fs::write(&path, bad).unwrap();
            assert!(
                matches!(Token::read(&path), Err(TokenError::Form { .. })),
                "{bad:?}"
            );
        }
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        assert!(Token::read(&path).is_ok());
    }
}
