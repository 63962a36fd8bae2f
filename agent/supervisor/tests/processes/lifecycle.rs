use crate::support::{Scene, plain, trial};
use branchpool_supervisor::protocol::Outcome;
use libtest_mimic::Trial;
use std::process::ExitCode;
use std::{future::Future, pin::Pin};

pub fn trials() -> Vec<Trial> {
    vec![trial("exit_notice")]
}

pub fn agent(name: &str, scene: Scene) -> Option<Pin<Box<dyn Future<Output = ExitCode>>>> {
    Some(match name {
        "exit_notice" => Box::pin(exit_notice(scene)),
        _ => return None,
    })
}

async fn exit_notice(scene: Scene) -> ExitCode {
    let mut child = scene
        .supervisor
        .spawn(plain("/bin/sh", &["-c", "exit 7"]), [None; 3])
        .await
        .unwrap();
    assert_eq!(child.wait().await.unwrap(), Outcome::Code(7));
    ExitCode::SUCCESS
}
