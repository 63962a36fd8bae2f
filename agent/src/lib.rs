pub mod journal;
pub mod preflight;
pub mod storage;
