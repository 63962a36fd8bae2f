//! The Postgres servers of a pool's branches.

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::rules::{rule, rule_at};

/// The Postgres servers of the branches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = [
    rule_at(
        ".role",
        "self.role != 'postgres' || self.superuser",
        "role postgres is the superuser: name another role, or set superuser: true",
    ),
    rule_at(
        ".role",
        "!self.role.startsWith('pg_') && !(self.role in ['public', 'none'])",
        "Postgres reserves public, none and names that start with pg_: name another role",
    ),
    rule_at(
        ".database",
        "!(self.database in ['template0', 'template1'])",
        "template0 and template1 belong to Postgres: name another database",
    ),
]))]
pub struct Postgres {
    /// Major version. Nodes that do not have it hold no branches of this pool.
    #[schemars(range(min = 14, max = 99))]
    pub version: u32,
    /// Database that leases connect to.
    #[serde(default = "default_name")]
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = "^[A-Za-z_][A-Za-z0-9_-]*$")
    )]
    pub database: String,
    /// Role that leases connect as; it owns the database of an sql source.
    #[serde(default = "default_name")]
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = "^[A-Za-z_][A-Za-z0-9_-]*$")
    )]
    pub role: String,
    /// Settings of postgresql.conf for leased branches, such as work_mem: 64MB. Values are strings: write "100", not 100.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "parameters_schema")]
    pub parameters: BTreeMap<String, String>,
    /// Ephemeral: fsync and full_page_writes are off, a branch survives a crash of its server but no reboot of its node. Durable: both on.
    #[serde(default)]
    pub tuning: Tuning,
    /// Whether the role is a superuser. Refused on nodes that cannot give each branch an OS user of its own.
    #[serde(default)]
    pub superuser: bool,
}

fn default_name() -> String {
    "app".to_owned()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Tuning {
    #[default]
    Ephemeral,
    Durable,
}

/// Settings that are not the user's. The agent refuses the same ones, each with its own reason.
const RESERVED: &str = "include(_dir|_if_exists)?|allow_alter_system|bonjour.*|config_file|data_directory|\
    dynamic_shared_memory_type|external_pid_file|hba_file|huge_pages|huge_page_size|ident_file|krb_.*|gss_.*|\
    listen_addresses|min_dynamic_shared_memory|port|restart_after_crash|shared_memory_type|stats_temp_directory|\
    unix_socket_.*|data_sync_retry|fsync|full_page_writes|wal_sync_method|event_source|log_destination|\
    log_directory|log_filename|log_file_mode|log_rotation_.*|log_truncate_on_rotation|logging_collector|syslog_.*|\
    ssl.*|archive_.*|primary_.*|recovery_.*|restore_command|promote_trigger_file";

fn parameters_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": {"type": "string", "maxLength": 1024},
        "x-kubernetes-validations": [
            rule(
                "self.all(key, key.matches('^[a-z_][a-z0-9_]{0,62}([.][a-z_][a-z0-9_]{0,62})?$'))",
                "write the names of parameters in lower case, as SHOW ALL does, such as work_mem or my_extension.setting",
            ),
            rule(
                &format!("!self.exists(key, key.matches('^({RESERVED})$'))"),
                "Branchpool sets addresses, files, sockets, logging, TLS, recovery and durability itself: take them out of parameters (postgres.tuning chooses durability)",
            ),
            rule(
                "self.all(key, self[key].matches('^[^\\\\x00-\\\\x1f\\\\x7f]*$'))",
                "a parameter's value is one line without control characters: correct the values of parameters",
            ),
        ],
    })
}
