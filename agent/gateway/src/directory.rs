//! Which branch an endpoint leads to, and what is known across branches.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use crate::{
    branch::Branch,
    cancel::Cancels,
    scram::{self, SALT_LENGTH},
    startup::Startup,
    takeover,
};

/// Length of an endpoint id; its characters are a-z and 2-7.
pub const ENDPOINT_LENGTH: usize = 13;

/// Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct Directory {
    shared: Arc<Shared>,
}

struct Shared {
    salt_key: [u8; 32],
    tables: RwLock<Tables>,
    cancels: Cancels,
}

#[derive(Default)]
struct Tables {
    branches: HashMap<String, Arc<Branch>>,
    learned: HashMap<String, Learned>,
    /// Every role that a pool has had here, so that what is offered to a user of an endpoint that
    /// is gone stays what it was.
    roles: HashSet<String>,
}

/// What clients of a pool were seen to send.
#[derive(Default)]
struct Learned {
    profile: Vec<(String, String)>,
    /// Of the last client.
    application_name: Option<String>,
    /// The client before it sent the same name.
    confirmed: bool,
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Directory")
            .field("branches", &self.read().branches.len())
            .finish_non_exhaustive()
    }
}

impl Directory {
    /// `salt_key`: a secret of the node, the same after a restart.
    pub fn new(salt_key: [u8; 32]) -> Self {
        Self {
            shared: Arc::new(Shared {
                salt_key,
                tables: RwLock::default(),
                cancels: Cancels::default(),
            }),
        }
    }

    /// The salt for the verifier of `<role>.<endpoint>`. With any other one, a user who is gone
    /// could be told by the change of the salt.
    pub fn salt(&self, role: &str, endpoint: &str) -> [u8; SALT_LENGTH] {
        self.salt_of_user(&format!("{role}.{endpoint}"))
    }

    pub(crate) fn salt_of_user(&self, user: &str) -> [u8; SALT_LENGTH] {
        let key = scram::hmac(&self.shared.salt_key, &[b"salt", user.as_bytes()]);
        let mut salt = [0; SALT_LENGTH];
        salt.copy_from_slice(&key[..SALT_LENGTH]);
        salt
    }

    /// Leads the endpoint to the branch from now on. Returns the branch that it led to before,
    /// which is not ended by this.
    pub fn insert(&self, endpoint: &str, branch: Arc<Branch>) -> Option<Arc<Branch>> {
        let mut tables = self.write();
        if !tables.roles.contains(&branch.facts().role) {
            tables.roles.insert(branch.facts().role.clone());
        }
        tables.branches.insert(endpoint.to_owned(), branch)
    }

    /// From now on the endpoint looks as if it had never been. The branch is not ended by this.
    pub fn remove(&self, endpoint: &str) -> Option<Arc<Branch>> {
        self.write().branches.remove(endpoint)
    }

    pub fn get(&self, endpoint: &str) -> Option<Arc<Branch>> {
        self.read().branches.get(endpoint).map(Arc::clone)
    }

    /// The start-up parameters to open a pool's sessions with, as its last successful client sent
    /// them. `None` before the first one. `application_name` is among them when the last two
    /// clients agree: it can be set at the hand-over, and a client without one could not take over
    /// a session that has one.
    pub fn profile(&self, pool: &str) -> Option<Vec<(String, String)>> {
        let tables = self.read();
        let learned = tables.learned.get(pool)?;
        let mut profile = learned.profile.clone();
        if let (Some(name), true) = (&learned.application_name, learned.confirmed) {
            profile.push(("application_name".to_owned(), name.clone()));
        }
        Some(profile)
    }

    /// Forgets what was learned of a pool that is gone.
    pub fn forget_pool(&self, pool: &str) {
        self.write().learned.remove(pool);
    }

    /// Remembers a client of the pool's role and database that has logged in.
    pub(crate) fn learn(&self, pool: &str, startup: &Startup) {
        let Some(mut profile) = takeover::profile_of(startup) else {
            return;
        };
        let position = profile
            .iter()
            .position(|(name, _)| name == "application_name");
        let application_name = position.map(|position| profile.remove(position).1);
        if self.knows(pool, &profile, application_name.as_ref()) {
            return;
        }
        let mut tables = self.write();
        let learned = tables.learned.entry(pool.to_owned()).or_default();
        *learned = Learned {
            confirmed: learned.application_name == application_name,
            profile,
            application_name,
        };
    }

    /// Whether there is nothing new: then readers are not disturbed.
    fn knows(
        &self,
        pool: &str,
        profile: &[(String, String)],
        application_name: Option<&String>,
    ) -> bool {
        self.read().learned.get(pool).is_some_and(|learned| {
            learned.confirmed
                && learned.profile == profile
                && learned.application_name.as_ref() == application_name
        })
    }

    /// Whether the role is one whose password is checked here, in some pool.
    pub(crate) fn is_pool_role(&self, role: &str) -> bool {
        self.read().roles.contains(role)
    }

    pub(crate) fn cancels(&self) -> &Cancels {
        &self.shared.cancels
    }

    fn read(&self) -> RwLockReadGuard<'_, Tables> {
        let tables = &self.shared.tables;
        tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        let tables = &self.shared.tables;
        tables.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The parts of a user name on the wire, `<role>.<endpoint>`. The role may hold dots.
pub(crate) fn split_user(user: &str) -> Option<(&str, &str)> {
    user.rsplit_once('.').filter(|(role, endpoint)| {
        !role.is_empty()
            && endpoint.len() == ENDPOINT_LENGTH
            && endpoint
                .bytes()
                .all(|byte| matches!(byte, b'a'..=b'z' | b'2'..=b'7'))
    })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn startup(parameters: &[(&'static str, &'static str)]) -> Startup {
        Startup {
            minor: 0,
            user: "app.abcdefghijklm".to_owned(),
            database: None,
            replication: false,
            protocol_options: Vec::new(),
            parameters: parameters
                .iter()
                .map(|(name, value)| ((*name).to_owned(), Bytes::from_static(value.as_bytes())))
                .collect(),
        }
    }

    #[test]
    fn user_names() {
        let endpoint = "abcdefghij234";
        assert_eq!(
            split_user("my.app.abcdefghij234"),
            Some(("my.app", endpoint))
        );
        for other in ["app", "app.", ".abcdefghij234", "app.abcdefghij23"] {
            assert_eq!(split_user(other), None);
        }
        assert_eq!(split_user("app.ABCDEFGHIJ234"), None);
        assert_eq!(split_user("app.abcdefghij231"), None);
    }

    #[test]
    fn the_last_client_is_learned() {
        let directory = Directory::new([7; 32]);
        assert_eq!(directory.profile("pool"), None);
        directory.learn("pool", &startup(&[("client_encoding", "UTF8")]));
        let profile = vec![("client_encoding".to_owned(), "UTF8".to_owned())];
        assert_eq!(directory.profile("pool"), Some(profile.clone()));
        // Not faithful, so nothing to be learned from.
        directory.learn("pool", &startup(&[("role", "other")]));
        assert_eq!(directory.profile("pool"), Some(profile));
        directory.learn("pool", &startup(&[]));
        assert_eq!(directory.profile("pool"), Some(Vec::new()));
        assert_eq!(directory.profile("other"), None);
        directory.forget_pool("pool");
        assert_eq!(directory.profile("pool"), None);
    }

    #[test]
    fn an_application_name_is_learned_from_two_in_a_row() {
        let directory = Directory::new([7; 32]);
        let psql = startup(&[("application_name", "psql")]);
        let name = vec![("application_name".to_owned(), "psql".to_owned())];
        directory.learn("pool", &psql);
        assert_eq!(directory.profile("pool"), Some(Vec::new()));
        directory.learn("pool", &psql);
        assert_eq!(directory.profile("pool"), Some(name.clone()));
        directory.learn("pool", &psql);
        assert_eq!(directory.profile("pool"), Some(name));
        directory.learn("pool", &startup(&[]));
        assert_eq!(directory.profile("pool"), Some(Vec::new()));
    }

    #[test]
    fn salts_differ_by_user_and_stay() {
        let directory = Directory::new([7; 32]);
        let salt = directory.salt("app", "abcdefghij234");
        assert_eq!(directory.salt_of_user("app.abcdefghij234"), salt);
        assert_ne!(directory.salt("app", "abcdefghij235"), salt);
        assert_ne!(Directory::new([8; 32]).salt("app", "abcdefghij234"), salt);
    }
}
