//! Where a pool's data comes from.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rules::rule;

/// Where the data comes from: exactly one of sql, physical, logical and subvolume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Source {
    /// A new, empty database filled by SQL scripts.
    Sql(SqlSource),
    /// A copy of a live server's files by pg_basebackup; Postgres must be of the same major version.
    Physical(RemoteSource),
    /// A dump of one database by pg_dump, restored into a new server.
    Logical(RemoteSource),
    /// A prepared data directory: a Btrfs subvolume below sources/ on each node.
    Subvolume(SubvolumeSource),
}

/// Scripts that fill a new database. The scripts of the ConfigMap run first. Without any, the database stays empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SqlSource {
    /// ConfigMap in the pool's namespace whose entries ending in .sql are run in the order of their names as the pool's role, which is a superuser meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map_ref: Option<ConfigMapReference>,
    /// Scripts written here, run in this order as the pool's role, which is a superuser meanwhile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend(
        "x-kubernetes-list-type" = "map",
        "x-kubernetes-list-map-keys" = ["name"],
    ))]
    pub scripts: Vec<Script>,
}

/// One SQL script.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Script {
    /// Name that messages use, unique in its list.
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = "^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    )]
    pub name: String,
    /// SQL as psql takes it.
    #[schemars(length(min = 1, max = 262_144))]
    pub sql: String,
}

/// A ConfigMap in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConfigMapReference {
    /// Name of the ConfigMap.
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
    )]
    pub name: String,
}

/// A live server, named by a Secret that holds its connection URI.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RemoteSource {
    /// Secret in the pool's namespace that holds the server's URI, postgresql://user:password@host:port/database.
    pub secret_ref: SecretReference,
}

/// One entry of a Secret in the same namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretReference {
    /// Name of the Secret.
    #[schemars(
        length(min = 1, max = 253),
        regex(pattern = "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
    )]
    pub name: String,
    /// Entry of the Secret.
    #[serde(default = "default_secret_key")]
    #[schemars(length(min = 1, max = 253), regex(pattern = "^[A-Za-z0-9._-]+$"))]
    pub key: String,
}

fn default_secret_key() -> String {
    "uri".to_owned()
}

/// A prepared subvolume present on the nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SubvolumeSource {
    /// Name of the subvolume below sources/ of the branch filesystem: the data directory of a server that was shut down cleanly.
    #[schemars(
        length(min = 1, max = 63),
        regex(pattern = "^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"),
        extend("x-kubernetes-validations" = [rule(
            "!self.contains('..')",
            "a subvolume's name holds no two dots in a row: rename the subvolume",
        )])
    )]
    pub name: String,
}
