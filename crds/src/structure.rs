//! What a schema says about the shape of an object, without CEL: types, fields, bounds, defaults.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use regex::Regex;
use serde_json::{Map, Value};

use crate::admission::{Problem, at_field, at_index};

/// One place in a schema, ready to be checked against. Anything the schema does not say is allowed,
/// but for fields: an object has the fields named, or is a map.
#[derive(Debug, Default)]
pub(crate) struct Shape {
    kind: Kind,
    pub(crate) properties: BTreeMap<String, Shape>,
    required: Vec<String>,
    items: Option<Box<Shape>>,
    entries: Option<Box<Shape>>,
    default: Option<Value>,
    choices: Vec<Value>,
    minimum: Option<i64>,
    maximum: Option<i64>,
    min_length: Option<usize>,
    max_length: Option<usize>,
    max_items: Option<usize>,
    max_entries: Option<usize>,
    pattern: Option<Regex>,
    is_time: bool,
    /// Fields that tell the items of a list apart; for a set, the item itself.
    unique_by: Option<Vec<String>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    Any,
    Object,
    List,
    Text,
    Integer,
    Boolean,
    IntegerOrText,
}

impl Shape {
    /// Reads a structural schema, as [`crate::crds`] holds it.
    pub(crate) fn read(schema: &Value) -> Self {
        let text = |key: &str| schema.get(key).and_then(Value::as_str);
        let size = |key: &str| usize::try_from(schema.get(key)?.as_u64()?).ok();
        let child = |key: &str| {
            let below = schema.get(key).filter(|below| below.is_object())?;
            Some(Box::new(Self::read(below)))
        };
        Self {
            kind: Kind::read(schema),
            properties: (schema.get("properties").and_then(Value::as_object))
                .map(|fields| {
                    fields
                        .iter()
                        .map(|(name, below)| (name.clone(), Self::read(below)))
                        .collect()
                })
                .unwrap_or_default(),
            required: strings(schema.get("required")),
            items: child("items"),
            entries: child("additionalProperties"),
            default: schema.get("default").cloned(),
            choices: (schema.get("enum").and_then(Value::as_array))
                .cloned()
                .unwrap_or_default(),
            minimum: schema.get("minimum").and_then(whole),
            maximum: schema.get("maximum").and_then(whole),
            min_length: size("minLength"),
            max_length: size("maxLength"),
            max_items: size("maxItems"),
            max_entries: size("maxProperties"),
            pattern: text("pattern")
                .map(|pattern| Regex::new(pattern).expect("a schema's pattern should compile")),
            is_time: text("format") == Some("date-time"),
            unique_by: match text("x-kubernetes-list-type") {
                Some("map") => Some(strings(schema.get("x-kubernetes-list-map-keys"))),
                Some("set") => Some(Vec::new()),
                _ => None,
            },
        }
    }

    /// Drops nulls, which stand for absence, and fills in defaults, as API servers do. Applying it
    /// twice gives the same as once.
    pub(crate) fn fill(&self, value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.retain(|_, value| !value.is_null());
                for (name, shape) in &self.properties {
                    if let Some(default) = &shape.default
                        && !fields.contains_key(name)
                    {
                        fields.insert(name.clone(), default.clone());
                    }
                }
                for (name, value) in fields {
                    if let Some(shape) = self.properties.get(name).or(self.entries.as_deref()) {
                        shape.fill(value);
                    }
                }
            }
            Value::Array(items) => {
                if let Some(shape) = &self.items {
                    for item in items {
                        shape.fill(item);
                    }
                }
            }
            _ => {}
        }
    }

    pub(crate) fn check(&self, value: &Value, path: &str, found: &mut Vec<Problem>) {
        if let Some(message) = self.kind.refusal(value) {
            found.push(Problem::blocking(path, message));
            return;
        }
        if !self.choices.is_empty() && !self.choices.contains(value) {
            let choices = listed(self.choices.iter().filter_map(Value::as_str));
            found.push(Problem::blocking(path, format!("must be one of {choices}")));
            return;
        }
        match value {
            Value::Object(fields) => self.check_object(fields, path, found),
            Value::Array(items) => self.check_list(items, path, found),
            Value::String(text) => self.check_text(text, path, found),
            Value::Number(number) => self.check_number(number.as_i64(), path, found),
            Value::Bool(_) | Value::Null => {}
        }
    }

    fn check_object(&self, fields: &Map<String, Value>, path: &str, found: &mut Vec<Problem>) {
        for name in &self.required {
            if !fields.contains_key(name) {
                found.push(Problem::blocking(&at_field(path, name), "is required"));
            }
        }
        if let Some(most) = self.max_entries
            && fields.len() > most
        {
            let message = format!("must have at most {most} entries, has {}", fields.len());
            found.push(Problem::blocking(path, message));
        }
        for (name, value) in fields {
            let path = at_field(path, name);
            if let Some(shape) = self.properties.get(name).or(self.entries.as_deref()) {
                shape.check(value, &path, found);
            } else if self.kind == Kind::Object {
                let known = listed(self.properties.keys().map(String::as_str));
                let message = format!("unknown field: the fields here are {known}");
                found.push(Problem::new(&path, message));
            }
        }
    }

    fn check_list(&self, items: &[Value], path: &str, found: &mut Vec<Problem>) {
        if let Some(most) = self.max_items
            && items.len() > most
        {
            let message = format!("must have at most {most} items, has {}", items.len());
            found.push(Problem::blocking(path, message));
            return;
        }
        if let Some(shape) = &self.items {
            for (index, item) in items.iter().enumerate() {
                shape.check(item, &at_index(path, index), found);
            }
        }
        if let Some(keys) = &self.unique_by {
            check_unique(items, keys, path, found);
        }
    }

    fn check_text(&self, text: &str, path: &str, found: &mut Vec<Problem>) {
        let length = text.chars().count();
        if let Some(most) = self.max_length
            && length > most
        {
            let message = format!("must have at most {most} characters, has {length}");
            found.push(Problem::blocking(path, message));
            return;
        }
        if let Some(least) = self.min_length
            && length < least
        {
            let message = format!("must have at least {least} characters, has {length}");
            found.push(Problem::new(path, message));
            return;
        }
        if let Some(pattern) = &self.pattern
            && !pattern.is_match(text)
        {
            let message = format!("must match {}", pattern.as_str());
            found.push(Problem::new(path, message));
        }
        if self.is_time && text.parse::<Timestamp>().is_err() {
            let message = "must be a time such as 2030-01-31T12:00:00Z";
            found.push(Problem::new(path, message));
        }
    }

    fn check_number(&self, number: Option<i64>, path: &str, found: &mut Vec<Problem>) {
        let Some(number) = number else {
            let message = format!("must be at most {}", self.maximum.unwrap_or(i64::MAX));
            found.push(Problem::blocking(path, message));
            return;
        };
        if let Some(least) = self.minimum
            && number < least
        {
            found.push(Problem::new(
                path,
                format!("must be at least {least}, is {number}"),
            ));
        }
        if let Some(most) = self.maximum
            && number > most
        {
            found.push(Problem::new(
                path,
                format!("must be at most {most}, is {number}"),
            ));
        }
    }
}

impl Kind {
    fn read(schema: &Value) -> Self {
        if schema.get("x-kubernetes-int-or-string").is_some() {
            return Self::IntegerOrText;
        }
        match schema.get("type").and_then(Value::as_str) {
            Some("object") => Self::Object,
            Some("array") => Self::List,
            Some("string") => Self::Text,
            Some("integer") => Self::Integer,
            Some("boolean") => Self::Boolean,
            _ => Self::Any,
        }
    }

    /// `None` when a value is of this kind.
    fn refusal(self, value: &Value) -> Option<String> {
        let fits = match self {
            Self::Any => true,
            Self::Object => value.is_object(),
            Self::List => value.is_array(),
            Self::Text => value.is_string(),
            Self::Integer => is_integer(value),
            Self::Boolean => value.is_boolean(),
            Self::IntegerOrText => value.is_string() || is_integer(value),
        };
        if fits {
            return None;
        }
        let wanted = match self {
            Self::Any => "a value",
            Self::Object => "an object",
            Self::List => "a list",
            Self::Text => "a string",
            Self::Integer => "a whole number",
            Self::Boolean => "true or false",
            Self::IntegerOrText => "a whole number or a string",
        };
        let hint = match (self, value) {
            (Self::Text | Self::IntegerOrText, Value::Number(_) | Value::Bool(_)) => {
                ": write it in quotes"
            }
            _ => "",
        };
        Some(format!("must be {wanted}, is {}{hint}", kind_of(value)))
    }
}

fn is_integer(value: &Value) -> bool {
    value.is_i64() || value.is_u64()
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a number with a fraction",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn check_unique(items: &[Value], keys: &[String], path: &str, found: &mut Vec<Problem>) {
    let mut seen = BTreeSet::new();
    for (index, item) in items.iter().enumerate() {
        let identity = if keys.is_empty() {
            item.to_string()
        } else {
            let parts: Vec<_> = keys.iter().map(|key| item.get(key)).collect();
            serde_json::json!(parts).to_string()
        };
        if !seen.insert(identity) {
            let by = listed(keys.iter().map(String::as_str));
            let message = if keys.is_empty() {
                "is in the list already".to_owned()
            } else {
                format!("has the same {by} as an item before it")
            };
            found.push(Problem::new(&at_index(path, index), message));
        }
    }
}

fn strings(list: Option<&Value>) -> Vec<String> {
    let items = list.and_then(Value::as_array).into_iter().flatten();
    items
        .filter_map(|item| item.as_str().map(str::to_owned))
        .collect()
}

/// Bounds are whole numbers, though schemas hold them as floating point.
#[allow(clippy::cast_possible_truncation)]
fn whole(bound: &Value) -> Option<i64> {
    bound
        .as_i64()
        .or_else(|| bound.as_f64().map(|number| number as i64))
}

fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}
