//! SQL over HTTP: a request's statements run in a session of their own on a lease's branch, and the answer
//! is JSON. Bounded are the time, the size of the answer, and how many run and wait.

mod address;
mod answer;
mod classify;
mod gate;
mod metrics;
mod params;
mod wire;

use std::{path::PathBuf, sync::Arc, time::Duration};

use branchpool_agent_api::{Problem, QueueProbe, SqlError, problem::reason};
use branchpool_gateway::Guest;
use tokio::{
    sync::oneshot,
    time::{Instant, timeout, timeout_at},
};

pub use self::{
    address::{Address, parse as parse_address},
    answer::{Shape, TooLong},
    classify::{Kind, classify},
    gate::Admission,
    metrics::Metrics,
    params::text as parameter,
};
use self::{
    answer::Answer,
    gate::{Gate, Place},
    wire::Wire,
};
use crate::postgres::session::Startup;

/// How long a server may take to open a session.
const OPENING: Duration = Duration::from_secs(10);
const RETRY_AFTER_MS: u64 = 500;
/// What a session is called in `pg_stat_activity` when its client does not say.
const APPLICATION: &str = "branchpool-sql";

/// Bounds of SQL over HTTP.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Read queries at a time.
    pub reads: u32,
    /// Write queries at a time.
    pub writes: u32,
    /// Queries that may wait, of each kind.
    pub queue: u32,
    /// Longest wait in a queue.
    pub queue_wait: Duration,
    /// Queries of one lease that run or wait.
    pub per_lease: u32,
    /// Time of requests that do not say.
    pub timeout: Duration,
    /// Most time that a request may ask for.
    pub max_timeout: Duration,
    /// Bytes of a request's body.
    pub body: usize,
    /// Bytes of an answer.
    pub result: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            reads: 16,
            writes: 8,
            queue: 64,
            queue_wait: Duration::from_secs(10),
            per_lease: 8,
            timeout: Duration::from_secs(30),
            max_timeout: Duration::from_secs(600),
            body: 8 << 20,
            result: 10 << 20,
        }
    }
}

/// Where a lease's queries go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SqlTarget {
    /// Holds the server's Unix socket.
    pub socket_dir: PathBuf,
    /// Whom the server takes this process for.
    pub role: String,
    /// Of requests that name none.
    pub database: String,
}

/// A target that a query has been let in to.
#[derive(Debug)]
pub struct Entered {
    pub target: SqlTarget,
    /// On a node with a gateway.
    pub guest: Option<Guest>,
}

/// One statement, with its parameters as Postgres reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    pub sql: String,
    /// `None` is NULL.
    pub params: Vec<Option<String>>,
    pub array_mode: bool,
}

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    One {
        statement: Statement,
        read_only: bool,
    },
    /// All in one transaction, or none.
    Batch {
        statements: Vec<Statement>,
        transaction: Transaction,
    },
}

/// How a batch's transaction begins; `None` is the database's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transaction {
    pub isolation: Option<Isolation>,
    pub read_only: bool,
    pub deferrable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    ReadUncommitted,
    ReadCommitted,
    RepeatableRead,
    Serializable,
}

impl Transaction {
    fn begin(self) -> String {
        let mut sql = "BEGIN".to_owned();
        if let Some(isolation) = self.isolation {
            sql += " ISOLATION LEVEL ";
            sql += match isolation {
                Isolation::ReadUncommitted => "READ UNCOMMITTED",
                Isolation::ReadCommitted => "READ COMMITTED",
                Isolation::RepeatableRead => "REPEATABLE READ",
                Isolation::Serializable => "SERIALIZABLE",
            };
        }
        if self.read_only {
            sql += " READ ONLY";
        }
        if self.deferrable {
            sql += " DEFERRABLE";
        }
        sql
    }
}

impl Work {
    fn kind(&self) -> Kind {
        let (statements, read_only) = match self {
            Self::One {
                statement,
                read_only,
            } => (std::slice::from_ref(statement), *read_only),
            Self::Batch {
                statements,
                transaction,
            } => (&**statements, transaction.read_only),
        };
        let all_read = || {
            statements
                .iter()
                .all(|statement| classify(&statement.sql) == Kind::Read)
        };
        if read_only || all_read() {
            Kind::Read
        } else {
            Kind::Write
        }
    }
}

/// A request that has been understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    pub work: Work,
    pub shape: Shape,
    /// `None`: the lease's.
    pub database: Option<String>,
    /// Startup parameters of the session.
    pub parameters: Vec<(String, String)>,
    /// From when the session is asked for to the end of the last statement.
    pub timeout: Duration,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    Postgres(Box<SqlError>),
    /// Neon's door cannot read the request.
    Malformed {
        message: String,
    },
    /// Neon's door knows no such user with such a password.
    Denied {
        user: String,
    },
    /// The agent refuses, or has no room now.
    Refused(Box<Problem>),
    TimedOut {
        after: Duration,
    },
    TooLong,
    Copy,
    /// No session can be had at present.
    Unreachable {
        detail: String,
    },
    /// The lease has ended or got another branch meanwhile.
    Ended,
    /// The server ended the session without a word.
    Lost,
}

impl From<TooLong> for Failure {
    fn from(_: TooLong) -> Self {
        Self::TooLong
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self::Refused(Box::new(problem))
    }
}

impl Failure {
    /// As Postgres would report it, or, where the query was not tried, as a problem.
    pub fn into_error(self, limits: &Limits) -> Result<SqlError, Problem> {
        Ok(match self {
            Self::Postgres(error) => *error,
            Self::Malformed { message } => SqlError::new("08P01", message),
            Self::Denied { user } => SqlError {
                severity: Some("FATAL".to_owned()),
                ..SqlError::new(
                    "28P01",
                    format!("password authentication failed for user \"{user}\""),
                )
            },
            Self::Refused(problem) => return Err(*problem),
            Self::Unreachable { detail } => {
                let detail = format!("the lease's server gives no session now: {detail}");
                return Err(Problem::new(503, "ServerUnavailable", detail)
                    .with_retry_after_ms(RETRY_AFTER_MS));
            }
            Self::TimedOut { after } => SqlError {
                detail: Some(format!("The request had {} ms.", after.as_millis())),
                ..SqlError::new("57014", "canceling statement due to statement timeout")
            },
            Self::TooLong => SqlError {
                hint: Some("Select less, or page with LIMIT.".to_owned()),
                ..SqlError::new(
                    "54000",
                    format!("the result is larger than {} bytes", limits.result),
                )
            },
            Self::Copy => SqlError {
                hint: Some("Use a Postgres driver for COPY.".to_owned()),
                ..SqlError::new("0A000", "COPY from and to the client does not go over HTTP")
            },
            Self::Ended => SqlError::new(
                "57P01",
                "terminating connection due to administrator command",
            ),
            Self::Lost => SqlError::new("08006", "the server ended the session"),
        })
    }

    /// As `POST /v1/leases/{uid}/sql` answers it.
    pub fn into_problem(self, limits: &Limits) -> Problem {
        match self.into_error(limits) {
            Ok(error) => Problem {
                postgres: Some(Box::new(error.clone())),
                ..Problem::new(400, reason::POSTGRES_ERROR, error.message)
            },
            Err(problem) => problem,
        }
    }
}

/// Runs requests within the limits. Clones share them.
#[derive(Clone, Debug)]
pub struct Sql {
    limits: Limits,
    gate: Arc<Gate>,
    metrics: Metrics,
}

impl Sql {
    pub fn new(limits: Limits) -> Self {
        Self {
            gate: Arc::new(Gate::new(&limits)),
            metrics: Metrics::default(),
            limits,
        }
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Depth of the queues for reads and for writes.
    pub fn probes(&self) -> (QueueProbe, QueueProbe) {
        self.gate.probes()
    }

    /// To be held from before a request's body is read until its answer is on its way. 503 when too many
    /// are there.
    pub fn admit(&self) -> Result<Admission, Problem> {
        self.gate.admit()
    }

    /// The answer's JSON. `entered` is asked once the job's turn has come, for a lease may end or be reset
    /// while it waits. A future that is dropped cancels the job.
    pub async fn run(
        &self,
        lease: &str,
        job: Job,
        entered: impl Future<Output = Result<Entered, Problem>>,
    ) -> Result<Vec<u8>, Failure> {
        let (kind, started) = (job.work.kind(), Instant::now());
        let place = self.gate.enter(lease, kind).await?;
        let entered = entered.await?;
        let (sender, answer) = oneshot::channel();
        tokio::spawn(serve(job, entered, self.limits.result, sender, place));
        // Only the branch's end leaves it unanswered.
        let answer = answer.await.unwrap_or(Err(Failure::Ended));
        self.metrics.ran(kind, started.into_std());
        answer
    }
}

type Outcome = Result<Vec<u8>, Failure>;

/// Serves the job until that is done, or the branch ends.
async fn serve(
    job: Job,
    Entered { target, guest }: Entered,
    limit: usize,
    sender: oneshot::Sender<Outcome>,
    _place: Place,
) {
    match &guest {
        Some(guest) => tokio::select! {
            () = converse(job, target, limit, sender) => {}
            // Its server goes as well, so nothing is left to be cancelled.
            () = guest.ended() => {}
        },
        None => converse(job, target, limit, sender).await,
    }
}

/// Answers, then ends the session.
async fn converse(job: Job, target: SqlTarget, limit: usize, mut sender: oneshot::Sender<Outcome>) {
    let deadline = Instant::now() + job.timeout;
    let startup = startup(&job, &target);
    let opening = timeout(
        OPENING.min(job.timeout),
        Wire::open(target.socket_dir, startup),
    );
    let opened = tokio::select! {
        opened = opening => opened,
        () = sender.closed() => return,
    };
    let mut wire = match opened {
        Ok(Ok(wire)) => wire,
        Ok(Err(failure)) => return answer(sender, Err(failure)),
        Err(_) => {
            let detail = "it does not answer in time".to_owned();
            return answer(sender, Err(Failure::Unreachable { detail }));
        }
    };
    let outcome = tokio::select! {
        outcome = timeout_at(deadline, perform(&job, &mut wire, limit)) => outcome,
        () = sender.closed() => return wire.abort().await,
    };
    match outcome {
        Ok(result @ (Ok(_) | Err(Failure::Postgres(_)))) => {
            answer(sender, result);
            wire.close().await;
        }
        Ok(Err(failure)) => {
            answer(sender, Err(failure));
            wire.abort().await;
        }
        Err(_) => {
            // The answer says that nothing goes on, so it waits for that.
            wire.abort().await;
            let after = job.timeout;
            answer(sender, Err(Failure::TimedOut { after }));
        }
    }
}

fn answer(sender: oneshot::Sender<Outcome>, outcome: Outcome) {
    let _caller_is_gone = sender.send(outcome);
}

fn startup(job: &Job, target: &SqlTarget) -> Startup {
    let mut parameters = vec![("client_encoding".to_owned(), "UTF8".to_owned())];
    parameters.extend(job.parameters.iter().cloned());
    if !parameters
        .iter()
        .any(|(name, _)| name == "application_name")
    {
        parameters.push(("application_name".to_owned(), APPLICATION.to_owned()));
    }
    Startup {
        user: target.role.clone(),
        database: job.database.clone().unwrap_or(target.database.clone()),
        parameters,
    }
}

async fn perform(job: &Job, wire: &mut Wire, limit: usize) -> Outcome {
    let mut answer = Answer::new(job.shape, limit);
    match &job.work {
        Work::One {
            statement,
            read_only: false,
        } => wire.run(statement, &mut answer).await?,
        Work::One {
            statement,
            read_only: true,
        } => {
            wire.command("BEGIN READ ONLY").await?;
            wire.run(statement, &mut answer).await?;
            wire.command("COMMIT").await?;
        }
        Work::Batch {
            statements,
            transaction,
        } => {
            // A failure ends the session, and with it the transaction.
            wire.command(&transaction.begin()).await?;
            answer.frame("{\"results\":[")?;
            for (index, statement) in statements.iter().enumerate() {
                if index > 0 {
                    answer.frame(",")?;
                }
                wire.run(statement, &mut answer).await?;
            }
            answer.frame("]}")?;
            wire.command("COMMIT").await?;
        }
    }
    Ok(answer.into_bytes())
}
