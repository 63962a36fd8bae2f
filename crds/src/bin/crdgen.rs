//! Writes the definitions and their reference: `crdgen [ROOT]`. With `--check` it writes nothing and
//! fails when a file differs from what it would write.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs, io};

use branchpool_crds::{crds, reference, to_yaml};

fn main() -> ExitCode {
    let mut check = false;
    let mut root = PathBuf::from(".");
    for argument in env::args().skip(1) {
        match argument.as_str() {
            "--check" => check = true,
            other if other.starts_with('-') => {
                eprintln!("unknown option {other}: usage: crdgen [--check] [ROOT]");
                return ExitCode::from(2);
            }
            other => root = PathBuf::from(other),
        }
    }
    let mut failed = false;
    for (path, content) in files(&root) {
        let outcome = if check {
            compare(&path, &content)
        } else {
            write(&path, &content).map_err(|error| format!("cannot be written: {error}"))
        };
        if let Err(message) = outcome {
            eprintln!("{}: {message}", path.display());
            failed = true;
        }
    }
    if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// Every generated file below the root of the repository, and what is in it. The chart's own `crds`
/// directory is not used: Helm never upgrades what is there.
fn files(root: &Path) -> Vec<(PathBuf, String)> {
    let crds = crds();
    let page = reference::to_markdown(&crds);
    let mut files: Vec<_> = crds
        .iter()
        .map(|crd| {
            let name = format!("{}.yaml", crd.spec.names.plural);
            (
                root.join("charts/branchpool/files/crds").join(name),
                to_yaml(crd),
            )
        })
        .collect();
    files.push((root.join("docs/crds.md"), page));
    files
}

fn compare(path: &Path, content: &str) -> Result<(), String> {
    match fs::read_to_string(path) {
        Ok(found) if found == content => Ok(()),
        Ok(_) => Err("is not what the types say: run `make generate`".to_owned()),
        Err(error) => Err(format!("cannot be read: {error}; run `make generate`")),
    }
}

fn write(path: &Path, content: &str) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, content)
}
