//! The checks of what a session starts with, and of what pools do with it.

use std::collections::BTreeMap;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use futures_util::future::try_join_all;
use serde_json::{Value, json};

use crate::{Result, Unsupported, connection::Session, suite::Suite};

const SETTINGS: &str = "SELECT name, setting FROM pg_settings WHERE name <> 'application_name'";
const CONNECTS: i32 = 1000;

impl Suite {
    pub(crate) async fn encoding(&self) -> Result<Value> {
        let query =
            "SELECT current_setting('client_encoding') AS client, $1::text, octet_length($1)";
        let row = self.first.row(query, &[&"naïve ☃ 𝄞"]).await?;
        Ok(json!({
            "client": row.try_get::<_, String>(0)?,
            "text": row.try_get::<_, String>(1)?,
            "octets": row.try_get::<_, i32>(2)?,
        }))
    }

    pub(crate) async fn reset_all(&self) -> Result<Value> {
        let before = self.first.pairs(SETTINGS).await?;
        self.first
            .execute("SET search_path = pg_catalog; SET jit = off; SET TimeZone = 'Asia/Tokyo'")
            .await?;
        let set = changed(&before, &self.first.pairs(SETTINGS).await?);
        self.first.execute("RESET ALL").await?;
        let left = changed(&before, &self.first.pairs(SETTINGS).await?);
        Ok(json!({"set": set, "left": left}))
    }

    pub(crate) async fn discard_all(&self) -> Result<Value> {
        let (client, kept) = (&self.first.client, "SELECT 'kept until now'");
        self.first
            .execute("CREATE TEMP TABLE discarded (); LISTEN events; SET jit = off")
            .await?;
        // It is closed when it goes out of scope, so it stays here.
        let _prepared = client.prepare(kept).await?;
        self.first.execute("DISCARD ALL").await?;
        let left: i64 = self
            .first
            .row(
                "SELECT (SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'SELECT ''kept until%') \
                    + (SELECT count(*) FROM pg_listening_channels()) \
                    + (to_regclass('pg_temp.discarded') IS NOT NULL)::int",
                &[],
            )
            .await?
            .try_get(0)?;
        let again = client.prepare(kept).await?;
        let again: String = client.query_one(&again, &[]).await?.try_get(0)?;
        Ok(json!({"left": left, "prepared_again": again}))
    }

    /// Of connections that are cleaned before they are handed out again.
    fn new_pool(&self, size: usize) -> Result<Pool> {
        let config = ManagerConfig {
            recycling_method: RecyclingMethod::Clean,
        };
        let manager = Manager::from_config(self.parameters.clone(), self.tls.clone(), config);
        Ok(Pool::builder(manager).max_size(size).build()?)
    }

    pub(crate) async fn pool(&self) -> Result<Value> {
        let pool = self.new_pool(1)?;
        let own_pid = "SELECT pg_backend_pid()";
        let client = pool.get().await?;
        let first: i32 = client.query_one(own_pid, &[]).await?.try_get(0)?;
        client
            .batch_execute("SET statement_timeout = '77s'; CREATE TEMP TABLE left_over ()")
            .await?;
        drop(client);
        let client = pool.get().await?;
        let again: i32 = client.query_one(own_pid, &[]).await?.try_get(0)?;
        let row = client
            .query_one(
                "SELECT current_setting('statement_timeout'), to_regclass('pg_temp.left_over')::text",
                &[],
            )
            .await?;

        let pool = self.new_pool(4)?;
        let squares = (0..40).map(async |i: i32| -> Result<i32> {
            let client = pool.get().await?;
            let row = client.query_one("SELECT $1::int * $1::int", &[&i]).await?;
            Ok(row.try_get(0)?)
        });
        let sum: i32 = try_join_all(squares).await?.into_iter().sum();
        Ok(json!({
            "reused": again == first,
            "statement_timeout": row.try_get::<_, String>(0)?,
            "temp_table": row.try_get::<_, Option<String>>(1)?,
            "sum": sum,
        }))
    }

    /// A session with startup parameters of its own.
    async fn with(
        &self,
        change: impl FnOnce(&mut tokio_postgres::Config) -> &mut tokio_postgres::Config,
    ) -> Result<Session> {
        let mut parameters = self.parameters.clone();
        change(&mut parameters);
        Session::open(&parameters, &self.tls).await
    }

    pub(crate) async fn timezone(&self) -> Result<Value> {
        let session = self.with(|parameters| parameters.options("-c TimeZone=Asia/Kolkata"));
        let session = session.await?;
        let query = "SELECT '2024-01-02 03:04:05Z'::timestamptz::text";
        let text: String = session.row(query, &[]).await?.try_get(0)?;
        Ok(json!({"text": text, "status": session.parameters.get("TimeZone")}))
    }

    pub(crate) fn latin1() -> Result<Value> {
        Err(Unsupported("tokio-postgres always asks for client_encoding=UTF8").into())
    }

    pub(crate) async fn application_name(&self) -> Result<Value> {
        let session = self.with(|parameters| parameters.application_name("branchpool drivers"));
        let texts = session
            .await?
            .texts(
                "SELECT current_setting('application_name'), application_name \
                    FROM pg_stat_activity WHERE pid = pg_backend_pid()",
            )
            .await?;
        Ok(json!({"show": texts[0], "activity": texts[1]}))
    }

    pub(crate) async fn options(&self) -> Result<Value> {
        let options = r#"-c geqo=off -c statement_timeout=54321 -c search_path=one,"two\ three""#;
        let session = self.with(|parameters| parameters.options(options)).await?;
        let show = "SELECT current_setting('geqo'), current_setting('statement_timeout'), \
            current_setting('search_path')";
        let at_start = session.texts(show).await?;
        session
            .execute("SET geqo = on; SET statement_timeout = 0; SET search_path = public")
            .await?;
        session.execute("RESET ALL").await?;
        Ok(json!({"at_start": at_start, "after_reset": session.texts(show).await?}))
    }

    pub(crate) async fn connects(&self) -> Result<Value> {
        let mut sum = 0;
        for i in 0..CONNECTS {
            let session = self.open().await?;
            let row = session.row("SELECT $1::int", &[&i]).await?;
            sum += row.try_get::<_, i32>(0)?;
        }
        Ok(json!({"sum": sum}))
    }
}

fn changed(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> Vec<String> {
    let names: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
    names
        .into_iter()
        .filter(|name| before.get(*name) != after.get(*name))
        .cloned()
        .collect()
}
