//! What a server is started with. Control settings go on the command line, where neither a
//! configuration file nor `ALTER SYSTEM` can override them; all else goes into a file.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::parameters::Parameters;

/// How much a branch cares for its data after a crash of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tuning {
    /// Nothing is flushed: after a reboot of the node a running branch is lost.
    Ephemeral,
    /// As a production server: recovers from a power cut.
    Durable,
}

/// Whether a branch waits in the pool or belongs to somebody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Autovacuum is off.
    Warming,
    /// Autovacuum is as the user wants it.
    HandedOver,
}

/// Settings of the image whose loss would silently change results of queries.
pub const CARRIED_OVER: [&str; 7] = [
    "TimeZone",
    "DateStyle",
    "lc_messages",
    "lc_monetary",
    "lc_numeric",
    "lc_time",
    "default_text_search_config",
];

/// What `postgresql.conf` is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    pub tuning: Tuning,
    pub parameters: Parameters,
    /// See [`CARRIED_OVER`]; the pool's `parameters` win.
    pub carried_over: BTreeMap<String, String>,
    /// The image's `shared_preload_libraries`; the pool's `parameters` win.
    pub preload_libraries: Vec<String>,
}

/// Paths and switches that keep the agent in control of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// As the server sees it.
    pub data_dir: PathBuf,
    pub config_file: PathBuf,
    pub hba_file: PathBuf,
    pub ident_file: PathBuf,
    pub socket_dir: PathBuf,
    pub tuning: Tuning,
    /// The server has an IPC namespace of its own.
    pub ipc_namespace: bool,
}

/// The server's command line, without the program's name. `overrides` come last and win.
pub fn arguments(control: &Control, overrides: &[(String, String)]) -> Vec<String> {
    let path = |path: &Path| path.display().to_string();
    let durable = on_off(control.tuning == Tuning::Durable);
    // Neither needs /dev/shm, which is 64 MiB for a whole container. A killed server's segments
    // go with its namespace; without one they would stay, files in its own directory do not.
    let dynamic = if control.ipc_namespace {
        "sysv"
    } else {
        "mmap"
    };
    let settings = [
        ("config_file", path(&control.config_file)),
        ("hba_file", path(&control.hba_file)),
        ("ident_file", path(&control.ident_file)),
        ("listen_addresses", String::new()),
        ("port", "5432".to_owned()),
        (
            "unix_socket_directories",
            quoted_list_item(&path(&control.socket_dir)),
        ),
        ("unix_socket_group", String::new()),
        // The directory's mode decides who gets in.
        ("unix_socket_permissions", "0777".to_owned()),
        ("bonjour", "off".to_owned()),
        ("ssl", "off".to_owned()),
        ("logging_collector", "off".to_owned()),
        ("log_destination", "stderr".to_owned()),
        ("archive_mode", "off".to_owned()),
        ("restart_after_crash", "on".to_owned()),
        ("huge_pages", "off".to_owned()),
        ("shared_memory_type", "mmap".to_owned()),
        ("dynamic_shared_memory_type", dynamic.to_owned()),
        ("fsync", durable.to_owned()),
        ("full_page_writes", durable.to_owned()),
    ];
    let mut arguments = vec!["-D".to_owned(), path(&control.data_dir)];
    let overrides = overrides
        .iter()
        .map(|(name, value)| (name.as_str(), value.clone()));
    for (name, value) in settings.into_iter().chain(overrides) {
        arguments.push("-c".to_owned());
        arguments.push(format!("{name}={value}"));
    }
    arguments
}

/// `postgresql.conf` of a server. Without comments: they cost time at each start.
pub fn render(profile: &Profile, phase: Phase) -> String {
    let mut settings: BTreeMap<String, String> = BTreeMap::new();
    let mut set = |name: &str, value: &str| {
        settings.insert(name.to_lowercase(), value.to_owned());
    };
    for (name, value) in BASE {
        set(name, value);
    }
    for (name, value) in &profile.carried_over {
        set(name, value);
    }
    if !profile.preload_libraries.is_empty() {
        set(
            "shared_preload_libraries",
            &profile.preload_libraries.join(","),
        );
    }
    for (name, value) in replication(&profile.parameters) {
        set(name, value);
    }
    for (name, value) in profile.parameters.iter() {
        set(name, value);
    }
    if phase == Phase::Warming {
        set("autovacuum", "off");
    }

    let mut text = String::with_capacity(1024);
    for (name, value) in settings {
        let _ = writeln!(text, "{name}={}", quoted(&value));
    }
    text
}

/// Chosen by measurement: what a start and a first connect cost.
const BASE: [(&str, &str); 15] = [
    ("shared_buffers", "16MB"),
    ("max_connections", "50"),
    ("max_wal_senders", "0"),
    ("max_replication_slots", "0"),
    ("max_logical_replication_workers", "0"),
    ("wal_level", "minimal"),
    ("wal_init_zero", "off"),
    ("wal_recycle", "off"),
    // Twice the largest usual segment would be more; the server wants at least two segments.
    ("min_wal_size", "32MB"),
    ("max_wal_size", "256MB"),
    ("checkpoint_timeout", "30min"),
    ("bgwriter_lru_maxpages", "0"),
    // A parallel query of one branch must not take the neighbours' processors.
    ("max_parallel_workers_per_gather", "0"),
    ("log_checkpoints", "off"),
    ("log_line_prefix", "%m [%p] "),
];

/// Senders, slots and workers that `wal_level` asks for, at the server's own defaults.
fn replication(parameters: &Parameters) -> &'static [(&'static str, &'static str)] {
    match parameters
        .get("wal_level")
        .map(str::to_lowercase)
        .as_deref()
    {
        Some("logical") => &[
            ("max_wal_senders", "10"),
            ("max_replication_slots", "10"),
            ("max_logical_replication_workers", "4"),
        ],
        Some("replica") => &[("max_wal_senders", "10"), ("max_replication_slots", "10")],
        _ => &[],
    }
}

/// `pg_hba.conf` of a branch: the agent comes in as the pool's role and as `postgres` by its
/// OS user, all other roles by password.
pub fn hba(role: &str) -> String {
    format!(
        "local all {},postgres peer map=bp\nlocal all all scram-sha-256\n",
        name(role)
    )
}

/// `pg_ident.conf` that goes with [`hba`]. `agent` is the OS user of the agent.
pub fn ident(role: &str, agent: &str) -> String {
    let (agent, role) = (name(agent), name(role));
    format!("bp {agent} {role}\nbp {agent} postgres\n")
}

/// `pg_hba.conf` while a golden image is made: whoever reaches the socket may be any role. Its
/// directory lets only root and the OS user in that the tools of the build run as.
pub fn build_hba() -> &'static str {
    "local all all trust\n"
}

/// A name for `pg_hba.conf` and `pg_ident.conf`. Quotes take the meaning from words such as
/// `all`, and from a leading `+` or `/`.
fn name(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A value for `postgresql.conf`, whose quoted strings know backslash escapes.
fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\\', "\\\\").replace('\'', "''"))
}

/// An item of a setting that is a list of identifiers.
fn quoted_list_item(item: &str) -> String {
    format!("\"{}\"", item.replace('"', "\"\""))
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(tuning: Tuning, parameters: &[(&str, &str)]) -> Profile {
        let parameters = parameters
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        Profile {
            tuning,
            parameters: Parameters::new(&parameters).unwrap(),
            carried_over: BTreeMap::from([("TimeZone".to_owned(), "Europe/Berlin".to_owned())]),
            preload_libraries: Vec::new(),
        }
    }

    fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
    }

    #[test]
    fn the_users_parameters_win_over_image_and_base() {
        let text = render(
            &profile(
                Tuning::Ephemeral,
                &[("timezone", "UTC"), ("max_connections", "20")],
            ),
            Phase::HandedOver,
        );
        assert_eq!(value(&text, "timezone"), Some("'UTC'"));
        assert_eq!(value(&text, "max_connections"), Some("'20'"));
        assert_eq!(value(&text, "shared_buffers"), Some("'16MB'"));
    }

    #[test]
    fn autovacuum_is_off_while_warming_and_the_users_afterwards() {
        let with = profile(Tuning::Ephemeral, &[("autovacuum", "on")]);
        assert_eq!(
            value(&render(&with, Phase::Warming), "autovacuum"),
            Some("'off'")
        );
        assert_eq!(
            value(&render(&with, Phase::HandedOver), "autovacuum"),
            Some("'on'")
        );
        let without = profile(Tuning::Ephemeral, &[]);
        assert_eq!(
            value(&render(&without, Phase::HandedOver), "autovacuum"),
            None
        );
    }

    #[test]
    fn replication_settings_follow_wal_level() {
        let text = render(
            &profile(Tuning::Durable, &[("wal_level", "logical")]),
            Phase::Warming,
        );
        assert_eq!(value(&text, "max_wal_senders"), Some("'10'"));
        assert_eq!(value(&text, "max_logical_replication_workers"), Some("'4'"));
        let text = render(&profile(Tuning::Durable, &[]), Phase::Warming);
        assert_eq!(value(&text, "max_wal_senders"), Some("'0'"));
    }

    #[test]
    fn a_commit_is_handed_to_the_kernel_before_it_is_answered() {
        for tuning in [Tuning::Ephemeral, Tuning::Durable] {
            let text = render(&profile(tuning, &[]), Phase::HandedOver);
            assert_eq!(value(&text, "synchronous_commit"), None, "{tuning:?}");
        }
    }

    #[test]
    fn quotes_and_backslashes_are_escaped() {
        assert_eq!(quoted(r"it's a \ "), r"'it''s a \\ '");
        assert_eq!(name("a\"b"), "\"a\"\"b\"");
    }

    #[test]
    fn control_settings_are_on_the_command_line_and_overrides_come_last() {
        let control = Control {
            data_dir: "/d".into(),
            config_file: "/c".into(),
            hba_file: "/h".into(),
            ident_file: "/i".into(),
            socket_dir: "/s".into(),
            tuning: Tuning::Ephemeral,
            ipc_namespace: true,
        };
        let arguments = arguments(&control, &[("fsync".to_owned(), "on".to_owned())]);
        assert_eq!(arguments[..2], ["-D", "/d"]);
        assert!(arguments.contains(&"hba_file=/h".to_owned()));
        assert!(arguments.contains(&"fsync=off".to_owned()));
        assert_eq!(arguments.last().map(String::as_str), Some("fsync=on"));
    }

    #[test]
    fn a_role_named_like_a_keyword_means_the_role() {
        assert!(hba("all").starts_with("local all \"all\",postgres peer map=bp\n"));
        assert_eq!(
            ident("app", "root"),
            "bp \"root\" \"app\"\nbp \"root\" postgres\n"
        );
    }
}
