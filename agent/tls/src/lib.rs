//! The node's TLS identity: certificate and key from files that someone else renews, or from a CA of
//! the node's own. Either way it comes as a value to watch: a connection that is accepted takes what is
//! there then, and keeps it.

pub mod ca;
mod files;
mod identity;
mod names;
mod own;
mod pem;
mod store;
pub mod watching;

use std::sync::Arc;

pub use files::follow;
pub use identity::TlsIdentity;
pub use names::{InvalidName, Names};
pub use own::{Error as OwnError, OwnAuthority};
pub use pem::Error as PairError;
pub use store::Error as StoreError;

/// The identity in force, now and later.
pub type Identities = tokio::sync::watch::Receiver<Arc<TlsIdentity>>;
