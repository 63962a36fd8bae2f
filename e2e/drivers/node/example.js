import pg from "pg";

const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
await client.connect();
const { rows } = await client.query("SELECT current_database() AS name");
console.log(rows[0].name);
await client.end();
