//! Where an agent is.

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc};

use rustls::{
    ClientConfig,
    pki_types::{InvalidDnsNameError, ServerName},
};
use tokio::sync::watch;

/// Written `unix:/path` (or plain `/path`) and `http://host:port`; mutual TLS takes more than a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Unix(PathBuf),
    /// `host:port`.
    Tcp(String),
    Tls(Tls),
}

/// An agent that is reached by mutual TLS.
#[derive(Clone)]
pub struct Tls {
    /// `host:port`.
    address: String,
    /// In the agent's certificate.
    name: ServerName<'static>,
    /// What the client shows and trusts: each connection takes what is there then, and keeps it.
    config: watch::Receiver<Arc<ClientConfig>>,
}

impl Tls {
    /// `address` is `host:port`; `name` is what the agent's certificate must be for.
    pub fn new(
        address: impl Into<String>,
        name: &str,
        config: watch::Receiver<Arc<ClientConfig>>,
    ) -> Result<Self, InvalidDnsNameError> {
        Ok(Self {
            address: address.into(),
            name: ServerName::try_from(name.to_owned())?,
            config,
        })
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn name(&self) -> ServerName<'static> {
        self.name.clone()
    }

    pub(super) fn config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.config.borrow())
    }
}

impl fmt::Display for Tls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "https://{} as {}",
            self.address,
            self.name.to_str()
        )
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Tls({self})")
    }
}

/// The same agent, whatever is shown to it.
impl PartialEq for Tls {
    fn eq(&self, other: &Self) -> bool {
        (&self.address, &self.name) == (&other.address, &other.name)
    }
}

impl Eq for Tls {}

/// Port when an `http://` address has none.
const DEFAULT_PORT: u16 = 80;

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
            Self::Tcp(authority) => write!(formatter, "http://{authority}"),
            Self::Tls(tls) => fmt::Display::fmt(tls, formatter),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix:") {
            return unix(path.strip_prefix("//").unwrap_or(path));
        }
        if text.starts_with('/') {
            return unix(text);
        }
        if let Some(rest) = text.strip_prefix("http://") {
            return tcp(rest);
        }
        if text.starts_with("https://") {
            return Err(
                "by HTTPS an agent answers its operator alone, use http://HOST:PORT".to_owned(),
            );
        }
        Err("must be unix:/PATH or http://HOST:PORT".to_owned())
    }
}

fn unix(path: &str) -> Result<Target, String> {
    if path.starts_with('/') {
        Ok(Target::Unix(PathBuf::from(path)))
    } else {
        Err("the path of a Unix socket must start with '/'".to_owned())
    }
}

fn tcp(rest: &str) -> Result<Target, String> {
    let authority: hyper::http::uri::Authority = rest
        .strip_suffix('/')
        .unwrap_or(rest)
        .parse()
        .map_err(|_| "must be http://HOST:PORT and nothing after it".to_owned())?;
    if authority.as_str().contains('@') {
        return Err("must not hold a user name".to_owned());
    }
    let has_port = authority.as_str().len() > authority.host().len();
    let port = match authority.port_u16() {
        Some(port) => port,
        None if has_port => return Err("must have a port from 0 to 65535".to_owned()),
        None => DEFAULT_PORT,
    };
    Ok(Target::Tcp(format!("{}:{port}", authority.host())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_an_address_is_read() {
        for (text, shown) in [
            ("unix:/run/a.sock", "unix:/run/a.sock"),
            ("unix:///run/a.sock", "unix:/run/a.sock"),
            ("/run/a.sock", "unix:/run/a.sock"),
            ("http://localhost:8080", "http://localhost:8080"),
            ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
            ("http://[::1]:8080", "http://[::1]:8080"),
            ("http://node", "http://node:80"),
        ] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), shown, "{text}");
        }
    }

    #[test]
    fn other_addresses_are_refused_with_the_right_form() {
        for (text, says) in [
            ("", "unix:/PATH"),
            ("localhost:8080", "http://HOST:PORT"),
            ("unix:run/a.sock", "start with '/'"),
            ("https://node:1", "operator alone"),
            ("http://node:1/v1", "nothing after"),
            ("http://me@node:1", "user name"),
            ("http://node:x", "65535"),
            ("http://node:65536", "65535"),
        ] {
            let refusal = text.parse::<Target>().unwrap_err();
            assert!(refusal.contains(says), "{text}: {refusal}");
        }
    }
}
