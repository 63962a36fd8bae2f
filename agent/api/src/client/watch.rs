//! The watch as the client sees it: one event a line.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use snafu::ResultExt;
use tokio::time::timeout;

use super::{
    ClientError, Target,
    error::{BrokenSnafu, DecodeSnafu, TimeoutSnafu, TooLongSnafu},
    transport::{MAX_ANSWER_BYTES, Sender},
};
use crate::WatchEvent;

/// Three bookmarks: an agent that is silent for longer is gone, whatever TCP still believes.
const SILENCE: Duration = Duration::from_secs(15);

/// Events of `GET /v1/watch`, in the order of their revisions.
#[derive(Debug)]
pub struct Watch {
    target: Target,
    // The connection may close when its sender is gone.
    _sender: Sender,
    body: Incoming,
    lines: Lines,
}

impl Watch {
    pub(super) fn new(target: Target, sender: Sender, body: Incoming) -> Self {
        Self {
            target,
            _sender: sender,
            body,
            lines: Lines::default(),
        }
    }

    /// The next event; `None` when the agent ended the stream, which it does when it stops. Safe
    /// to drop and call again.
    pub async fn next(&mut self) -> Result<Option<WatchEvent>, ClientError> {
        loop {
            if let Some(line) = self.lines.take() {
                let event = serde_json::from_slice(&line).context(DecodeSnafu {
                    target: self.target.clone(),
                })?;
                return Ok(Some(event));
            }
            if self.lines.pending.len() > MAX_ANSWER_BYTES {
                return TooLongSnafu {
                    target: self.target.clone(),
                    limit: MAX_ANSWER_BYTES,
                }
                .fail();
            }
            let Ok(frame) = timeout(SILENCE, self.body.frame()).await else {
                return TimeoutSnafu {
                    target: self.target.clone(),
                    seconds: SILENCE.as_secs(),
                }
                .fail();
            };
            match frame {
                None => return Ok(None),
                Some(frame) => {
                    let frame = frame.context(BrokenSnafu {
                        target: self.target.clone(),
                    })?;
                    if let Some(data) = frame.data_ref() {
                        self.lines.pending.extend_from_slice(data);
                    }
                }
            }
        }
    }
}

/// Cuts bytes into lines, looking at each byte once.
#[derive(Debug, Default)]
struct Lines {
    pending: BytesMut,
    searched: usize,
}

impl Lines {
    fn take(&mut self) -> Option<Bytes> {
        loop {
            let newline = self.pending[self.searched..]
                .iter()
                .position(|byte| *byte == b'\n');
            let Some(offset) = newline else {
                self.searched = self.pending.len();
                return None;
            };
            let line = self.pending.split_to(self.searched + offset + 1).freeze();
            self.searched = 0;
            if line.len() > 1 {
                return Some(line.slice(..line.len() - 1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_out_whole_however_the_bytes_arrive() {
        let text = b"one\n\ntwo\nthree";
        for step in 1..=text.len() {
            let mut lines = Lines::default();
            let mut found = Vec::new();
            for part in text.chunks(step) {
                lines.pending.extend_from_slice(part);
                while let Some(line) = lines.take() {
                    found.push(line);
                }
            }
            assert_eq!(found, ["one", "two"], "in steps of {step}");
            assert_eq!(&lines.pending[..], b"three");
        }
    }
}
