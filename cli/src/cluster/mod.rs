//! The verbs against a cluster.

mod connect;
mod error;
mod lease;
mod obtain;
mod output;
mod secret;

use std::{ffi::OsString, time::Duration};

use branchpool_agent_api::check;
use branchpool_crds::{BranchLease, BranchNode, BranchPool};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use self::{
    connect::Cluster,
    error::{
        FinishedSnafu, NoLeaseSnafu, NoNodeReadySnafu, NoSecretSnafu, NotBoundSnafu, failed,
        is_not_found,
    },
    lease::{Progress, is_answered, millis, progress},
    obtain::{MANAGER, Request, no_pool, obtain, settle},
    secret::Connection,
};
use crate::{
    args::{self, Command, Global, PoolArg, Priority},
    error::{CliError, NeitherLeaseNorPoolSnafu, NotReleasedSnafu, UsageSnafu},
    names::{new_id, random, this_user},
    run::{self, Held, RenewError},
    signals::Signals,
};

pub(crate) use self::error::ClusterError;

/// For the operator to answer a change of a lease.
const RENEWAL: Duration = Duration::from_secs(10);
/// For a fresh branch, which may have to be made first.
const RESET: Duration = Duration::from_secs(120);

pub(crate) async fn execute(global: &Global, command: Command) -> Result<(), CliError> {
    if global.token_file.is_some() {
        let message = "--token-file is for a standalone agent on TCP: name it with --server";
        return UsageSnafu { message }.fail();
    }
    let cluster = Cluster::connect(global).await?;
    match command {
        Command::Pools { name: None } => pools(&cluster, global).await,
        Command::Pools { name: Some(pool) } => one_pool(&cluster, global, &pool).await,
        Command::Lease(arguments) => lease(&cluster, global, arguments).await,
        Command::Ls => list(&cluster, global).await,
        Command::Renew { id, ttl } => renew(&cluster, global, &id, ttl).await,
        Command::Reset { id } => reset(&cluster, global, &id).await,
        Command::Release { ids } => release(&cluster, global, &ids).await,
        Command::Psql {
            what,
            wait,
            arguments,
        } => psql(&cluster, global, &what, wait.wait, arguments).await,
        Command::Status => status(&cluster, global).await,
        Command::Completion { .. } => Ok(()),
    }
}

async fn pools(cluster: &Cluster, global: &Global) -> Result<(), CliError> {
    let pools: Api<BranchPool> = cluster.listed();
    let mut list = pools
        .list(&ListParams::default())
        .await
        .map_err(failed("list pools"))?;
    list.items
        .sort_by_key(|pool| (pool.namespace(), pool.name_any()));
    crate::output::show(global.output, &list, || output::pools(&list.items))
}

async fn one_pool(cluster: &Cluster, global: &Global, pool: &PoolArg) -> Result<(), CliError> {
    let (namespace, name) = cluster.pool(pool, global)?;
    let pools: Api<BranchPool> = cluster.api(&namespace);
    match pools.get(&name).await {
        Ok(pool) => crate::output::show(global.output, &pool, || output::pool(&pool)),
        Err(error) if is_not_found(&error) => Err(no_pool(&pools, &namespace, &name).await.into()),
        Err(error) => Err(failed(format!("read pool {name}"))(error).into()),
    }
}

async fn lease(cluster: &Cluster, global: &Global, arguments: args::Lease) -> Result<(), CliError> {
    let (namespace, pool) = cluster.pool(&arguments.pool, global)?;
    let name = match arguments.id {
        Some(id) => object_name(id)?,
        None => new_id(&pool),
    };
    let mut spec = json!({});
    let holder = arguments.holder.or_else(this_user);
    let priority = arguments.priority.map(|priority| match priority {
        Priority::High => "High",
        Priority::Medium => "Medium",
        Priority::Low => "Low",
    });
    let ttl = arguments.ttl.map(|ttl| format!("{}s", ttl.as_secs()));
    for (field, value) in [
        ("holder", holder.map(Value::from)),
        ("priority", priority.map(Value::from)),
        ("ttl", ttl.map(Value::from)),
    ] {
        if let Some(value) = value {
            spec[field] = value;
        }
    }
    let request = Request {
        namespace,
        name,
        pool,
        spec,
    };
    let mut signals = Signals::catch()?;
    let bound = obtain(cluster, &request, arguments.wait.wait, &mut signals).await?;
    if arguments.command.is_empty() {
        let uri = match global.output {
            Some(_) => String::new(),
            None => secret::stored_uri(&secret_of(cluster, &bound).await?)?,
        };
        return crate::output::show(global.output, &bound, || {
            format!("{uri}\n{}\n", bound.name_any())
        });
    }
    let held = hold(cluster, bound).await?;
    run::with_lease(&held, arguments.ttl, &arguments.command, &mut signals).await
}

fn object_name(id: String) -> Result<String, CliError> {
    match check::dns_label(&id) {
        Ok(()) => Ok(id),
        Err(why) => UsageSnafu {
            message: format!("--id {id}: the id is the name of an object and {why}"),
        }
        .fail(),
    }
}

async fn list(cluster: &Cluster, global: &Global) -> Result<(), CliError> {
    let leases: Api<BranchLease> = cluster.listed();
    let mut list = leases
        .list(&ListParams::default())
        .await
        .map_err(failed("list leases"))?;
    list.items.sort_by_key(|lease| {
        (
            lease.creation_timestamp(),
            lease.namespace(),
            lease.name_any(),
        )
    });
    crate::output::show(global.output, &list, || {
        output::leases(&list.items, crate::output::now())
    })
}

/// Changes the spec, refusing fields that the server does not know.
async fn change(cluster: &Cluster, name: &str, spec: Value) -> Result<BranchLease, ClusterError> {
    let leases: Api<BranchLease> = cluster.api(&cluster.namespace);
    let parameters = PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    }
    .validation_strict();
    let patch = Patch::Merge(json!({"spec": spec}));
    match leases.patch(name, &parameters, &patch).await {
        Ok(lease) => Ok(lease),
        Err(error) if is_not_found(&error) => Err(no_lease(cluster, name)),
        Err(error) => Err(failed(format!("change lease {name}"))(error)),
    }
}

fn no_lease(cluster: &Cluster, name: &str) -> ClusterError {
    NoLeaseSnafu {
        namespace: &cluster.namespace,
        name,
    }
    .build()
}

/// The lease with its new end.
async fn renewed(
    cluster: &Cluster,
    name: &str,
    ttl: Option<Duration>,
) -> Result<BranchLease, ClusterError> {
    let mut spec = json!({"renewTime": Timestamp::now().to_string()});
    if let Some(ttl) = ttl {
        spec["ttl"] = format!("{}s", ttl.as_secs()).into();
    }
    change(cluster, name, spec).await?;
    let leases = cluster.api(&cluster.namespace);
    let lease = settle(&leases, name, RENEWAL, is_answered).await?;
    match progress(&lease) {
        Progress::Finished(phase, why) => FinishedSnafu {
            name,
            phase: format!("{phase:?}"),
            why,
        }
        .fail(),
        _ => Ok(lease),
    }
}

async fn renew(
    cluster: &Cluster,
    global: &Global,
    name: &str,
    ttl: Option<Duration>,
) -> Result<(), CliError> {
    let lease = renewed(cluster, name, ttl).await?;
    crate::output::show(global.output, &lease, || {
        let left = crate::output::span(crate::output::now(), expires_at(&lease));
        format!("lease {name} renewed, expires in {left}\n")
    })
}

async fn reset(cluster: &Cluster, global: &Global, name: &str) -> Result<(), CliError> {
    let token = random(16);
    change(cluster, name, json!({"resetToken": token})).await?;
    let leases = cluster.api(&cluster.namespace);
    let lease = settle(&leases, name, RESET, |lease: &BranchLease| {
        let answered = lease
            .status
            .as_ref()
            .and_then(|status| status.observed_reset_token.as_ref());
        answered == Some(&token) || matches!(progress(lease), Progress::Finished(..))
    })
    .await?;
    if let Progress::Finished(phase, why) = progress(&lease) {
        return Err(FinishedSnafu {
            name,
            phase: format!("{phase:?}"),
            why,
        }
        .build()
        .into());
    }
    crate::output::show(global.output, &lease, || {
        let branch = lease
            .status
            .as_ref()
            .and_then(|status| status.branch.as_deref());
        format!(
            "lease {name} reset, now on branch {}\n",
            branch.unwrap_or("<unknown>")
        )
    })
}

/// Goes on after a failure, so that one wrong id does not keep the other branches.
async fn release(cluster: &Cluster, global: &Global, names: &[String]) -> Result<(), CliError> {
    if global.output.is_some() {
        let message = "there is nothing to print of a lease that is deleted; leave out --output";
        return UsageSnafu { message }.fail();
    }
    let leases: Api<BranchLease> = cluster.api(&cluster.namespace);
    let mut failures = 0_usize;
    for name in names {
        match leases.delete(name, &DeleteParams::default()).await {
            Ok(_) => crate::output::print(&format!("lease {name} released\n"))?,
            Err(error) => {
                failures += 1;
                let problem = if is_not_found(&error) {
                    no_lease(cluster, name)
                } else {
                    failed(format!("delete lease {name}"))(error)
                };
                eprintln!("error: {problem}");
            }
        }
    }
    if failures == 0 {
        return Ok(());
    }
    NotReleasedSnafu {
        failed: failures,
        all: names.len(),
    }
    .fail()
}

async fn psql(
    cluster: &Cluster,
    global: &Global,
    what: &str,
    wait: Duration,
    arguments: Vec<OsString>,
) -> Result<(), CliError> {
    let mut command = vec![OsString::from("psql")];
    command.extend(arguments);
    let mut signals = Signals::catch()?;
    if let Some(bound) = bound_lease(cluster, what).await? {
        let held = hold(cluster, bound).await?;
        return run::command_alone(&held, &command, &mut signals).await;
    }
    let neither = |why: String| NeitherLeaseNorPoolSnafu { what, why }.build();
    let pool = args::pool(what).map_err(neither)?;
    let (namespace, pool) = cluster.pool(&pool, global)?;
    let spec = this_user().map_or_else(|| json!({}), |holder| json!({"holder": holder}));
    let request = Request {
        namespace,
        name: new_id(&pool),
        pool,
        spec,
    };
    let bound = match obtain(cluster, &request, wait, &mut signals).await {
        Err(CliError::Cluster {
            source: source @ ClusterError::NoPool { .. },
        }) => return Err(neither(source.to_string())),
        result => result?,
    };
    let held = hold(cluster, bound).await?;
    run::with_lease(&held, None, &command, &mut signals).await
}

/// `None` when no lease has this name; an error when it is not bound.
async fn bound_lease(cluster: &Cluster, name: &str) -> Result<Option<BranchLease>, ClusterError> {
    if check::dns_label(name).is_err() {
        return Ok(None);
    }
    let leases: Api<BranchLease> = cluster.api(&cluster.namespace);
    let found = leases
        .get_opt(name)
        .await
        .map_err(failed(format!("read lease {name}")))?;
    let Some(lease) = found else {
        return Ok(None);
    };
    match progress(&lease) {
        Progress::Bound => Ok(Some(lease)),
        Progress::Finished(phase, why) => FinishedSnafu {
            name,
            phase: format!("{phase:?}"),
            why,
        }
        .fail(),
        Progress::Waiting(why) => NotBoundSnafu { name, why }.fail(),
        Progress::Unanswered => NotBoundSnafu {
            name,
            why: "the operator has not answered",
        }
        .fail(),
    }
}

async fn status(cluster: &Cluster, global: &Global) -> Result<(), CliError> {
    let nodes: Api<BranchNode> = Api::all(cluster.client.clone());
    let mut list = nodes
        .list(&ListParams::default())
        .await
        .map_err(failed("list nodes"))?;
    list.items.sort_by_key(ResourceExt::name_any);
    crate::output::show(global.output, &list, || output::nodes(&list.items))?;
    if list.items.iter().any(output::is_ready) {
        return Ok(());
    }
    Err(NoNodeReadySnafu.build().into())
}

fn expires_at(lease: &BranchLease) -> u64 {
    millis(
        lease
            .status
            .as_ref()
            .and_then(|status| status.expiration_time.as_ref()),
    )
}

async fn secret_of(cluster: &Cluster, lease: &BranchLease) -> Result<Secret, ClusterError> {
    let binding = lease
        .status
        .as_ref()
        .and_then(|status| status.binding.as_ref());
    let Some(binding) = binding else {
        return NoSecretSnafu {
            name: lease.name_any(),
        }
        .fail();
    };
    let namespace = lease
        .namespace()
        .unwrap_or_else(|| cluster.namespace.clone());
    let secrets: Api<Secret> = cluster.api(&namespace);
    secrets
        .get(&binding.name)
        .await
        .map_err(failed(format!("read Secret {}", binding.name)))
}

/// A bound lease with its credentials.
struct ClusterLease<'a> {
    cluster: &'a Cluster,
    lease: BranchLease,
    name: String,
    connection: Connection,
}

async fn hold(cluster: &Cluster, lease: BranchLease) -> Result<ClusterLease<'_>, ClusterError> {
    let connection = Connection::read(&secret_of(cluster, &lease).await?)?;
    Ok(ClusterLease {
        cluster,
        name: lease.name_any(),
        lease,
        connection,
    })
}

impl ClusterLease<'_> {
    /// In the lease's own namespace, which may be another than the context's.
    fn scoped(&self) -> Cluster {
        Cluster {
            client: self.cluster.client.clone(),
            namespace: self
                .lease
                .namespace()
                .unwrap_or_else(|| self.cluster.namespace.clone()),
            all_namespaces: false,
        }
    }
}

impl Held for ClusterLease<'_> {
    fn id(&self) -> &str {
        &self.name
    }

    fn variables(&self) -> Vec<(&'static str, String)> {
        self.connection.variables(&self.name)
    }

    fn bound_at(&self) -> u64 {
        millis(
            self.lease
                .status
                .as_ref()
                .and_then(|status| status.bound_time.as_ref()),
        )
    }

    fn expires_at(&self) -> u64 {
        expires_at(&self.lease)
    }

    async fn renew(&self, ttl: Option<Duration>) -> Result<u64, RenewError> {
        let renewed = renewed(&self.scoped(), &self.name, ttl).await;
        renewed
            .map(|lease| expires_at(&lease))
            .map_err(|error| RenewError {
                may_pass: error.may_pass() || matches!(error, ClusterError::NoAnswer { .. }),
                message: error.to_string(),
            })
    }

    async fn release(&self) -> Result<(), String> {
        let scoped = self.scoped();
        let leases: Api<BranchLease> = scoped.api(&scoped.namespace);
        let parameters = DeleteParams {
            preconditions: self.lease.uid().map(|uid| kube::api::Preconditions {
                uid: Some(uid),
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match leases.delete(&self.name, &parameters).await {
            Err(error) if !is_not_found(&error) => Err(failed("delete it")(error).to_string()),
            _ => Ok(()),
        }
    }
}
