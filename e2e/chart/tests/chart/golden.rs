//! What the chart makes of each file in `values`, as it was looked at and committed. After a change:
//! `make generate`, and look at the difference.

use std::fs;

use crate::helm::{KUBERNETES, chart, helm, here, notes, objects, string, template, value_files};

#[test]
fn every_file_of_values_gives_its_golden_file() {
    let generate = std::env::var_os("BRANCHPOOL_GENERATE").is_some();
    let mut differing = Vec::new();
    for name in value_files() {
        let path = here().join("golden").join(format!("{name}.yaml"));
        let found = template(&name, &[]);
        if generate {
            fs::write(&path, &found).unwrap();
        }
        let expected = fs::read_to_string(&path).unwrap_or_default();
        let line = expected
            .lines()
            .zip(found.lines())
            .position(|(expected, found)| expected != found);
        if expected != found {
            let line = line.map_or(0, |line| line + 1);
            differing.push(format!("{}, line {line}", path.display()));
        }
    }
    assert!(
        differing.is_empty(),
        "not what the chart gives: {differing:#?}; run `make generate` and look at the difference"
    );
}

#[test]
fn no_golden_file_is_left_over() {
    let values = value_files();
    for entry in fs::read_dir(here().join("golden")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(values.iter().any(|known| known == name), "{name}");
    }
}

/// The files are what the types say: `make lint` sees to that.
#[test]
fn definitions_are_installed_as_they_are_and_stay() {
    let rendered = objects(&template("default", &["--set", "crds.install=true"]));
    let mut rendered: Vec<_> = (rendered.into_iter())
        .filter(|object| string(object, "/kind") == "CustomResourceDefinition")
        .collect();
    for entry in fs::read_dir(chart().join("files/crds")).unwrap() {
        let expected = fs::read_to_string(entry.unwrap().path()).unwrap();
        let expected = objects(&expected).remove(0);
        let policy = string(&expected, "/metadata/annotations/helm.sh~1resource-policy");
        assert_eq!(policy, "keep");
        let found = rendered.iter().position(|object| *object == expected);
        rendered.swap_remove(found.unwrap());
    }
    assert_eq!(rendered.len(), 0);
    // Helm installs what is there, and never upgrades it.
    assert!(!chart().join("crds").exists());
}

#[test]
fn lint_has_no_complaint() {
    for name in value_files() {
        let file = here().join("values").join(format!("{name}.yaml"));
        let output = helm(&[
            "lint",
            "--strict",
            ".",
            "--kube-version",
            KUBERNETES,
            "--values",
            file.to_str().unwrap(),
        ]);
        assert!(output.status.success(), "{name}: {output:?}");
    }
}

#[test]
fn notes_name_what_was_installed() {
    let default = notes("default");
    for command in [
        "kubectl rollout status -n branchpool-system deployment/branchpool-operator",
        "kubectl rollout status -n branchpool-agents daemonset/branchpool-agent",
        "kubectl apply -n default -f -",
        "kubectl branch -n default lease app --",
        "helm test -n branchpool-system branchpool",
        "--clusterrole=branchpool-source-secrets --serviceaccount=branchpool-system:branchpool-operator",
    ] {
        assert!(default.contains(command), "{command}: {default}");
    }
    assert!(!default.contains("prepare-node"), "{default}");
    let one = notes("one-namespace");
    for words in [
        "deployment/branches-operator",
        "daemonset/branches-agent",
        "kubectl apply -n review",
        "namespaces that are served: review",
    ] {
        assert!(one.contains(words), "{words}: {one}");
    }
    let prepared = notes("local-ssd");
    assert!(prepared.contains("-c prepare-node"), "{prepared}");
    // kubectl knows no rollout of a DaemonSet that is replaced by hand.
    assert!(
        !prepared.contains("rollout status -n branchpool-agents"),
        "{prepared}"
    );
}
