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
    source.map_or_else(String::new, |source| {
        let mut text = format!(": {source}");
        let mut next = source.source();
        while let Some(cause) = next {
            text.push_str(&format!(": {cause}"));
            next = cause.source();
        }
        text
    })
}
