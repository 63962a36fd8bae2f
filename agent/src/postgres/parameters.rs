//! Settings that users choose for a pool, checked before anything starts with them.

use std::collections::BTreeMap;

use snafu::Snafu;

/// Longest accepted value, in bytes.
const MAX_VALUE: usize = 1024;
/// Longest accepted name, in bytes: two identifiers and a dot.
const MAX_NAME: usize = 127;
/// Slots that Postgres keeps for superusers, the preconnected session, and one to spare.
const MIN_CONNECTIONS: i64 = 5;

#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
pub enum Error {
    #[snafu(display(
        "parameter {name:?} is not a valid setting name; use letters, digits and underscores, with at most one dot"
    ))]
    Name { name: String },

    #[snafu(display(
        "parameter {name} is given twice, in different spellings; Postgres ignores upper and lower case, so keep one"
    ))]
    Twice { name: String },

    #[snafu(display(
        "the value of parameter {name} contains a control character such as a line break; remove it"
    ))]
    ControlCharacter { name: String },

    #[snafu(display("the value of parameter {name} has {length} bytes; the most is {MAX_VALUE}"))]
    TooLong { name: String, length: usize },

    #[snafu(display("parameter {name} cannot be set: {reason}"))]
    Reserved { name: String, reason: &'static str },

    #[snafu(display("parameter {name} must be {expected}, but is {value:?}"))]
    Value {
        name: &'static str,
        value: String,
        expected: String,
    },
}

impl Error {
    /// The parameter that was refused.
    pub fn parameter(&self) -> &str {
        match self {
            Self::Name { name }
            | Self::Twice { name }
            | Self::ControlCharacter { name }
            | Self::TooLong { name, .. }
            | Self::Reserved { name, .. } => name,
            Self::Value { name, .. } => name,
        }
    }
}

const BY_AGENT: &str = "the agent sets it to stay in control of its servers; remove it";
const BY_TUNING: &str =
    "it follows from the pool's tuning; set tuning to Durable or Ephemeral instead";
const LOGGING: &str = "servers log to a file that the agent keeps and caps; remove it";
const NO_TLS: &str = "servers listen on no TCP port, so TLS is not theirs to do; remove it";
const NO_RECOVERY: &str = "branches neither archive nor replicate from elsewhere; remove it";
const DIRECTIVE: &str =
    "it is a directive that reads other files, not a setting; write the settings themselves";

/// Settings that are not the user's, with the reason. A trailing `*` stands for any ending.
const RESERVED: [(&str, &str); 41] = [
    ("include", DIRECTIVE),
    ("include_dir", DIRECTIVE),
    ("include_if_exists", DIRECTIVE),
    ("allow_alter_system", BY_AGENT),
    ("bonjour*", BY_AGENT),
    ("config_file", BY_AGENT),
    ("data_directory", BY_AGENT),
    ("dynamic_shared_memory_type", BY_AGENT),
    ("external_pid_file", BY_AGENT),
    ("hba_file", BY_AGENT),
    ("huge_pages", BY_AGENT),
    ("huge_page_size", BY_AGENT),
    ("ident_file", BY_AGENT),
    ("krb_*", BY_AGENT),
    ("gss_*", BY_AGENT),
    ("listen_addresses", BY_AGENT),
    ("min_dynamic_shared_memory", BY_AGENT),
    ("port", BY_AGENT),
    ("restart_after_crash", BY_AGENT),
    ("shared_memory_type", BY_AGENT),
    ("stats_temp_directory", BY_AGENT),
    ("unix_socket_*", BY_AGENT),
    ("data_sync_retry", BY_TUNING),
    ("fsync", BY_TUNING),
    ("full_page_writes", BY_TUNING),
    ("wal_sync_method", BY_TUNING),
    ("event_source", LOGGING),
    ("log_destination", LOGGING),
    ("log_directory", LOGGING),
    ("log_filename", LOGGING),
    ("log_file_mode", LOGGING),
    ("log_rotation_*", LOGGING),
    ("log_truncate_on_rotation", LOGGING),
    ("logging_collector", LOGGING),
    ("syslog_*", LOGGING),
    ("ssl*", NO_TLS),
    ("archive_*", NO_RECOVERY),
    ("primary_*", NO_RECOVERY),
    ("recovery_*", NO_RECOVERY),
    ("restore_command", NO_RECOVERY),
    ("promote_trigger_file", NO_RECOVERY),
];

/// A pool's own settings: names in lower case, values as Postgres is to see them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    values: BTreeMap<String, String>,
}

impl Parameters {
    /// Checks names and values one by one, then those that must agree with each other.
    /// Whether Postgres knows a setting and likes its value is only found out by starting one.
    pub fn new(wanted: &BTreeMap<String, String>) -> Result<Self, Vec<Error>> {
        let mut errors = Vec::new();
        let mut values = BTreeMap::new();
        for (name, value) in wanted {
            match check(name, value) {
                Ok(name) => {
                    if values.insert(name.clone(), value.clone()).is_some() {
                        errors.push(TwiceSnafu { name }.build());
                    }
                }
                Err(error) => errors.push(error),
            }
        }
        let parameters = Self { values };
        parameters.check_connections(&mut errors);
        parameters.check_replication(&mut errors);
        if errors.is_empty() {
            Ok(parameters)
        } else {
            Err(errors)
        }
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.values
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
    }

    fn check_connections(&self, errors: &mut Vec<Error>) {
        self.check_at_least("max_connections", MIN_CONNECTIONS, errors);
    }

    /// Senders, slots and workers have to follow `wal_level`, or the server does not start.
    fn check_replication(&self, errors: &mut Vec<Error>) {
        const LEVELS: &str = "minimal, replica or logical";
        let level = self.get("wal_level").unwrap_or("minimal").to_lowercase();
        match level.as_str() {
            "minimal" => {
                if self
                    .get("max_wal_senders")
                    .is_some_and(|value| value.trim() != "0")
                {
                    errors.push(self.refused("max_wal_senders", "0 while wal_level is minimal"));
                }
            }
            "replica" => {}
            "logical" => {
                self.check_at_least("max_wal_senders", 1, errors);
                self.check_at_least("max_replication_slots", 1, errors);
                self.check_workers(errors);
            }
            _ => errors.push(self.refused("wal_level", LEVELS)),
        }
    }

    fn check_workers(&self, errors: &mut Vec<Error>) {
        const DEFAULT_PROCESSES: i64 = 8;
        let processes = self
            .number("max_worker_processes")
            .unwrap_or(DEFAULT_PROCESSES);
        if let Some(workers) = self.number("max_logical_replication_workers")
            && workers > processes
        {
            let expected = format!("at most max_worker_processes, which is {processes}");
            errors.push(self.refused("max_logical_replication_workers", &expected));
        }
    }

    fn check_at_least(&self, name: &'static str, least: i64, errors: &mut Vec<Error>) {
        if self.get(name).is_some() && self.number(name).is_none_or(|value| value < least) {
            errors.push(self.refused(name, &format!("a number of at least {least}")));
        }
    }

    fn number(&self, name: &str) -> Option<i64> {
        self.get(name)?.trim().parse().ok()
    }

    fn refused(&self, name: &'static str, expected: &str) -> Error {
        Error::Value {
            name,
            value: self.get(name).unwrap_or_default().to_owned(),
            expected: expected.to_owned(),
        }
    }
}

/// The name in lower case.
fn check(name: &str, value: &str) -> Result<String, Error> {
    if !is_name(name) {
        return NameSnafu { name }.fail();
    }
    let name = name.to_ascii_lowercase();
    if let Some((_, reason)) = RESERVED.iter().find(|(entry, _)| matches(entry, &name)) {
        return ReservedSnafu {
            name,
            reason: *reason,
        }
        .fail();
    }
    if value.chars().any(char::is_control) {
        return ControlCharacterSnafu { name }.fail();
    }
    if value.len() > MAX_VALUE {
        return TooLongSnafu {
            name,
            length: value.len(),
        }
        .fail();
    }
    Ok(name)
}

fn matches(entry: &str, name: &str) -> bool {
    entry
        .strip_suffix('*')
        .map_or(entry == name, |prefix| name.starts_with(prefix))
}

fn is_name(name: &str) -> bool {
    name.len() <= MAX_NAME
        && name.split('.').count() <= 2
        && name.split('.').all(|part| {
            part.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Parameters, Vec<Error>> {
        let map = pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        Parameters::new(&map)
    }

    fn only_error(pairs: &[(&str, &str)]) -> Error {
        let mut errors = parse(pairs).unwrap_err();
        assert_eq!(errors.len(), 1, "{errors:?}");
        errors.remove(0)
    }

    #[test]
    fn ordinary_settings_pass_in_lower_case() {
        let parameters = parse(&[("Work_Mem", "8MB"), ("pg_stat_statements.max", "100")]).unwrap();
        assert_eq!(parameters.get("work_mem"), Some("8MB"));
        assert_eq!(parameters.get("pg_stat_statements.max"), Some("100"));
    }

    #[test]
    fn control_settings_are_refused_in_any_spelling() {
        for name in [
            "HBA_file",
            "listen_addresses",
            "fsync",
            "ssl_cert_file",
            "archive_mode",
            "log_directory",
            "include",
            "unix_socket_directories",
            "primary_conninfo",
            "full_page_writes",
        ] {
            assert!(
                matches!(only_error(&[(name, "x")]), Error::Reserved { .. }),
                "{name}"
            );
        }
    }

    #[test]
    fn names_that_could_break_the_file_are_refused() {
        for name in ["", "a b", "a=b", "a\nb", "a.b.c", "1a", "a'", "a.", "#a"] {
            assert!(
                matches!(only_error(&[(name, "x")]), Error::Name { .. }),
                "{name:?}"
            );
        }
    }

    #[test]
    fn values_with_line_breaks_or_of_great_length_are_refused() {
        let error = only_error(&[("work_mem", "1MB\nfsync=off")]);
        assert!(matches!(error, Error::ControlCharacter { .. }));
        let error = only_error(&[("search_path", &"x".repeat(MAX_VALUE + 1))]);
        assert!(matches!(error, Error::TooLong { .. }));
    }

    #[test]
    fn two_spellings_of_one_name_are_refused() {
        let error = only_error(&[("work_mem", "1MB"), ("WORK_MEM", "2MB")]);
        assert_eq!(error.parameter(), "work_mem");
    }

    #[test]
    fn replication_settings_have_to_agree() {
        assert!(parse(&[("wal_level", "logical")]).is_ok());
        assert!(parse(&[("wal_level", "Logical"), ("max_wal_senders", "4")]).is_ok());
        let refused = |pairs: &[(&str, &str)]| only_error(pairs).parameter().to_owned();
        assert_eq!(refused(&[("wal_level", "hot_standby")]), "wal_level");
        assert_eq!(refused(&[("max_wal_senders", "4")]), "max_wal_senders");
        assert_eq!(
            refused(&[("wal_level", "logical"), ("max_wal_senders", "0")]),
            "max_wal_senders"
        );
        assert_eq!(
            refused(&[("wal_level", "logical"), ("max_replication_slots", "none")]),
            "max_replication_slots"
        );
        assert_eq!(
            refused(&[
                ("wal_level", "logical"),
                ("max_worker_processes", "2"),
                ("max_logical_replication_workers", "3")
            ]),
            "max_logical_replication_workers"
        );
    }

    #[test]
    fn too_few_connections_are_refused() {
        assert_eq!(
            only_error(&[("max_connections", "3")]).parameter(),
            "max_connections"
        );
    }

    proptest! {
        #[test]
        fn accepted_names_and_values_fit_on_one_line(name in ".{0,20}", value in ".{0,20}") {
            if let Ok(parameters) = parse(&[(&name, &value)]) {
                for (name, value) in parameters.iter() {
                    prop_assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.'));
                    prop_assert!(!value.chars().any(char::is_control));
                }
            }
        }
    }
}
