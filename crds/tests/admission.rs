//! What is taken and what is refused, from defaults to CEL rules.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use branchpool_crds::{
    BranchLease, BranchNode, BranchPool, ConnectionSecret, Duration, LeasePolicy, Placement,
    Preconnect, Priority, Source, Tuning, Unleased, Warming, WarmingMode, admit, admit_as,
    validate,
};
use proptest::prelude::*;
use serde::Deserialize;
use serde_json::{Map, Value, json};

fn valid(kind: &str) -> Value {
    match kind {
        "BranchPool" => json!({
            "apiVersion": "branchpool.dev/v1alpha1",
            "kind": "BranchPool",
            "metadata": {"name": "shop", "namespace": "default"},
            "spec": {
                "source": {"sql": {"scripts": [{"name": "schema.sql", "sql": "create table t ()"}]}},
                "postgres": {"version": 15, "parameters": {"max_connections": "50"}},
                "maxBranches": 10,
                "lease": {"maxTTL": "24h"},
                "warming": {},
                "resources": {},
                "refresh": {},
                "cleanup": {"tombstones": {}},
            },
        }),
        "BranchLease" => json!({
            "apiVersion": "branchpool.dev/v1alpha1",
            "kind": "BranchLease",
            "metadata": {"name": "test-1", "namespace": "default"},
            "spec": {"poolRef": {"name": "shop"}},
        }),
        other => json!({
            "apiVersion": "branchpool.dev/v1alpha1",
            "kind": other,
            "metadata": {"name": "node-1.example"},
        }),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Refused {
    title: String,
    kind: String,
    #[serde(default)]
    set: Map<String, Value>,
    #[serde(default)]
    remove: Vec<String>,
    #[serde(default)]
    old: Option<Map<String, Value>>,
    field: String,
    message: String,
    #[serde(default)]
    others: usize,
    /// An API server refuses it only when asked to be strict about unknown fields.
    #[serde(default)]
    #[allow(dead_code)]
    strict: bool,
}

fn set(object: &mut Value, pointer: &str, value: Value) {
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    if !parent.is_empty() && object.pointer(parent).is_none() {
        set(object, parent, json!({}));
    }
    object.pointer_mut(parent).unwrap()[name] = value;
}

fn remove(object: &mut Value, pointer: &str) {
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    let parent = object.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    assert!(parent.remove(name).is_some(), "{pointer} is not there");
}

#[test]
fn refuses_each_fault_at_its_field() {
    let cases: Vec<Refused> =
        serde_saphyr::from_str(include_str!("fixtures/refused.yaml")).unwrap();
    for case in cases {
        let title = &case.title;
        let mut old = valid(&case.kind);
        for (pointer, value) in case.old.iter().flatten() {
            set(&mut old, pointer, value.clone());
        }
        assert_eq!(validate(&old, None), [], "{title}: before the change");
        let mut object = old.clone();
        for (pointer, value) in case.set {
            set(&mut object, &pointer, value);
        }
        for pointer in &case.remove {
            remove(&mut object, pointer);
        }
        let found = validate(&object, case.old.is_some().then_some(&old));
        let hits = found
            .iter()
            .filter(|violation| violation.field == case.field)
            .filter(|violation| violation.message.contains(&case.message));
        assert_eq!(hits.count(), 1, "{title}: {found:#?}");
        assert_eq!(found.len(), 1 + case.others, "{title}: {found:#?}");
    }
}

#[test]
fn fills_in_every_default_of_a_pool() {
    let object = json!({
        "apiVersion": "branchpool.dev/v1alpha1",
        "kind": "BranchPool",
        "metadata": {"name": "shop"},
        "spec": {"source": {"sql": {}}, "postgres": {"version": 17}},
    });
    let filled = admit(&object, None).unwrap();
    insta::assert_snapshot!(serde_json::to_string_pretty(&filled["spec"]).unwrap());

    let pool: BranchPool = admit_as(&object, None).unwrap();
    let spec = pool.spec;
    assert!(matches!(spec.source, Source::Sql(_)));
    assert_eq!((spec.replicas, spec.max_branches), (4, 100));
    assert_eq!(spec.placement, Placement::Spread);
    assert_eq!(spec.postgres.tuning, Tuning::Ephemeral);
    assert!(!spec.postgres.superuser);
    assert_eq!(spec.refresh.unleased, Unleased::Replace);
    // The schema's defaults and the Rust types' are the same.
    assert_eq!(spec.warming, Warming::default());
    assert_eq!(spec.warming.mode, WarmingMode::Phased);
    assert_eq!(spec.warming.preconnect, Preconnect::WhileWarming);
    assert_eq!(spec.lease, LeasePolicy::default());
    assert_eq!(spec.cleanup, branchpool_crds::Cleanup::default());
    assert_eq!(spec.network, branchpool_crds::Network::default());
    assert_eq!(spec.resources, branchpool_crds::BranchResources::default());
    assert_eq!(spec.resources.memory.units(), 512 << 20);
}

#[test]
fn the_constants_behind_defaults_say_what_their_text_says() {
    let policy = LeasePolicy::default();
    for span in [
        &policy.default_ttl,
        &policy.max_ttl,
        &policy.max_lifetime,
        &policy.admission_wait,
        &policy.retain_finished,
        &Warming::default().stale_after,
        &branchpool_crds::Cleanup::default().start_delay,
        &branchpool_crds::Tombstones::default().delay,
    ] {
        let read: Duration = span.as_str().parse().unwrap();
        assert_eq!(&read, span);
    }
    for amount in [
        &branchpool_crds::BranchResources::default().memory,
        &branchpool_crds::Tombstones::default().max_bytes,
    ] {
        assert_eq!(
            &amount
                .as_str()
                .parse::<branchpool_crds::Quantity>()
                .unwrap(),
            amount
        );
    }
}

#[test]
fn decodes_leases_and_nodes() {
    let lease: BranchLease = admit_as(&valid("BranchLease"), None).unwrap();
    assert_eq!(lease.spec.priority, Priority::Medium);
    assert_eq!(lease.spec.connection_secret, ConnectionSecret::Create);
    assert_eq!(lease.spec.ttl, None);

    let mut node = valid("BranchNode");
    node["status"] = json!({
        "storage": {"capacity": "100Gi", "free": "50Gi", "unallocated": "40Gi", "metadataFree": 1024},
        "postgresVersions": [15, 17],
    });
    let node: BranchNode = admit_as(&node, None).unwrap();
    let status = node.status.unwrap();
    assert_eq!(status.postgres_versions, [15, 17]);
    assert_eq!(status.storage.unwrap().metadata_free.units(), 1024);
}

#[test]
fn takes_amounts_as_numbers_and_text() {
    let mut object = valid("BranchPool");
    for (cpu, milli) in [
        (json!(2), 2000),
        (json!("2"), 2000),
        (json!("1.5"), 1500),
        (json!("250m"), 250),
    ] {
        set(&mut object, "/spec/resources/cpu", cpu);
        let pool: BranchPool = admit_as(&object, None).unwrap();
        assert_eq!(pool.spec.resources.cpu.unwrap().milli_units(), milli);
    }
}

#[test]
fn takes_the_schedules_of_cron() {
    let mut object = valid("BranchPool");
    for schedule in [
        "Never",
        "@daily",
        "0 4 * * *",
        "*/15 0-6,20-23 1,15 */2 1-5",
        "59 23 31 12 7",
    ] {
        set(&mut object, "/spec/refresh/schedule", json!(schedule));
        assert_eq!(validate(&object, None), [], "{schedule}");
    }
}

#[test]
fn takes_null_for_absent() {
    let mut object = valid("BranchPool");
    for pointer in ["/spec/lease/idleTimeout", "/spec/replicas", "/spec/prepare"] {
        set(&mut object, pointer, Value::Null);
    }
    let pool: BranchPool = admit_as(&object, None).unwrap();
    assert_eq!(pool.spec.replicas, 4);
}

#[test]
fn takes_what_may_change() {
    let old = valid("BranchLease");
    let mut object = old.clone();
    for (pointer, value) in [
        ("/spec/ttl", json!("2h")),
        ("/spec/priority", json!("High")),
        ("/spec/renewTime", json!("2030-01-31T12:00:00Z")),
        ("/spec/resetToken", json!("2")),
    ] {
        set(&mut object, pointer, value);
    }
    assert_eq!(validate(&object, Some(&old)), []);

    let mut ended = old.clone();
    ended["status"] = json!({"phase": "Lost"});
    let mut labelled = ended.clone();
    set(&mut labelled, "/metadata/labels/seen", json!("yes"));
    assert_eq!(validate(&labelled, Some(&ended)), []);
}

#[test]
fn names_the_kind_that_is_wrong() {
    for (pointer, value, field) in [
        ("/kind", json!("Pool"), "kind"),
        ("/kind", json!(3), "kind"),
        ("/apiVersion", json!("branchpool.dev/v1"), "apiVersion"),
        ("/metadata", json!([]), "metadata"),
        ("/metadata/name", json!(null), "metadata.name"),
        ("/metadata/name", json!("Shop"), "metadata.name"),
        ("/metadata/namespace", json!("a.b"), "metadata.namespace"),
        ("/metadata/nmae", json!("x"), "metadata.nmae"),
        ("/metadata/labels/a", json!(1), "metadata.labels.a"),
        ("/spec", json!(null), "spec"),
        ("/spce", json!({}), "spce"),
    ] {
        let mut object = valid("BranchPool");
        set(&mut object, pointer, value);
        let found = validate(&object, None);
        assert_eq!(found.len(), 1, "{pointer}: {found:#?}");
        assert_eq!(found[0].field, field);
    }
    assert_eq!(validate(&json!(7), None)[0].field, "apiVersion");
    let pool = admit_as::<BranchLease>(&valid("BranchPool"), None).unwrap_err();
    assert_eq!(pool[0].message, "must be BranchLease, is BranchPool");
}

#[test]
fn a_name_of_253_characters_is_too_long() {
    let mut object = valid("BranchPool");
    set(&mut object, "/metadata/name", json!("a".repeat(253)));
    let found = validate(&object, None);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(
        found[0]
            .message
            .starts_with("a name has at most 63 characters")
    );
}

/// A value of any shape, now and then one that belongs somewhere.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(|number| json!(number)),
        ".{0,30}".prop_map(Value::from),
        "[0-9]{1,7}(h|m|s|ms|Mi|Gi|k|d)".prop_map(Value::from),
        proptest::sample::select(vec![
            "Spread",
            "1h",
            "Never",
            "postgres",
            "0 4 * * *",
            "a",
            ""
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map("[a-z.]{0,6}", inner, 0..4).prop_map(|map| json!(map)),
        ]
    })
}

/// Places that the schemas know, and some that they do not.
fn any_place() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(vec![
        "/spec",
        "/spec/source",
        "/spec/source/sql",
        "/spec/source/sql/scripts",
        "/spec/source/sql/scripts/0",
        "/spec/source/physical/secretRef/key",
        "/spec/postgres",
        "/spec/postgres/role",
        "/spec/postgres/parameters",
        "/spec/postgres/parameters/work_mem",
        "/spec/lease/defaultTTL",
        "/spec/lease/maxTTL",
        "/spec/lease",
        "/spec/resources/memory",
        "/spec/resources/cpu",
        "/spec/replicas",
        "/spec/maxBranches",
        "/spec/nodeSelector",
        "/spec/refresh/schedule",
        "/spec/poolRef",
        "/spec/ttl",
        "/spec/from",
        "/status",
        "/status/conditions",
        "/status/phase",
        "/metadata",
        "/metadata/name",
        "/metadata/labels",
        "/kind",
        "/other",
    ])
}

fn mutated() -> impl Strategy<Value = Value> {
    let kind = proptest::sample::select(vec!["BranchPool", "BranchLease", "BranchNode"]);
    let changes = proptest::collection::vec((any_place(), any_value()), 0..4);
    (kind, changes).prop_map(|(kind, changes)| {
        let mut object = valid(kind);
        for (pointer, value) in changes {
            put(&mut object, pointer, value);
        }
        object
    })
}

/// Like `set`, where the way there may lead through anything.
fn put(object: &mut Value, pointer: &str, value: Value) {
    let mut place = object;
    for name in pointer.split('/').skip(1) {
        place = match place {
            Value::Array(items) if items.is_empty() => return,
            Value::Array(items) => &mut items[0],
            Value::Object(fields) => fields.entry(name).or_insert(Value::Null),
            other => {
                *other = json!({ name: null });
                &mut other[name]
            }
        };
    }
    *place = value;
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn never_panics_and_defaults_once(object in mutated(), old in mutated()) {
        let _ = validate(&object, Some(&old));
        if let Ok(filled) = admit(&object, None) {
            prop_assert_eq!(&admit(&filled, None).unwrap(), &filled);
            // What is taken can be decoded, and nothing of it is lost.
            let decoded = match filled["kind"].as_str() {
                Some("BranchPool") => serde_json::to_value(admit_as::<BranchPool>(&object, None).unwrap()),
                Some("BranchLease") => serde_json::to_value(admit_as::<BranchLease>(&object, None).unwrap()),
                _ => serde_json::to_value(admit_as::<BranchNode>(&object, None).unwrap()),
            };
            prop_assert_eq!(admit(&decoded.unwrap(), None).map(|value| value["kind"].clone()), Ok(filled["kind"].clone()));
        }
    }

    #[test]
    fn rule_and_reader_agree_on_durations(text in "([0-9]{0,7}(h|m|s|ms|d)?){0,5}") {
        let mut object = valid("BranchLease");
        set(&mut object, "/spec/ttl", json!(text));
        let read = text.parse::<Duration>();
        let taken = validate(&object, None).is_empty();
        prop_assert_eq!(taken, read.is_ok_and(|span| span.as_millis() >= 1000), "{}", text);
    }

    #[test]
    fn rule_and_reader_agree_on_quantities(text in "[0-9]{1,20}([.][0-9]{0,4})?(m|k|K|M|G|E|P)?i?") {
        let mut object = valid("BranchPool");
        set(&mut object, "/spec/cleanup/tombstones/maxBytes", json!(text));
        let read = text.parse::<branchpool_crds::Quantity>();
        prop_assert_eq!(validate(&object, None).is_empty(), read.is_ok(), "{}", text);
    }
}
