//! Every decision of the operator, as functions of plain values: nothing here knows kube or tokio.

pub mod leader;
pub mod leases;
pub mod nodes;
pub mod placement;
pub mod pools;
pub mod queue;
pub mod schema;
pub mod secret;

use std::{borrow::Borrow, fmt, sync::Arc};

/// Milliseconds since the Unix epoch, or a span of them.
pub type Millis = u64;

pub const SECOND: Millis = 1_000;

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text.into())
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(&self.0)
            }
        }
    };
}

name!(
    /// `metadata.uid` of an object.
    Uid
);
name!(
    /// Name of a node of the cluster.
    NodeName
);
