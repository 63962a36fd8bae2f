//! The names of leases, and the Secret under each.
//!
//! Leases that follow each other under a name share one place for a Secret. So what is known of it is
//! kept here, once for all of them, and at most one create or delete is under way there at a time:
//! no lease can lose its Secret to another's deletion, or leave one that nobody knows of.

use std::collections::{BTreeSet, HashMap};

use super::ObjectRef;
use crate::plan::Uid;

/// Namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    namespace: String,
    name: String,
}

impl ObjectRef {
    pub(super) fn key(&self) -> Key {
        Key {
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }
}

/// What is there, of ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Secret {
    /// What a former leader left: the holder's, if its status tells of one, else perhaps any lease's.
    #[default]
    Inherited,
    /// An operation was begun, and what became of it is not known: perhaps any lease's, or none.
    Doubtful,
    Absent,
    /// The Secret's own UID is known where this process made it.
    Of(Uid, Option<Uid>),
}

/// What a lease is to think of the Secret under its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is being created or deleted.
    UnderWay,
    /// Perhaps its own, perhaps that of the lease that has the name now: to be known first.
    Unclear,
    /// There is none, or it is another lease's.
    NotIts,
    Its(Option<Uid>),
    /// Perhaps its own, and nobody relies on it.
    Perhaps,
}

#[derive(Clone, Debug)]
struct Holder {
    uid: Uid,
    version: u64,
    /// It is known whether its status tells of a Secret.
    read: bool,
}

#[derive(Debug, Default)]
struct Name {
    /// All that have or had the name and are not done with.
    leases: BTreeSet<Uid>,
    /// Whose object has the name now.
    holder: Option<Holder>,
    secret: Secret,
    under_way: bool,
}

/// An object is older than the one that has its name: it is gone.
pub(super) struct Outdated;

#[derive(Debug, Default)]
pub(super) struct Names {
    names: HashMap<Key, Name>,
}

impl Names {
    pub(super) fn join(&mut self, key: Key, uid: &Uid) {
        let leases = &mut self.names.entry(key).or_default().leases;
        if !leases.contains(uid) {
            leases.insert(uid.clone());
        }
    }

    pub(super) fn leave(&mut self, key: &Key, uid: &Uid) {
        if let Some(name) = self.names.get_mut(key) {
            name.leases.remove(uid);
            if name.leases.is_empty() {
                self.names.remove(key);
            }
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// All that have or had the name.
    pub(super) fn of(&self, key: &Key) -> impl Iterator<Item = &Uid> {
        self.names
            .get(key)
            .into_iter()
            .flat_map(|name| &name.leases)
    }

    /// An object has the name; the answer is whose object had it until now.
    pub(super) fn hold(
        &mut self,
        id: &ObjectRef,
        version: u64,
        read: bool,
    ) -> Result<Option<Uid>, Outdated> {
        let name = self.names.entry(id.key()).or_default();
        let new = Holder {
            uid: id.uid.clone(),
            version,
            read,
        };
        match &mut name.holder {
            Some(holder) if holder.uid == id.uid => {
                holder.version = holder.version.max(version);
                holder.read = read;
                Ok(None)
            }
            Some(holder) if holder.version > version => Err(Outdated),
            Some(holder) => Ok(Some(std::mem::replace(holder, new).uid)),
            none => {
                *none = Some(new);
                Ok(None)
            }
        }
    }

    /// Whether the object is there, and what its status tells, is not known any more.
    pub(super) fn doubt(&mut self, id: &ObjectRef) {
        if let Some(holder) = self.holder(id) {
            holder.read = false;
        }
    }

    /// The object is gone.
    pub(super) fn release(&mut self, id: &ObjectRef) {
        if self.holder(id).is_some()
            && let Some(name) = self.names.get_mut(&id.key())
        {
            name.holder = None;
        }
    }

    fn holder(&mut self, id: &ObjectRef) -> Option<&mut Holder> {
        let name = self.names.get_mut(&id.key())?;
        name.holder.as_mut().filter(|holder| holder.uid == id.uid)
    }

    /// Its status tells of its Secret. That is old where this process has done something since.
    pub(super) fn told(&mut self, id: &ObjectRef) {
        if let Some(name) = self.names.get_mut(&id.key())
            && name.secret == Secret::Inherited
        {
            name.secret = Secret::Of(id.uid.clone(), None);
        }
    }

    pub(super) fn begun(&mut self, id: &ObjectRef) {
        if let Some(name) = self.names.get_mut(&id.key()) {
            name.under_way = true;
            name.secret = Secret::Doubtful;
        }
    }

    pub(super) fn created(&mut self, id: &ObjectRef, secret: Uid) {
        self.ended(id, Secret::Of(id.uid.clone(), Some(secret)));
    }

    /// There is none of ours.
    pub(super) fn absent(&mut self, id: &ObjectRef) {
        self.ended(id, Secret::Absent);
    }

    pub(super) fn unknown(&mut self, id: &ObjectRef) {
        self.ended(id, Secret::Doubtful);
    }

    fn ended(&mut self, id: &ObjectRef, secret: Secret) {
        if let Some(name) = self.names.get_mut(&id.key()) {
            name.under_way = false;
            name.secret = secret;
        }
    }

    pub(super) fn standing(&self, key: &Key, uid: &Uid) -> Standing {
        let Some(name) = self.names.get(key) else {
            return Standing::Perhaps;
        };
        if name.under_way {
            return Standing::UnderWay;
        }
        match &name.secret {
            Secret::Of(lease, secret) if lease == uid => Standing::Its(secret.clone()),
            Secret::Absent | Secret::Of(..) => Standing::NotIts,
            Secret::Inherited | Secret::Doubtful => match &name.holder {
                Some(holder) if holder.uid != *uid && !holder.read => Standing::Unclear,
                // What a holder does not tell of, it makes anew.
                _ => Standing::Perhaps,
            },
        }
    }
}
