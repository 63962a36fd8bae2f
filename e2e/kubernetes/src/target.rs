//! Where things are: the checkout, the target directory and what is kept below it.

use std::path::{Path, PathBuf};

/// The root of the checkout.
pub(crate) fn checkout() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("this crate should be two folders below the root")
}

/// `kubernetes` in Cargo's target directory, as scripts/build-kubernetes takes it.
pub(crate) fn directory() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    checkout().join(target).join("kubernetes")
}
