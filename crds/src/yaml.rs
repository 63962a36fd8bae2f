//! YAML as JSON values, with the line of each field.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::{Location, Spanned};

use crate::admission::{at_field, at_index};

/// One document of a YAML stream.
#[derive(Debug)]
pub(crate) struct Document {
    pub(crate) value: Value,
    lines: BTreeMap<String, u64>,
}

/// Why a text is no YAML, and on which line, counted from 1.
#[derive(Debug)]
pub(crate) struct SyntaxError {
    pub(crate) line: Option<u64>,
    pub(crate) message: String,
}

impl Document {
    /// The line of a field, or of the closest object around it that is there.
    pub(crate) fn line_of(&self, field: &str) -> Option<u64> {
        let mut path = field;
        loop {
            if let Some(line) = self.lines.get(path) {
                return Some(*line);
            }
            if path.is_empty() {
                return None;
            }
            path = path.rfind(['.', '[']).map_or("", |end| &path[..end]);
        }
    }
}

/// Reads all documents; empty ones are left out. A key that is given twice is an error.
pub(crate) fn read(text: &str) -> Result<Vec<Document>, SyntaxError> {
    let options = serde_saphyr::options! {
        with_snippet: false,
        reject_unsupported_tags: true,
    };
    let trees: Vec<Spanned<Tree>> = serde_saphyr::from_multiple_with_options(text, options)
        .map_err(|error| SyntaxError {
            line: error.location().and_then(line),
            message: (error.without_snippet())
                .render_with_formatter(&serde_saphyr::UserMessageFormatter),
        })?;
    Ok(trees
        .into_iter()
        .map(|tree| {
            let mut lines = BTreeMap::new();
            let value = tree.into_value("", &mut lines);
            Document { value, lines }
        })
        .filter(|document| !document.value.is_null())
        .collect())
}

fn line(location: Location) -> Option<u64> {
    Some(location.line()).filter(|line| *line > 0)
}

enum Tree {
    Scalar(Value),
    List(Vec<Spanned<Tree>>),
    Map(Vec<(Spanned<String>, Spanned<Tree>)>),
}

trait IntoValue {
    fn into_value(self, path: &str, lines: &mut BTreeMap<String, u64>) -> Value;
}

impl IntoValue for Spanned<Tree> {
    fn into_value(self, path: &str, lines: &mut BTreeMap<String, u64>) -> Value {
        if let Some(line) = line(self.referenced) {
            lines.entry(path.to_owned()).or_insert(line);
        }
        match self.value {
            Tree::Scalar(value) => value,
            Tree::List(items) => (items.into_iter().enumerate())
                .map(|(index, item)| item.into_value(&at_index(path, index), lines))
                .collect(),
            Tree::Map(fields) => {
                let mut map = Map::new();
                for (name, value) in fields {
                    let path = at_field(path, &name.value);
                    if let Some(line) = line(name.referenced) {
                        lines.insert(path.clone(), line);
                    }
                    map.insert(name.value, value.into_value(&path, lines));
                }
                Value::Object(map)
            }
        }
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree::Scalar(Value::Null))
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<Tree, E> {
        self.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Tree, D::Error> {
        Tree::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Tree, E> {
        Ok(Tree::Scalar(Value::Bool(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_i128<E: serde::de::Error>(self, value: i128) -> Result<Tree, E> {
        Err(E::custom(format!("the number {value} is out of range")))
    }

    fn visit_u128<E: serde::de::Error>(self, value: u128) -> Result<Tree, E> {
        Err(E::custom(format!("the number {value} is out of range")))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Tree, E> {
        Number::from_f64(value)
            .map(|number| Tree::Scalar(number.into()))
            .ok_or_else(|| E::custom("infinity and NaN are no numbers here"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_string<E>(self, value: String) -> Result<Tree, E> {
        Ok(Tree::Scalar(value.into()))
    }

    fn visit_bytes<E: serde::de::Error>(self, _: &[u8]) -> Result<Tree, E> {
        Err(E::custom("binary data has no place here"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Tree, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Tree::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Tree, A::Error> {
        let mut fields: Vec<(Spanned<String>, Spanned<Tree>)> = Vec::new();
        while let Some(field) = access.next_entry()? {
            fields.push(field);
        }
        let mut names: Vec<_> = fields.iter().map(|(name, _)| name.value.as_str()).collect();
        names.sort_unstable();
        if let Some([name, _]) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            let message = format!("the field {name} is given twice");
            return Err(A::Error::custom(message));
        }
        Ok(Tree::Map(fields))
    }
}
