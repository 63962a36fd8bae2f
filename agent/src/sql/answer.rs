//! Results as JSON, written while rows arrive: what is held is the text of the answer, up to its limit.

use std::io::{self, Write};

use branchpool_agent_api::SqlColumn;
use postgres_types::{Kind, Oid, Type};
use serde::Serialize;
use serde_json::value::RawValue;

/// How values and results are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// As `POST /v1/leases/{uid}/sql` answers.
    Own,
    /// As Neon's driver reads it; `raw`: each value is Postgres's text.
    Neon { raw: bool },
}

/// A column as the server describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Field {
    pub(super) name: String,
    #[serde(rename = "dataTypeID")]
    pub(super) type_id: Oid,
    #[serde(rename = "tableID")]
    pub(super) table_id: Oid,
    #[serde(rename = "columnID")]
    pub(super) column_id: i16,
    #[serde(rename = "dataTypeSize")]
    pub(super) type_size: i16,
    #[serde(rename = "dataTypeModifier")]
    pub(super) type_modifier: i32,
    pub(super) format: &'static str,
}

/// What a command tag says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tag<'a> {
    words: &'a str,
    rows: Option<u64>,
}

impl<'a> Tag<'a> {
    /// Such as `INSERT 0 3` (an OID, then rows), `SELECT 3` and `CREATE TABLE`.
    pub(super) fn parse(tag: &'a str) -> Self {
        let end = tag.find(|letter: char| letter.is_ascii_digit());
        let Some(end) = end else {
            return Self {
                words: tag,
                rows: None,
            };
        };
        Self {
            words: tag[..end].trim_end(),
            rows: tag[end..].rsplit(' ').next().and_then(|n| n.parse().ok()),
        }
    }

    fn shown(&self, shape: Shape) -> &'a str {
        match shape {
            Shape::Own => self.words,
            Shape::Neon { .. } => self.words.split(' ').next().unwrap_or_default(),
        }
    }
}

/// The answer is longer than it may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLong;

/// Results one after the other.
#[derive(Debug)]
pub(super) struct Answer {
    text: Bounded,
    shape: Shape,
    fields: Vec<Field>,
    array_mode: bool,
    rows: usize,
}

impl Answer {
    pub(super) fn new(shape: Shape, limit: usize) -> Self {
        Self {
            text: Bounded {
                bytes: Vec::new(),
                limit,
            },
            shape,
            fields: Vec::new(),
            array_mode: false,
            rows: 0,
        }
    }

    /// Bytes that are left.
    pub(super) fn room(&self) -> usize {
        self.text.limit - self.text.bytes.len()
    }

    /// Text between results.
    pub(super) fn frame(&mut self, text: &str) -> Result<(), TooLong> {
        self.text.put(text)
    }

    pub(super) fn begin(&mut self, fields: Vec<Field>, array_mode: bool) -> Result<(), TooLong> {
        (self.fields, self.array_mode, self.rows) = (fields, array_mode, 0);
        match self.shape {
            Shape::Own => {
                let columns: Vec<_> = self.fields.iter().map(column).collect();
                self.text.put("{\"columns\":")?;
                self.text.json(&columns)?;
            }
            Shape::Neon { .. } => {
                self.text.put("{\"fields\":")?;
                self.text.json(&self.fields)?;
            }
        }
        self.text.put(",\"rows\":[")
    }

    /// Values in the order of the columns, `None` for NULL.
    pub(super) fn row<'v>(
        &mut self,
        values: impl Iterator<Item = Option<&'v [u8]>>,
    ) -> Result<(), TooLong> {
        let Self {
            text,
            shape,
            fields,
            array_mode,
            rows,
        } = self;
        let brackets = if *array_mode { ["[", "]"] } else { ["{", "}"] };
        if *rows > 0 {
            text.put(",")?;
        }
        *rows += 1;
        text.put(brackets[0])?;
        for (index, (field, value)) in fields.iter().zip(values).enumerate() {
            if index > 0 {
                text.put(",")?;
            }
            if !*array_mode {
                text.json(&field.name)?;
                text.put(":")?;
            }
            match value {
                None => text.put("null")?,
                Some(bytes) => text.value(*shape, field.type_id, bytes)?,
            }
        }
        text.put(brackets[1])
    }

    pub(super) fn end(&mut self, tag: &Tag<'_>) -> Result<(), TooLong> {
        self.text.put("],\"command\":")?;
        self.text.json(tag.shown(self.shape))?;
        self.text.put(",\"rowCount\":")?;
        self.text.json(&tag.rows)?;
        if let Shape::Neon { .. } = self.shape {
            self.text.put(",\"rowAsArray\":")?;
            self.text.json(&self.array_mode)?;
        }
        self.text.put("}")
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.text.bytes
    }
}

fn column(field: &Field) -> SqlColumn {
    SqlColumn {
        name: field.name.clone(),
        type_name: Type::from_oid(field.type_id).map(|known| known.name().to_owned()),
        type_id: field.type_id,
    }
}

/// Text that does not grow beyond its limit.
#[derive(Debug)]
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.limit - self.bytes.len() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Bounded {
    fn put(&mut self, text: &str) -> Result<(), TooLong> {
        self.write_all(text.as_bytes()).map_err(|_| TooLong)
    }

    fn json<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), TooLong> {
        // What is written here has a form in JSON, so only the limit can stop it.
        serde_json::to_writer(self, value).map_err(|_| TooLong)
    }

    fn value(&mut self, shape: Shape, type_id: Oid, bytes: &[u8]) -> Result<(), TooLong> {
        let text = String::from_utf8_lossy(bytes);
        if let Some(element) = array_element(shape, type_id) {
            let start = self.bytes.len();
            if self.array(shape, element, &text)? {
                return Ok(());
            }
            self.bytes.truncate(start);
        }
        match embedded(shape, type_id, &text) {
            Some(json) => self.put(json),
            None => self.json(&*text),
        }
    }

    /// An array's text, item by item; `false` where it is none. Lower bounds other than 1 are left out.
    fn array(&mut self, shape: Shape, element: Oid, text: &str) -> Result<bool, TooLong> {
        let mut rest = match text.split_once('=') {
            Some((bounds, items)) if bounds.starts_with('[') => items,
            _ => text,
        };
        let mut depth = 0_usize;
        while let Some(first) = rest.chars().next() {
            let after = &rest[first.len_utf8()..];
            match first {
                '{' => (depth, rest) = (depth + 1, after),
                '}' if depth > 0 => (depth, rest) = (depth - 1, after),
                ',' if depth > 0 => rest = after,
                '"' if depth > 0 => {
                    let Some((item, after)) = unquoted(after) else {
                        return Ok(false);
                    };
                    rest = after;
                    self.value(shape, element, item.as_bytes())?;
                    continue;
                }
                _ if depth > 0 => {
                    let Some(end) = rest.find([',', '}']) else {
                        return Ok(false);
                    };
                    let (item, after) = rest.split_at(end);
                    rest = after;
                    if item == "NULL" {
                        self.put("null")?;
                    } else {
                        self.value(shape, element, item.as_bytes())?;
                    }
                    continue;
                }
                _ => return Ok(false),
            }
            self.put(match first {
                '{' => "[",
                '}' => "]",
                _ => ",",
            })?;
        }
        Ok(depth == 0 && text.ends_with('}'))
    }
}

/// An item of an array up to its closing quote, without escapes, and what follows.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let mut item = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Some((item, &text[at + 1..])),
            '\\' => item.push(letters.next()?.1),
            _ => item.push(letter),
        }
    }
    None
}

/// The type of an array's items, where arrays are shown as JSON's. Boxes have another delimiter.
fn array_element(shape: Shape, type_id: Oid) -> Option<Oid> {
    if shape != (Shape::Neon { raw: false }) || type_id == Type::BOX_ARRAY.oid() {
        return None;
    }
    match Type::from_oid(type_id)?.kind() {
        Kind::Array(element) => Some(element.oid()),
        _ => None,
    }
}

/// The value as JSON, where it is not shown as a string of Postgres's text. Numbers that JSON lacks, such
/// as NaN, are strings.
fn embedded(shape: Shape, type_id: Oid, text: &str) -> Option<&str> {
    if shape == (Shape::Neon { raw: true }) {
        return None;
    }
    match Type::from_oid(type_id)? {
        Type::BOOL => Some(if text == "t" { "true" } else { "false" }),
        Type::INT2 | Type::INT4 | Type::FLOAT4 | Type::FLOAT8 | Type::JSON | Type::JSONB => {
            json(text)
        }
        // Neon's answers are read by JavaScript, whose numbers do not hold all of these.
        Type::INT8 | Type::OID if shape == Shape::Own => json(text),
        _ => None,
    }
}

fn json(text: &str) -> Option<&str> {
    serde_json::from_str::<&RawValue>(text)
        .ok()
        .map(RawValue::get)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn field(name: &str, known: &Type) -> Field {
        Field {
            name: name.to_owned(),
            type_id: known.oid(),
            table_id: 0,
            column_id: 0,
            type_size: -1,
            type_modifier: -1,
            format: "text",
        }
    }

    fn shown(shape: Shape, array_mode: bool, columns: &[(Type, Option<&str>)]) -> Value {
        let mut answer = Answer::new(shape, 1 << 20);
        let name = |index| format!("c{index}");
        let fields = columns.iter().enumerate();
        let fields = fields.map(|(index, (known, _))| field(&name(index), known));
        answer.begin(fields.collect(), array_mode).unwrap();
        let values = columns.iter().map(|(_, value)| value.map(str::as_bytes));
        answer.row(values).unwrap();
        answer.end(&Tag::parse("SELECT 1")).unwrap();
        serde_json::from_slice(&answer.into_bytes()).unwrap()
    }

    fn columns() -> Vec<(Type, Option<&'static str>)> {
        vec![
            (Type::BOOL, Some("t")),
            (Type::INT4, Some("-7")),
            (Type::INT8, Some("9007199254740993")),
            (Type::FLOAT8, Some("1e+300")),
            (Type::FLOAT8, Some("NaN")),
            (Type::NUMERIC, Some("1.10")),
            (Type::JSONB, Some(r#"{"a": [1, null]}"#)),
            (Type::TEXT, Some("a\"b\nä")),
            (Type::INT4, None),
            (Type::INT4_ARRAY, Some("{1,2}")),
        ]
    }

    #[test]
    fn values_have_the_types_of_json() {
        let shown = shown(Shape::Own, true, &columns());
        let expected = json!([
            true, -7, 9_007_199_254_740_993_u64, 1e300, "NaN", "1.10", {"a": [1, null]}, "a\"b\nä",
            null, "{1,2}",
        ]);
        assert_eq!(shown["rows"][0], expected);
        assert_eq!(
            shown["columns"][2],
            json!({"name": "c2", "typeName": "int8", "typeId": 20})
        );
        assert_eq!(
            (&shown["command"], &shown["rowCount"]),
            (&json!("SELECT"), &json!(1))
        );
        assert!(shown.get("rowAsArray").is_none());
    }

    #[test]
    fn neon_gets_text_when_it_asks_for_it() {
        let raw = shown(Shape::Neon { raw: true }, true, &columns());
        assert_eq!(raw["rows"][0][0], "t");
        assert_eq!(raw["rows"][0][6], r#"{"a": [1, null]}"#);
        assert_eq!(raw["rows"][0][8], Value::Null);
        assert_eq!(raw["rowAsArray"], true);
        let field = json!({
            "name": "c0", "dataTypeID": 16, "tableID": 0, "columnID": 0, "dataTypeSize": -1,
            "dataTypeModifier": -1, "format": "text",
        });
        assert_eq!(raw["fields"][0], field);
        let typed = shown(Shape::Neon { raw: false }, false, &columns());
        assert_eq!(typed["rows"][0]["c0"], true);
        assert_eq!(typed["rows"][0]["c2"], "9007199254740993");
        assert_eq!(typed["rowAsArray"], false);
    }

    #[test]
    fn neon_gets_arrays_as_json_unless_it_asks_for_text() {
        for (known, text, expected) in [
            (Type::INT4_ARRAY, "{}", json!([])),
            (Type::INT4_ARRAY, "{1,NULL,-3}", json!([1, null, -3])),
            (Type::INT4_ARRAY, "{{1,2},{3,4}}", json!([[1, 2], [3, 4]])),
            (Type::INT4_ARRAY, "[0:1]={1,2}", json!([1, 2])),
            (
                Type::INT8_ARRAY,
                "{9007199254740993}",
                json!(["9007199254740993"]),
            ),
            (Type::BOOL_ARRAY, "{t,f}", json!([true, false])),
            (
                Type::TEXT_ARRAY,
                r#"{a,"b,c","\"","\\","NULL","","{}","ä"}"#,
                json!(["a", "b,c", "\"", "\\", "NULL", "", "{}", "ä"]),
            ),
            (
                Type::JSONB_ARRAY,
                r#"{"{\"a\": [1]}"}"#,
                json!([{"a": [1]}]),
            ),
            (
                Type::BOX_ARRAY,
                "{(1,1),(0,0);(2,2),(1,1)}",
                json!("{(1,1),(0,0);(2,2),(1,1)}"),
            ),
            (Type::TEXT_ARRAY, "{\"unfinished", json!("{\"unfinished")),
            (Type::TEXT_ARRAY, "no array", json!("no array")),
        ] {
            let answer = shown(
                Shape::Neon { raw: false },
                true,
                &[(known.clone(), Some(text))],
            );
            assert_eq!(answer["rows"][0][0], expected, "{text}");
            let raw = shown(Shape::Neon { raw: true }, true, &[(known, Some(text))]);
            assert_eq!(raw["rows"][0][0], text);
        }
    }

    #[test]
    fn tags_are_taken_apart() {
        for (tag, own, neon, rows) in [
            ("INSERT 0 3", "INSERT", "INSERT", Some(3)),
            ("SELECT 12", "SELECT", "SELECT", Some(12)),
            ("CREATE TABLE", "CREATE TABLE", "CREATE", None),
            ("", "", "", None),
        ] {
            let parsed = Tag::parse(tag);
            assert_eq!(parsed.shown(Shape::Own), own);
            assert_eq!(parsed.shown(Shape::Neon { raw: true }), neon);
            assert_eq!(parsed.rows, rows, "{tag}");
        }
    }

    #[test]
    fn an_answer_stops_at_its_limit() {
        let mut answer = Answer::new(Shape::Own, 200);
        answer.begin(vec![field("a", &Type::TEXT)], true).unwrap();
        let value = [b'x'; 40];
        let row = || std::iter::once(Some(&value[..]));
        let rows = std::iter::repeat_with(|| answer.row(row())).take_while(Result::is_ok);
        assert!((1..=4).contains(&rows.count()));
        assert!(answer.into_bytes().len() <= 200);
        // What grows when it is escaped is counted as it grows.
        let mut answer = Answer::new(Shape::Own, 200);
        answer.begin(vec![field("a", &Type::TEXT)], true).unwrap();
        assert_eq!(
            answer.row(std::iter::once(Some(&[1_u8; 40][..]))),
            Err(TooLong)
        );
    }
}
