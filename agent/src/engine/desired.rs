//! From a `BranchPool` spec to what the core plans by and what servers are started with.

use branchpool_agent_api::{DesiredPool, FieldError, PoolName, Problem};
use branchpool_crds::{
    BranchPoolSpec, OpenConnections, Outbound, Preconnect, Source, StopMode, Tuning, Unleased,
    WarmingMode,
};
use branchpool_sys::cgroup::Limits;
use data_encoding::HEXLOWER;
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    golden::{self, Script},
    plan::{self, PoolSpec, PoolUid},
    postgres::{config, parameters::Parameters},
};

/// Processes of one branch: its connections, its own, and what `COPY PROGRAM` starts.
const PIDS_BEYOND_CONNECTIONS: u32 = 64;
const DEFAULT_CONNECTIONS: u32 = 50;

/// What the servers of a pool's branches, and the builds of its image, are started with.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) source: golden::Source,
    pub(super) prepare: Vec<Script>,
    pub(super) major: u32,
    pub(super) database: String,
    pub(super) role: String,
    pub(super) superuser: bool,
    pub(super) parameters: Parameters,
    pub(super) tuning: config::Tuning,
    pub(super) limits: Limits,
    /// Servers may open connections outward.
    pub(super) outbound: bool,
    pub(super) preconnect: plan::Preconnect,
    /// Start-up parameters of the preconnected session; `None`: as the pool's clients send them.
    pub(super) session_parameters: Option<Vec<(String, String)>>,
    /// The spec that all of this was made from.
    pub(super) spec: Value,
}

/// What a node can do for a pool.
#[derive(Clone, Debug)]
pub(super) struct Abilities {
    /// Branches are kept apart well enough for superusers: users, IPC and network of their own.
    pub(super) separate: bool,
    /// Whoever reaches the node's own addresses may use the agent's API.
    pub(super) open_api: bool,
    /// It sees who uses a branch.
    pub(super) gateway: bool,
    pub(super) default_concurrency: u32,
    pub(super) majors: Vec<u32>,
}

/// Checks a desired pool as the API server would, and against what this node can do.
pub(super) fn convert(
    uid: &PoolUid,
    desired: &DesiredPool,
    node: &Abilities,
) -> Result<(PoolSpec, Settings), Problem> {
    let spec = admit(desired).map_err(Problem::invalid_fields)?;
    let (settings, refused) = settings(&spec, desired, node);
    if !refused.is_empty() {
        return Err(Problem::invalid_fields(refused));
    }
    let name = PoolName {
        namespace: desired.namespace.clone(),
        name: desired.name.clone(),
    };
    let plan = plan_spec(uid, name, desired.generation, &spec, node);
    Ok((plan, settings))
}

/// As the API server admits it: schema, defaults, rules.
fn admit(desired: &DesiredPool) -> Result<BranchPoolSpec, Vec<FieldError>> {
    let object = json!({
        "apiVersion": "branchpool.dev/v1alpha1",
        "kind": "BranchPool",
        "metadata": { "namespace": desired.namespace, "name": desired.name },
        "spec": desired.spec,
    });
    branchpool_crds::admit_as::<branchpool_crds::BranchPool>(&object, None)
        .map(|pool| pool.spec)
        .map_err(|violations| {
            violations
                .into_iter()
                .map(|violation| FieldError::new(violation.field, violation.message))
                .collect()
        })
}

/// The settings, and the fields that this node refuses.
fn settings(
    spec: &BranchPoolSpec,
    desired: &DesiredPool,
    node: &Abilities,
) -> (Settings, Vec<FieldError>) {
    let mut refused = Vec::new();
    let mut refuse = |field: &str, message: String| refused.push(FieldError::new(field, message));

    let source = source(&spec.source, &mut refuse);
    if spec.refresh.schedule != "Never" {
        refuse("spec.refresh.schedule", "this version does not refresh on a schedule: write Never, and change the source for a new generation".to_owned());
    }
    if spec.lease.idle_timeout.is_some() && !node.gateway {
        refuse(
            "spec.lease.idleTimeout",
            "this node has no gateway, so it does not see when a branch is idle: give the agent one, or use a short ttl"
                .to_owned(),
        );
    }
    if spec.postgres.superuser && !node.separate {
        refuse("spec.postgres.superuser", "superusers are allowed only where each branch has an OS user and namespaces of its own, which this node lacks: see its isolation in the node's status".to_owned());
    }
    if spec.network.outbound == Outbound::Allow && node.open_api {
        refuse("spec.network.outbound", "a branch with outward connections would reach this agent's API, which is served on TCP without a token: give the agent a --token-file, or leave out --listen".to_owned());
    }
    let major = spec.postgres.version;
    if !node.majors.contains(&major) {
        let found: Vec<String> = node.majors.iter().map(ToString::to_string).collect();
        refuse(
            "spec.postgres.version",
            format!(
                "Postgres {major} is not installed on this node, which has {}: install it, or name one of these",
                found.join(", ")
            ),
        );
    }
    let parameters = Parameters::new(&spec.postgres.parameters).unwrap_or_else(|errors| {
        for error in errors {
            refuse(
                &format!("spec.postgres.parameters.{}", error.parameter()),
                error.to_string(),
            );
        }
        Parameters::default()
    });
    let settings = Settings {
        source,
        prepare: spec.prepare.iter().map(script).collect(),
        major,
        database: spec.postgres.database.clone(),
        role: spec.postgres.role.clone(),
        superuser: spec.postgres.superuser,
        tuning: match spec.postgres.tuning {
            Tuning::Ephemeral => config::Tuning::Ephemeral,
            Tuning::Durable => config::Tuning::Durable,
        },
        limits: limits(spec, &parameters),
        parameters,
        outbound: spec.network.outbound == Outbound::Allow,
        preconnect: preconnect(spec),
        session_parameters: spec
            .warming
            .session_parameters
            .clone()
            .map(|parameters| parameters.into_iter().collect()),
        spec: desired.spec.clone(),
    };
    (settings, refused)
}

fn source(source: &Source, refuse: &mut impl FnMut(&str, String)) -> golden::Source {
    match source {
        Source::Sql(sql) => {
            if let Some(reference) = &sql.config_map_ref {
                refuse(
                    "spec.source.sql.configMapRef",
                    format!(
                        "the node agent does not read ConfigMaps: whoever sends the pool puts the scripts of {} into scripts",
                        reference.name
                    ),
                );
            }
            golden::Source::Sql {
                scripts: sql.scripts.iter().map(script).collect(),
            }
        }
        Source::Subvolume(subvolume) => golden::Source::Subvolume {
            name: subvolume.name.clone(),
        },
        Source::Physical(_) | Source::Logical(_) => {
            refuse("spec.source", "this version builds images from sql and subvolume sources only: load a dump by sql, or prepare a subvolume from a base backup".to_owned());
            golden::Source::Sql {
                scripts: Vec::new(),
            }
        }
    }
}

fn script(script: &branchpool_crds::Script) -> Script {
    Script {
        name: script.name.clone(),
        sql: script.sql.clone(),
    }
}

fn preconnect(spec: &BranchPoolSpec) -> plan::Preconnect {
    match spec.warming.preconnect {
        Preconnect::WhileWarming => plan::Preconnect::WhileWarming,
        Preconnect::OnLease => plan::Preconnect::OnLease,
        Preconnect::Never => plan::Preconnect::Never,
    }
}

fn limits(spec: &BranchPoolSpec, parameters: &Parameters) -> Limits {
    let connections = parameters
        .get("max_connections")
        .and_then(|value| value.parse::<u32>().ok())
        .unwrap_or(DEFAULT_CONNECTIONS);
    let millicores = spec
        .resources
        .cpu
        .as_ref()
        .map(branchpool_crds::Quantity::milli_units);
    Limits {
        memory: Some(spec.resources.memory.units()),
        cpu_millicores: millicores.map(|milli| u32::try_from(milli).unwrap_or(u32::MAX)),
        pids: Some(2 * connections + PIDS_BEYOND_CONNECTIONS),
    }
}

fn plan_spec(
    uid: &PoolUid,
    name: PoolName,
    generation: u64,
    spec: &BranchPoolSpec,
    node: &Abilities,
) -> PoolSpec {
    let postgres = &spec.postgres;
    let (lease, cleanup, warming) = (&spec.lease, &spec.cleanup, &spec.warming);
    PoolSpec {
        uid: uid.clone(),
        name,
        observed_generation: generation,
        image_key: digest(&json!({
            "source": spec.source,
            "prepare": spec.prepare,
            "version": postgres.version,
            "database": postgres.database,
            "role": postgres.role,
            "superuser": postgres.superuser,
        })),
        settings_key: digest(&json!({
            "parameters": postgres.parameters,
            "tuning": postgres.tuning,
            "resources": spec.resources,
            "sessionParameters": spec.warming.session_parameters,
            "network": spec.network,
        })),
        target: spec.replicas,
        max_branches: spec.max_branches,
        database: postgres.database.clone(),
        role: postgres.role.clone(),
        durable: postgres.tuning == Tuning::Durable,
        replace_stale: spec.refresh.unleased == Unleased::Replace,
        warming: plan::Warming {
            mode: match warming.mode {
                WarmingMode::Phased => plan::WarmingMode::Phased,
                WarmingMode::Pipelined => plan::WarmingMode::Pipelined,
            },
            snapshot_concurrency: warming.snapshot_concurrency,
            start_concurrency: warming
                .start_concurrency
                .unwrap_or(node.default_concurrency),
            preconnect_concurrency: warming
                .preconnect_concurrency
                .unwrap_or(node.default_concurrency),
            preconnect: preconnect(spec),
            stale_after: warming.stale_after.as_millis(),
        },
        lease: plan::LeaseTerms {
            default_ttl: lease.default_ttl.as_millis(),
            max_ttl: lease.max_ttl.as_millis(),
            max_lifetime: lease.max_lifetime.as_millis(),
            retain_finished: lease.retain_finished.as_millis(),
            admission_wait: lease.admission_wait.as_millis(),
            idle_timeout: lease
                .idle_timeout
                .as_ref()
                .map(branchpool_crds::Duration::as_millis),
            open_connections_count: lease.open_connections == OpenConnections::InUse,
        },
        cleanup: plan::Cleanup {
            concurrency: cleanup.concurrency,
            start_delay: cleanup.start_delay.as_millis(),
            stop_mode: match cleanup.stop_mode {
                StopMode::Immediate => plan::StopMode::Immediate,
                StopMode::Fast => plan::StopMode::Fast,
            },
            tombstones: plan::Tombstones {
                delay: cleanup.tombstones.delay.as_millis(),
                concurrency: cleanup.tombstones.concurrency,
                max_count: cleanup.tombstones.max_count,
                max_bytes: cleanup.tombstones.max_bytes.units(),
            },
        },
    }
}

fn digest(value: &impl Serialize) -> String {
    // Maps are sorted, so equal specs have equal texts.
    let text = serde_json::to_value(value).map(|value: Value| value.to_string());
    HEXLOWER.encode(&Sha256::digest(text.unwrap_or_default())[..16])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(spec: Value, node: &Abilities) -> Vec<String> {
        let desired = DesiredPool {
            namespace: "default".to_owned(),
            name: "shop".to_owned(),
            generation: 1,
            epoch: None,
            spec,
        };
        let uid = "pool".parse().unwrap();
        match convert(&uid, &desired, node) {
            Ok(_) => Vec::new(),
            Err(problem) => problem
                .errors
                .into_iter()
                .map(|error| error.field)
                .collect(),
        }
    }

    fn able() -> Abilities {
        Abilities {
            separate: true,
            open_api: false,
            gateway: true,
            default_concurrency: 3,
            majors: vec![15],
        }
    }

    #[test]
    fn superusers_need_branches_that_are_kept_apart() {
        let spec = json!({
            "postgres": { "version": 15, "superuser": true },
            "source": { "sql": {} },
        });
        assert_eq!(refused(spec.clone(), &able()), [] as [&str; 0]);
        let shared = Abilities {
            separate: false,
            ..able()
        };
        assert_eq!(refused(spec, &shared), ["spec.postgres.superuser"]);
    }

    #[test]
    fn branches_that_reach_outward_do_not_reach_an_open_api() {
        let spec = json!({
            "postgres": { "version": 15 },
            "source": { "sql": {} },
            "network": { "outbound": "Allow" },
        });
        assert_eq!(refused(spec.clone(), &able()), [] as [&str; 0]);
        let open = Abilities {
            open_api: true,
            ..able()
        };
        assert_eq!(refused(spec, &open), ["spec.network.outbound"]);
    }

    #[test]
    fn idle_branches_are_seen_by_a_gateway_only() {
        let spec = json!({
            "postgres": { "version": 15 },
            "source": { "sql": {} },
            "lease": { "idleTimeout": "5m" },
        });
        assert_eq!(refused(spec.clone(), &able()), [] as [&str; 0]);
        let without = Abilities {
            gateway: false,
            ..able()
        };
        assert_eq!(refused(spec, &without), ["spec.lease.idleTimeout"]);
    }

    #[test]
    fn what_this_version_lacks_is_named_and_not_ignored() {
        let spec = json!({
            "postgres": { "version": 16 },
            "source": { "physical": { "secretRef": { "name": "primary" } } },
            "refresh": { "schedule": "@daily" },
        });
        let mut fields = refused(spec, &able());
        fields.sort();
        let expected = [
            "spec.postgres.version",
            "spec.refresh.schedule",
            "spec.source",
        ];
        assert_eq!(fields, expected);
    }
}
