//! Tests of `charts/branchpool`, with the real Helm; see `tests/chart`.
