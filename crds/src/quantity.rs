//! Amounts as Kubernetes writes them: `512Mi`, `2`, `500m`.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use snafu::{OptionExt, Snafu, ensure};

use crate::rules::quantity_format;

const MAX_TEXT: usize = 24;

#[derive(Debug, PartialEq, Eq, Snafu)]
pub enum QuantityError {
    #[snafu(display(
        "{text:?} is not a quantity: write a number with an optional suffix, such as 512Mi, 1.5Gi, 2 or 500m"
    ))]
    Format { text: String },
    #[snafu(display("{text:?} is too large: a quantity is below 8Ei"))]
    TooLarge { text: String },
}

/// Most digits before a point or a suffix.
const SUFFIXED_DIGITS: u32 = 12;

/// A non-negative amount in thousandths, below 8 `Ei`, that keeps the text it was written as.
#[derive(Clone)]
pub struct Quantity {
    text: Cow<'static, str>,
    milli: u128,
}

impl Quantity {
    /// In whole units; every quantity in whole units fits `i64`.
    const LIMIT: u128 = 1 << 63;

    pub(crate) const fn literal(text: &'static str, units: u64) -> Self {
        Self {
            text: Cow::Borrowed(text),
            milli: units as u128 * 1000,
        }
    }

    /// Bytes with the largest binary suffix that divides them, or none where too many digits would
    /// stand before it.
    pub fn from_bytes(bytes: u64) -> Self {
        const SUFFIXES: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
        let mut number = bytes;
        let mut step = 0;
        while number > 0 && number.is_multiple_of(1024) && step + 1 < SUFFIXES.len() {
            number /= 1024;
            step += 1;
        }
        if number >= 10_u64.pow(SUFFIXED_DIGITS) {
            (number, step) = (bytes, 0);
        }
        Self {
            text: Cow::Owned(format!("{number}{}", SUFFIXES[step])),
            milli: u128::from(bytes) * 1000,
        }
    }

    /// Whole units (bytes of memory), a fraction rounded up.
    pub fn units(&self) -> u64 {
        u64::try_from(self.milli.div_ceil(1000)).unwrap_or(u64::MAX)
    }

    /// Thousandths (millicores of CPU).
    pub fn milli_units(&self) -> u64 {
        u64::try_from(self.milli).unwrap_or(u64::MAX)
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let shown = || text.chars().take(MAX_TEXT).collect::<String>();
        ensure!(text.len() <= MAX_TEXT, FormatSnafu { text: shown() });
        let milli = parse_milli(text).with_context(|| FormatSnafu { text: shown() })?;
        ensure!(
            milli <= (Self::LIMIT - 1) * 1000,
            TooLargeSnafu { text: shown() }
        );
        Ok(Self {
            text: Cow::Owned(text.to_owned()),
            milli,
        })
    }
}

/// Thousandths, rounded up; `None` when the text does not have the form.
fn parse_milli(text: &str) -> Option<u128> {
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let max_digits = if whole.len() == text.len() {
        19
    } else {
        SUFFIXED_DIGITS as usize
    };
    if !(1..=max_digits).contains(&whole.len()) || !(1..=3).contains(&fraction.len()) {
        return None;
    }
    let whole: u128 = whole.parse().ok()?;
    let fraction: u128 = format!("{fraction:0<3}").parse().ok()?;
    let milli = whole.checked_mul(1000)?.checked_add(fraction)?;
    match suffix {
        "m" => Some(milli.div_ceil(1000)),
        _ => milli.checked_mul(multiplier(suffix)?),
    }
}

fn multiplier(suffix: &str) -> Option<u128> {
    let power = |letter: &str| {
        "KMGTPE"
            .find(letter)
            .and_then(|at| u32::try_from(at + 1).ok())
    };
    match suffix {
        "" => Some(1),
        "k" => Some(1000),
        "M" | "G" | "T" | "P" | "E" => Some(1000_u128.pow(power(suffix)?)),
        _ => Some(1024_u128.pow(power(suffix.strip_suffix('i').filter(|s| s.len() == 1)?)?)),
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.milli == other.milli
    }
}

impl Eq for Quantity {}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(QuantityVisitor)
    }
}

struct QuantityVisitor;

impl Visitor<'_> for QuantityVisitor {
    type Value = Quantity;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a quantity such as 512Mi, 2 or 500m")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Quantity, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Quantity, E> {
        number.to_string().parse().map_err(E::custom)
    }

    fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Quantity, E> {
        let number =
            u64::try_from(number).map_err(|_| E::custom("a quantity is never negative"))?;
        self.visit_u64(number)
    }
}

impl JsonSchema for Quantity {
    fn schema_name() -> Cow<'static, str> {
        "Quantity".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": MAX_TEXT,
            "x-kubernetes-validations": [quantity_format()],
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_what_users_write() {
        for (text, units, milli) in [
            ("0", 0, 0),
            ("2", 2, 2_000),
            ("500m", 1, 500),
            ("1.5", 2, 1_500),
            ("0.001", 1, 1),
            ("1k", 1_000, 1_000_000),
            ("64Mi", 64 << 20, (64 << 20) * 1_000),
            ("1.5Gi", 3 << 29, (3 << 29) * 1_000),
            ("10G", 10_000_000_000, 10_000_000_000_000),
            ("7Ei", 7 << 60, u64::MAX),
        ] {
            let read: Quantity = text.parse().unwrap();
            assert_eq!(read.units(), units, "{text}");
            assert_eq!(read.milli_units(), milli, "{text}");
            assert_eq!(read.to_string(), text);
        }
    }

    #[test]
    fn refuses_what_is_no_quantity() {
        for text in [
            "",
            "Mi",
            "-1",
            "+1",
            "1.",
            ".5",
            "1.2345",
            "1e3",
            "1 Gi",
            "1gi",
            "1KI",
            "1mi",
            "1Gii",
            "1µ",
            "12345678901234567890",
        ] {
            assert!(
                matches!(text.parse::<Quantity>(), Err(QuantityError::Format { .. })),
                "{text}"
            );
        }
        for text in ["8Ei", "10E", "999999999999Ei", "9999999999999999999"] {
            assert!(
                matches!(
                    text.parse::<Quantity>(),
                    Err(QuantityError::TooLarge { .. })
                ),
                "{text}"
            );
        }
    }

    #[test]
    fn takes_numbers_and_text_from_json() {
        for (json, units) in [("2", 2), ("\"2\"", 2), ("\"1Ki\"", 1024)] {
            let read: Quantity = serde_json::from_str(json).unwrap();
            assert_eq!(read.units(), units);
        }
        assert!(serde_json::from_str::<Quantity>("-2").is_err());
        assert!(serde_json::from_str::<Quantity>("1.5").is_err());
    }

    #[test]
    fn bytes_of_many_digits_have_no_suffix() {
        let made = Quantity::from_bytes(7_166_253_747_144_176_640);
        assert_eq!(made.as_str(), "7166253747144176640");
        assert_eq!(Quantity::from_bytes(5 << 30).as_str(), "5Gi");
    }

    proptest! {
        #[test]
        fn never_panics(text in ".{0,40}") {
            let _ = text.parse::<Quantity>();
        }

        #[test]
        fn bytes_survive_writing_and_reading(bytes in 0_u64..(1 << 63)) {
            let made = Quantity::from_bytes(bytes);
            let read: Quantity = made.to_string().parse().unwrap();
            prop_assert_eq!(read.units(), bytes);
        }
    }
}
