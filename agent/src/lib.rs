pub mod golden;
pub mod journal;
pub mod postgres;
pub mod preflight;
pub mod storage;
