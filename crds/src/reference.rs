//! The reference of all fields, as Markdown for the documentation.

use std::fmt::Write;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Map, Value};

use crate::definition::schema_of;
use crate::{GROUP, VERSION};

/// A Markdown page with every field: type, default, bounds, meaning, and every rule.
pub fn to_markdown(crds: &[CustomResourceDefinition]) -> String {
    let mut page = format!(
        "<!-- Generated from the types in crds/ by `make generate`; edits are lost. -->\n\n\
         # Resources\n\n\
         Group `{GROUP}`, version `{VERSION}`. `kubectl explain branchpool.spec` says the same.\n\
         Defaults are filled in when an object is stored, so `kubectl get -o yaml` shows what is in force;\n\
         a standalone agent fills in the same defaults and refuses the same objects.\n\
         A *duration* is written as whole numbers with `h`, `m`, `s` or `ms`, such as `1h30m`, at most `8760h`.\n\
         A *quantity* is a number with an optional suffix, such as `512Mi`, `2` or `500m`.\n"
    );
    for crd in crds {
        write_kind(&mut page, crd);
    }
    page
}

fn write_kind(page: &mut String, crd: &CustomResourceDefinition) {
    let names = &crd.spec.names;
    let schema = schema_of(crd);
    let mut fields = Vec::new();
    collect(&schema, "", &mut fields);
    let short = names.short_names.iter().flatten().cloned();
    let short = short.collect::<Vec<_>>().join(", ");
    put(
        page,
        format_args!(
            "\n## {}\n\n{}\n\n{}, short name `{short}`.\n",
            names.kind,
            schema["description"].as_str().unwrap_or_default(),
            crd.spec.scope,
        ),
    );
    for (title, prefix) in [("Spec", "spec"), ("Status", "status")] {
        let rows: Vec<_> = fields
            .iter()
            .filter(|field| field.path.starts_with(&format!("{prefix}.")))
            .collect();
        if rows.is_empty() {
            continue;
        }
        put(
            page,
            format_args!(
                "\n### {title} of {}\n\n| Field | Type | Default | Bounds | Meaning |\n|---|---|---|---|---|\n",
                names.kind
            ),
        );
        for field in rows {
            put(page, format_args!("{}\n", field.row()));
        }
    }
    write_rules(page, &schema, &names.kind);
}

fn write_rules(page: &mut String, schema: &Value, kind: &str) {
    let mut rules = Vec::new();
    collect_rules(schema, "", &mut rules);
    if rules.is_empty() {
        return;
    }
    put(
        page,
        format_args!("\n### Rules of {kind}\n\n| Where | Refused with |\n|---|---|\n"),
    );
    for (path, message) in rules {
        put(page, format_args!("| `{path}` | {} |\n", cell(&message)));
    }
}

/// Writing to a `String` cannot fail.
fn put(page: &mut String, text: std::fmt::Arguments<'_>) {
    page.write_fmt(text)
        .expect("writing to a string should work");
}

struct Field<'a> {
    path: String,
    required: bool,
    schema: &'a Value,
}

impl Field<'_> {
    fn row(&self) -> String {
        let default = match (self.required, self.schema.get("default")) {
            (true, _) => "required".to_owned(),
            (false, None) => String::new(),
            (false, Some(Value::Object(fields))) if fields.is_empty() => String::new(),
            (false, Some(Value::String(text))) => format!("`{text}`"),
            (false, Some(value)) => format!("`{value}`"),
        };
        let meaning = self.schema["description"].as_str().unwrap_or_default();
        format!(
            "| `{}` | {} | {default} | {} | {} |",
            self.path,
            kind(self.schema),
            cell(&bounds(self.schema)),
            cell(meaning),
        )
    }
}

fn collect<'a>(schema: &'a Value, path: &str, into: &mut Vec<Field<'a>>) {
    for (name, below) in fields_of(schema) {
        let path = join(path, name);
        let required = schema["required"]
            .as_array()
            .is_some_and(|names| names.iter().any(|known| known == name));
        into.push(Field {
            path: path.clone(),
            required,
            schema: below,
        });
        // The fields of conditions are the same in all of Kubernetes.
        if name != "conditions" {
            collect(below, &path, into);
            collect(&below["items"], &format!("{path}[]"), into);
        }
    }
}

fn collect_rules(schema: &Value, path: &str, into: &mut Vec<(String, String)>) {
    for rule in schema["x-kubernetes-validations"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let message = rule["message"].as_str().unwrap_or_default();
        let below = rule["fieldPath"].as_str().unwrap_or_default();
        let place = format!("{path}{below}");
        let place = place.trim_start_matches('.');
        let place = if place.is_empty() {
            "(the object)"
        } else {
            place
        };
        if !is_format(message) {
            into.push((place.to_owned(), message.to_owned()));
        }
    }
    for (name, below) in fields_of(schema) {
        let path = join(path, name);
        collect_rules(below, &path, into);
        collect_rules(&below["items"], &format!("{path}[]"), into);
    }
}

/// The format of durations and quantities is said once, at the head of the page.
fn is_format(message: &str) -> bool {
    message.starts_with("write a duration") || message.starts_with("write a number below")
}

fn fields_of(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let fields = schema.get("properties").and_then(Value::as_object);
    fields.into_iter().flat_map(Map::iter)
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

fn kind(schema: &Value) -> &'static str {
    let is_format = |start: &str| {
        schema["x-kubernetes-validations"][0]["message"]
            .as_str()
            .is_some_and(|message| message.starts_with(start))
    };
    if schema.get("x-kubernetes-int-or-string").is_some() {
        return "quantity";
    }
    match schema["type"].as_str() {
        Some("string") if is_format("write a duration") => "duration",
        Some("string") if schema["format"] == "date-time" => "time",
        Some("object") if schema.get("additionalProperties").is_some() => "map of strings",
        Some("array") => "list",
        Some("object") => "object",
        Some("integer") => "integer",
        Some("boolean") => "boolean",
        _ => "string",
    }
}

fn bounds(schema: &Value) -> String {
    if let Some(choices) = schema["enum"].as_array() {
        let choices = choices.iter().filter_map(Value::as_str);
        return choices
            .map(|choice| format!("`{choice}`"))
            .collect::<Vec<_>>()
            .join(", ");
    }
    if kind(schema) == "duration" || kind(schema) == "quantity" {
        return String::new();
    }
    let mut said = Vec::new();
    for (least, most, unit) in [
        ("minimum", "maximum", ""),
        ("minLength", "maxLength", " characters"),
        ("minItems", "maxItems", " items"),
        ("minProperties", "maxProperties", " entries"),
    ] {
        match (schema[least].as_f64(), schema[most].as_f64()) {
            (Some(least), Some(most)) if most >= f64::from(i32::MAX) => {
                said.push(format!("at least {least}{unit}"));
            }
            (Some(least), Some(most)) => said.push(format!("{least} to {most}{unit}")),
            (Some(least), None) => said.push(format!("at least {least}{unit}")),
            (None, Some(most)) => said.push(format!("at most {most}{unit}")),
            (None, None) => {}
        }
    }
    if let Some(pattern) = schema["pattern"].as_str() {
        said.push(format!("`{pattern}`"));
    }
    said.join("; ")
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}
