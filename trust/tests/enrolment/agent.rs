//! The agent's side: what it waits for, and when it enrols again.

use std::{fs, time::Duration};

use branchpool_trust::plan::{Step, step};

use crate::support::{Agent, Operator, in_time, now};

#[tokio::test]
async fn an_agent_waits_for_its_files_and_says_what_is_missing() {
    let operator = Operator::new();
    operator.register.pod("secret-token", "node-1");
    let serving = operator.serve().await;
    let mut agent = Agent::start(&serving.url()).await;
    assert!(agent.enrolment.server.borrow().is_none());
    operator.write_bundle(&agent.bundle());
    let status = agent.wait(|status| status.problem.is_some()).await;
    let problem = status.problem.unwrap();
    assert!(
        problem.contains("token") && problem.contains("No such file"),
        "{problem}"
    );
    fs::write(agent.token(), "secret-token\n").unwrap();
    let status = agent.wait(|status| status.trust.is_some()).await;
    let trust = status.trust.unwrap();
    assert_eq!(trust.trusts, operator.authority().bundle().ids());
    assert_eq!(trust.issuer, trust.trusts[0]);
    let left = status.expires_at - now().unix_timestamp();
    assert!((23 * 3600..=24 * 3600).contains(&left), "{left}");
    agent.wait(|status| status.problem.is_none()).await;
    assert!(agent.enrolment.server.borrow().is_some());
    // Nothing but what was put there.
    let files: Vec<_> = fs::read_dir(agent.directory.path()).unwrap().collect();
    assert_eq!(files.len(), 2, "{files:?}");
    serving.stop().await;
}

#[tokio::test]
async fn an_agent_goes_on_while_the_operator_is_away_and_waits_for_it() {
    let operator = Operator::new();
    let serving = operator.serve().await;
    let (address, url) = (serving.address, serving.url());
    let first = Agent::enrolled(&operator, &serving, "node-1").await;
    serving.stop().await;

    operator.register.pod("second", "node-2");
    let mut second = Agent::start(&url).await;
    fs::write(second.token(), "second").unwrap();
    operator.write_bundle(&second.bundle());
    let status = second.wait(|status| status.problem.is_some()).await;
    assert!(status.problem.unwrap().contains("not reached"));
    assert!(first.enrolment.server.borrow().is_some());

    let serving = operator.serve_at(address).await;
    second.wait(|status| status.trust.is_some()).await;
    serving.stop().await;
}

#[tokio::test]
async fn an_agent_trusts_no_other_operator() {
    let (operator, impostor) = (Operator::new(), Operator::new());
    impostor.register.pod("token", "node-1");
    let serving = impostor.serve().await;
    let mut agent = Agent::start(&serving.url()).await;
    fs::write(agent.token(), "token").unwrap();
    operator.write_bundle(&agent.bundle());
    let status = agent.wait(|status| status.problem.is_some()).await;
    let problem = status.problem.unwrap();
    assert!(problem.contains("not the operator"), "{problem}");
    // The token was not sent.
    assert_eq!(impostor.register.reviews(), 0);
    serving.stop().await;
}

#[tokio::test]
async fn a_certificate_is_renewed_before_it_expires() {
    let operator = Operator::new();
    let serving = operator.serve().await;
    let mut agent = Agent::enrolled(&operator, &serving, "node-1").await;
    let mut operators = operator.identity.agents.clone();
    agent.enrolment.server.mark_unchanged();
    let reviews = operator.register.reviews();
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(15 * 3600)).await;
    tokio::time::resume();
    assert!(!agent.enrolment.server.has_changed().unwrap());
    assert!(!operators.has_changed().unwrap());
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(2 * 3600)).await;
    tokio::time::resume();
    in_time(agent.enrolment.server.changed()).await.unwrap();
    in_time(operators.changed()).await.unwrap();
    assert_eq!(operator.register.reviews(), reviews + 1);
    serving.stop().await;
}

#[tokio::test]
async fn a_broken_bundle_changes_nothing() {
    let operator = Operator::new();
    let serving = operator.serve().await;
    let mut agent = Agent::enrolled(&operator, &serving, "node-1").await;
    let before = agent.enrolment.status.borrow().trust.clone();
    fs::write(agent.bundle(), "").unwrap();
    fs::write(
        agent.bundle(),
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    )
    .unwrap();
    fs::remove_file(agent.bundle()).unwrap();
    let mut rotated = operator;
    rotated.take(&Step::Introduce).await;
    rotated.write_bundle(&agent.bundle());
    // The next change is the good one.
    in_time(agent.enrolment.status.changed()).await.unwrap();
    let after = agent.enrolment.status.borrow().trust.clone();
    assert_eq!(after.unwrap().trusts.len(), 2);
    assert_eq!(before.unwrap().trusts.len(), 1);
    serving.stop().await;
}

#[tokio::test]
async fn a_ca_is_replaced_while_agents_stay_enrolled() {
    let mut operator = Operator::new();
    let serving = operator.serve().await;
    let mut agents = [
        Agent::enrolled(&operator, &serving, "node-1").await,
        Agent::enrolled(&operator, &serving, "node-2").await,
    ];
    let decide = |operator: &Operator, agents: &[Agent; 2], asked| {
        let reports = [agents[0].report("node-1"), agents[1].report("node-2")];
        let rotation = operator.authority().rotation();
        step(&rotation, &reports, asked, now().unix_timestamp())
    };
    let first = operator.authority().bundle().signing();
    assert_eq!(decide(&operator, &agents, true), Step::Introduce);
    operator.take(&Step::Introduce).await;
    let both = operator.authority().bundle().ids().to_vec();
    assert_eq!((both.len(), both[0]), (2, first));
    operator.write_bundle(&agents[0].bundle());
    agents[0]
        .wait(|status| status.trust.as_ref().unwrap().trusts == both)
        .await;
    let waiting = Step::Keep {
        waiting_for: vec!["node-2".into()],
    };
    assert_eq!(decide(&operator, &agents, false), waiting);
    operator.write_bundle(&agents[1].bundle());
    agents[1]
        .wait(|status| status.trust.as_ref().unwrap().trusts == both)
        .await;

    assert_eq!(decide(&operator, &agents, false), Step::Switch);
    operator.take(&Step::Switch).await;
    let second = operator.authority().bundle().signing();
    assert_eq!(second, both[1]);
    for agent in &mut agents {
        assert_eq!(agent.report("").trust.unwrap().issuer, first);
        operator.write_bundle(&agent.bundle());
        agent
            .wait(|status| status.trust.as_ref().unwrap().issuer == second)
            .await;
    }

    assert_eq!(decide(&operator, &agents, false), Step::Retire);
    operator.take(&Step::Retire).await;
    for agent in &mut agents {
        operator.write_bundle(&agent.bundle());
        agent
            .wait(|status| status.trust.as_ref().unwrap().trusts == [second])
            .await;
    }
    assert_eq!(
        decide(&operator, &agents, false),
        Step::Keep {
            waiting_for: vec![]
        }
    );
    serving.stop().await;
}
