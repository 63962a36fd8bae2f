//! The engine as the HTTP API sees it.

use std::{
    sync::{Arc, PoisonError},
    time::{Instant, UNIX_EPOCH},
};

use branchpool_agent_api::{
    Condition, DesiredPool, FieldError, Lease, LeasePhase, LeaseProbe, LeaseRequest, NodeStatus,
    PoolStatus, Problem, RenewRequest, ResetRequest, problem::reason,
};

use subtle::ConstantTimeEq;

use super::{Engine, Operator, desired, world::millis};
use crate::{
    http::{Service, Subscription},
    plan::{Answer, Command, LeaseUid, PoolUid, Refusal},
    sql::{Entered, Sql, SqlTarget},
    storage::ids::BranchId,
};

const SECOND: u64 = 1_000;

impl Refusal {
    /// CamelCase word for programs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::PoolNotFound { .. } | Self::PoolUidNotFound { .. } => reason::POOL_NOT_FOUND,
            Self::LeaseNotFound { .. } => reason::LEASE_NOT_FOUND,
            Self::LeaseConflict { .. } => "LeaseConflict",
            Self::LeaseEnded { .. } => "LeaseEnded",
            Self::StillBound { .. } => "StillBound",
            Self::NoBranchReady { .. } => reason::NO_BRANCH_READY,
            Self::TtlTooLong { .. } => reason::INVALID_FIELD,
            Self::LifetimeOver { .. } => "LifetimeOver",
            Self::TooManyLeases { .. } => "TooManyLeases",
            Self::StaleEpoch { .. } => reason::STALE_EPOCH,
            Self::StaleGeneration { .. } => "StaleGeneration",
            Self::NameTaken { .. } => "NameTaken",
            Self::Draining => "Draining",
            Self::JournalFailed { .. } => "JournalFailed",
        }
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        let word = refusal.reason();
        match refusal {
            Refusal::PoolNotFound { pool, known } => Problem::pool_not_found(&pool, &known),
            Refusal::PoolUidNotFound { pool } => Problem::new(
                404,
                word,
                format!("there is no pool with the uid {pool} on this node"),
            ),
            Refusal::LeaseNotFound { uid } => {
                Problem::new(404, word, format!("there is no lease {uid} on this node"))
            }
            Refusal::LeaseConflict { uid, pool } => Problem::new(
                409,
                word,
                format!("the lease {uid} exists and is of pool {pool}; choose another uid"),
            ),
            Refusal::LeaseEnded { uid, phase } => Problem::new(
                410,
                word,
                format!("the lease {uid} has ended ({phase:?}); take a new one, with another uid"),
            ),
            Refusal::StillBound { uid } => Problem::new(
                409,
                word,
                format!("the lease {uid} is bound; release it first"),
            ),
            Refusal::NoBranchReady {
                pool,
                why,
                retry_after,
            } => Problem::new(
                503,
                word,
                format!("no branch of pool {pool} is ready: {why}"),
            )
            .with_retry_after_ms(retry_after),
            Refusal::TtlTooLong { asked, most, field } => {
                Problem::invalid_fields(vec![FieldError::new(
                    field,
                    format!(
                        "{} s are asked for, and the pool's lease.maxTTL allows {} s; ask for less, or raise it",
                        asked / SECOND,
                        most / SECOND
                    ),
                )])
            }
            Refusal::LifetimeOver { uid, most } => Problem::new(
                409,
                word,
                format!(
                    "the lease {uid} has reached the pool's lease.maxLifetime of {} s; take a new one",
                    most / SECOND
                ),
            ),
            Refusal::TooManyLeases { most } => Problem::new(
                503,
                word,
                format!("the node knows {most} leases, which is the most; forget finished ones"),
            )
            .with_retry_after_ms(10 * SECOND),
            Refusal::StaleEpoch { given, current } => Problem::new(
                409,
                word,
                format!(
                    "the command is of epoch {given}, and a leader of epoch {current} has taken over"
                ),
            )
            .with_epoch(current),
            Refusal::StaleGeneration {
                pool,
                given,
                current,
            } => Problem::new(
                409,
                word,
                format!(
                    "generation {given} of pool {pool} is older than {current}, which is in force; read the pool again"
                ),
            ),
            Refusal::NameTaken { pool, by } => Problem::new(
                409,
                word,
                format!("pool {pool} is there already, with the uid {by}; remove that one first"),
            ),
            Refusal::Draining => Problem::new(
                503,
                word,
                "the agent is stopping; ask again when it has been started",
            )
            .with_retry_after_ms(2 * SECOND),
            Refusal::JournalFailed { detail } => Problem::new(
                503,
                word,
                format!(
                    "the change could not be journalled: {detail}; send the same request again"
                ),
            )
            .with_retry_after_ms(SECOND),
        }
    }
}

fn stopped() -> Problem {
    Problem::new(
        503,
        "Draining",
        "the agent has stopped; ask again when it has been started",
    )
    .with_retry_after_ms(2 * SECOND)
}

impl Engine {
    async fn ask_lease(&self, command: Command) -> Result<(Lease, bool), Problem> {
        let answer = self.ask(command, None).await.ok_or_else(stopped)??;
        match *answer {
            Answer::Lease {
                uid,
                lease,
                created,
            } => {
                let socket = self.world.layout.endpoint(&lease.endpoint);
                let socket = socket.display().to_string();
                let lease = lease.view(&uid.0, &socket, self.world.addresses.reach());
                Ok((self.with_password(lease), created))
            }
            other => Err(unexpected(&other)),
        }
    }

    fn with_password(&self, lease: Lease) -> Lease {
        if lease.phase != LeasePhase::Bound {
            return lease;
        }
        let endpoint = lease.endpoint.parse().ok();
        let password = endpoint.and_then(|endpoint| self.world.addresses.password(&endpoint));
        match password {
            Some(password) => Lease {
                ca: self.world.authority.get().cloned(),
                ..lease.with_password(password)
            },
            None => lease,
        }
    }

    /// Filled in when asked for: in the watch it would be a change with each byte.
    fn with_activity(&self, lease: Lease) -> Lease {
        if lease.phase != LeasePhase::Bound {
            return lease;
        }
        let branch = lease.branch.parse().ok();
        let activity = branch.and_then(|branch| self.world.addresses.activity(&branch));
        let Some(activity) = activity else {
            return lease;
        };
        let last = activity.last_client_byte.map(|time| {
            let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            millis(since)
        });
        Lease {
            connections: Some(u32::try_from(activity.connections).unwrap_or(u32::MAX)),
            last_used_at: last,
            ..lease
        }
    }

    /// The lease's branch, and where its server is; refused unless the lease is bound.
    fn target_of(&self, uid: &str) -> Result<(BranchId, SqlTarget), Problem> {
        let uid = LeaseUid(uid.to_owned());
        let Some(lease) = self.log.known_lease(&uid.0) else {
            return Err(Refusal::LeaseNotFound { uid }.into());
        };
        if lease.phase != LeasePhase::Bound {
            let phase = lease.phase;
            return Err(Refusal::LeaseEnded { uid, phase }.into());
        }
        let branch = lease.branch.parse::<BranchId>();
        let branch = branch.map_err(|error| Problem::new(500, "Unexpected", error.to_string()))?;
        let suffix = format!(".{}", lease.endpoint);
        let role = lease.user.strip_suffix(&suffix).unwrap_or(&lease.user);
        let target = SqlTarget {
            socket_dir: self.world.layout.branch_socket_dir(&branch),
            role: role.to_owned(),
            database: lease.database,
        };
        Ok((branch, target))
    }
}

fn lease_probe(lease: Lease) -> Option<LeaseProbe> {
    Some(LeaseProbe {
        connections: lease.connections?,
        last_used_at: lease.last_used_at,
        uid: lease.uid,
        pool: lease.pool,
    })
}

fn unexpected(answer: &Answer) -> Problem {
    Problem::new(
        500,
        "Unexpected",
        format!("the core gave another answer than was asked for: {answer:?}"),
    )
}

impl Service for Engine {
    async fn lease(&self, uid: String, request: LeaseRequest) -> Result<(Lease, bool), Problem> {
        let started = Instant::now();
        let _waiting = self.world.hand_outs.enter();
        let answer = self
            .ask_lease(Command::Lease {
                uid: LeaseUid(uid),
                pool: request.pool,
                ttl: request.ttl_seconds.map(|seconds| seconds * SECOND),
                holder: request.holder,
                epoch: request.epoch,
            })
            .await?;
        self.world
            .metrics
            .handout
            .observe(started.elapsed().as_secs_f64());
        if answer.1 {
            self.world.metrics.handed_out.inc();
        }
        Ok(answer)
    }

    async fn renew(&self, uid: String, request: RenewRequest) -> Result<Lease, Problem> {
        let ttl = request.ttl_seconds.map(|seconds| seconds * SECOND);
        let command = Command::Renew {
            uid: LeaseUid(uid),
            ttl,
            epoch: request.epoch,
        };
        Ok(self.ask_lease(command).await?.0)
    }

    async fn reset(&self, uid: String, request: ResetRequest) -> Result<Lease, Problem> {
        let command = Command::Reset {
            uid: LeaseUid(uid),
            reset_token: request.token,
            epoch: request.epoch,
        };
        Ok(self.ask_lease(command).await?.0)
    }

    async fn release(&self, uid: String, epoch: Option<u64>) -> Result<Lease, Problem> {
        let command = Command::Release {
            uid: LeaseUid(uid),
            epoch,
        };
        Ok(self.ask_lease(command).await?.0)
    }

    async fn forget(&self, uid: String, epoch: Option<u64>) -> Result<(), Problem> {
        let command = Command::Forget {
            uid: LeaseUid(uid),
            epoch,
        };
        self.ask(command, None).await.ok_or_else(stopped)??;
        Ok(())
    }

    fn get_lease(&self, uid: &str) -> Option<Lease> {
        let lease = self.log.known_lease(uid)?;
        Some(self.with_password(self.with_activity(lease)))
    }

    fn leases(&self) -> Vec<Lease> {
        let leases = self.log.known_leases().into_iter();
        leases.map(|lease| self.with_activity(lease)).collect()
    }

    fn pools(&self) -> Vec<PoolStatus> {
        self.log.known_pools()
    }

    fn node(&self) -> NodeStatus {
        let mut node = self.log.known_node();
        node.space = self.world.sample().space;
        let leases = self.leases().into_iter();
        node.lease_activity = leases.filter_map(lease_probe).collect();
        (node.read_queries, node.write_queries) = self.sql.probes();
        node.journal_pending = u32::try_from(self.world.committer.pending()).unwrap_or(u32::MAX);
        let manifests = self
            .manifests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(message) = manifests {
            node.conditions
                .push(Condition::new("Manifests", false, "Refused", &message));
        }
        if let Some(certified) = self.certified(&node) {
            let condition = match certified {
                Ok(()) => Condition::new("Certified", true, "Enrolled", "the operator can call"),
                Err(why) => Condition::new("Certified", false, "NotEnrolled", &why),
            };
            node.conditions.push(condition);
        }
        node
    }

    fn sql(&self) -> &Sql {
        &self.sql
    }

    fn sql_target(&self, uid: &str) -> Result<SqlTarget, Problem> {
        self.target_of(uid).map(|(_, target)| target)
    }

    async fn sql_enter(&self, uid: &str) -> Result<Entered, Problem> {
        let (branch, target) = self.target_of(uid)?;
        match self.world.addresses.enter(&branch).await {
            Ok(guest) => Ok(Entered { target, guest }),
            Err(why) => {
                // Unless the lease itself has ended meanwhile.
                self.target_of(uid)?;
                let detail = format!("{why}; ask again");
                Err(Problem::new(503, "ServerUnavailable", detail).with_retry_after_ms(SECOND))
            }
        }
    }

    fn sql_login(&self, user: &str, password: &str) -> Option<String> {
        // The same work for whoever is not known.
        let endpoint = user.rsplit_once('.')?.1.parse().ok()?;
        let expected = self.world.addresses.password(&endpoint)?;
        if !bool::from(expected.as_bytes().ct_eq(password.as_bytes())) {
            return None;
        }
        let is_theirs = |lease: &Lease| lease.phase == LeasePhase::Bound && lease.user == user;
        self.log.find_lease(is_theirs).map(|lease| lease.uid)
    }

    async fn apply_pool(&self, uid: String, desired: DesiredPool) -> Result<PoolStatus, Problem> {
        let uid: PoolUid = uid.parse().map_err(|error: crate::storage::ids::Error| {
            Problem::invalid_field("uid", error.to_string())
        })?;
        let (spec, settings) = desired::convert(&uid, &desired, &self.abilities)?;
        let body = serde_json::to_value(&desired)
            .map_err(|error| Problem::new(500, "Encoding", error.to_string()))?;
        let command = Command::Apply {
            spec: Box::new(spec),
            body,
            epoch: desired.epoch,
        };
        let answer = self.ask(command, Some(Arc::new(settings))).await;
        match *answer.ok_or_else(stopped)?? {
            Answer::Pool(status) => Ok(*status),
            other => Err(unexpected(&other)),
        }
    }

    async fn remove_pool(&self, uid: String, epoch: Option<u64>) -> Result<(), Problem> {
        let pool: PoolUid = uid.parse().map_err(|error: crate::storage::ids::Error| {
            Problem::invalid_field("uid", error.to_string())
        })?;
        self.ask(Command::Remove { pool, epoch }, None)
            .await
            .ok_or_else(stopped)??;
        Ok(())
    }

    fn subscribe(&self, since: Option<(String, u64)>) -> Result<Subscription, Problem> {
        self.log.subscribe(since)
    }

    fn metrics(&self) -> String {
        let space = self.world.sample().space;
        self.world.metrics.set_space(&[
            ("total", space.total),
            ("used", space.used),
            ("free", space.free),
            ("unallocated", space.unallocated),
            ("metadata_free", space.metadata_free),
        ]);
        self.sql.metrics().set_queues(self.sql.probes());
        let pending = self.world.committer.pending();
        self.world
            .metrics
            .journal_pending
            .set(i64::try_from(pending).unwrap_or(i64::MAX));
        self.world.metrics.text()
    }

    fn readiness(&self) -> Result<(), String> {
        let node = self.log.known_node();
        if !node.ready {
            return Err("the agent is stopping".to_owned());
        }
        self.certified(&node).unwrap_or(Ok(()))
    }
}

impl Engine {
    /// Whether the operator can call; `None` where there is no operator.
    fn certified(&self, node: &NodeStatus) -> Option<Result<(), String>> {
        let operator = self.operator.lock().unwrap_or_else(PoisonError::into_inner);
        let Operator::Known { problem } = &*operator else {
            return None;
        };
        let now = self.world.clock.now().wall;
        let state = match &node.trust {
            Some(trust) if now < trust.expires_at => return Some(Ok(())),
            Some(_) => "the certificate of the operator has expired",
            None => "the operator has issued no certificate yet",
        };
        let why = problem.as_deref().unwrap_or("it has not been asked");
        Some(Err(format!("{state}: {why}")))
    }
}
