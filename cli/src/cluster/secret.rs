//! The connection Secret, as variables for a command.

use std::{fmt::Write as _, io::Write as _};

use k8s_openapi::api::core::v1::Secret;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use snafu::{OptionExt, ResultExt};
use tempfile::NamedTempFile;

use super::error::{CaFileSnafu, ClusterError, SecretEntrySnafu};

/// What may stand in a URI as it is.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

#[derive(Debug)]
pub(super) struct Connection {
    host: String,
    port: String,
    database: String,
    user: String,
    password: String,
    ssl_mode: Option<String>,
    /// Gone with this value: libpq takes a CA from a file only.
    ca: Option<NamedTempFile>,
}

impl Connection {
    pub(super) fn read(secret: &Secret) -> Result<Self, ClusterError> {
        let entry = |key: &'static str| {
            text(secret, key).context(SecretEntrySnafu {
                name: secret.metadata.name.clone().unwrap_or_default(),
                key,
            })
        };
        Ok(Self {
            host: entry("host")?,
            port: entry("port")?,
            database: entry("database")?,
            user: entry("username")?,
            password: entry("password")?,
            ssl_mode: text(secret, "sslmode"),
            ca: text(secret, "ca.crt").map(|ca| write(&ca)).transpose()?,
        })
    }

    /// With everything that a driver needs while this value is there.
    pub(super) fn uri(&self) -> String {
        let encoded = |text: &str| utf8_percent_encode(text, ENCODED).to_string();
        // Brackets are how an IPv6 address stands in a URI.
        let host = if self.host.contains(':') {
            format!("[{}]", self.host)
        } else {
            encoded(&self.host)
        };
        let mut uri = format!(
            "postgresql://{}:{}@{host}:{}/{}",
            encoded(&self.user),
            encoded(&self.password),
            self.port,
            encoded(&self.database)
        );
        let ca = self
            .ca
            .as_ref()
            .map(|file| file.path().to_string_lossy().into_owned());
        let parameters = [("sslmode", self.ssl_mode.clone()), ("sslrootcert", ca)];
        let mut separator = '?';
        for (name, value) in parameters {
            if let Some(value) = value {
                uri.push(separator);
                let _ = write!(uri, "{name}={}", encoded(&value));
                separator = '&';
            }
        }
        uri
    }

    pub(super) fn variables(&self, lease: &str) -> Vec<(&'static str, String)> {
        let mut variables = vec![
            ("DATABASE_URL", self.uri()),
            ("PGHOST", self.host.clone()),
            ("PGPORT", self.port.clone()),
            ("PGDATABASE", self.database.clone()),
            ("PGUSER", self.user.clone()),
            ("PGPASSWORD", self.password.clone()),
            ("BRANCHPOOL_LEASE", lease.to_owned()),
        ];
        if let Some(mode) = &self.ssl_mode {
            variables.push(("PGSSLMODE", mode.clone()));
        }
        if let Some(file) = &self.ca {
            variables.push(("PGSSLROOTCERT", file.path().to_string_lossy().into_owned()));
        }
        variables
    }
}

/// The URI in the Secret, which leads there without a file.
pub(super) fn stored_uri(secret: &Secret) -> Result<String, ClusterError> {
    text(secret, "uri").context(SecretEntrySnafu {
        name: secret.metadata.name.clone().unwrap_or_default(),
        key: "uri",
    })
}

fn text(secret: &Secret, key: &str) -> Option<String> {
    let bytes = &secret.data.as_ref()?.get(key)?.0;
    String::from_utf8(bytes.clone()).ok()
}

/// Readable by this user only, as all temporary files here.
fn write(ca: &str) -> Result<NamedTempFile, ClusterError> {
    let made = || -> std::io::Result<NamedTempFile> {
        let mut file = tempfile::Builder::new()
            .prefix("branchpool-ca-")
            .suffix(".crt")
            .tempfile()?;
        file.write_all(ca.as_bytes())?;
        Ok(file)
    };
    made().context(CaFileSnafu)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs};

    use k8s_openapi::ByteString;

    use super::*;

    fn secret(entries: &[(&str, &str)]) -> Secret {
        let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
        let data: BTreeMap<_, _> = entries
            .iter()
            .map(|(key, value)| ((*key).to_owned(), bytes(value)))
            .collect();
        Secret {
            data: Some(data),
            ..Secret::default()
        }
    }

    const PLAIN: [(&str, &str); 5] = [
        ("host", "10.0.0.7"),
        ("port", "7432"),
        ("database", "app"),
        ("username", "app_owner.abc"),
        ("password", "a/b"),
    ];

    #[test]
    fn the_ca_is_in_a_file_for_as_long_as_it_is_needed() {
        let with_ca = [
            &PLAIN[..],
            &[
                ("sslmode", "verify-full"),
                ("sslrootcert", "ca.crt"),
                ("ca.crt", "PEM"),
            ],
        ]
        .concat();
        let connection = Connection::read(&secret(&with_ca)).unwrap();
        let variables: BTreeMap<_, _> = connection.variables("ci-7").into_iter().collect();
        let file = variables["PGSSLROOTCERT"].clone();
        assert_eq!(fs::read_to_string(&file).unwrap(), "PEM");
        assert_eq!(variables["PGSSLMODE"], "verify-full");
        assert_eq!(variables["BRANCHPOOL_LEASE"], "ci-7");
        let uri = format!(
            "postgresql://app_owner.abc:a%2Fb@10.0.0.7:7432/app?sslmode=verify-full&sslrootcert={}",
            file.replace('/', "%2F")
        );
        assert_eq!(variables["DATABASE_URL"], uri);
        drop(connection);
        assert!(fs::metadata(file).is_err());
    }

    #[test]
    fn without_tls_nothing_is_said_of_it() {
        let mut entries = PLAIN;
        entries[0].1 = "fd00::7";
        let connection = Connection::read(&secret(&entries)).unwrap();
        assert_eq!(
            connection.uri(),
            "postgresql://app_owner.abc:a%2Fb@[fd00::7]:7432/app"
        );
        assert!(
            !connection
                .variables("a")
                .iter()
                .any(|(name, _)| name.starts_with("PGSSL"))
        );
    }

    #[test]
    fn a_secret_of_somebody_else_is_refused() {
        let error = Connection::read(&secret(&PLAIN[..4])).unwrap_err();
        assert!(
            error.to_string().contains("no usable entry password"),
            "{error}"
        );
        assert!(stored_uri(&secret(&PLAIN)).is_err());
    }
}
