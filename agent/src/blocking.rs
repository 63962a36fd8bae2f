//! Work that blocks, apart from what must not.

use snafu::Snafu;

#[derive(Debug, Snafu)]
#[snafu(display("it ended abnormally: {source}"), context(false))]
pub struct Interrupted {
    source: tokio::task::JoinError,
}

impl From<Interrupted> for String {
    fn from(interrupted: Interrupted) -> Self {
        interrupted.to_string()
    }
}

/// Off the runtime's threads. An error is a panic of the work, or the runtime's end.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Interrupted> {
    Ok(tokio::task::spawn_blocking(work).await?)
}
