// The common checks with node-postgres and its pool.

import { createHash } from "node:crypto";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { Readable } from "node:stream";
import { buffer } from "node:stream/consumers";
import { pipeline } from "node:stream/promises";

import pg from "pg";
import { from as copyFrom, to as copyTo } from "pg-copy-streams";

// The period is prime, so that a lost or doubled buffer shows.
const PATTERN = "0123456789abcdefghijklmnopqrstu";
const LARGE_ROW = 64 * 1024 * 1024;
const LARGE_OBJECT = 1024 * 1024;
// Runs until it is cancelled, and says when it has begun.
const ENDLESS = "DO $$ BEGIN RAISE NOTICE 'running'; PERFORM pg_sleep(600); END $$";
const SETTINGS = "SELECT name, setting FROM pg_settings WHERE name <> 'application_name'";

class Unsupported extends Error {}

const config = JSON.parse(readFileSync(0, "utf8"));
const parameters = {
  host: config.host,
  port: config.port,
  user: config.user,
  password: config.password,
  database: config.database,
  // A CA alone means: check the chain and the host's name.
  ssl: config.ca ? { ca: readFileSync(config.ca, "utf8") } : false,
};

const repeated = (size) => PATTERN.repeat(size / PATTERN.length + 1).slice(0, size);
const repeatedSql = (size) =>
  `left(repeat('${PATTERN}', ${Math.floor(size / PATTERN.length) + 1}), ${size})`;
const md5 = (data) => createHash("md5").update(data).digest("hex");

const open = async (more = {}) => {
  const client = new pg.Client({ ...parameters, ...more });
  const status = {};
  client.connection.on("parameterStatus", (message) => {
    status[message.parameterName] = message.parameterValue;
  });
  await client.connect();
  return Object.assign(client, { status });
};

const withClient = async (more, use) => {
  const client = await open(more);
  try {
    return await use(client);
  } finally {
    await client.end();
  }
};

const row = async (client, text, values) =>
  (await client.query({ text, values, rowMode: "array" })).rows[0];
const value = async (client, text, values) => (await row(client, text, values))[0];
const codeOf = (promise) =>
  promise.then(
    () => null,
    (error) => error.code ?? Promise.reject(error),
  );

const settings = async (client) => {
  const { rows } = await client.query({ text: SETTINGS, rowMode: "array" });
  return Object.fromEntries(rows);
};
const changed = (before, after) =>
  Object.keys({ ...before, ...after })
    .filter((name) => before[name] !== after[name])
    .sort();

// A thousand rows in COPY's text format, with NULLs, escapes and more than ASCII.
const copyText = () =>
  Array.from({ length: 1000 }, (_, index) => index + 1)
    .map((i) => `${i}\t${i % 10 === 0 ? "\\N" : `line ${i} ☃\\twith\\ttabs\\nand a newline`}\n`)
    .join("");

const first = await open();

const checks = {
  async connect() {
    const { rows } = await first.query({
      text:
        "SELECT name, reset_val FROM pg_settings" +
        " WHERE name IN ('DateStyle', 'IntervalStyle', 'TimeZone', 'client_encoding', 'extra_float_digits', 'search_path') ORDER BY name",
      rowMode: "array",
    });
    return {
      row: await row(first, "SELECT current_user, session_user, current_database(), 1"),
      client_settings: Object.fromEntries(rows),
    };
  },

  async parameters() {
    return first.status;
  },

  async prepared() {
    const rows = [];
    for (const i of [0, 1, 2]) {
      const { rows: answer } = await first.query({
        name: "added",
        text: "SELECT $1::int + 1, $2::text",
        values: [i, `text ${i}`],
        rowMode: "array",
      });
      rows.push(answer[0]);
    }
    const server = await value(
      first,
      "SELECT count(*)::int FROM pg_prepared_statements WHERE name = 'added'",
    );
    return { rows, on_server: server };
  },

  async binary() {
    throw new Unsupported(
      "node-postgres decodes every value as UTF-8 before its binary parsers see it, which damages it",
    );
  },

  async copy() {
    const data = copyText();
    await first.query("CREATE TEMP TABLE copied (id int PRIMARY KEY, value text)");
    const input = first.query(copyFrom("COPY copied FROM STDIN"));
    await pipeline(Readable.from([data]), input);
    const out = await buffer(
      first.query(copyTo("COPY (SELECT * FROM copied ORDER BY id) TO STDOUT")),
    );
    const bad = first.query(copyFrom("COPY copied FROM STDIN"));
    return {
      rows_in: input.rowCount,
      out: md5(out),
      same: out.toString() === data,
      bad_row: await codeOf(pipeline(Readable.from(["word\tvalue\n"]), bad)),
    };
  },

  async notify() {
    await first.query("LISTEN events");
    const received = once(first, "notification");
    await withClient({}, (other) => other.query("SELECT pg_notify('events', 'naïve ☃')"));
    const [{ channel, payload }] = await received;
    return { channel, payload };
  },

  async cancel() {
    const query = new pg.Query(ENDLESS);
    const running = once(first, "notice");
    const failed = once(query, "error");
    first.query(query);
    await running;
    new pg.Client(parameters).cancel(first, query);
    const [error] = await failed;
    return { cancelled: error.code === "57014", then: await value(first, "SELECT 1") };
  },

  async large_object() {
    // node-postgres has no large object API: the server's functions.
    await first.query("BEGIN");
    const oid = await value(first, "SELECT lo_create(0)");
    const descriptor = await value(first, "SELECT lo_open($1, x'60000'::int)", [oid]);
    const data = Buffer.from(repeated(LARGE_OBJECT));
    const written = await value(first, "SELECT lowrite($1, $2)", [descriptor, data]);
    await value(first, "SELECT lo_lseek($1, 500000, 0)", [descriptor]);
    const middle = await value(first, "SELECT loread($1, 31)", [descriptor]);
    await first.query("COMMIT");
    const content = await value(first, "SELECT lo_get($1)", [oid]);
    await value(first, "SELECT lo_unlink($1)", [oid]);
    const gone = await codeOf(first.query("SELECT lo_get($1)", [oid]));
    return { written, digest: md5(content), middle: middle.toString(), gone };
  },

  async large_row() {
    const text = repeated(LARGE_ROW);
    const out = await value(first, `SELECT ${repeatedSql(LARGE_ROW)}`);
    return { out: out === text, in: await row(first, "SELECT length($1), md5($1)", [text]) };
  },

  async transaction() {
    await first.query("CREATE TEMP TABLE numbers (n int PRIMARY KEY)");
    await first.query("BEGIN");
    await first.query("INSERT INTO numbers VALUES (1)");
    await first.query("SAVEPOINT inner_one");
    await first.query("INSERT INTO numbers VALUES (2)");
    const failed = await codeOf(first.query("SELECT 1 / 0"));
    const aborted = await codeOf(first.query("SELECT 1"));
    await first.query("ROLLBACK TO SAVEPOINT inner_one");
    await first.query("INSERT INTO numbers VALUES (3)");
    await first.query("COMMIT");
    const { rows } = await first.query("SELECT n FROM numbers ORDER BY n");
    return { error: failed, aborted, rows: rows.map(({ n }) => n) };
  },

  async encoding() {
    const { rows } = await first.query(
      "SELECT current_setting('client_encoding') AS client, $1::text AS text, octet_length($1) AS octets",
      ["naïve ☃ 𝄞"],
    );
    return rows[0];
  },

  async reset_all() {
    const before = await settings(first);
    await first.query("SET search_path = pg_catalog; SET jit = off; SET TimeZone = 'Asia/Tokyo'");
    const set = changed(before, await settings(first));
    await first.query("RESET ALL");
    return { set, left: changed(before, await settings(first)) };
  },

  async discard_all() {
    const kept = { name: "kept", text: "SELECT 'kept until now'", rowMode: "array" };
    await first.query("CREATE TEMP TABLE discarded (); LISTEN events; SET jit = off");
    await first.query(kept);
    await first.query("DISCARD ALL");
    const left = await value(
      first,
      "SELECT ((SELECT count(*) FROM pg_prepared_statements WHERE name = 'kept')" +
        " + (SELECT count(*) FROM pg_listening_channels())" +
        " + (to_regclass('pg_temp.discarded') IS NOT NULL)::int)::int",
    );
    // node-postgres does not notice that its named statements are discarded as well: another name.
    const { rows } = await first.query({ ...kept, name: "kept again" });
    return { left, prepared_again: rows[0][0] };
  },

  async pool() {
    const withPool = async (max, use) => {
      const pool = new pg.Pool({ ...parameters, max });
      try {
        return await use(pool);
      } finally {
        await pool.end();
      }
    };
    // pg.Pool does not reset what is given back to it: its users do.
    const withPooled = async (pool, use) => {
      const client = await pool.connect();
      try {
        return await use(client);
      } finally {
        await client.query("DISCARD ALL");
        client.release();
      }
    };
    const again = await withPool(1, async (pool) => {
      const pid = await withPooled(pool, async (client) => {
        await client.query("SET statement_timeout = '77s'; CREATE TEMP TABLE left_over ()");
        return value(client, "SELECT pg_backend_pid()");
      });
      return withPooled(pool, async (client) => ({
        reused: (await value(client, "SELECT pg_backend_pid()")) === pid,
        statement_timeout: await value(client, "SHOW statement_timeout"),
        temp_table: await value(client, "SELECT to_regclass('pg_temp.left_over')::text"),
      }));
    });
    const squares = await withPool(4, (pool) =>
      Promise.all(
        Array.from({ length: 40 }, (_, i) =>
          withPooled(pool, (client) => value(client, "SELECT $1::int * $1::int", [i])),
        ),
      ),
    );
    return { ...again, sum: squares.reduce((sum, square) => sum + square, 0) };
  },

  timezone: () =>
    withClient({ options: "-c TimeZone=Asia/Kolkata" }, async (client) => ({
      text: await value(client, "SELECT '2024-01-02 03:04:05Z'::timestamptz::text"),
      status: client.status.TimeZone,
    })),

  async latin1() {
    throw new Unsupported("node-postgres reads and writes UTF-8 only, whatever client_encoding is");
  },

  application_name: () =>
    withClient({ application_name: "branchpool drivers" }, async (client) => ({
      show: await value(client, "SHOW application_name"),
      activity: await value(
        client,
        "SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()",
      ),
    })),

  async options() {
    const options = `-c geqo=off -c statement_timeout=54321 -c search_path=one,"two\\ three"`;
    return withClient({ options }, async (client) => {
      const show = async () => [
        await value(client, "SHOW geqo"),
        await value(client, "SHOW statement_timeout"),
        await value(client, "SHOW search_path"),
      ];
      const atStart = await show();
      await client.query("SET geqo = on; SET statement_timeout = 0; SET search_path = public");
      await client.query("RESET ALL");
      return { at_start: atStart, after_reset: await show() };
    });
  },

  async connects() {
    let sum = 0;
    for (let i = 0; i < 1000; i++) {
      sum += await withClient({}, (client) => value(client, "SELECT $1::int", [i]));
    }
    return { sum };
  },
};

const results = {};
for (const [name, check] of Object.entries(checks)) {
  if (config.only?.length && !config.only.includes(name)) continue;
  try {
    results[name] = await check();
  } catch (error) {
    if (!(error instanceof Unsupported)) console.error(name, error);
    results[name] =
      error instanceof Unsupported ? { unsupported: error.message } : { failed: String(error) };
  }
}
await first.end();
console.log(JSON.stringify(results));
