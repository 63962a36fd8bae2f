pub mod golden;
pub mod postgres;
pub mod journal;
pub mod preflight;
pub mod storage;
