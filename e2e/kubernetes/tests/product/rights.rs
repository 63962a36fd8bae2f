//! What accounts may do, and whether they need it.

use std::collections::BTreeSet;

use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule, Role};
use kube::{Api, api::ListParams};
use libtest_mimic::Failed;
use serde_json::json;

use crate::{
    TESTS,
    stage::{AGENTS, Done, NAMESPACE, SYSTEM, Stage, run},
};

const OPERATOR: &str = "system:serviceaccount:branchpool-system:branchpool-operator";
/// Only a CA that nears its end is replaced, and an Event is patched only when it is told again within minutes. Tests of
/// the operator look into the audit log for both: `rotation` and `pools` in `operator/tests/controllers`.
const SELDOM: [&str; 3] = [
    "update secrets[branchpool-ca]",
    "update configmaps[branchpool-ca]",
    "patch events.events.k8s.io",
];

pub(crate) async fn an_expired_lease_is_collected(stage: &mut Stage) -> Done {
    let terms = json!({"retainFinished": "1s"});
    stage
        .fill("short", &json!({"replicas": 1, "lease": terms}))
        .await?;
    stage
        .create_lease("brief", &json!({"poolRef": {"name": "short"}, "ttl": "2s"}))
        .await?;
    stage.wait("delete", &["branchlease/brief"]).await?;
    stage.nothing_leased().await?;
    stage.drop_pool("short").await
}

/// With the accounts' real tokens.
pub(crate) async fn accounts_reach_nothing_else(stage: &mut Stage) -> Done {
    let foreign = [
        "create",
        "secret",
        "generic",
        "theirs",
        "--from-literal=word=known",
    ];
    stage.kubectl(&foreign).await?;
    let operator = stage
        .kubectl(&[
            "create",
            "token",
            "branchpool-operator",
            "--namespace",
            SYSTEM,
        ])
        .await?;
    let namespace = format!("--namespace={NAMESPACE}");
    for attempt in [
        &["get", "secret", "theirs", &namespace][..],
        &["get", "secrets", "-A"],
        &["patch", "secret", "theirs", &namespace, "--patch={}"],
        &["delete", "secret", "theirs", &namespace],
        &["delete", "secrets", "--all", &namespace],
        &["create", "secret", "generic", "another", &namespace],
        &["get", "pods", &namespace],
    ] {
        refused(stage, &operator, attempt, "orbidden").await?;
    }
    stage.kubectl(&["delete", "secret", "theirs"]).await?;
    // A token that an agent never has: it is made for the API server.
    let agent = stage
        .kubectl(&["create", "token", "branchpool-agent", "--namespace", AGENTS])
        .await?;
    for attempt in [
        &["get", "pods", "--namespace", AGENTS][..],
        &["get", "configmaps", "--namespace", AGENTS],
        &["get", "nodes"],
        &["get", "secrets", "-A"],
        &["get", "branchleases", "-A"],
        &["get", "branchnodes"],
    ] {
        refused(stage, &agent, attempt, "orbidden").await?;
    }
    // The one that it has is for the operator alone.
    for pod in stage.agents().await?.values() {
        let read = [
            "exec",
            "--namespace",
            AGENTS,
            pod,
            "--container=agent",
            "--",
            "cat",
            "/var/run/secrets/branchpool/token",
        ];
        let token = stage.kubectl(&read).await?;
        refused(stage, &token, &["get", "pods", &namespace], "nauthorized").await?;
    }
    Ok(())
}

async fn refused(stage: &Stage, token: &str, attempt: &[&str], how: &str) -> Done {
    let server = [
        "config",
        "view",
        "--minify",
        "--output=jsonpath={.clusters[0].cluster.server}",
    ];
    let server = stage.kubectl(&server).await?;
    let mut command = stage.cluster.command("kubectl");
    // Without the administrator's certificate, which would win over a token.
    command
        .env("KUBECONFIG", "/dev/null")
        .args([
            "--insecure-skip-tls-verify",
            "--server",
            server.trim(),
            "--token",
            token.trim(),
        ])
        .args(attempt);
    let why = match run(command).await {
        Ok(printed) => return Err(format!("{attempt:?} was allowed: {printed}").into()),
        Err(why) => format!("{why:?}"),
    };
    assert!(why.contains(how), "{attempt:?}: {why}");
    Ok(())
}

/// What the tests before used, by the audit log, against what the chart grants.
pub(crate) async fn every_granted_verb_is_used(stage: &mut Stage) -> Done {
    if stage.passed + 1 < TESTS.len() {
        println!("skipped: it looks at what all other tests did, and not all of them passed");
        return Ok(());
    }
    let Some(own) = stage.hands("its audit log is out of reach") else {
        return Ok(());
    };
    let used: BTreeSet<String> = own
        .api
        .audit_events()?
        .iter()
        .filter(|event| event["user"]["username"] == OPERATOR)
        .flat_map(|event| {
            let of = |field: &str| event["objectRef"][field].as_str().unwrap_or_default();
            let resource = match of("subresource") {
                "" => of("resource").to_owned(),
                part => format!("{}/{part}", of("resource")),
            };
            let verb = event["verb"].as_str().unwrap_or_default();
            [
                name(verb, of("apiGroup"), &resource, ""),
                name(verb, of("apiGroup"), &resource, of("name")),
            ]
        })
        .collect();
    let granted = granted(stage).await?;
    assert!(granted.len() > 15, "{granted:?}");
    let mut unused: Vec<_> = granted
        .iter()
        .filter(|grant| !used.contains(*grant))
        .collect();
    unused.retain(|grant| !SELDOM.contains(&grant.as_str()));
    assert!(
        unused.is_empty(),
        "granted, and used by nothing: {unused:?}"
    );
    Ok(())
}

async fn granted(stage: &Stage) -> Result<BTreeSet<String>, Failed> {
    let client = stage.cluster.client();
    let ours = ListParams::default()
        .labels("app.kubernetes.io/instance=branchpool,app.kubernetes.io/component=operator");
    let operators =
        |name: Option<&String>| name.is_some_and(|name| name.starts_with("branchpool-operator"));
    let mut rules: Vec<PolicyRule> = Vec::new();
    for role in Api::<ClusterRole>::all(client.clone()).list(&ours).await? {
        if operators(role.metadata.name.as_ref()) {
            rules.extend(role.rules.unwrap_or_default());
        }
    }
    for role in Api::<Role>::all(client).list(&ours).await? {
        rules.extend(role.rules.unwrap_or_default());
    }
    let mut granted = BTreeSet::new();
    for rule in rules {
        let names = rule.resource_names.unwrap_or_else(|| vec![String::new()]);
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                for object in &names {
                    granted.extend(
                        rule.verbs
                            .iter()
                            .map(|verb| name(verb, group, resource, object)),
                    );
                }
            }
        }
    }
    Ok(granted)
}

fn name(verb: &str, group: &str, resource: &str, object: &str) -> String {
    let group = if group.is_empty() {
        String::new()
    } else {
        format!(".{group}")
    };
    let object = if object.is_empty() {
        String::new()
    } else {
        format!("[{object}]")
    };
    format!("{verb} {resource}{group}{object}")
}
