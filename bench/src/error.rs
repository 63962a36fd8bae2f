//! One error for the whole program: a measurement that fails says why and writes nothing.

use snafu::Snafu;

type Cause = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, Snafu)]
#[snafu(whatever, display("{message}{}", cause(source.as_ref())))]
pub(crate) struct Failure {
    message: String,
    #[snafu(source(from(Cause, Some)))]
    source: Option<Cause>,
}

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

fn cause(source: Option<&Cause>) -> String {
    let mut text = String::new();
    let mut next: Option<&dyn std::error::Error> = source.map(|source| &**source as _);
    while let Some(cause) = next {
        text += ": ";
        text += &cause.to_string();
        next = cause.source();
    }
    text
}
