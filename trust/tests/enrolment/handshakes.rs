//! Who gets through to a listener.

use std::fs;

use branchpool_trust::plan::Step;
use tokio::net::TcpStream;

use crate::support::{Agent, Operator, in_time};

#[tokio::test]
async fn silent_strangers_keep_nobody_out() {
    let operator = Operator::new();
    let serving = operator.serve().await;
    let mut silent = Vec::new();
    // As many as may shake hands at a time, and some more.
    for _ in 0..300 {
        silent.push(TcpStream::connect(serving.address).await.unwrap());
    }
    let agent = Agent::enrolled(&operator, &serving, "node-1").await;
    // The oldest had to go, the latest are still waited for.
    let mut byte = [0];
    let oldest = in_time(tokio::io::AsyncReadExt::read(&mut silent[0], &mut byte)).await;
    assert!(matches!(oldest, Ok(0) | Err(_)), "{oldest:?}");
    let latest = silent.last().unwrap().try_read(&mut byte).unwrap_err();
    assert_eq!(latest.kind(), std::io::ErrorKind::WouldBlock);
    drop(agent);
    serving.stop().await;
}

#[tokio::test]
async fn an_operator_with_a_replaced_ca_is_known_by_the_new_bundle_alone() {
    let mut operator = Operator::new();
    let old = operator.bundle();
    let serving = operator.serve().await;
    operator.take(&Step::Introduce).await;
    operator.take(&Step::Switch).await;
    operator.take(&Step::Retire).await;
    operator.register.pod("token", "node-1");
    let mut agent = Agent::start(&serving.url()).await;
    fs::write(agent.token(), "token").unwrap();
    fs::create_dir(agent.bundle().parent().unwrap()).unwrap();
    fs::write(agent.bundle(), old).unwrap();
    let status = agent.wait(|status| status.problem.is_some()).await;
    assert!(status.problem.unwrap().contains("not the operator"));
    operator.write_bundle(&agent.bundle());
    agent.wait(|status| status.trust.is_some()).await;
    serving.stop().await;
}
