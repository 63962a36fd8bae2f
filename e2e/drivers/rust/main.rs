//! The common checks with tokio-postgres and deadpool-postgres.

mod connection;
mod sessions;
mod suite;

use std::{collections::BTreeMap, error::Error, fmt, io};

use branchpool_e2e_drivers::Config;
use serde_json::{Value, json};

use crate::suite::Suite;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// What this driver cannot do, and why.
#[derive(Debug)]
struct Unsupported(&'static str);

impl Error for Unsupported {}

impl fmt::Display for Unsupported {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.0)
    }
}

fn shown(name: &str, result: Result<Value>) -> Value {
    result.unwrap_or_else(|error| {
        if error.is::<Unsupported>() {
            json!({"unsupported": error.to_string()})
        } else {
            eprintln!("{name}: {error:?}");
            json!({"failed": error.to_string()})
        }
    })
}

#[tokio::main]
async fn main() -> Result<()> {
    let config: Config = serde_json::from_reader(io::stdin())?;
    let mut suite = Suite::start(&config).await?;
    let mut results = BTreeMap::new();
    for name in suite::CHECKS {
        if config.only.is_empty() || config.only.iter().any(|only| only == name) {
            let result = suite.check(name).await;
            results.insert(name, shown(name, result));
        }
    }
    println!("{}", serde_json::to_string(&results)?);
    Ok(())
}
