//! A place where tests end the operator, as a crash between two steps would.
//!
//! `BRANCHPOOL_DIE_AT=STEP` aborts the process when it comes to the step for the first time.

use std::sync::LazyLock;

static STEP: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("BRANCHPOOL_DIE_AT").ok());

pub(crate) fn reached(step: &str) {
    if STEP.as_deref() == Some(step) {
        tracing::warn!(step, "ending here, as BRANCHPOOL_DIE_AT says");
        std::process::abort();
    }
}
