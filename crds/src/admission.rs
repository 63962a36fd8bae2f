//! What an API server does with an object of ours before it stores it: defaults, the schema, the
//! CEL rules. The same here, without a cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;

use kube::core::cel::{
    CompiledSchema, ErrorKind, ValidationError, compile_schema, validate_compiled,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::definition::schema_of;
use crate::metadata::check_metadata;
use crate::structure::Shape;
use crate::{BranchLease, BranchNode, BranchPool, GROUP, VERSION, crds};

/// One reason why an object is refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// Path such as `spec.prepare[0].sql`; empty for the object as a whole.
    pub field: String,
    /// What is wrong and what to do.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            return f.write_str(&self.message);
        }
        write!(f, "{}: {}", self.field, self.message)
    }
}

/// A violation, and whether CEL rules can be asked in spite of it.
#[derive(Debug)]
pub(crate) struct Problem {
    violation: Violation,
    /// The value is of the wrong type or size: rules would fail for no reason of their own.
    blocking: bool,
}

impl Problem {
    pub(crate) fn new(field: &str, message: impl Into<String>) -> Self {
        Self {
            violation: Violation {
                field: field.to_owned(),
                message: message.into(),
            },
            blocking: false,
        }
    }

    pub(crate) fn blocking(field: &str, message: impl Into<String>) -> Self {
        Self {
            blocking: true,
            ..Self::new(field, message)
        }
    }

    pub(crate) fn into_violation(self) -> Violation {
        self.violation
    }
}

/// A resource of ours.
pub trait Resource: DeserializeOwned {
    const KIND: &str;
}

impl Resource for BranchPool {
    const KIND: &str = "BranchPool";
}

impl Resource for BranchLease {
    const KIND: &str = "BranchLease";
}

impl Resource for BranchNode {
    const KIND: &str = "BranchNode";
}

/// Everything that speaks against `object`, a BranchPool, BranchLease or BranchNode as JSON. With
/// `old`, the object as it was, the rules on changes are asked too.
pub fn validate(object: &Value, old: Option<&Value>) -> Vec<Violation> {
    admit(object, old).err().unwrap_or_default()
}

/// The object with its defaults, or everything that speaks against it.
pub fn admit(object: &Value, old: Option<&Value>) -> Result<Value, Vec<Violation>> {
    let schema = schema_for(object).map_err(|violation| vec![violation])?;
    let filled = schema.filled(object);
    let mut problems = Vec::new();
    schema.check(&filled, &mut problems);
    check_metadata(&filled, &mut problems);
    let blocked = problems.iter().any(|problem| problem.blocking);
    let mut violations: Vec<_> = (problems.into_iter())
        .map(Problem::into_violation)
        .collect();
    if !blocked {
        let old = old.map(|old| schema.filled(old));
        let asked = validate_compiled(&schema.rules, &filled, old.as_ref());
        violations.extend(asked.err().into_iter().flatten().map(refusal));
    }
    if violations.is_empty() {
        Ok(filled)
    } else {
        violations.sort();
        violations.dedup();
        Err(violations)
    }
}

/// [`admit`], decoded.
pub fn admit_as<R: Resource>(object: &Value, old: Option<&Value>) -> Result<R, Vec<Violation>> {
    let kind = object.get("kind").and_then(Value::as_str);
    if kind != Some(R::KIND) {
        let message = format!("must be {}, is {}", R::KIND, kind.unwrap_or("absent"));
        return Err(vec![violation("kind", message)]);
    }
    let filled = admit(object, old)?;
    serde_json::from_value(filled)
        .map_err(|error| vec![violation("", format!("cannot be decoded: {error}"))])
}

fn violation(field: &str, message: impl Into<String>) -> Violation {
    Violation {
        field: field.to_owned(),
        message: message.into(),
    }
}

fn refusal(error: ValidationError) -> Violation {
    let message = match error.kind {
        ErrorKind::ValidationFailure => error.message,
        _ => format!("{} (rule: {})", error.message, error.rule),
    };
    violation(error.field_path.trim_start_matches('.'), message)
}

struct Schema {
    shape: Shape,
    rules: CompiledSchema,
}

impl Schema {
    fn filled(&self, object: &Value) -> Value {
        let mut filled = object.clone();
        self.shape.fill(&mut filled);
        filled
    }

    fn check(&self, object: &Value, problems: &mut Vec<Problem>) {
        self.shape.check(object, "", problems);
    }
}

fn schema_for(object: &Value) -> Result<&'static Schema, Violation> {
    static SCHEMAS: OnceLock<BTreeMap<String, Schema>> = OnceLock::new();

    let expected = format!("{GROUP}/{VERSION}");
    match object.get("apiVersion").and_then(Value::as_str) {
        Some(version) if version == expected => {}
        Some(version) => {
            return Err(violation(
                "apiVersion",
                format!("must be {expected}, is {version}"),
            ));
        }
        None => {
            return Err(violation(
                "apiVersion",
                format!("is required: write {expected}"),
            ));
        }
    }
    let schemas = SCHEMAS.get_or_init(read_schemas);
    let kinds = || schemas.keys().cloned().collect::<Vec<_>>().join(", ");
    match object.get("kind").and_then(Value::as_str) {
        Some(kind) => schemas
            .get(kind)
            .ok_or_else(|| violation("kind", format!("must be one of {}, is {kind}", kinds()))),
        None => Err(violation(
            "kind",
            format!("is required: write one of {}", kinds()),
        )),
    }
}

fn read_schemas() -> BTreeMap<String, Schema> {
    crds()
        .into_iter()
        .map(|crd| {
            let mut schema = schema_of(&crd);
            let rules = compile_schema(&schema);
            for field in ["apiVersion", "kind"] {
                schema["properties"][field] = json!({"type": "string"});
            }
            schema["properties"]["metadata"] = json!({});
            let shape = Shape::read(&schema);
            (crd.spec.names.kind, Schema { shape, rules })
        })
        .collect()
}

pub(crate) fn at_field(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

pub(crate) fn at_index(path: &str, index: usize) -> String {
    format!("{path}[{index}]")
}
