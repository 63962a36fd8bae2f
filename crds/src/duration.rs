//! Spans of time as users write them: `90s`, `1h30m`, `500ms`.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration as StdDuration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use snafu::{Snafu, ensure};

use crate::rules::duration_format;

/// The longest span that any field takes: 8760 hours.
pub const MAX_DURATION: StdDuration = StdDuration::from_hours(8760);

const MAX_TEXT: usize = 20;
const MAX_PARTS: usize = 4;

#[derive(Debug, PartialEq, Eq, Snafu)]
pub enum DurationError {
    #[snafu(display(
        "{text:?} is not a duration: write one to four whole numbers, each with h, m, s or ms, such as 1h30m or 45s"
    ))]
    Format { text: String },
    #[snafu(display("{text:?} is longer than 8760h, the longest duration allowed"))]
    TooLong { text: String },
}

/// A span in whole milliseconds, at most [`MAX_DURATION`], that keeps the text it was written as.
/// Two spans are equal when they last equally long: `60m` equals `1h`.
#[derive(Clone)]
pub struct Duration {
    text: Cow<'static, str>,
    millis: u64,
}

impl Duration {
    pub(crate) const fn literal(text: &'static str, millis: u64) -> Self {
        Self {
            text: Cow::Borrowed(text),
            millis,
        }
    }

    pub fn as_millis(&self) -> u64 {
        self.millis
    }

    pub fn as_std(&self) -> StdDuration {
        StdDuration::from_millis(self.millis)
    }

    pub fn is_zero(&self) -> bool {
        self.millis == 0
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for Duration {
    type Err = DurationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        ensure!(text.len() <= MAX_TEXT, FormatSnafu { text: shown(text) });
        let millis = parse_millis(text).ok_or_else(|| FormatSnafu { text }.build())?;
        ensure!(
            u128::from(millis) <= MAX_DURATION.as_millis(),
            TooLongSnafu { text }
        );
        Ok(Self {
            text: Cow::Owned(text.to_owned()),
            millis,
        })
    }
}

impl TryFrom<StdDuration> for Duration {
    type Error = DurationError;

    /// Rounds down to whole milliseconds.
    fn try_from(span: StdDuration) -> Result<Self, Self::Error> {
        let millis = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let text = written(millis);
        ensure!(span <= MAX_DURATION, TooLongSnafu { text });
        Ok(Self {
            text: Cow::Owned(text),
            millis,
        })
    }
}

/// `None` when the text does not have the form, or overflows.
fn parse_millis(text: &str) -> Option<u64> {
    let mut rest = text;
    let mut total = 0_u64;
    let mut parts = 0;
    while !rest.is_empty() {
        parts += 1;
        if parts > MAX_PARTS {
            return None;
        }
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, tail) = rest.split_at(digits);
        let (unit, tail) = unit(tail)?;
        if !(1..=unit.max_digits).contains(&digits) {
            return None;
        }
        let part = number.parse::<u64>().ok()?.checked_mul(unit.millis)?;
        total = total.checked_add(part)?;
        rest = tail;
    }
    (parts > 0).then_some(total)
}

struct Unit {
    name: &'static str,
    millis: u64,
    max_digits: usize,
}

/// The unit that `text` starts with, and what follows it.
fn unit(text: &str) -> Option<(&'static Unit, &str)> {
    const fn of(name: &'static str, millis: u64, max_digits: usize) -> Unit {
        Unit {
            name,
            millis,
            max_digits,
        }
    }
    static UNITS: [Unit; 4] = [
        of("ms", 1, 6),
        of("h", 3_600_000, 4),
        of("m", 60_000, 6),
        of("s", 1_000, 6),
    ];
    UNITS
        .iter()
        .find_map(|unit| Some((unit, text.strip_prefix(unit.name)?)))
}

fn written(millis: u64) -> String {
    let parts = [
        (millis / 3_600_000, "h"),
        (millis / 60_000 % 60, "m"),
        (millis / 1_000 % 60, "s"),
        (millis % 1_000, "ms"),
    ];
    let written = parts.iter().filter(|(count, _)| *count > 0);
    let text = written
        .map(|(count, unit)| format!("{count}{unit}"))
        .collect::<Vec<_>>()
        .concat();
    if text.is_empty() {
        "0s".to_owned()
    } else {
        text
    }
}

/// A bounded start of a text that may be huge, for messages.
fn shown(text: &str) -> String {
    text.chars().take(MAX_TEXT).chain("…".chars()).collect()
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl PartialEq for Duration {
    fn eq(&self, other: &Self) -> bool {
        self.millis == other.millis
    }
}

impl Eq for Duration {}

impl PartialOrd for Duration {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Duration {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.millis.cmp(&other.millis)
    }
}

impl Serialize for Duration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl JsonSchema for Duration {
    fn schema_name() -> Cow<'static, str> {
        "Duration".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "maxLength": MAX_TEXT,
            "x-kubernetes-validations": [duration_format()],
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_what_users_write() {
        for (text, millis) in [
            ("0s", 0),
            ("45s", 45_000),
            ("1h30m", 5_400_000),
            ("500ms", 500),
            ("1h2m3s4ms", 3_723_004),
            ("30m1h", 5_400_000),
            ("8760h", 31_536_000_000),
        ] {
            let read: Duration = text.parse().unwrap();
            assert_eq!(read.as_millis(), millis, "{text}");
            assert_eq!(read.to_string(), text);
        }
    }

    #[test]
    fn refuses_what_is_no_duration() {
        for text in [
            "",
            "5",
            "h",
            "-1s",
            "1.5h",
            "1d",
            "1 h",
            "1h ",
            "1234567s",
            "1s1s1s1s1s",
            "1µs",
            "10000h",
            "000001h",
        ] {
            assert!(
                matches!(text.parse::<Duration>(), Err(DurationError::Format { .. })),
                "{text}"
            );
        }
        for text in ["8761h", "8760h1ms", "9999h9999h9999h9999h"] {
            assert!(
                matches!(text.parse::<Duration>(), Err(DurationError::TooLong { .. })),
                "{text}"
            );
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in ".{0,40}") {
            let _ = text.parse::<Duration>();
        }

        #[test]
        fn survives_writing_and_reading(millis in 0_u64..=31_536_000_000) {
            let made = Duration::try_from(StdDuration::from_millis(millis)).unwrap();
            let read: Duration = made.to_string().parse().unwrap();
            prop_assert_eq!(read.as_millis(), millis);
        }

        #[test]
        fn the_widest_written_form_fits(millis in 31_500_000_000_u64..=31_535_999_999) {
            let made = Duration::try_from(StdDuration::from_millis(millis)).unwrap();
            prop_assert!(made.as_str().len() <= MAX_TEXT);
        }
    }
}
