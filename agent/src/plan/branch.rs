//! A branch and its life: `Snapshotting → Starting → Preconnecting → Ready → Leased → Stopping →
//! tombstone → gone`, from any step to `Quarantined`.

use super::{BranchRecord, LeaseUid, Millis, PoolUid, Slot, Stage, StopMode, backoff};
use crate::storage::ids::{BranchId, EndpointId};

/// A server that ran this long after its restart was healthy.
const GOOD_RUN: Millis = 60_000;

/// Why a step failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// CamelCase word for programs.
    pub reason: String,
    /// What failed, with what, and what to do.
    pub message: String,
}

/// What becomes of a branch once its server is down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum After {
    /// It is renamed into the trash.
    Trash,
    /// It stays where it is, for people to look at.
    Quarantine(Failure),
    /// It is leased and waits for the agent's next start.
    Park,
}

/// The server behind a leased branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Server {
    Running,
    /// Down; the next attempt is due at the time given.
    Down {
        failures: u32,
        retry_at: Millis,
    },
    Restarting {
        failures: u32,
    },
    /// Being stopped, since nobody uses it.
    Suspending,
    /// Stopped cleanly until somebody wants it.
    Suspended,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    Snapshotting,
    /// On disk, waits for its start.
    Snapshotted,
    Starting,
    /// Running, waits for its session.
    Started,
    Preconnecting,
    Ready,
    Leased {
        lease: LeaseUid,
        server: Server,
    },
    /// Waits for a cleanup worker until `due`, or has one.
    Stopping {
        after: After,
        mode: StopMode,
        due: Millis,
        working: bool,
        failures: u32,
    },
    /// Its server was stopped cleanly for a restart of the agent.
    Parked {
        lease: LeaseUid,
    },
    Quarantined(Failure),
}

impl State {
    /// Leased, and without a running server.
    pub(super) fn is_down(&self) -> bool {
        match self {
            Self::Leased { server, .. } => *server != Server::Running,
            _ => false,
        }
    }
}

/// Ends that came between the success of a step and the news of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Meanwhile {
    pub(super) server_exited: Option<String>,
    pub(super) session_closed: bool,
    /// Somebody came for a server that was being suspended.
    pub(super) wanted: bool,
}

/// One branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch {
    pub id: BranchId,
    pub pool: PoolUid,
    /// Golden image it was made from.
    pub generation: u64,
    /// Settings that its server was started with.
    pub settings_key: String,
    pub slot: Slot,
    /// The address it is handed out under.
    pub endpoint: EndpointId,
    /// Order of creation on this node: the oldest ready branch goes first.
    pub serial: u64,
    pub created: Millis,
    pub state: State,
    /// What it is to become when the step under way ends.
    pub(super) retire: Option<(After, StopMode)>,
    /// What ended while a step was under way, whose own end may say that all went well.
    pub(super) meanwhile: Meanwhile,
    /// When its server was last started again after its hand-over.
    pub(super) restarted: Option<Millis>,
    /// Deaths in a row of servers that had just been started again.
    pub(super) early_deaths: u32,
    /// Its restart is no repair: somebody wanted it.
    pub(super) waking: bool,
    /// When it was last known to be used.
    pub(super) used_at: Millis,
    /// When that is to be looked at again.
    pub(super) idle_look: Option<Millis>,
}

impl Branch {
    /// In the making: counts against the deficit.
    pub fn is_warming(&self) -> bool {
        matches!(
            self.state,
            State::Snapshotting
                | State::Snapshotted
                | State::Starting
                | State::Started
                | State::Preconnecting
        )
    }

    /// An action for it is under way, so it must not be touched until that ends.
    pub(super) fn is_busy(&self) -> bool {
        match &self.state {
            State::Snapshotting | State::Starting | State::Preconnecting => true,
            State::Leased { server, .. } => {
                matches!(server, Server::Restarting { .. } | Server::Suspending)
            }
            State::Stopping { working, .. } => *working,
            _ => false,
        }
    }

    /// What follows from the death of its server while it is leased: the first restart is due at
    /// once.
    pub(super) fn down(&mut self, now: Millis) -> Server {
        let is_early = |at: Millis| now.saturating_sub(at) < GOOD_RUN;
        self.early_deaths = match self.restarted {
            Some(at) if is_early(at) => self.early_deaths.saturating_add(1),
            _ => 0,
        };
        let wait = match self.early_deaths {
            0 => 0,
            deaths => backoff::RESTART.after(deaths),
        };
        Server::Down {
            failures: self.early_deaths,
            retry_at: now.saturating_add(wait),
        }
    }

    /// As the journal has it.
    pub fn record(&self) -> BranchRecord {
        let stage = match &self.state {
            State::Snapshotting
            | State::Snapshotted
            | State::Starting
            | State::Started
            | State::Preconnecting
            | State::Ready => Stage::Warming,
            State::Leased { lease, server } => Stage::Leased {
                lease: lease.clone(),
                parked: *server == Server::Suspended,
                suspended: *server == Server::Suspended,
            },
            State::Parked { lease } => Stage::Leased {
                lease: lease.clone(),
                parked: true,
                suspended: false,
            },
            State::Stopping { .. } => Stage::Stopping,
            State::Quarantined(failure) => Stage::Quarantined {
                reason: failure.reason.clone(),
                message: failure.message.clone(),
            },
        };
        BranchRecord {
            pool: self.pool.clone(),
            generation: self.generation,
            settings_key: self.settings_key.clone(),
            slot: self.slot,
            endpoint: self.endpoint,
            serial: self.serial,
            stage,
        }
    }
}
