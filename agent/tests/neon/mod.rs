//! Neon's published driver for HTTP, run by Node.js against an agent.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn run(command: &mut Command) -> Output {
    let program = command.get_program().display().to_string();
    let output = command.output();
    output.unwrap_or_else(|error| panic!("{program} cannot be run: {error}"))
}

/// What `scripts/setup-drivers` has made; it does nothing when all is there.
fn install() -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/setup-drivers");
    let done = run(Command::new(script).arg("neon"));
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "no driver: {errors}");
    PathBuf::from(String::from_utf8_lossy(&done.stdout).trim())
}

/// Runs the checks of `driver.mjs` against the agent's `/sql`; the database has the table `items`, and
/// no other.
pub(crate) async fn check_driver(endpoint: String, url: String) {
    let made = tokio::task::spawn_blocking(install).await.unwrap();
    let path = env::var_os("PATH").unwrap_or_default();
    let path = [made.join("bin")]
        .into_iter()
        .chain(env::split_paths(&path));
    let mut command = Command::new("node");
    command
        .arg("driver.mjs")
        .current_dir(made.join("neon"))
        .env("PATH", env::join_paths(path).unwrap())
        .env("ENDPOINT", endpoint)
        .env("DATABASE_URL", url)
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
}
