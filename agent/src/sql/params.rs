//! Parameters: JSON values as the text that Postgres reads.

use serde_json::value::RawValue;

/// Postgres itself knows six dimensions.
const MAX_DIMENSIONS: usize = 6;

/// `None` is NULL. Numbers are taken as they are written, digit by digit, and objects byte by byte. `Err`
/// is a sentence about the value.
pub fn text(param: &RawValue) -> Result<Option<String>, String> {
    let json = param.get();
    match json.as_bytes().first() {
        Some(b'n') => Ok(None),
        Some(b'"') => string(json).map(Some),
        Some(b'[') => {
            let mut text = String::with_capacity(json.len());
            array(json, MAX_DIMENSIONS, &mut text)?;
            Ok(Some(text))
        }
        _ => Ok(Some(json.to_owned())),
    }
}

fn string(json: &str) -> Result<String, String> {
    let text: String =
        serde_json::from_str(json).map_err(|error| format!("is not a string: {error}"))?;
    if text.contains('\0') {
        return Err("holds a zero byte, which no text of Postgres has".to_owned());
    }
    Ok(text)
}

/// An array literal; nested arrays are further dimensions.
fn array(json: &str, dimensions: usize, text: &mut String) -> Result<(), String> {
    if dimensions == 0 {
        return Err(format!("has more than {MAX_DIMENSIONS} dimensions"));
    }
    let items: Vec<&RawValue> =
        serde_json::from_str(json).map_err(|error| format!("is not an array: {error}"))?;
    text.push('{');
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        let json = item.get();
        match json.as_bytes().first() {
            Some(b'n') => text.push_str("NULL"),
            Some(b'[') => array(json, dimensions - 1, text)?,
            Some(b'"') => quoted(&string(json)?, text),
            _ => quoted(json, text),
        }
    }
    text.push('}');
    Ok(())
}

fn quoted(item: &str, text: &mut String) {
    text.push('"');
    for letter in item.chars() {
        if matches!(letter, '"' | '\\') {
            text.push('\\');
        }
        text.push(letter);
    }
    text.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_becomes_what_postgres_reads() {
        for (json, expected) in [
            ("null", None),
            ("true", Some("true")),
            ("-1.50e3", Some("-1.50e3")),
            (
                "123456789012345678901234567890.10",
                Some("123456789012345678901234567890.10"),
            ),
            (r#""a\"b\u00e4\n""#, Some("a\"bä\n")),
            (r#"{"a": [1,  2]}"#, Some(r#"{"a": [1,  2]}"#)),
            ("[]", Some("{}")),
            ("[1, null, true]", Some(r#"{"1",NULL,"true"}"#)),
            (
                r#"["a,b", "NULL", "\\\"", ""]"#,
                Some(r#"{"a,b","NULL","\\\"",""}"#),
            ),
            ("[[1,2],[3,4]]", Some(r#"{{"1","2"},{"3","4"}}"#)),
            (r#"[{"a":"b"}]"#, Some(r#"{"{\"a\":\"b\"}"}"#)),
        ] {
            let param: &RawValue = serde_json::from_str(json).unwrap();
            assert_eq!(text(param).unwrap().as_deref(), expected, "{json}");
        }
    }

    #[test]
    fn what_postgres_cannot_hold_is_refused() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        for (json, why) in [
            (r#""a\u0000""#, "zero byte"),
            (r#"["a\u0000"]"#, "zero byte"),
            (&*deep, "6 dimensions"),
        ] {
            let param: &RawValue = serde_json::from_str(json).unwrap();
            let error = text(param).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
