//! What a server is called: DNS names and addresses.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use rcgen::SanType;
use snafu::{OptionExt, Snafu};
use x509_parser::{certificate::X509Certificate, extensions::GeneralName};

const LONGEST_NAME: usize = 253;
const LONGEST_LABEL: usize = 63;

#[derive(Debug, Snafu)]
#[snafu(display(
    "{name:?} is neither an IP address nor a DNS name, so no certificate can be made for it"
))]
pub struct InvalidName {
    pub name: String,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Name {
    Dns(String),
    Address(IpAddr),
}

/// The names that a certificate is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names(BTreeSet<Name>);

impl Names {
    /// `localhost`, its addresses, the host's name where that is a DNS name, and `more`: DNS names, which
    /// may start with `*.`, and IP addresses.
    pub fn of_host<'a>(
        host: &str,
        more: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, InvalidName> {
        let mut names = BTreeSet::from([
            Name::Dns("localhost".to_owned()),
            Name::Address(Ipv4Addr::LOCALHOST.into()),
            Name::Address(Ipv6Addr::LOCALHOST.into()),
        ]);
        // Nobody asked for the host's name, so one such as "(none)" is no error.
        names.extend(parse(host));
        for name in more {
            names.insert(parse(name).context(InvalidNameSnafu { name })?);
        }
        Ok(Self(names))
    }

    /// Of a certificate; `None` when it is for anything else than names and addresses.
    pub(crate) fn of_certificate(certificate: &X509Certificate<'_>) -> Option<Self> {
        let extension = certificate.subject_alternative_name().ok()??;
        let names = extension.value.general_names.iter().map(|name| match name {
            GeneralName::DNSName(name) => Some(Name::Dns((*name).to_owned())),
            GeneralName::IPAddress(bytes) => address(bytes).map(Name::Address),
            _ => None,
        });
        names.collect::<Option<_>>().map(Self)
    }

    pub(crate) fn subject_alt_names(&self) -> Result<Vec<SanType>, rcgen::Error> {
        let names = self.0.iter().map(|name| match name {
            Name::Dns(name) => Ok(SanType::DnsName(name.as_str().try_into()?)),
            Name::Address(address) => Ok(SanType::IpAddress(*address)),
        });
        names.collect()
    }
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from))
        .ok()
}

fn parse(text: &str) -> Option<Name> {
    if let Ok(address) = text.parse() {
        return Some(Name::Address(address));
    }
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    let labels = name.strip_prefix("*.").unwrap_or(&name);
    let fits = name.len() <= LONGEST_NAME && labels.split('.').all(is_label);
    fits.then_some(Name::Dns(name))
}

/// Underscores are in no host name by the rules, and in many in use.
fn is_label(label: &str) -> bool {
    (1..=LONGEST_LABEL).contains(&label.len())
        && !label.starts_with('-')
        && !label.ends_with('-')
        && label
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_compared_in_one_spelling() {
        let one = Names::of_host("Node-1.", ["10.0.0.7", "*.Example.COM", "fe80::0:1"]).unwrap();
        let other =
            Names::of_host("node-1", ["fe80::1", "10.0.0.7", "*.example.com", "::1"]).unwrap();
        assert_eq!(one, other);
        assert_ne!(one, Names::of_host("node-2", ["10.0.0.7"]).unwrap());
    }

    #[test]
    fn what_is_no_name_is_refused() {
        let long = ["a"; 200].join(".");
        for name in [
            "", ".", "a..b", "-a", "a b", "*", "a.*.b", "http://a", "a:5432", &long,
        ] {
            assert!(Names::of_host("host", [name]).is_err(), "{name}");
        }
        assert_eq!(
            Names::of_host("(none)", []).unwrap(),
            Names::of_host("localhost", []).unwrap()
        );
    }
}
