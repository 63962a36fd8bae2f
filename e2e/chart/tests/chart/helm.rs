//! Helm, and what it prints.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
};

use serde_json::Value;

pub(crate) const NAMESPACE: &str = "branchpool-system";

/// Helm has one of its own in mind where no cluster says so.
pub(crate) const KUBERNETES: &str = "1.34.4";

pub(crate) fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub(crate) fn root() -> PathBuf {
    here().join("../..").canonicalize().unwrap()
}

pub(crate) fn chart() -> PathBuf {
    root().join("charts/branchpool")
}

/// The program, built when it is missing.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let output = Command::new(root().join("scripts/build-kubernetes"))
            .arg("helm")
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let directory = String::from_utf8(output.stdout).unwrap();
        Path::new(directory.trim()).join("helm")
    })
}

/// Without the configuration and the cluster of whoever runs the tests.
pub(crate) fn helm(arguments: &[&str]) -> Output {
    helm_with("/dev/null".as_ref(), arguments)
}

pub(crate) fn helm_with(kubeconfig: &Path, arguments: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    Command::new(program())
        .args(arguments)
        .env("HOME", home.path())
        .env("KUBECONFIG", kubeconfig)
        .current_dir(chart())
        .output()
        .unwrap()
}

fn printed(output: Output) -> String {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// What `helm template` prints with one of the files in `values` and further arguments.
pub(crate) fn template(values: &str, more: &[&str]) -> String {
    let file = here().join("values").join(format!("{values}.yaml"));
    let file = file.to_str().unwrap();
    let fixed = [
        "template",
        "branchpool",
        ".",
        "--namespace",
        NAMESPACE,
        "--kube-version",
        KUBERNETES,
        "--values",
        file,
    ];
    printed(helm(&[&fixed, more].concat()))
}

/// What `helm install` would print behind the objects. Helm shows it with a cluster only, so a copy of the chart
/// has the text as an object.
pub(crate) fn notes(values: &str) -> String {
    const OBJECT: &str =
        "kind: Notes\ntext: {{ tpl (.Files.Get \"files/NOTES.txt\") . | quote }}\n";
    let copy = tempfile::tempdir().unwrap();
    let status = Command::new("cp")
        .arg("-r")
        .arg(chart())
        .arg(copy.path())
        .status();
    assert!(status.unwrap().success());
    let copy = copy.path().join("branchpool");
    fs::copy(
        copy.join("templates/NOTES.txt"),
        copy.join("files/NOTES.txt"),
    )
    .unwrap();
    fs::write(copy.join("templates/notes.yaml"), OBJECT).unwrap();
    let file = here().join("values").join(format!("{values}.yaml"));
    let text = printed(helm(&[
        "template",
        "branchpool",
        copy.to_str().unwrap(),
        "--namespace",
        NAMESPACE,
        "--kube-version",
        KUBERNETES,
        "--values",
        file.to_str().unwrap(),
        "--show-only",
        "templates/notes.yaml",
    ]));
    string(&objects(&text)[0], "/text").to_owned()
}

/// Why the values are refused.
pub(crate) fn refusal(arguments: &[&str]) -> String {
    let version = if arguments.contains(&"--kube-version") {
        &[][..]
    } else {
        &["--kube-version", KUBERNETES]
    };
    let fixed = ["template", "branchpool", ".", "--namespace", NAMESPACE];
    let output = helm(&[&fixed, version, arguments].concat());
    assert!(!output.status.success(), "{arguments:?} are accepted");
    String::from_utf8(output.stderr).unwrap()
}

pub(crate) fn objects(text: &str) -> Vec<Value> {
    let objects: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    objects
        .into_iter()
        .filter(|object| !object.is_null())
        .collect()
}

/// Names of the files in `values`.
pub(crate) fn value_files() -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(here().join("values"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    assert!(!names.is_empty());
    names
}

pub(crate) fn string<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or("")
}

pub(crate) fn strings<'a>(value: &'a Value, field: &str) -> Vec<&'a str> {
    let list = value.get(field).and_then(Value::as_array);
    let items = list.into_iter().flatten();
    items.map(|item| item.as_str().unwrap()).collect()
}
