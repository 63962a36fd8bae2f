use serde_json::{Value, json};

use crate::fixture::{
    eventually,
    stage::{Stage, phase},
};

#[tokio::test]
async fn agents_enrol_and_leases_are_had_in_one_request() {
    let stage = Stage::with_trust(2).await;
    stage
        .create_pool("app", &json!({"replicas": 4, "maxBranches": 8}))
        .await;
    stage.wait_filled("app", 4).await;
    let lease = async |token: &str, name: &str| {
        let url = format!(
            "https://localhost:{}/v1/namespaces/shop/pools/app/leases",
            stage.port
        );
        let body = json!({"name": name, "ttl": "60s"}).to_string();
        // A client as users have it, with the CA that the operator tells.
        let output = std::process::Command::new("curl")
            .args(["--silent", "--show-error", "--cacert"])
            .arg(stage.bundle_file("node-1"))
            .args(["--header", &format!("authorization: Bearer {token}")])
            .args(["--data", &body, "--write-out", "\n%{http_code}", &url])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (body, code) = text.rsplit_once('\n').unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let body: Value = serde_json::from_str(body).unwrap();
        (code.parse::<u16>().unwrap(), body)
    };
    let user = stage.token("shop", "user", &json!({})).await;
    let (code, granted) = lease(&user, "test").await;
    assert_eq!(code, 201, "{granted}");
    assert!(
        granted["uri"]
            .as_str()
            .unwrap()
            .contains(granted["password"].as_str().unwrap())
    );
    let bound = stage.wait_bound("test").await;
    assert_eq!(granted["uid"].as_str(), bound.metadata.uid.as_deref());
    assert_eq!(bound.status.unwrap().binding, None);
    assert_eq!(stage.lease_secrets().await, [] as [String; 0]);
    let (code, again) = lease(&user, "test").await;
    assert_eq!((code, &again["password"]), (201, &granted["password"]));
    let stranger = stage.token("shop", "stranger", &json!({})).await;
    let (code, refused) = lease(&stranger, "other").await;
    assert_eq!((code, refused["reason"].as_str()), (403, Some("Forbidden")));
    let (code, _) = lease("nonsense", "other").await;
    assert_eq!(code, 401);
    stage.create_lease("by-hand", &json!({})).await;
    stage
        .wait_lease("by-hand", |lease| {
            phase(lease) == branchpool_crds::LeasePhase::Bound
        })
        .await;
    let (code, taken) = lease(&user, "by-hand").await;
    assert_eq!((code, taken["reason"].as_str()), (409, Some("NameTaken")));
    for name in ["test", "by-hand"] {
        stage.delete_lease(name).await;
    }
    stage.wait_nothing_left().await;
    eventually("the agents tell whom they trust", async || {
        let nodes = stage.agents.iter();
        let mut told = 0;
        for agent in nodes {
            told += usize::from(agent.client.node().await.unwrap().trust.is_some());
        }
        (told == 2).then_some(())
    })
    .await;
}
