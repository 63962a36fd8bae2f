//! Files as a user writes them, good and bad.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::fs;
use std::path::Path;

use branchpool_crds::{Manifests, load_manifests};
use proptest::prelude::*;

const POOL: &str = "\
apiVersion: branchpool.dev/v1alpha1
kind: BranchPool
metadata:
  name: shop
spec:
  source:
    sql:
      configMapRef:
        name: shop-schema
      scripts:
        - name: more
          sql: select 3
  postgres:
    version: 15
  replicas: 8
";

const CONFIG_MAP: &str = "\
apiVersion: v1
kind: ConfigMap
metadata:
  name: shop-schema
data:
  20-data.sql: |
    insert into t select 2;
  10-schema.sql: create table t (n int)
  README: not a script
";

fn load(texts: &[(&str, &str)]) -> Manifests {
    load_manifests(texts).unwrap_or_else(|errors| panic!("{errors:#?}"))
}

/// The errors as a user sees them.
fn refused(texts: &[(&str, &str)]) -> Vec<String> {
    let errors = load_manifests(texts).unwrap_err();
    errors.iter().map(ToString::to_string).collect()
}

fn one(text: &str) -> String {
    let errors = refused(&[("pools.yaml", text)]);
    assert_eq!(errors.len(), 1, "{errors:#?}");
    errors.into_iter().next().unwrap()
}

#[test]
fn reads_a_pool_and_its_config_map_from_one_file_or_two() {
    let together = format!("# A comment before.\n---\n{CONFIG_MAP}---\n---\n{POOL}...\n");
    let manifests = load(&[("all.yaml", &together)]);
    assert_eq!(manifests, load(&[("a.yaml", POOL), ("b.yaml", CONFIG_MAP)]));

    let [pool] = manifests.pools.as_slice() else {
        panic!("{manifests:?}");
    };
    assert_eq!(pool.metadata.namespace.as_deref(), Some("default"));
    assert_eq!((pool.spec.replicas, pool.spec.max_branches), (8, 100));
    let scripts = manifests.scripts(pool);
    let names: Vec<_> = scripts.iter().map(|script| script.name.as_str()).collect();
    assert_eq!(names, ["10-schema.sql", "20-data.sql", "more"]);
    assert_eq!(scripts[1].sql, "insert into t select 2;\n");
}

#[test]
fn reads_the_examples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let mut read = 0;
    for directory in fs::read_dir(root).unwrap() {
        for file in fs::read_dir(directory.unwrap().path()).unwrap() {
            let path = file.unwrap().path();
            if path
                .extension()
                .is_some_and(|extension| extension == "yaml")
            {
                let text = fs::read_to_string(&path).unwrap();
                // Leases and Jobs are for a cluster alone; the tests on one apply them.
                if !text.contains("kind: BranchPool") {
                    continue;
                }
                let manifests = load(&[(&path.display().to_string(), &text)]);
                read += manifests.pools.len();
            }
        }
    }
    assert!(read > 0);
}

#[test]
fn nothing_is_a_set_too() {
    assert_eq!(load(&[]), Manifests::default());
    assert_eq!(
        load(&[("a.yaml", ""), ("b.yaml", "# nothing\n---\n")]),
        Manifests::default()
    );
}

#[test]
fn reads_json_with_tabs() {
    let text = "{\n\t\"apiVersion\": \"v1\",\n\t\"kind\": \"ConfigMap\",\n\t\"metadata\": {\"name\": \"a\"},\n\t\"data\": {\"a.sql\": \"select 1\\n\"}\n}\n";
    let manifests = load(&[("a.json", text)]);
    assert_eq!(manifests.config_maps[0].data["a.sql"], "select 1\n");
}

#[test]
fn takes_a_pool_as_a_cluster_gives_it_back() {
    let text = POOL
        .replace("  name: shop\n", "  name: shop\n  uid: 0c1d\n  resourceVersion: \"7\"\n  creationTimestamp: 2030-01-31T12:00:00Z\n")
        + "status: {ready: 4, conditions: []}\n";
    let manifests = load(&[("a.yaml", &text), ("b.yaml", CONFIG_MAP)]);
    assert_eq!(manifests.pools[0].status, None);
    assert_eq!(manifests.pools[0].metadata.uid, None);
}

#[test]
fn names_file_line_and_field() {
    let text = format!("{CONFIG_MAP}---\n{POOL}").replace("replicas: 8", "replicas: -1");
    assert_eq!(
        one(&text),
        "pools.yaml:25: spec.replicas: must be at least 0, is -1"
    );
    let text = format!("{CONFIG_MAP}---\n{POOL}").replace("replicas", "replica");
    assert!(one(&text).starts_with("pools.yaml:25: spec.replica: unknown field"));
    // A field that is missing is reported where it should be.
    let text = format!("{CONFIG_MAP}---\n{POOL}").replace("    version: 15", "    database: x");
    assert_eq!(
        one(&text),
        "pools.yaml:23: spec.postgres.version: is required"
    );
}

#[test]
fn refuses_keys_that_are_given_twice() {
    let message = one(&format!("{POOL}  replicas: 9\n"));
    assert_eq!(
        message,
        "pools.yaml:16: is not readable YAML: duplicate mapping key `replicas` is not allowed here at line 16, column 3"
    );
}

#[test]
fn refuses_what_yaml_takes_for_another_type() {
    let text = POOL.replace(
        "    version: 15\n",
        "    version: 15\n    parameters:\n      jit: off\n      max_connections: 50\n",
    );
    let errors = refused(&[("a.yaml", &text), ("b.yaml", CONFIG_MAP)]);
    assert_eq!(
        errors,
        [
            "a.yaml:16: spec.postgres.parameters.jit: must be a string, is a boolean: write it in quotes",
            "a.yaml:17: spec.postgres.parameters.max_connections: must be a string, is a number: write it in quotes",
        ]
    );
}

#[test]
fn refuses_broken_yaml() {
    for text in [
        "a: [",
        "a: b: c",
        "\tx",
        "a: &x b\nc: *y",
        "- !!python/object x",
        "a: .nan",
        "a: 340282366920938463463374607431768211456",
    ] {
        let message = one(text);
        assert!(message.starts_with("pools.yaml:"), "{message}");
    }
    let bomb = format!("{}[]{}", "[".repeat(10_000), "]".repeat(10_000));
    assert!(one(&bomb).contains("is not readable YAML"), "{bomb}");
}

#[test]
fn refuses_other_kinds() {
    assert_eq!(
        one(
            "apiVersion: branchpool.dev/v1alpha1\nkind: BranchLease\nmetadata: {name: a}\nspec: {poolRef: {name: shop}}\n"
        ),
        "pools.yaml:2: kind: a standalone agent takes no BranchLease from files: lease with `kubectl-branch lease POOL`"
    );
    assert_eq!(
        one("apiVersion: v1\nkind: Secret\nmetadata: {name: a}\n"),
        "pools.yaml:2: kind: a standalone agent takes BranchPool and ConfigMap, not Secret: keep it in another directory"
    );
    assert!(one("just words").contains("kind: is required"));
    assert!(one("- a\n- list\n").contains("kind: is required"));
    assert_eq!(
        one(&POOL.replace("v1alpha1", "v1")),
        "pools.yaml:1: apiVersion: must be branchpool.dev/v1alpha1, is branchpool.dev/v1"
    );
}

#[test]
fn refuses_long_names() {
    let text = POOL.replace("name: shop\n", &format!("name: {}\n", "a".repeat(253)));
    let errors = refused(&[("a.yaml", &text), ("b.yaml", CONFIG_MAP)]);
    assert_eq!(
        errors,
        ["a.yaml:4: metadata.name: a name has at most 63 characters: choose a shorter one"]
    );
}

#[test]
fn refuses_a_second_object_of_a_name() {
    let errors = refused(&[("a.yaml", POOL), ("b.yaml", CONFIG_MAP), ("c.yaml", POOL)]);
    assert_eq!(
        errors,
        [
            "c.yaml:4: metadata.name: BranchPool default/shop is in a.yaml:4 already: rename or remove one of them"
        ]
    );
    // Another namespace is another name.
    let elsewhere = format!("{POOL}---\n{CONFIG_MAP}")
        .replace("metadata:\n", "metadata:\n  namespace: other\n");
    let manifests = load(&[
        ("a.yaml", POOL),
        ("b.yaml", CONFIG_MAP),
        ("c.yaml", &elsewhere),
    ]);
    assert_eq!(manifests.pools.len(), 2);
}

#[test]
fn refuses_a_config_map_that_is_not_there() {
    assert_eq!(
        one(POOL),
        "pools.yaml:9: spec.source.sql.configMapRef.name: there is no ConfigMap default/shop-schema: add one to the manifests"
    );
    let other = CONFIG_MAP.replace("metadata:\n", "metadata:\n  namespace: other\n");
    assert_eq!(refused(&[("a.yaml", POOL), ("b.yaml", &other)]).len(), 1);
    let empty = CONFIG_MAP.replace(".sql", ".txt");
    let errors = refused(&[("a.yaml", POOL), ("b.yaml", &empty)]);
    assert!(
        errors[0].contains("has no entry whose name ends in .sql"),
        "{errors:?}"
    );
}

#[test]
fn refuses_config_maps_with_faults_and_says_only_that() {
    let faulty = CONFIG_MAP.replace(
        "\ndata:\n",
        "\nbinaryData: {}\ndate: x\ndata:\n  number: 1\n",
    );
    let errors = refused(&[("a.yaml", POOL), ("b.yaml", &faulty)]);
    assert_eq!(
        errors,
        [
            "b.yaml:5: binaryData: a standalone agent reads no binary data: put texts into data",
            "b.yaml:6: date: unknown field: the fields here are data, immutable, metadata",
            "b.yaml:8: data.number: must be a string: write it in quotes",
        ]
    );
}

#[test]
fn says_at_most_fifty_things() {
    let text = "kind: X\n---\n".repeat(200);
    assert_eq!(refused(&[("a.yaml", &text)]).len(), 50);
}

proptest! {
    #[test]
    fn never_panics(cut in 0..POOL.len(), insert in "[ -~\n\t]{0,12}", more in ".{0,40}") {
        let mut text = POOL.to_owned();
        text.insert_str(cut, &insert);
        let _ = load_manifests(&[("a", &text), ("b", &more), ("c", CONFIG_MAP)]);
    }
}

/// What the chart tells to do next works as it is.
#[test]
fn the_pool_in_the_notes_of_the_chart_is_valid() {
    let notes = include_str!("../../charts/branchpool/templates/NOTES.txt");
    let (_, rest) = notes.split_once("<<'EOF'\n").unwrap();
    let (manifest, _) = rest.split_once("\nEOF\n").unwrap();
    let loaded = load_manifests(&[("NOTES.txt", manifest)]).unwrap();
    assert_eq!(loaded.pools.len(), 1);
}
