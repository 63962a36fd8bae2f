// What users of the driver do, against the agent at ENDPOINT.
import assert from 'node:assert/strict';
import { neon, neonConfig, NeonDbError } from '@neondatabase/serverless';

neonConfig.fetchEndpoint = process.env.ENDPOINT;
const url = process.env.DATABASE_URL;
const sql = neon(url);
let passed = 0;

async function check(name, test) {
  try {
    await test();
    passed += 1;
  } catch (error) {
    console.log(`${name}:`, error);
    process.exitCode = 1;
  }
}

await check('a query with a parameter', async () => {
  const id = 2;
  assert.deepEqual(await sql`SELECT id, body FROM items WHERE id = ${id}`, [{ id: 2, body: 'two' }]);
});

await check('placeholders, and composed templates', async () => {
  assert.deepEqual(await sql.query('SELECT $1::int + $2::int AS sum', [40, 2]), [{ sum: 42 }]);
  const rest = sql`WHERE id > ${1} ORDER BY ${sql.unsafe('id')}`;
  assert.deepEqual(await sql`SELECT id FROM items ${rest}`, [{ id: 2 }, { id: 3 }]);
});

await check('array mode', async () => {
  const arrays = neon(url, { arrayMode: true });
  assert.deepEqual(await arrays`SELECT id, body FROM items ORDER BY id LIMIT 2`, [
    [1, 'one'],
    [2, 'two'],
  ]);
});

await check('full results', async () => {
  const full = neon(url, { fullResults: true });
  const result = await full`SELECT id, body FROM items ORDER BY id`;
  assert.equal(result.command, 'SELECT');
  assert.equal(result.rowCount, 3);
  assert.equal(result.rowAsArray, false);
  assert.equal(result.viaNeonFetch, true);
  assert.deepEqual(result.rows[2], { id: 3, body: 'three' });
  const [id, body] = result.fields;
  assert.deepEqual([id.name, id.dataTypeID, id.columnID, id.dataTypeSize], ['id', 23, 1, 4]);
  assert.deepEqual([body.name, body.dataTypeID, body.dataTypeModifier, body.format], ['body', 25, -1, 'text']);
  assert.ok(id.tableID > 16383 && id.tableID === body.tableID);
  const made = await full`CREATE TABLE made (id int)`;
  assert.deepEqual([made.command, made.rowCount, made.rows, made.fields], ['CREATE', null, [], []]);
});

await check('types both ways', async () => {
  const when = new Date('2024-05-06T07:08:09.123Z');
  const bytes = Buffer.from([0, 1, 254, 255]);
  const [row] = await sql`SELECT
    ${true}::bool AS bool, ${-5}::int2 AS int2, ${'9007199254740993'}::int8 AS int8,
    ${1.5}::float8 AS float8, ${'1.10'}::numeric AS numeric, ${"it's ä"}::text AS text,
    ${null}::int AS none, ${{ a: [1, 'b', null] }}::jsonb AS jsonb, ${when}::timestamptz AS at,
    ${bytes} AS bytes, ${[1, 2, 3]}::int[] AS ints, ${['a,b', '"', '\\', null]}::text[] AS texts,
    ${'2024-05-06'}::date AS date, ${'NaN'}::float8 AS nan`;
  assert.equal(row.bool, true);
  assert.equal(row.int2, -5);
  assert.equal(row.int8, '9007199254740993');
  assert.equal(row.float8, 1.5);
  assert.equal(row.numeric, '1.10');
  assert.equal(row.text, "it's ä");
  assert.equal(row.none, null);
  assert.deepEqual(row.jsonb, { a: [1, 'b', null] });
  assert.equal(row.at.getTime(), when.getTime());
  assert.deepEqual(Buffer.from(row.bytes), bytes);
  assert.deepEqual(row.ints, [1, 2, 3]);
  assert.deepEqual(row.texts, ['a,b', '"', '\\', null]);
  assert.ok(row.date instanceof Date);
  assert.ok(Number.isNaN(row.nan));
});

await check('errors of Postgres', async () => {
  const error = await sql`INSERT INTO items VALUES (1, 'again')`.then(assert.fail, (error) => error);
  assert.ok(error instanceof NeonDbError);
  assert.match(error.message, /duplicate key value/);
  assert.deepEqual(
    [error.code, error.severity, error.schema, error.table, error.constraint, error.detail],
    ['23505', 'ERROR', 'public', 'items', 'items_pkey', 'Key (id)=(1) already exists.'],
  );
  assert.equal(error.hint, undefined);
  const syntax = await sql`SELEC 1`.then(assert.fail, (error) => error);
  assert.deepEqual([syntax.code, syntax.position], ['42601', '1']);
});

await check('a wrong password', async () => {
  const wrong = new URL(url);
  wrong.password = 'wrong';
  const error = await neon(wrong.href)`SELECT 1`.then(assert.fail, (error) => error);
  assert.ok(error instanceof NeonDbError);
  assert.deepEqual([error.code, error.severity], ['28P01', 'FATAL']);
});

await check('a transaction', async () => {
  const [inserted, rows] = await sql.transaction([
    sql`INSERT INTO items VALUES (${10}, ${'ten'}) RETURNING id`,
    sql`SELECT count(*)::int AS count FROM items`,
  ]);
  assert.deepEqual(inserted, [{ id: 10 }]);
  assert.deepEqual(rows, [{ count: 4 }]);
  const error = await sql
    .transaction((tx) => [tx`DELETE FROM items`, tx`SELECT 1 / 0`])
    .then(assert.fail, (error) => error);
  assert.equal(error.code, '22012');
  assert.deepEqual(await sql`SELECT count(*)::int AS count FROM items`, [{ count: 4 }]);
});

await check('isolation, read only and deferrable', async () => {
  const shown = (tx) => [
    tx`SHOW transaction_isolation`,
    tx`SHOW transaction_read_only`,
    tx`SHOW transaction_deferrable`,
  ];
  const options = { isolationLevel: 'Serializable', readOnly: true, deferrable: true };
  assert.deepEqual(await sql.transaction(shown, options), [
    [{ transaction_isolation: 'serializable' }],
    [{ transaction_read_only: 'on' }],
    [{ transaction_deferrable: 'on' }],
  ]);
  for (const [isolationLevel, level] of [
    ['ReadUncommitted', 'read uncommitted'],
    ['ReadCommitted', 'read committed'],
    ['RepeatableRead', 'repeatable read'],
  ]) {
    const [rows] = await sql.transaction(shown, { isolationLevel });
    assert.deepEqual(rows, [{ transaction_isolation: level }]);
  }
  const error = await sql
    .transaction([sql`DELETE FROM items`], { readOnly: true })
    .then(assert.fail, (error) => error);
  assert.equal(error.code, '25006');
});

await check('array mode and full results of single queries in a transaction', async () => {
  const [full, plain] = await sql.transaction(
    [
      sql.query('SELECT id FROM items WHERE id = $1', [1], { fullResults: true, arrayMode: true }),
      sql`SELECT body FROM items WHERE id = 1`,
    ],
    { arrayMode: false },
  );
  assert.deepEqual(full.rows, [[1]]);
  assert.deepEqual(plain, [{ body: 'one' }]);
});

console.log(`${passed} passed`);
