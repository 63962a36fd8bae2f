//! What the enrolment server refuses, and how it says so.

use std::sync::Arc;

use axum::{
    Router,
    body::Body,
    http::{Request, StatusCode, header::RETRY_AFTER},
};
use branchpool_agent_api::Problem;
use branchpool_trust::{
    Authority,
    enrol::{self, PodToken, Refusal, Reviewed, Reviewer},
};
use http_body_util::BodyExt;
use rcgen::{CertificateParams, KeyPair};
use serde_json::json;
use tokio::sync::{Notify, watch};
use tower::ServiceExt;

use crate::support::{Register, in_time, now};

fn router<R: Reviewer>(reviewer: R) -> Router {
    let authority = Authority::make(now()).unwrap();
    let (_, current) = watch::channel(Arc::new(authority));
    enrol::router(reviewer, current)
}

fn csr() -> String {
    let key = KeyPair::generate().unwrap();
    let request = CertificateParams::default().serialize_request(&key);
    request.unwrap().pem().unwrap()
}

fn post(token: Option<&str>, body: impl Into<Body>) -> Request<Body> {
    let mut request = Request::post(enrol::PATH).header("content-type", "application/json");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    request.body(body.into()).unwrap()
}

async fn refusal(router: &Router, request: Request<Body>) -> Problem {
    let response = router.clone().oneshot(request).await.unwrap();
    let status = response.status();
    assert_eq!(
        response.headers()["content-type"],
        "application/problem+json"
    );
    assert_eq!(
        response.headers().contains_key(RETRY_AFTER),
        status == StatusCode::SERVICE_UNAVAILABLE
    );
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let problem: Problem = serde_json::from_slice(&body).unwrap();
    assert_eq!(problem.status, status.as_u16());
    problem
}

#[tokio::test]
async fn tokens_that_are_no_agents_are_refused_with_the_reviewer_s_words() {
    let register = Register::default();
    let says = "the token is for the audience https://kubernetes.default.svc";
    register.refuse("other-audience", Refusal::Denied(says.into()));
    let says_later = "the API server cannot be reached";
    register.refuse("later", Refusal::Unavailable(says_later.into()));
    register.pod("strange-node", "not a name");
    register.pod("good", "node-1");
    let router = router(register.clone());
    let good = json!({"csr": csr()}).to_string();

    let refused = refusal(&router, post(Some("other-audience"), good.clone())).await;
    assert_eq!(
        (refused.status, &*refused.reason, &*refused.detail),
        (403, "TokenRefused", says)
    );
    let refused = refusal(&router, post(Some("later"), good.clone())).await;
    assert_eq!((refused.status, &*refused.detail), (503, says_later));
    let refused = refusal(&router, post(Some("strange-node"), good.clone())).await;
    assert_eq!((refused.status, &*refused.reason), (422, "NodeName"));
    let reviews = register.reviews();
    for request in [
        post(None, good.clone()),
        post(Some(""), good.clone()),
        post(Some("two words"), good.clone()),
        post(Some(&"x".repeat(20_000)), good.clone()),
    ] {
        assert_eq!(refusal(&router, request).await.reason, "Unauthorized");
    }
    assert_eq!(register.reviews(), reviews);
    let answer = router.oneshot(post(Some("good"), good)).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()["cache-control"], "no-store");
}

#[tokio::test]
async fn bodies_that_are_no_request_are_refused_before_anybody_is_asked() {
    let register = Register::default();
    register.pod("good", "node-1");
    let router = router(register.clone());
    for (body, reason) in [
        (String::new(), "MalformedJson"),
        ("{}".into(), "MalformedJson"),
        (
            json!({"csr": csr(), "node": "node-2"}).to_string(),
            "MalformedJson",
        ),
        (
            json!({"csr": "x".repeat(20_000)}).to_string(),
            "BodyTooLarge",
        ),
    ] {
        let refused = refusal(&router, post(Some("good"), body.clone())).await;
        assert_eq!(refused.reason, reason, "{body}");
    }
    let mut plain = post(Some("good"), "csr");
    plain.headers_mut().remove("content-type");
    assert_eq!(refusal(&router, plain).await.reason, "UnsupportedMediaType");
    assert_eq!(register.reviews(), 0);
}

#[tokio::test]
async fn requests_for_other_keys_or_without_proof_are_refused() {
    let register = Register::default();
    register.pod("good", "node-1");
    let router = router(register);
    let good = csr();
    let forged = {
        // Another key's signature: the last bytes of the DER.
        let pem = csr();
        let mut lines: Vec<_> = pem.lines().map(str::to_owned).collect();
        let last = lines.len() - 2;
        let line = &mut lines[last];
        let flipped = if line.starts_with('A') { "B" } else { "A" };
        line.replace_range(0..1, flipped);
        lines.join("\n")
    };
    for (csr, says) in [
        ("nonsense".to_owned(), "PKCS #10"),
        (format!("{good}{good}"), "not one"),
        (
            good.replace("CERTIFICATE REQUEST", "CERTIFICATE"),
            "PKCS #10",
        ),
        (forged, "not signed by its own key"),
        (rsa(), "ECDSA"),
        ("x".repeat(5_000), "larger"),
    ] {
        let refused = refusal(&router, post(Some("good"), json!({"csr": csr}).to_string())).await;
        assert_eq!(refused.status, 422, "{csr}");
        assert!(refused.detail.contains(says), "{says}: {}", refused.detail);
        assert_eq!(refused.errors[0].field, "csr");
    }
}

/// Of 2048 bits, made by the program `openssl`.
fn rsa() -> String {
    let made = std::process::Command::new("openssl")
        .args([
            "req",
            "-new",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            "/CN=a",
            "-keyout",
            "/dev/null",
        ])
        .stdin(std::process::Stdio::null())
        .output()
        .expect("the program openssl is needed: install the package openssl");
    assert!(made.status.success(), "{made:?}");
    String::from_utf8(made.stdout).unwrap()
}

/// Answers nobody before it is told to.
#[derive(Clone, Default)]
struct Slow {
    begun: Arc<Notify>,
    go_on: Arc<Notify>,
}

impl Reviewer for Slow {
    async fn review(&self, _: &PodToken) -> Result<Reviewed, Refusal> {
        let going_on = self.go_on.notified();
        self.begun.notify_one();
        going_on.await;
        Ok(Reviewed {
            node: "node-1".into(),
            pod_uid: "uid".into(),
        })
    }
}

#[tokio::test]
async fn too_many_at_a_time_are_sent_away_and_served_later() {
    let slow = Slow::default();
    let router = router(slow.clone());
    let body = json!({"csr": csr()}).to_string();
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..16 {
        waiting.spawn(router.clone().oneshot(post(Some("token"), body.clone())));
        in_time(slow.begun.notified()).await;
    }
    let refused = refusal(&router, post(Some("token"), body.clone())).await;
    assert_eq!(refused.reason, "TooManyEnrolments");
    assert_eq!(refused.retry_after_ms, Some(1000));
    slow.go_on.notify_waiters();
    for answer in in_time(waiting.join_all()).await {
        assert_eq!(answer.unwrap().status(), 200);
    }
    // One whose sender went away makes room.
    let gone = tokio::spawn(router.clone().oneshot(post(Some("token"), body.clone())));
    in_time(slow.begun.notified()).await;
    gone.abort();
    assert!(gone.await.unwrap_err().is_cancelled());
    let last = tokio::spawn(router.oneshot(post(Some("token"), body)));
    in_time(slow.begun.notified()).await;
    slow.go_on.notify_waiters();
    assert_eq!(last.await.unwrap().unwrap().status(), 200);
}
