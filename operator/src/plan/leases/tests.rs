//! The machine against an API server, agents and a network that are plain values too, and fail.

mod random;
mod scenarios;
mod world;
