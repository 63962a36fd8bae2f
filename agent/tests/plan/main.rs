//! The pure core under random interleavings and crashes, and under other clocks.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]
#![allow(unreachable_pub, reason = "a test binary exports nothing")]
#![allow(
    clippy::too_many_lines,
    reason = "one arm for each action and each step"
)]

mod clock;
mod idle;
mod random;
mod scenarios;
mod world;
