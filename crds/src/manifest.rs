//! Manifests: the files that a cluster takes, for an agent that stands alone.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

use crate::admission::{Problem, Resource, Violation, admit_as, at_field};
use crate::metadata::check_metadata;
use crate::yaml::{self, Document};
use crate::{BranchLease, BranchNode, BranchPool, Script, Source};

/// Where pools and ConfigMaps are that name no namespace.
const DEFAULT_NAMESPACE: &str = "default";
/// More would not be read.
const MAX_ERRORS: usize = 50;

/// Everything that a set of manifests holds. Names are unique, namespaces are filled in, and every
/// ConfigMap that a pool names is there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifests {
    /// By namespace and name.
    pub pools: Vec<BranchPool>,
    /// By namespace and name.
    pub config_maps: Vec<ConfigMap>,
}

/// Named texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigMap {
    pub namespace: String,
    pub name: String,
    pub data: BTreeMap<String, String>,
}

impl Manifests {
    /// The scripts that fill the database of an sql source, in the order in which they run: those of
    /// the ConfigMap by name, then those of the pool. Empty for other sources.
    pub fn scripts(&self, pool: &BranchPool) -> Vec<Script> {
        let Source::Sql(source) = &pool.spec.source else {
            return Vec::new();
        };
        let config_map = source.config_map_ref.as_ref().and_then(|reference| {
            let namespace = pool.metadata.namespace.as_deref();
            self.config_maps
                .iter()
                .find(|map| map.name == reference.name && Some(map.namespace.as_str()) == namespace)
        });
        let named = config_map.into_iter().flat_map(ConfigMap::scripts);
        named.chain(source.scripts.iter().cloned()).collect()
    }
}

impl ConfigMap {
    /// Its entries whose names end in `.sql`, in the order of their names.
    pub fn scripts(&self) -> impl Iterator<Item = Script> {
        let scripts = self.data.iter().filter(|(name, _)| is_script(name));
        scripts.map(|(name, sql)| Script {
            name: name.clone(),
            sql: sql.clone(),
        })
    }
}

fn is_script(name: &str) -> bool {
    name.strip_suffix(".sql")
        .is_some_and(|stem| !stem.is_empty())
}

/// One reason why manifests are refused, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestError {
    pub file: String,
    /// Counted from 1.
    pub line: Option<u64>,
    /// Path of the field in the object; empty for an object or a file as a whole.
    pub field: String,
    pub message: String,
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        f.write_str(": ")?;
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for ManifestError {}

/// Reads files of one or more YAML or JSON documents, given as pairs of a file's name and its text.
/// All of them are taken, or none: the errors are then in the order of the files, at most 50.
pub fn load_manifests(texts: &[(&str, &str)]) -> Result<Manifests, Vec<ManifestError>> {
    let mut loader = Loader::default();
    for (file, text) in texts {
        loader.load(file, text);
    }
    loader.check_references();
    loader.errors.truncate(MAX_ERRORS);
    if loader.errors.is_empty() {
        Ok(loader.into_manifests())
    } else {
        Err(loader.errors)
    }
}

/// Kind, namespace and name.
type Identity = (&'static str, String, String);

/// Where an object was found.
#[derive(Clone)]
struct Place {
    file: String,
    line: Option<u64>,
    config_map_ref: Option<u64>,
}

#[derive(Default)]
struct Loader {
    places: BTreeMap<Identity, Place>,
    pools: BTreeMap<Identity, BranchPool>,
    config_maps: BTreeMap<Identity, ConfigMap>,
    /// A reference to an object that was refused is no second error.
    refused_config_maps: bool,
    errors: Vec<ManifestError>,
}

impl Loader {
    fn load(&mut self, file: &str, text: &str) {
        match yaml::read(text) {
            Ok(documents) => {
                for document in documents {
                    self.take(file, document);
                }
            }
            Err(error) => {
                self.refused_config_maps = true;
                self.errors.push(ManifestError {
                    file: file.to_owned(),
                    line: error.line,
                    field: String::new(),
                    message: format!("is not readable YAML: {}", error.message),
                });
            }
        }
    }

    fn take(&mut self, file: &str, mut document: Document) {
        let word = |field: &str| document.value.get(field).and_then(Value::as_str);
        let outcome = match (word("apiVersion"), word("kind")) {
            (Some("v1"), Some("ConfigMap")) => {
                in_namespace(&mut document.value);
                let read = read_config_map(&document.value);
                self.refused_config_maps |= read.is_err();
                read.and_then(|map| self.add_config_map(file, &document, map))
            }
            (_, Some(BranchPool::KIND)) => {
                in_namespace(&mut document.value);
                admit_as(&document.value, None)
                    .and_then(|pool| self.add_pool(file, &document, pool))
            }
            (_, kind) => Err(vec![other_kind(kind)]),
        };
        for violation in outcome.err().into_iter().flatten() {
            self.errors.push(ManifestError {
                file: file.to_owned(),
                line: document.line_of(&violation.field),
                field: violation.field,
                message: violation.message,
            });
        }
    }

    fn add_pool(
        &mut self,
        file: &str,
        document: &Document,
        mut pool: BranchPool,
    ) -> Result<(), Vec<Violation>> {
        let namespace = pool.metadata.namespace.clone().unwrap_or_default();
        let name = pool.metadata.name.clone().unwrap_or_default();
        // What another API server knew about the pool says nothing here.
        pool.status = None;
        pool.metadata.uid = None;
        let identity = self.claim(BranchPool::KIND, namespace, name, file, document)?;
        self.pools.insert(identity, pool);
        Ok(())
    }

    fn add_config_map(
        &mut self,
        file: &str,
        document: &Document,
        map: ConfigMap,
    ) -> Result<(), Vec<Violation>> {
        let (namespace, name) = (map.namespace.clone(), map.name.clone());
        let identity = self.claim("ConfigMap", namespace, name, file, document)?;
        self.config_maps.insert(identity, map);
        Ok(())
    }

    /// The first object of a name has it.
    fn claim(
        &mut self,
        kind: &'static str,
        namespace: String,
        name: String,
        file: &str,
        document: &Document,
    ) -> Result<Identity, Vec<Violation>> {
        let identity = (kind, namespace, name);
        if let Some(place) = self.places.get(&identity) {
            let (kind, namespace, name) = &identity;
            let line = place
                .line
                .map_or_else(String::new, |line| format!(":{line}"));
            let message = format!(
                "{kind} {namespace}/{name} is in {}{line} already: rename or remove one of them",
                place.file
            );
            return Err(vec![violation("metadata.name", message)]);
        }
        let place = Place {
            file: file.to_owned(),
            line: document.line_of("metadata.name"),
            config_map_ref: document.line_of("spec.source.sql.configMapRef.name"),
        };
        self.places.insert(identity.clone(), place);
        Ok(identity)
    }

    fn check_references(&mut self) {
        if self.refused_config_maps {
            return;
        }
        for (identity, pool) in &self.pools {
            let Source::Sql(source) = &pool.spec.source else {
                continue;
            };
            let Some(reference) = &source.config_map_ref else {
                continue;
            };
            let (_, namespace, _) = identity;
            let wanted = ("ConfigMap", namespace.clone(), reference.name.clone());
            let message = match self.config_maps.get(&wanted) {
                None => format!(
                    "there is no ConfigMap {namespace}/{}: add one to the manifests",
                    reference.name
                ),
                Some(map) if map.scripts().next().is_none() => format!(
                    "ConfigMap {namespace}/{} has no entry whose name ends in .sql: add one",
                    reference.name
                ),
                Some(_) => continue,
            };
            let place = self.places.get(identity);
            self.errors.push(ManifestError {
                file: place.map(|place| place.file.clone()).unwrap_or_default(),
                line: place.and_then(|place| place.config_map_ref),
                field: "spec.source.sql.configMapRef.name".to_owned(),
                message,
            });
        }
    }

    fn into_manifests(self) -> Manifests {
        Manifests {
            pools: self.pools.into_values().collect(),
            config_maps: self.config_maps.into_values().collect(),
        }
    }
}

fn violation(field: &str, message: impl Into<String>) -> Violation {
    Violation {
        field: field.to_owned(),
        message: message.into(),
    }
}

fn other_kind(kind: Option<&str>) -> Violation {
    match kind {
        Some(BranchLease::KIND) => violation(
            "kind",
            "a standalone agent takes no BranchLease from files: lease with `kubectl-branch lease POOL`",
        ),
        Some(BranchNode::KIND) => violation(
            "kind",
            "a BranchNode is a report of the operator: remove it from the manifests",
        ),
        Some(kind) => violation(
            "kind",
            format!(
                "a standalone agent takes BranchPool and ConfigMap, not {kind}: keep it in another directory"
            ),
        ),
        None => violation("kind", "is required: write BranchPool or ConfigMap"),
    }
}

/// Fills in the namespace, where there is metadata to hold it.
fn in_namespace(object: &mut Value) {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        let namespace = metadata.entry("namespace").or_insert(Value::Null);
        if namespace.is_null() {
            *namespace = DEFAULT_NAMESPACE.into();
        }
    }
}

fn read_config_map(object: &Value) -> Result<ConfigMap, Vec<Violation>> {
    let mut problems = Vec::new();
    check_metadata(object, &mut problems);
    for (name, _) in object.as_object().into_iter().flatten() {
        match name.as_str() {
            "apiVersion" | "kind" | "metadata" | "data" | "immutable" => {}
            "binaryData" => problems.push(Problem::new(
                name,
                "a standalone agent reads no binary data: put texts into data",
            )),
            _ => problems.push(Problem::new(
                name,
                "unknown field: the fields here are data, immutable, metadata",
            )),
        }
    }
    let mut data = BTreeMap::new();
    match object.get("data") {
        None | Some(Value::Null) => {}
        Some(Value::Object(entries)) => {
            for (name, value) in entries {
                match value {
                    Value::String(text) => {
                        data.insert(name.clone(), text.clone());
                    }
                    _ => problems.push(Problem::new(
                        &at_field("data", name),
                        "must be a string: write it in quotes",
                    )),
                }
            }
        }
        Some(_) => problems.push(Problem::new("data", "must be a map of strings")),
    }
    if !problems.is_empty() {
        return Err(problems.into_iter().map(Problem::into_violation).collect());
    }
    let word = |field: &str| {
        let value = object["metadata"][field].as_str();
        value.unwrap_or_default().to_owned()
    };
    Ok(ConfigMap {
        namespace: word("namespace"),
        name: word("name"),
        data,
    })
}
