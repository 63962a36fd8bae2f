//! Real processes under a real supervisor. This program is test, supervisor and agent in one: a test
//! runs itself as supervisor, which runs it as the agent that the test describes.
#![allow(clippy::unwrap_used)]

mod cost;
mod groups;
mod isolation;
mod lifecycle;
mod support;

use std::{env, path::PathBuf, process::ExitCode};

use branchpool_supervisor::server::{self, Program};
use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let args: Vec<String> = env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("supervise") => supervise(&args[2..]),
        Some("agent") => support::be_agent(&args[2], PathBuf::from(&args[3])),
        _ => libtest_mimic::run(&Arguments::from_args(), trials()).exit_code(),
    }
}

fn supervise(args: &[String]) -> ExitCode {
    let program = Program {
        path: env::current_exe().unwrap(),
        args: ["agent"]
            .into_iter()
            .chain(args.iter().map(String::as_str))
            .map(Into::into)
            .collect(),
    };
    match server::supervise(program) {
        Ok(code) => ExitCode::from(code),
        Err(error) => panic!("{error:?}"),
    }
}

fn trials() -> Vec<Trial> {
    [
        lifecycle::trials(),
        groups::trials(),
        isolation::trials(),
        cost::trials(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
