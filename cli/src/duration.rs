//! Spans of time as people write and read them.

use std::time::Duration;

const UNITS: [(char, u64); 4] = [('d', 86_400), ('h', 3_600), ('m', 60), ('s', 1)];

/// Whole numbers with a unit each, larger units first: `90s`, `30m`, `1h30m`, `2d`.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let mut seconds = 0_u64;
    let mut units = UNITS.iter();
    let mut rest = text;
    if rest.is_empty() {
        return Err("must be a duration such as 90s, 30m or 1h30m".to_owned());
    }
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = rest.split_at(digits);
        if number.is_empty() {
            return Err(format!(
                "there must be a number before {rest:?}, as in 1h30m"
            ));
        }
        let Some(unit) = after.chars().next() else {
            return Err(format!("{number} needs a unit: d, h, m or s"));
        };
        let Some((_, factor)) = units.find(|(name, _)| *name == unit) else {
            return Err(format!(
                "{unit:?} is no unit that may stand here; units are d, h, m and s, in this order, each once"
            ));
        };
        seconds = number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(*factor)?.checked_add(seconds))
            .ok_or_else(|| format!("{text} is too long"))?;
        rest = &after[unit.len_utf8()..];
    }
    Ok(Duration::from_secs(seconds))
}

/// The two largest units that matter, as kubectl shows ages: `45s`, `12m30s`, `3h20m`, `5d`.
pub(crate) fn show(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600, seconds / 60);
    let with_rest = |value: u64, unit: &str, rest: u64, rest_unit: &str| match rest {
        0 => format!("{value}{unit}"),
        rest => format!("{value}{unit}{rest}{rest_unit}"),
    };
    if days >= 2 {
        with_rest(days, "d", hours % 24, "h")
    } else if hours >= 1 {
        with_rest(hours, "h", minutes % 60, "m")
    } else if minutes >= 1 {
        with_rest(minutes, "m", seconds % 60, "s")
    } else {
        format!("{seconds}s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write_is_read() {
        for (text, seconds) in [
            ("0s", 0),
            ("90s", 90),
            ("30m", 1_800),
            ("1h30m", 5_400),
            ("2d", 172_800),
            ("1d1h1m1s", 90_061),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "5",
            "m",
            "1h30",
            "1m1h",
            "1s1s",
            "-5s",
            "+5s",
            "1.5h",
            "5 m",
            "5ms",
            "1w",
            "1ü",
            "99999999999999999999s",
            "18446744073709551615d",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn two_units_are_shown_at_most() {
        for (seconds, shown) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (754, "12m34s"),
            (3_600, "1h"),
            (12_034, "3h20m"),
            (90_000, "25h"),
            (432_000, "5d"),
            (435_700, "5d1h"),
        ] {
            assert_eq!(show(Duration::from_secs(seconds)), shown);
        }
    }
}
