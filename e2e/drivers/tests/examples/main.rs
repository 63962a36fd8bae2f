//! The documented example of every driver, and what it refuses, against a Postgres server of its own.
//! What the drivers get through the gateway is compared in `tests/gateway`. Needs root.
#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod server;

use std::{path::Path, process::ExitCode, sync::Arc};

use branchpool_e2e_drivers::{Config, Driver, Toolbox, toolbox::Error};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;

use crate::server::Server;

/// Each driver uses one core, and the server another.
const THREADS: usize = 2;

const CONNECTING: &str = include_str!("../../../../docs/connecting.md");

struct Context {
    runtime: Runtime,
    toolbox: Toolbox,
    server: Server,
}

type Test = fn(&Context, Driver) -> Result<(), Failed>;

const TESTS: [(&str, Test); 3] = [
    ("connects_as_the_documentation_says", example_connects),
    ("refuses_another_ca", refuses_another_ca),
    ("refuses_another_name", refuses_another_name),
];

fn example_connects(context: &Context, driver: Driver) -> Result<(), Failed> {
    let config = context.server.over_tls(driver);
    let url = config.url();
    let example = context.toolbox.run_example(driver, &url);
    assert_eq!(context.runtime.block_on(example)?, config.database);
    let source = Toolbox::example_source(driver);
    assert!(
        CONNECTING.contains(&format!("\n{source}```\n")),
        "docs/connecting.md does not show the example of {driver}:\n{source}"
    );
    Ok(())
}

/// Otherwise no comparison would prove anything about TLS.
fn refuses_another_ca(context: &Context, driver: Driver) -> Result<(), Failed> {
    refuses(
        context,
        driver,
        Config {
            ca: Some(context.server.other_ca()),
            ..context.server.over_tls(driver)
        },
    )
}

fn refuses_another_name(context: &Context, driver: Driver) -> Result<(), Failed> {
    refuses(
        context,
        driver,
        Config {
            // The certificate is for `localhost`.
            host: "127.0.0.1".to_owned(),
            ..context.server.over_tls(driver)
        },
    )
}

fn refuses(context: &Context, driver: Driver, mut config: Config) -> Result<(), Failed> {
    config.only = vec!["connect".to_owned()];
    match context
        .runtime
        .block_on(context.toolbox.run(driver, &config))
    {
        Err(Error::Failed { message, .. }) if message.to_lowercase().contains("certificate") => {
            Ok(())
        }
        other => Err(format!("{driver} should refuse the certificate: {other:?}").into()),
    }
}

/// A trap that docs/connecting.md names. The day this fails, the warning can go.
fn node_postgres_refuses_a_private_ca(context: &Context) -> Result<(), Failed> {
    let config = context.server.over_tls(Driver::NodePostgres);
    let url = config.url().replace("verify-full", "require");
    let (without_ca, _) = url.split_once("&sslrootcert").unwrap();
    let example = context
        .toolbox
        .run_example(Driver::NodePostgres, without_ca);
    match context.runtime.block_on(example) {
        Err(Error::Failed { message, .. }) if message.contains("certificate") => Ok(()),
        other => Err(format!("node-postgres should refuse the private CA: {other:?}").into()),
    }
}

fn trials(context: &Arc<Context>) -> Vec<Trial> {
    let trial = |driver: Driver, name: &str, test: Test| {
        let context = Arc::clone(context);
        Trial::test(format!("{driver}::{name}"), move || test(&context, driver))
    };
    let trap = Arc::clone(context);
    let trap = Trial::test(
        "node-postgres::refuses_a_private_ca_with_require",
        move || node_postgres_refuses_a_private_ca(&trap),
    );
    TESTS
        .iter()
        .flat_map(|(name, test)| Driver::ALL.map(|driver| trial(driver, name, *test)))
        .chain([trap])
        .collect()
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    let runtime = Runtime::new().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_tokio-postgres-suite"));
    let toolbox = runtime.block_on(Toolbox::ready(program));
    let context = Arc::new(Context {
        toolbox: toolbox.unwrap_or_else(|error| panic!("{error}")),
        server: Server::start(),
        runtime,
    });
    libtest_mimic::run(&arguments, trials(&context)).exit_code()
}
