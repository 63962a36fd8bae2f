//! One line on the terminal that is written over as things move on.

use std::io::{self, IsTerminal, Write};

use rustix::termios::tcgetwinsize;

const FALLBACK_COLUMNS: u16 = 80;

/// Shows nothing when standard error is not a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    on_terminal: bool,
    shown: bool,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self {
            on_terminal: io::stderr().is_terminal(),
            shown: false,
        }
    }

    pub(crate) fn show(&mut self, text: &str) {
        if !self.on_terminal {
            return;
        }
        // A terminal that was never told its size says 0.
        let columns = tcgetwinsize(io::stderr())
            .map(|size| size.ws_col)
            .ok()
            .filter(|columns| *columns > 0)
            .unwrap_or(FALLBACK_COLUMNS);
        // A line that wraps could not be written over.
        let line = fitting(text, usize::from(columns).saturating_sub(1));
        write(&format!("\r\x1b[K{line}"));
        self.shown = true;
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            write("\r\x1b[K");
        }
    }
}

fn write(text: &str) {
    let mut error = io::stderr().lock();
    // Progress is a courtesy: a terminal that is gone must not fail the command.
    let _ = error
        .write_all(text.as_bytes())
        .and_then(|()| error.flush());
}

fn fitting(text: &str, columns: usize) -> String {
    let printable = text.chars().filter(|letter| !letter.is_control());
    if text.chars().count() <= columns {
        return printable.collect();
    }
    let mut line: String = printable.take(columns.saturating_sub(1)).collect();
    line.push('…');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_never_wraps() {
        assert_eq!(fitting("12345", 5), "12345");
        assert_eq!(fitting("123456", 5), "1234…");
        assert_eq!(fitting("äöüßé6", 5), "äöüß…");
        assert_eq!(fitting("a\nb\x1b[", 9), "ab[");
    }
}
