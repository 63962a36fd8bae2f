//! The verbs against a standalone agent.

mod obtain;

use std::{ffi::OsString, fs, time::Duration};

use branchpool_agent_api::{
    Client, ClientError, Lease, LeaseList, LeasePhase, LeaseRequest, PoolList, PoolName,
    RenewRequest, ResetRequest, Target, check, problem::reason,
};
use snafu::ResultExt;

use self::obtain::{obtain, pool_not_found};
use crate::{
    args::{self, Command, Global, PoolArg},
    environment,
    error::{
        CliError, FinishedSnafu, NeitherLeaseNorPoolSnafu, NotReleasedSnafu, TokenFileSnafu,
        UsageSnafu,
    },
    names::{new_id, random, this_user},
    output,
    run::{self, Held, RenewError},
    signals::Signals,
};

pub(crate) async fn execute(
    target: Target,
    global: &Global,
    command: Command,
) -> Result<(), CliError> {
    let client = client(target, global)?;
    match command {
        Command::Pools { name: None } => pools(&client, global).await,
        Command::Pools { name: Some(pool) } => one_pool(&client, global, &pool).await,
        Command::Lease(lease_args) => lease(&client, global, lease_args).await,
        Command::Ls => list(&client, global).await,
        Command::Renew { id, ttl } => renew(&client, global, &id, ttl).await,
        Command::Reset { id } => reset(&client, global, &id).await,
        Command::Release { ids } => release(&client, global, &ids).await,
        Command::Psql {
            what,
            wait,
            arguments,
        } => psql(&client, global, &what, wait.wait, arguments).await,
        Command::Status => {
            let node = client.node().await?;
            output::show(global.output, &node, || output::node(&node))
        }
        Command::Completion { .. } => Ok(()),
    }
}

fn client(target: Target, global: &Global) -> Result<Client, CliError> {
    let Some(path) = &global.token_file else {
        return Ok(Client::new(target));
    };
    let token = fs::read_to_string(path).context(TokenFileSnafu { path })?;
    Ok(Client::with_token(target, token.trim())?)
}

/// A lease, and the agent that it is of.
struct AgentLease<'a> {
    client: &'a Client,
    lease: Lease,
}

impl Held for AgentLease<'_> {
    fn id(&self) -> &str {
        &self.lease.uid
    }

    fn variables(&self) -> Vec<(&'static str, String)> {
        environment::of(&self.lease)
    }

    fn bound_at(&self) -> u64 {
        self.lease.bound_at
    }

    fn expires_at(&self) -> u64 {
        self.lease.expires_at
    }

    async fn renew(&self, ttl: Option<Duration>) -> Result<u64, RenewError> {
        let request = RenewRequest {
            ttl_seconds: ttl.map(|ttl| ttl.as_secs()),
            epoch: None,
        };
        let renewed = self.client.renew(&self.lease.uid, &request).await;
        renewed
            .map(|lease| lease.expires_at)
            .map_err(|error| RenewError {
                may_pass: error.is_transport(),
                message: error.to_string(),
            })
    }

    async fn release(&self) -> Result<(), String> {
        let released: Result<Lease, ClientError> = self.client.release(&self.lease.uid, None).await;
        released.map(drop).map_err(|error| error.to_string())
    }
}

async fn pools(client: &Client, global: &Global) -> Result<(), CliError> {
    let mut pools = client.pools().await?;
    pools.retain(|pool| is_wanted(global, &pool.name));
    pools.sort_by(|one, other| one.name.cmp(&other.name));
    let list = PoolList { pools };
    output::show(global.output, &list, || output::pools(&list.pools))
}

async fn one_pool(client: &Client, global: &Global, pool: &PoolArg) -> Result<(), CliError> {
    let name = resolve(pool, global)?;
    match client.pool(&name).await {
        Ok(pool) => output::show(global.output, &pool, || output::pool(&pool)),
        Err(error) if error.is(reason::POOL_NOT_FOUND) => Err(pool_not_found(client, &name).await),
        Err(error) => Err(error.into()),
    }
}

async fn lease(client: &Client, global: &Global, args: args::Lease) -> Result<(), CliError> {
    if args.priority.is_some() {
        let message =
            "a standalone agent has no queue, so there is no priority; leave out --priority";
        return UsageSnafu { message }.fail();
    }
    let pool = resolve(&args.pool, global)?;
    let id = args.id.unwrap_or_else(|| new_id(&pool.name));
    let request = LeaseRequest {
        pool,
        ttl_seconds: args.ttl.map(|ttl| ttl.as_secs()),
        holder: args.holder.or_else(this_user),
        epoch: None,
    };
    let mut signals = Signals::catch()?;
    let lease = obtain(client, &id, &request, args.wait.wait, &mut signals).await?;
    if args.command.is_empty() {
        return output::show(global.output, &lease, || {
            format!("{}\n{}\n", lease.uri, lease.uid)
        });
    }
    let held = AgentLease { client, lease };
    run::with_lease(&held, args.ttl, &args.command, &mut signals).await
}

async fn list(client: &Client, global: &Global) -> Result<(), CliError> {
    let mut leases = client.leases().await?;
    leases.retain(|lease| is_wanted(global, &lease.pool));
    leases.sort_by(|one, other| (one.bound_at, &one.uid).cmp(&(other.bound_at, &other.uid)));
    let list = LeaseList { leases };
    output::show(global.output, &list, || {
        output::agent_leases(&list.leases, output::now())
    })
}

async fn renew(
    client: &Client,
    global: &Global,
    id: &str,
    ttl: Option<Duration>,
) -> Result<(), CliError> {
    let request = RenewRequest {
        ttl_seconds: ttl.map(|ttl| ttl.as_secs()),
        epoch: None,
    };
    let lease = client.renew(id, &request).await?;
    output::show(global.output, &lease, || {
        let left = output::span(output::now(), lease.expires_at);
        format!("lease {id} renewed, expires in {left}\n")
    })
}

async fn reset(client: &Client, global: &Global, id: &str) -> Result<(), CliError> {
    let request = ResetRequest {
        token: random(16),
        epoch: None,
    };
    let lease = client.reset(id, &request).await?;
    output::show(global.output, &lease, || {
        format!("lease {id} reset, now on branch {}\n", lease.branch)
    })
}

/// Goes on after a failure, so that one wrong id does not keep the other branches.
async fn release(client: &Client, global: &Global, ids: &[String]) -> Result<(), CliError> {
    let mut leases = Vec::new();
    for id in ids {
        match client.release(id, None).await {
            Ok(lease) => {
                if global.output.is_none() {
                    output::print(&format!("lease {id} released\n"))?;
                }
                leases.push(lease);
            }
            Err(error) => eprintln!("error: {error}"),
        }
    }
    let failed = ids.len() - leases.len();
    if let Some(format) = global.output {
        output::print(&output::formatted(format, &LeaseList { leases })?)?;
    }
    if failed == 0 {
        return Ok(());
    }
    NotReleasedSnafu {
        failed,
        all: ids.len(),
    }
    .fail()
}

async fn psql(
    client: &Client,
    global: &Global,
    what: &str,
    wait: Duration,
    arguments: Vec<OsString>,
) -> Result<(), CliError> {
    let mut command = vec![OsString::from("psql")];
    command.extend(arguments);
    let mut signals = Signals::catch()?;
    if let Some(lease) = bound_lease(client, what).await? {
        return run::command_alone(&AgentLease { client, lease }, &command, &mut signals).await;
    }
    let neither = |why: String| NeitherLeaseNorPoolSnafu { what, why }.build();
    let pool = args::pool(what).map_err(neither)?;
    let pool = resolve(&pool, global)?;
    let id = new_id(&pool.name);
    let request = LeaseRequest {
        pool,
        ttl_seconds: None,
        holder: this_user(),
        epoch: None,
    };
    let lease = match obtain(client, &id, &request, wait, &mut signals).await {
        Err(CliError::Agent { source }) if source.is(reason::POOL_NOT_FOUND) => {
            return Err(neither(source.to_string()));
        }
        result => result?,
    };
    run::with_lease(&AgentLease { client, lease }, None, &command, &mut signals).await
}

/// `None` when no lease has this id; an error when it has ended.
async fn bound_lease(client: &Client, id: &str) -> Result<Option<Lease>, CliError> {
    if check::uid(id).is_err() {
        return Ok(None);
    }
    match client.get_lease(id).await {
        Ok(lease) if lease.phase == LeasePhase::Bound => Ok(Some(lease)),
        Ok(lease) => FinishedSnafu {
            id,
            phase: lease.phase,
        }
        .fail(),
        Err(error) if error.is(reason::LEASE_NOT_FOUND) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn resolve(pool: &PoolArg, global: &Global) -> Result<PoolName, CliError> {
    pool.resolve(global.namespace.as_deref(), PoolName::DEFAULT_NAMESPACE)
        .map_err(|message| UsageSnafu { message }.build())
}

fn is_wanted(global: &Global, pool: &PoolName) -> bool {
    let namespace = global.namespace.as_ref();
    namespace.is_none_or(|namespace| *namespace == pool.namespace)
}
