//! The pure core under random interleavings and crashes, and under other clocks.

mod clock;
mod random;
mod scenarios;
mod world;
