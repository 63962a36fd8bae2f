//! The environment that a command finds its branch by.

use branchpool_agent_api::Lease;
use percent_encoding::percent_decode_str;

/// What would lead libpq elsewhere, or to someone else's credentials, in spite of the variables
/// that are set: a service's settings even win over them.
pub(crate) const REMOVED: [&str; 9] = [
    "PGHOSTADDR",
    "PGSERVICE",
    "PGSERVICEFILE",
    "PGPASSWORD",
    "PGSSLMODE",
    "PGSSLROOTCERT",
    "PGTARGETSESSIONATTRS",
    "PGREQUIREPEER",
    "PGREQUIREAUTH",
];

pub(crate) fn of(lease: &Lease) -> Vec<(&'static str, String)> {
    let mut variables = vec![
        ("DATABASE_URL", lease.uri.clone()),
        ("PGHOST", lease.host.clone()),
        ("PGPORT", lease.port.to_string()),
        ("PGDATABASE", lease.database.clone()),
        ("PGUSER", lease.user.clone()),
        ("BRANCHPOOL_LEASE", lease.uid.clone()),
    ];
    if let Some(password) = &lease.password {
        variables.push(("PGPASSWORD", password.clone()));
    }
    if let Some(mode) = ssl_mode(lease) {
        variables.push(("PGSSLMODE", mode));
    }
    if let Some(file) = in_uri(lease, "sslrootcert") {
        variables.push(("PGSSLROOTCERT", file));
    }
    variables
}

/// As the URI says; there is no TLS on a Unix socket.
fn ssl_mode(lease: &Lease) -> Option<String> {
    in_uri(lease, "sslmode").or_else(|| lease.host.starts_with('/').then(|| "disable".to_owned()))
}

fn in_uri(lease: &Lease, name: &str) -> Option<String> {
    let (_, query) = lease.uri.split_once('?')?;
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.into_iter().find(|(found, _)| *found == name)?;
    percent_decode_str(value).decode_utf8().ok().map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::tests::lease;

    fn value(lease: &Lease, name: &str) -> Option<String> {
        let found = of(lease).into_iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| value)
    }

    #[test]
    fn every_variable_comes_from_the_lease() {
        let lease = lease("l1");
        for (name, expected) in [
            ("DATABASE_URL", &*lease.uri),
            ("PGHOST", "/run/branchpool/e/abc"),
            ("PGPORT", "5432"),
            ("PGDATABASE", "app"),
            ("PGUSER", "app_owner"),
            ("BRANCHPOOL_LEASE", "l1"),
            ("PGSSLMODE", "disable"),
        ] {
            assert_eq!(value(&lease, name).as_deref(), Some(expected), "{name}");
        }
    }

    #[test]
    fn the_gateway_s_password_and_ca_are_passed_on() {
        let mut lease = lease("l1");
        assert_eq!(value(&lease, "PGPASSWORD"), None);
        lease.uri =
            "postgresql://app@node/app?sslmode=verify-full&sslrootcert=/a%20b/ca.crt".to_owned();
        let lease = lease.with_password("secret".to_owned());
        assert_eq!(value(&lease, "PGPASSWORD").as_deref(), Some("secret"));
        assert_eq!(
            value(&lease, "PGSSLROOTCERT").as_deref(),
            Some("/a b/ca.crt")
        );
        let url = value(&lease, "DATABASE_URL").unwrap();
        assert!(url.starts_with("postgresql://app:secret@node/app?"));
    }

    #[test]
    fn tls_is_as_the_uri_says() {
        let mut lease = lease("l1");
        lease.uri = "postgresql://node/app?a=b&sslmode=verify-full".to_owned();
        assert_eq!(value(&lease, "PGSSLMODE").as_deref(), Some("verify-full"));
        lease.host = "node".to_owned();
        lease.uri = "postgresql://node/app".to_owned();
        assert_eq!(value(&lease, "PGSSLMODE"), None);
    }
}
