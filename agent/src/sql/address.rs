//! The connection string that Neon's driver sends as its credentials.

use std::{borrow::Cow, fmt};

/// Settings that a client may give its session; others in the string concern the way to the server.
const SESSION_PARAMETERS: [&str; 2] = ["application_name", "options"];

/// What a connection string says.
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    /// `<role>.<endpoint>`.
    pub user: String,
    pub password: String,
    pub database: String,
    /// Startup parameters of the session.
    pub parameters: Vec<(String, String)>,
}

impl fmt::Debug for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Address")
            .field("user", &self.user)
            .field("database", &self.database)
            .finish_non_exhaustive()
    }
}

/// Reads `postgresql://user:password@host/database?parameters`; `Err` says what is missing, and nothing
/// of the string.
pub fn parse(text: &str) -> Result<Address, &'static str> {
    let rest = text
        .strip_prefix("postgresql://")
        .or_else(|| text.strip_prefix("postgres://"))
        .ok_or("it must start with postgresql://")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
    let (login, _host) = authority.rsplit_once('@').ok_or("it names no user")?;
    let (user, password) = login.split_once(':').ok_or("it holds no password")?;
    let address = Address {
        user: decoded(user)?,
        password: decoded(password)?,
        database: decoded(database)?,
        parameters: parameters(query)?,
    };
    if address.user.is_empty() || address.password.is_empty() {
        return Err("it needs a user and a password");
    }
    if address.database.is_empty() {
        return Err("it names no database");
    }
    Ok(address)
}

fn parameters(query: &str) -> Result<Vec<(String, String)>, &'static str> {
    let mut parameters = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let name = decoded(name)?;
        if SESSION_PARAMETERS.contains(&name.as_str()) {
            // Queries of URLs write a space as a plus sign.
            parameters.push((name, decoded(&value.replace('+', " "))?));
        }
    }
    Ok(parameters)
}

fn decoded(text: &str) -> Result<String, &'static str> {
    let decoded = percent_encoding::percent_decode_str(text)
        .decode_utf8()
        .map(Cow::into_owned)
        .map_err(|_| "its percent-encoding is not of UTF-8")?;
    if decoded.contains('\0') {
        return Err("it holds a zero byte");
    }
    Ok(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_decoded() {
        let address = parse(
            "postgresql://app.t6w2:p%40ss:w%2Ford@db.example.com:5432/my%20db?sslmode=require&application_name=pkg%3Anpm%2F%40neon&options=-c+a%3D1",
        )
        .unwrap();
        assert_eq!(address.user, "app.t6w2");
        assert_eq!(address.password, "p@ss:w/ord");
        assert_eq!(address.database, "my db");
        let parameters = [("application_name", "pkg:npm/@neon"), ("options", "-c a=1")];
        assert_eq!(
            address.parameters,
            parameters.map(|(name, value)| (name.to_owned(), value.to_owned()))
        );
        assert!(!format!("{address:?}").contains("p@ss"));
    }

    #[test]
    fn what_is_missing_is_named() {
        for (text, missing) in [
            ("http://a:b@c/d", "start with"),
            ("postgres://host/db", "no user"),
            ("postgres://user@host/db", "no password"),
            ("postgres://user:@host/db", "password"),
            ("postgres://user:p@host", "no database"),
            ("postgres://user:p@host/?x=1", "no database"),
            ("postgres://user:%ff@host/db", "UTF-8"),
            ("postgres://user:%00@host/db", "zero byte"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(missing), "{text}: {error}");
        }
    }
}
