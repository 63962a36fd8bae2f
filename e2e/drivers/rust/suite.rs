//! The checks of what a session can do.

use std::{
    pin::pin,
    time::{SystemTime, UNIX_EPOCH},
};

use branchpool_e2e_drivers::Config;
use bytes::Bytes;
use futures_util::{SinkExt, TryStreamExt, future::join};
use md5::{Digest, Md5};
use serde_json::{Value, json};
use tokio_postgres::{AsyncMessage, error::SqlState};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::{
    Result,
    connection::{self, Session, code, said},
};

/// The period is prime, so that a lost or doubled buffer shows.
const PATTERN: &str = "0123456789abcdefghijklmnopqrstu";
const LARGE_ROW: usize = 64 << 20;
const LARGE_OBJECT: usize = 1 << 20;
/// Runs until it is cancelled, and says when it has begun.
const ENDLESS: &str = "DO $$ BEGIN RAISE NOTICE 'running'; PERFORM pg_sleep(600); END $$";

pub(crate) const CHECKS: [&str; 19] = [
    "connect",
    "parameters",
    "prepared",
    "binary",
    "copy",
    "notify",
    "cancel",
    "large_object",
    "large_row",
    "transaction",
    "encoding",
    "reset_all",
    "discard_all",
    "pool",
    "timezone",
    "latin1",
    "application_name",
    "options",
    "connects",
];

pub(crate) struct Suite {
    pub(crate) parameters: tokio_postgres::Config,
    pub(crate) tls: MakeRustlsConnect,
    pub(crate) first: Session,
}

impl Suite {
    pub(crate) async fn start(config: &Config) -> Result<Self> {
        let parameters = connection::parameters(config);
        let tls = connection::tls(config)?;
        let first = Session::open(&parameters, &tls).await?;
        Ok(Self {
            parameters,
            tls,
            first,
        })
    }

    pub(crate) async fn check(&mut self, name: &str) -> Result<Value> {
        match name {
            "connect" => self.connect().await,
            "parameters" => Ok(json!(self.first.parameters)),
            "prepared" => self.prepared().await,
            "binary" => self.binary().await,
            "copy" => self.copy().await,
            "notify" => self.notify().await,
            "cancel" => self.cancel().await,
            "large_object" => self.large_object().await,
            "large_row" => self.large_row().await,
            "transaction" => self.transaction().await,
            "encoding" => self.encoding().await,
            "reset_all" => self.reset_all().await,
            "discard_all" => self.discard_all().await,
            "pool" => self.pool().await,
            "timezone" => self.timezone().await,
            "latin1" => Self::latin1(),
            "application_name" => self.application_name().await,
            "options" => self.options().await,
            "connects" => self.connects().await,
            other => Err(format!("there is no check {other}").into()),
        }
    }

    pub(crate) async fn open(&self) -> Result<Session> {
        Session::open(&self.parameters, &self.tls).await
    }

    async fn connect(&self) -> Result<Value> {
        let who = "SELECT current_user::text, session_user::text, current_database()::text";
        let mut row = json!(self.first.texts(who).await?);
        let one: i32 = self.first.row("SELECT 1", &[]).await?.try_get(0)?;
        row.as_array_mut().ok_or("no row")?.push(one.into());
        let settings = "SELECT name, reset_val FROM pg_settings \
            WHERE name IN ('DateStyle', 'IntervalStyle', 'TimeZone', 'client_encoding', \
                'extra_float_digits', 'search_path') ORDER BY name";
        Ok(json!({"row": row, "client_settings": self.first.pairs(settings).await?}))
    }

    async fn prepared(&self) -> Result<Value> {
        let client = &self.first.client;
        let statement = client.prepare("SELECT $1::int + 1, $2::text").await?;
        let mut rows = Vec::new();
        for i in 0..3_i32 {
            let row = client
                .query_one(&statement, &[&i, &format!("text {i}")])
                .await?;
            rows.push((row.try_get::<_, i32>(0)?, row.try_get::<_, String>(1)?));
        }
        let count = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'SELECT $1::int + 1%'";
        let on_server: i64 = self.first.row(count, &[]).await?.try_get(0)?;
        Ok(json!({"rows": rows, "on_server": on_server}))
    }

    /// tokio-postgres knows no other format.
    async fn binary(&self) -> Result<Value> {
        let query = "SELECT int8 '-9223372036854775808', float8 '0.1', true, text 'naïve ☃', \
            bytea '\\x00ff10', timestamptz '2024-01-02 03:04:05.678Z', '{1,NULL,3}'::int4[]";
        let row = self.first.row(query, &[]).await?;
        let timestamptz: SystemTime = row.try_get(5)?;
        let milliseconds = timestamptz.duration_since(UNIX_EPOCH)?.as_millis();
        Ok(json!({
            "int8": row.try_get::<_, i64>(0)?.to_string(),
            "float8": row.try_get::<_, f64>(1)?,
            "bool": row.try_get::<_, bool>(2)?,
            "text": row.try_get::<_, String>(3)?,
            "bytea": hex(row.try_get(4)?),
            "timestamptz": u64::try_from(milliseconds)?,
            "int4[]": row.try_get::<_, Vec<Option<i32>>>(6)?,
        }))
    }

    async fn copy(&self) -> Result<Value> {
        let data = copy_text();
        self.first
            .execute("CREATE TEMP TABLE copied (id int PRIMARY KEY, value text)")
            .await?;
        let rows_in = self.copy_in(data.clone()).await?;
        let query = "COPY (SELECT * FROM copied ORDER BY id) TO STDOUT";
        let stream = self.first.client.copy_out(query).await?;
        let out: Vec<Bytes> = stream.try_collect().await?;
        let out = out.concat();
        let bad = self.copy_in(Bytes::from_static(b"word\tvalue\n")).await;
        Ok(json!({
            "rows_in": rows_in,
            "out": digest(&out),
            "same": out == data,
            "bad_row": code(bad)?,
        }))
    }

    async fn copy_in(&self, data: Bytes) -> std::result::Result<u64, tokio_postgres::Error> {
        let sink = self.first.client.copy_in("COPY copied FROM STDIN").await?;
        let mut sink = pin!(sink);
        sink.send(data).await?;
        sink.finish().await
    }

    async fn notify(&mut self) -> Result<Value> {
        self.first.execute("LISTEN events").await?;
        let other = self.open().await?;
        other
            .execute("SELECT pg_notify('events', 'naïve ☃')")
            .await?;
        let notification = said(&mut self.first.messages, |message| match message {
            AsyncMessage::Notification(notification) => Some(notification),
            _ => None,
        })
        .await?;
        Ok(json!({"channel": notification.channel(), "payload": notification.payload()}))
    }

    async fn cancel(&mut self) -> Result<Value> {
        let token = self.first.client.cancel_token();
        let Session {
            client, messages, ..
        } = &mut self.first;
        let running = async {
            said(messages, |message| match message {
                AsyncMessage::Notice(notice) if notice.message() == "running" => Some(()),
                _ => None,
            })
            .await?;
            Result::Ok(token.cancel_query(self.tls.clone()).await?)
        };
        let (failed, cancelled) = join(client.batch_execute(ENDLESS), running).await;
        cancelled?;
        let cancelled = code(failed)? == SqlState::QUERY_CANCELED.code();
        let then: i32 = self.first.row("SELECT 1", &[]).await?.try_get(0)?;
        Ok(json!({"cancelled": cancelled, "then": then}))
    }

    /// tokio-postgres has no large object API: the server's functions.
    async fn large_object(&mut self) -> Result<Value> {
        let data = repeated(LARGE_OBJECT).into_bytes();
        let transaction = self.first.client.transaction().await?;
        let row = transaction.query_one("SELECT lo_create(0)", &[]).await?;
        let oid: u32 = row.try_get(0)?;
        let query = "SELECT lo_open($1, x'60000'::int)";
        let descriptor: i32 = transaction.query_one(query, &[&oid]).await?.try_get(0)?;
        let query = "SELECT lowrite($1, $2)";
        let row = transaction.query_one(query, &[&descriptor, &data]).await?;
        let written: i32 = row.try_get(0)?;
        let query = "SELECT lo_lseek($1, 500000, 0)";
        transaction.query_one(query, &[&descriptor]).await?;
        let query = "SELECT loread($1, 31)";
        let row = transaction.query_one(query, &[&descriptor]).await?;
        let middle = String::from_utf8(row.try_get(0)?)?;
        transaction.commit().await?;

        let row = self.first.row("SELECT lo_get($1)", &[&oid]).await?;
        let content: &[u8] = row.try_get(0)?;
        self.first.row("SELECT lo_unlink($1)", &[&oid]).await?;
        let query = "SELECT lo_get($1)";
        let gone = code(self.first.client.query_one(query, &[&oid]).await)?;
        Ok(json!({
            "written": written,
            "digest": digest(content),
            "middle": middle,
            "gone": gone,
        }))
    }

    async fn large_row(&self) -> Result<Value> {
        let text = repeated(LARGE_ROW);
        let query = format!(
            "SELECT left(repeat('{PATTERN}', {}), {LARGE_ROW})",
            LARGE_ROW / PATTERN.len() + 1
        );
        let row = self.first.row(&query, &[]).await?;
        let same = row.try_get::<_, &str>(0)? == text;
        let row = self
            .first
            .row("SELECT length($1), md5($1)", &[&text])
            .await?;
        let (length, sum): (i32, String) = (row.try_get(0)?, row.try_get(1)?);
        Ok(json!({"out": same, "in": (length, sum)}))
    }

    async fn transaction(&mut self) -> Result<Value> {
        let client = &mut self.first.client;
        client
            .batch_execute("CREATE TEMP TABLE numbers (n int PRIMARY KEY)")
            .await?;
        let mut transaction = client.transaction().await?;
        transaction
            .execute("INSERT INTO numbers VALUES (1)", &[])
            .await?;
        let savepoint = transaction.transaction().await?;
        savepoint
            .execute("INSERT INTO numbers VALUES (2)", &[])
            .await?;
        let failed = code(savepoint.query_one("SELECT 1 / 0", &[]).await)?;
        let aborted = code(savepoint.query_one("SELECT 1", &[]).await)?;
        savepoint.rollback().await?;
        transaction
            .execute("INSERT INTO numbers VALUES (3)", &[])
            .await?;
        transaction.commit().await?;
        let rows = client
            .query("SELECT n FROM numbers ORDER BY n", &[])
            .await?;
        let numbers: Vec<i32> = rows
            .iter()
            .map(|row| row.try_get(0))
            .collect::<std::result::Result<_, _>>()?;
        Ok(json!({"error": failed, "aborted": aborted, "rows": numbers}))
    }
}

fn repeated(size: usize) -> String {
    let mut text = PATTERN.repeat(size / PATTERN.len() + 1);
    text.truncate(size);
    text
}

fn digest(data: &[u8]) -> String {
    hex(&Md5::digest(data))
}

fn hex(data: &[u8]) -> String {
    use std::fmt::Write;
    data.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string should take what is written");
        text
    })
}

/// A thousand rows in COPY's text format, with NULLs, escapes and more than ASCII.
fn copy_text() -> Bytes {
    let row = |i: u32| {
        if i.is_multiple_of(10) {
            format!("{i}\t\\N\n")
        } else {
            format!("{i}\tline {i} ☃\\twith\\ttabs\\nand a newline\n")
        }
    };
    (1..=1000).map(row).collect::<String>().into()
}
