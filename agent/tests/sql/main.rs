//! SQL over HTTP against a real Postgres, by requests byte by byte and by Neon's own driver. Needs root,
//! and node with npm.

#![allow(clippy::unwrap_used, reason = "in a test, unwrap is an assertion")]

mod bounds;
#[allow(dead_code, reason = "the tests of the HTTP server use the rest")]
#[path = "../http/message.rs"]
mod message;
mod neon;
#[path = "../neon/mod.rs"]
mod neon_driver;
mod own;
mod postgres;
#[allow(dead_code, reason = "the tests of the HTTP server use the rest")]
#[path = "../http/raw.rs"]
mod raw;
#[path = "../http/service.rs"]
mod service;

use branchpool_agent::sql::Limits;
use serde_json::Value;

use crate::{
    message::{Reply, Request},
    postgres::Postgres,
    raw::{Running, local},
    service::InMemory,
};

/// Agent and server, with the lease `shop` on the server's database `app`.
struct Node {
    postgres: Postgres,
    agent: Running,
}

impl Node {
    async fn start() -> Self {
        Self::with(Limits::default()).await
    }

    async fn with(limits: Limits) -> Self {
        let postgres = Postgres::start().await;
        let service = InMemory::with(limits);
        service.sql_target("shop", postgres.target());
        let tcp = Some(local());
        let agent = Running::serve(service, |options| options.tcp = tcp).await;
        Self { postgres, agent }
    }

    /// Sends the body to the lease's own door.
    async fn post(&self, body: &Value) -> Reply {
        let request = Request::json("POST", "/v1/leases/shop/sql", body.to_string());
        self.agent.send(&request).await
    }

    /// The result of a query that must succeed.
    async fn query(&self, body: &Value) -> Value {
        let reply = self.post(body).await;
        assert_eq!(reply.status, 200, "{body}: {reply:?}");
        reply.json()
    }

    async fn stop(self) {
        self.agent.stop().await;
    }
}
