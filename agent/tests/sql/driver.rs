//! Neon's published driver for HTTP, run by node against the agent.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::{Node, neon::address};

/// The versions that are tested with; what is installed from them is kept for the next run.
const PACKAGE: &str = include_str!("npm/package.json");
const LOCK: &str = include_str!("npm/package-lock.json");

fn run(command: &mut Command) -> Output {
    let program = command.get_program().display().to_string();
    command.output().unwrap_or_else(|error| {
        panic!("{program} cannot be run ({error}); this test needs node 19 or newer with npm: install nodejs and npm")
    })
}

fn install() -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("neon-driver");
    let installed = directory.join("installed.json");
    if fs::read_to_string(&installed).is_ok_and(|lock| lock == LOCK) {
        return directory;
    }
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("package.json"), PACKAGE).unwrap();
    fs::write(directory.join("package-lock.json"), LOCK).unwrap();
    let done = run(Command::new("npm")
        .args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"])
        .current_dir(&directory));
    assert!(
        done.status.success(),
        "npm could not install the driver: {done:?}"
    );
    fs::write(installed, LOCK).unwrap();
    directory
}

#[tokio::test(flavor = "multi_thread")]
async fn the_published_driver_works_unchanged() {
    let directory = install();
    let node = Node::start().await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sql/npm/driver.mjs");
    fs::copy(script, directory.join("driver.mjs")).unwrap();
    let mut command = Command::new("node");
    command
        .arg("driver.mjs")
        .current_dir(&directory)
        .env("ENDPOINT", format!("http://{}/sql", node.agent.tcp.unwrap()))
        .env("DATABASE_URL", address("app", "?sslmode=require"))
        // Nothing between the driver and the agent.
        .env_remove("NODE_OPTIONS");
    let done = tokio::task::spawn_blocking(move || run(&mut command))
        .await
        .unwrap();
    let (output, errors) = (
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr),
    );
    assert!(done.status.success(), "{output}{errors}");
    assert!(output.ends_with("10 passed\n"), "{output}{errors}");
    node.stop().await;
}
