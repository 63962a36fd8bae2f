pub mod golden;
pub mod postgres;
