//! The environment that a command finds its branch by.

use branchpool_agent_api::Lease;

/// What would lead libpq elsewhere, or to someone else's credentials, in spite of the variables
/// that are set: a service's settings even win over them.
pub(crate) const REMOVED: [&str; 8] = [
    "PGHOSTADDR",
    "PGSERVICE",
    "PGSERVICEFILE",
    "PGPASSWORD",
    "PGSSLMODE",
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
    if let Some(mode) = ssl_mode(lease) {
        variables.push(("PGSSLMODE", mode));
    }
    variables
}

/// As the URI says; there is no TLS on a Unix socket.
fn ssl_mode(lease: &Lease) -> Option<String> {
    let in_uri = lease
        .uri
        .split_once('?')
        .into_iter()
        .flat_map(|(_, query)| query.split('&'))
        .find_map(|parameter| parameter.strip_prefix("sslmode="));
    in_uri
        .or_else(|| lease.host.starts_with('/').then_some("disable"))
        .map(ToOwned::to_owned)
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
    fn tls_is_as_the_uri_says() {
        let mut lease = lease("l1");
        lease.uri = "postgresql://node/app?a=b&sslmode=verify-full".to_owned();
        assert_eq!(value(&lease, "PGSSLMODE").as_deref(), Some("verify-full"));
        lease.host = "node".to_owned();
        lease.uri = "postgresql://node/app".to_owned();
        assert_eq!(value(&lease, "PGSSLMODE"), None);
    }
}
