//! Whether a client may take the preconnected session over, and what of a client is worth
//! preconnecting with. Pure.
//!
//! A session may only be handed over when the client cannot tell it from one of its own. `SET`
//! cannot make two sessions equal, since `RESET ALL` and `DISCARD ALL`, which connection pools
//! send, bring back what the session was *opened* with. So each start-up parameter has to be
//! equal to what the session has as its reset value; `application_name` alone may be set.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::startup::Startup;

/// Parameters that need a session of their own, whatever their value.
const NEVER: [&str; 4] = [
    "local_preload_libraries",
    "role",
    "session_authorization",
    "session_preload_libraries",
];
/// Settings that a client may choose and of which the server reports the value in force. In a
/// session that nobody has used yet this is the reset value.
const REPORTED: [&str; 8] = [
    "application_name",
    "client_encoding",
    "DateStyle",
    "default_transaction_read_only",
    "IntervalStyle",
    "search_path",
    "standard_conforming_strings",
    "TimeZone",
];
const APPLICATION_NAME: &str = "application_name";
/// Postgres cuts a name here (`NAMEDATALEN`).
const NAME_LENGTH: usize = 63;

/// What the preconnected session is.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// Nobody, HTTP SQL included, has used the branch yet.
    pub first_session: bool,
    /// The pool's role and database.
    pub role: &'a str,
    pub database: &'a str,
    /// Start-up parameters that it was opened with, besides user and database.
    pub profile: &'a [(String, String)],
    /// `ParameterStatus` by name.
    pub parameters: &'a BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    TakeOver {
        /// To be set, since it is another than the session's.
        application_name: Option<String>,
    },
    Fresh(Reason),
}

/// Why a client needs a backend of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    NotFirst,
    /// A protocol option that is not known here.
    Protocol,
    Replication,
    Role,
    Database,
    /// `options` holds more than settings.
    Options,
    /// A parameter is given twice.
    Repeated(String),
    /// A parameter that needs a session of its own.
    Never(String),
    /// A parameter of the client is not that of the session.
    Differs(String),
    /// A parameter of the session is not the client's.
    Missing(String),
}

/// The rule. `role` is the role part of the user name, `startup.user` the whole of it.
pub fn decide(startup: &Startup, role: &str, offer: &Offer<'_>) -> Verdict {
    match check(startup, role, offer) {
        Ok(application_name) => Verdict::TakeOver { application_name },
        Err(reason) => Verdict::Fresh(reason),
    }
}

fn check(startup: &Startup, role: &str, offer: &Offer<'_>) -> Result<Option<String>, Reason> {
    let must = |holds: bool, reason| if holds { Ok(()) } else { Err(reason) };
    must(offer.first_session, Reason::NotFirst)?;
    must(startup.protocol_options.is_empty(), Reason::Protocol)?;
    must(!startup.replication, Reason::Replication)?;
    must(role == offer.role, Reason::Role)?;
    must(is_pools(startup, offer.database), Reason::Database)?;
    let wanted = settings(&startup.parameters)?;
    let profile = settings(offer.profile)?;
    for name in profile.keys() {
        must(wanted.contains_key(name), Reason::Missing(name.clone()))?;
    }
    let mut application_name = None;
    for (name, value) in &wanted {
        if profile.get(name) == Some(value) || is_reset_value(name, value, offer.parameters) {
            continue;
        }
        let settable = if name == APPLICATION_NAME {
            settable_name(value)
        } else {
            None
        };
        let differs = || Reason::Differs(name.clone());
        application_name = Some(settable.ok_or_else(differs)?);
    }
    Ok(application_name)
}

/// Whether the client asks for the pool's database. libpq sends the whole user name when it was
/// told no database, Postgres takes the user's when there is none.
pub fn is_pools(startup: &Startup, database: &str) -> bool {
    startup
        .database
        .as_ref()
        .is_none_or(|wanted| *wanted == database || *wanted == startup.user)
}

/// What a client's successor should be preconnected with, if a session can be opened with it
/// that this client could have taken over.
pub fn profile_of(startup: &Startup) -> Option<Vec<(String, String)>> {
    if startup.replication || !startup.protocol_options.is_empty() {
        return None;
    }
    settings(&startup.parameters).ok()?;
    startup
        .parameters
        .iter()
        .map(|(name, value)| Some((name.clone(), str::from_utf8(value).ok()?.to_owned())))
        .collect()
}

/// All settings by name in lower case, with `options` unpacked.
fn settings<V: AsRef<[u8]>>(parameters: &[(String, V)]) -> Result<BTreeMap<String, Bytes>, Reason> {
    let mut made = BTreeMap::new();
    for (name, value) in parameters {
        if name == "options" {
            for (name, value) in unpack(value.as_ref()).ok_or(Reason::Options)? {
                add(&mut made, &name, value)?;
            }
        } else {
            add(&mut made, name, Bytes::copy_from_slice(value.as_ref()))?;
        }
    }
    Ok(made)
}

fn add(made: &mut BTreeMap<String, Bytes>, name: &str, value: Bytes) -> Result<(), Reason> {
    let name = name.to_ascii_lowercase();
    if NEVER.contains(&name.as_str()) {
        return Err(Reason::Never(name));
    }
    if made.contains_key(&name) {
        return Err(Reason::Repeated(name));
    }
    made.insert(name, value);
    Ok(())
}

/// The settings in an `options` parameter, read as Postgres does; `None` if it holds anything else.
fn unpack(options: &[u8]) -> Option<Vec<(String, Bytes)>> {
    let mut words = words(options).into_iter();
    let mut made = Vec::new();
    while let Some(word) = words.next() {
        let assignment = match word.as_slice() {
            b"-c" => words.next()?,
            [b'-', b'c' | b'-', assignment @ ..] => assignment.to_vec(),
            _ => return None,
        };
        let equals = assignment.iter().position(|byte| *byte == b'=')?;
        let name = str::from_utf8(&assignment[..equals]).ok()?;
        let value = Bytes::copy_from_slice(&assignment[equals + 1..]);
        made.push((name.replace('-', "_"), value));
    }
    Some(made)
}

/// Splits at white space; a backslash takes the next byte as it is.
fn words(options: &[u8]) -> Vec<Vec<u8>> {
    let mut words = Vec::new();
    let mut word: Option<Vec<u8>> = None;
    let mut bytes = options.iter();
    while let Some(&byte) = bytes.next() {
        // C's isspace, which has the vertical tab besides.
        if byte.is_ascii_whitespace() || byte == 0x0b {
            words.extend(word.take());
            continue;
        }
        let word = word.get_or_insert_default();
        if byte == b'\\' {
            word.extend(bytes.next());
        } else {
            word.push(byte);
        }
    }
    words.extend(word);
    words
}

fn is_reset_value(name: &str, value: &[u8], parameters: &BTreeMap<String, String>) -> bool {
    REPORTED
        .iter()
        .find(|reported| reported.eq_ignore_ascii_case(name))
        .and_then(|reported| parameters.get(*reported))
        .is_some_and(|reported| reported.as_bytes() == value)
}

/// Postgres alters other names on their way in, by rules that depend on its version.
fn settable_name(value: &[u8]) -> Option<String> {
    let plain = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
    (value.len() <= NAME_LENGTH && value.iter().all(plain))
        .then(|| String::from_utf8_lossy(value).into_owned())
}

/// A statement that sets the name whatever `standard_conforming_strings` is.
pub fn set_application_name(name: &str) -> String {
    let quoted = name.replace('\\', r"\\").replace('\'', r"\'");
    format!("SET application_name = E'{quoted}'")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::startup::NEWEST_MINOR;

    const USER: &str = "app.abcdefghijklm";

    fn startup(parameters: &[(&str, &str)]) -> Startup {
        Startup {
            minor: 0,
            user: USER.to_owned(),
            database: Some(Bytes::from_static(b"shop")),
            replication: false,
            protocol_options: Vec::new(),
            parameters: parameters
                .iter()
                .map(|(name, value)| ((*name).to_owned(), value.to_string().into()))
                .collect(),
        }
    }

    fn owned(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn reported() -> BTreeMap<String, String> {
        owned(&[
            ("application_name", ""),
            ("client_encoding", "UTF8"),
            ("DateStyle", "ISO, MDY"),
            ("TimeZone", "Etc/UTC"),
            ("is_superuser", "off"),
        ])
        .into_iter()
        .collect()
    }

    fn decide_with(startup: &Startup, profile: &[(&str, &str)]) -> Verdict {
        let offer = Offer {
            first_session: true,
            role: "app",
            database: "shop",
            profile: &owned(profile),
            parameters: &reported(),
        };
        decide(startup, "app", &offer)
    }

    fn taken() -> Verdict {
        Verdict::TakeOver {
            application_name: None,
        }
    }

    fn named(name: &str) -> Verdict {
        Verdict::TakeOver {
            application_name: Some(name.to_owned()),
        }
    }

    fn differs(name: &str) -> Verdict {
        Verdict::Fresh(Reason::Differs(name.to_owned()))
    }

    #[test]
    fn the_first_session_only() {
        let offer = Offer {
            first_session: false,
            role: "app",
            database: "shop",
            profile: &[],
            parameters: &reported(),
        };
        let verdict = decide(&startup(&[]), "app", &offer);
        assert_eq!(verdict, Verdict::Fresh(Reason::NotFirst));
    }

    #[test]
    fn protocol_versions() {
        for minor in [0, NEWEST_MINOR, 9999] {
            let client = Startup {
                minor,
                ..startup(&[])
            };
            assert_eq!(decide_with(&client, &[]), taken());
        }
        let client = Startup {
            protocol_options: vec!["_pq_.command_tag_format".to_owned()],
            ..startup(&[])
        };
        let fresh = Verdict::Fresh(Reason::Protocol);
        assert_eq!(decide_with(&client, &[]), fresh);
    }

    #[test]
    fn replication_is_never_taken_over() {
        let client = Startup {
            replication: true,
            ..startup(&[("replication", "false")])
        };
        let fresh = Verdict::Fresh(Reason::Replication);
        assert_eq!(decide_with(&client, &[]), fresh);
        assert_eq!(profile_of(&client), None);
    }

    #[test]
    fn the_pools_role_only() {
        let offer = Offer {
            first_session: true,
            role: "app",
            database: "shop",
            profile: &[],
            parameters: &reported(),
        };
        let verdict = decide(&startup(&[]), "postgres", &offer);
        assert_eq!(verdict, Verdict::Fresh(Reason::Role));
    }

    #[test]
    fn the_pools_database_by_each_of_its_names() {
        let with = |database: Option<&'static str>| {
            let database = database.map(|name| Bytes::from_static(name.as_bytes()));
            let client = Startup {
                database,
                ..startup(&[])
            };
            decide_with(&client, &[])
        };
        assert_eq!(with(None), taken());
        assert_eq!(with(Some("shop")), taken());
        assert_eq!(with(Some(USER)), taken());
        let fresh = Verdict::Fresh(Reason::Database);
        assert_eq!(with(Some("app")), fresh);
        assert_eq!(with(Some("postgres")), fresh);
    }

    #[test]
    fn each_parameter_equals_the_profile_byte_for_byte() {
        let profile = &[("TimeZone", "Europe/Berlin"), ("extra_float_digits", "2")];
        assert_eq!(decide_with(&startup(profile), profile), taken());
        // Names are not case-sensitive, values are.
        let client = startup(&[("timezone", "Europe/Berlin"), ("extra_float_digits", "2")]);
        assert_eq!(decide_with(&client, profile), taken());
        let client = startup(&[("TimeZone", "europe/berlin"), ("extra_float_digits", "2")]);
        assert_eq!(decide_with(&client, profile), differs("timezone"));
        let client = startup(&[("extra_float_digits", "2")]);
        let missing = Verdict::Fresh(Reason::Missing("timezone".to_owned()));
        assert_eq!(decide_with(&client, profile), missing);
        let client = startup(&[("search_path", "a")]);
        assert_eq!(decide_with(&client, &[]), differs("search_path"));
    }

    #[test]
    fn options_are_unpacked() {
        let profile = &[("options", "-c work_mem=1MB --search-path=a")];
        for options in [
            "-c work_mem=1MB --search-path=a",
            "  -cwork_mem=1MB\t-c search_path=a ",
            r"-c work\_mem=1MB -c search_path=a",
        ] {
            let client = startup(&[("options", options)]);
            assert_eq!(decide_with(&client, profile), taken(), "{options}");
        }
        let client = startup(&[("work_mem", "1MB"), ("search_path", "a")]);
        assert_eq!(decide_with(&client, profile), taken());
        let client = startup(&[("options", r"-c work_mem=1MB -c search_path=a\ b")]);
        assert_eq!(decide_with(&client, profile), differs("search_path"));
        assert_eq!(decide_with(&startup(&[("options", "")]), &[]), taken());
    }

    #[test]
    fn options_with_anything_else_are_not_understood() {
        for options in [
            "-e",
            "-d 5",
            "-c",
            "-c work_mem",
            "work_mem=1MB",
            "-S 64",
            "-",
        ] {
            let client = startup(&[("options", options)]);
            let fresh = Verdict::Fresh(Reason::Options);
            assert_eq!(decide_with(&client, &[]), fresh, "{options}");
            assert_eq!(profile_of(&client), None);
        }
    }

    #[test]
    fn a_parameter_given_twice_is_not_decided_upon() {
        let client = startup(&[("work_mem", "1MB"), ("options", "-c WORK_MEM=1MB")]);
        let fresh = Verdict::Fresh(Reason::Repeated("work_mem".to_owned()));
        assert_eq!(decide_with(&client, &[("work_mem", "1MB")]), fresh);
    }

    #[test]
    fn some_parameters_need_a_session_of_their_own() {
        for name in NEVER {
            let parameters = [(name, "x")];
            let client = startup(&parameters);
            let fresh = Verdict::Fresh(Reason::Never(name.to_owned()));
            assert_eq!(decide_with(&client, &parameters), fresh);
            assert_eq!(profile_of(&client), None);
        }
    }

    #[test]
    fn the_reset_value_needs_nothing() {
        let client = startup(&[("client_encoding", "UTF8"), ("timezone", "Etc/UTC")]);
        assert_eq!(decide_with(&client, &[]), taken());
        // The server's canonical spelling counts.
        let client = startup(&[("DateStyle", "ISO")]);
        assert_eq!(decide_with(&client, &[]), differs("datestyle"));
        // Reported, but not for a client to choose: the server would refuse.
        let client = startup(&[("is_superuser", "off")]);
        assert_eq!(decide_with(&client, &[]), differs("is_superuser"));
    }

    #[test]
    fn the_application_name_may_be_set() {
        let client = startup(&[("application_name", "psql")]);
        assert_eq!(decide_with(&client, &[]), named("psql"));
        assert_eq!(
            decide_with(&client, &[("application_name", "other")]),
            named("psql")
        );
        assert_eq!(
            decide_with(&client, &[("application_name", "psql")]),
            taken()
        );
        let missing = Verdict::Fresh(Reason::Missing("application_name".to_owned()));
        assert_eq!(
            decide_with(&startup(&[]), &[("application_name", "psql")]),
            missing
        );
        for odd in ["naïve", "two\nlines", &"x".repeat(64)] {
            let client = startup(&[("application_name", odd)]);
            assert_eq!(decide_with(&client, &[]), differs("application_name"));
        }
    }

    #[test]
    fn a_name_is_quoted() {
        assert_eq!(
            set_application_name(r"a'b\c"),
            r"SET application_name = E'a\'b\\c'"
        );
    }

    /// What drivers send, besides user and database.
    #[test]
    fn start_up_packets_of_drivers() {
        let libpq: &[(&str, &str)] = &[];
        let psql: &[(&str, &str)] = &[("application_name", "psql")];
        let asyncpg: &[(&str, &str)] = &[("client_encoding", "'utf-8'")];
        let node: &[(&str, &str)] = &[("client_encoding", "UTF8")];
        let pgjdbc: &[(&str, &str)] = &[
            ("client_encoding", "UTF8"),
            ("DateStyle", "ISO"),
            ("TimeZone", "Europe/Berlin"),
            ("extra_float_digits", "2"),
        ];
        let npgsql: &[(&str, &str)] = &[("client_encoding", "UTF8"), ("application_name", "shop")];
        // Without a profile.
        assert_eq!(decide_with(&startup(libpq), &[]), taken());
        assert_eq!(decide_with(&startup(psql), &[]), named("psql"));
        assert_eq!(
            decide_with(&startup(asyncpg), &[]),
            differs("client_encoding")
        );
        assert_eq!(decide_with(&startup(node), &[]), taken());
        assert_eq!(decide_with(&startup(pgjdbc), &[]), differs("datestyle"));
        assert_eq!(decide_with(&startup(npgsql), &[]), named("shop"));
        // After one of their kind: the next finds a session that was opened for it.
        for driver in [libpq, psql, asyncpg, node, pgjdbc, npgsql] {
            let learned = profile_of(&startup(driver)).unwrap();
            assert_eq!(learned, owned(driver));
            assert_eq!(decide_with(&startup(driver), driver), taken());
        }
        // Of another kind: a client without a preference is not given another's.
        let missing = Verdict::Fresh(Reason::Missing("client_encoding".to_owned()));
        assert_eq!(decide_with(&startup(libpq), asyncpg), missing);
    }
}
