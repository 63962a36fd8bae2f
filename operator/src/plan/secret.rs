//! What a lease's Secret holds.
//!
//! The keys of the Service Binding specification serve a workload that mounts the Secret as files and
//! verifies the server; the `PG…` keys and `DATABASE_URL` serve one that takes it as environment. An
//! environment holds no files, so there `sslmode` is `require`: encrypted, the server unverified.

use std::collections::BTreeMap;

use branchpool_agent_api::Lease;

/// Type of the Secret; the admission policy admits no other.
pub const SECRET_TYPE: &str = "servicebinding.io/postgresql";
/// Label with the UID of the lease.
pub const LEASE_LABEL: &str = "branchpool.dev/lease-uid";
pub const MANAGED_BY_LABEL: &str = "app.kubernetes.io/managed-by";
pub const MANAGED_BY: &str = "branchpool";

/// The entries, from an agent's answer about a bound lease.
pub fn entries(lease: &Lease) -> BTreeMap<&'static str, String> {
    let password = lease.password.clone().unwrap_or_default();
    // Without a gateway the address is the directory of a Unix socket.
    let (environment_mode, file_mode, uri) = if lease.host.starts_with('/') {
        ("disable", "disable", lease.uri.clone())
    } else {
        let mode = if lease.ca.is_some() {
            "verify-full"
        } else {
            "require"
        };
        ("require", mode, uri(lease, &password))
    };
    let mut entries = BTreeMap::from([
        ("type", "postgresql".to_owned()),
        ("provider", "branchpool".to_owned()),
        ("host", lease.host.clone()),
        ("port", lease.port.to_string()),
        ("database", lease.database.clone()),
        ("username", lease.user.clone()),
        ("password", password.clone()),
        ("uri", uri.clone()),
        ("sslmode", file_mode.to_owned()),
        ("PGHOST", lease.host.clone()),
        ("PGPORT", lease.port.to_string()),
        ("PGDATABASE", lease.database.clone()),
        ("PGUSER", lease.user.clone()),
        ("PGPASSWORD", password),
        ("PGSSLMODE", environment_mode.to_owned()),
        ("DATABASE_URL", uri),
    ]);
    if let Some(ca) = &lease.ca {
        entries.insert("sslrootcert", "ca.crt".to_owned());
        entries.insert("ca.crt", ca.clone());
    }
    entries
}

/// Role, endpoint, database and password are of characters that a URI takes as they are.
fn uri(lease: &Lease, password: &str) -> String {
    let host = if lease.host.contains(':') {
        format!("[{}]", lease.host)
    } else {
        lease.host.clone()
    };
    let (user, port, database) = (&lease.user, lease.port, &lease.database);
    format!("postgresql://{user}:{password}@{host}:{port}/{database}?sslmode=require")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::leases::sample::bound;

    #[test]
    fn files_verify_and_environments_encrypt() {
        let lease = Lease {
            host: "10.0.0.7".into(),
            user: "app.k3v7q2m5xa4ne".into(),
            password: Some("secret".into()),
            ca: Some("PEM".into()),
            ..bound("uid", 0)
        };
        let entries = entries(&lease);
        let lines: Vec<String> = entries
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        insta::assert_snapshot!(lines.join("\n"), @r"
        DATABASE_URL=postgresql://app.k3v7q2m5xa4ne:secret@10.0.0.7:7432/app?sslmode=require
        PGDATABASE=app
        PGHOST=10.0.0.7
        PGPASSWORD=secret
        PGPORT=7432
        PGSSLMODE=require
        PGUSER=app.k3v7q2m5xa4ne
        ca.crt=PEM
        database=app
        host=10.0.0.7
        password=secret
        port=7432
        provider=branchpool
        sslmode=verify-full
        sslrootcert=ca.crt
        type=postgresql
        uri=postgresql://app.k3v7q2m5xa4ne:secret@10.0.0.7:7432/app?sslmode=require
        username=app.k3v7q2m5xa4ne
        ");
    }

    #[test]
    fn an_address_of_version_six_stands_in_brackets() {
        let lease = Lease {
            host: "fd00::7".into(),
            password: Some("secret".into()),
            ..bound("uid", 0)
        };
        assert!(entries(&lease)["uri"].contains("@[fd00::7]:7432/"));
    }
}
