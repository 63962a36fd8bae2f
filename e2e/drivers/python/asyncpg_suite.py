"""The common checks with asyncpg and its pool."""

import asyncio
import io
import ssl

import asyncpg

import common


def parameters_of(config: dict) -> dict:
    ca = config.get("ca")
    return {
        "host": config["host"], "port": config["port"], "user": config["user"],
        "password": config.get("password"), "database": config["database"],
        # Checks the chain and the host's name.
        "ssl": ssl.create_default_context(cafile=ca) if ca else False,
    }  # fmt: skip


class Suite:
    def __init__(self, config: dict, parameters: dict, first: asyncpg.Connection):
        self.config = config
        self.parameters_of_connection = parameters
        self.first = first

    @classmethod
    async def start(cls, config: dict) -> "Suite":
        parameters = parameters_of(config)
        return cls(config, parameters, await asyncpg.connect(**parameters))

    async def open(self, **settings) -> asyncpg.Connection:
        return await asyncpg.connect(**self.parameters_of_connection, server_settings=settings)

    async def connect(self):
        row = await self.first.fetchrow("SELECT current_user, session_user, current_database(), 1")
        return {"row": list(row), "client_settings": dict(await self.first.fetch(common.CLIENT_SETTINGS))}

    async def parameters(self):
        settings = self.first.get_settings()
        status = {name: getattr(settings, name, None) for name in common.PARAMETERS}
        return {name: value for name, value in status.items() if value is not None}

    async def prepared(self):
        statement = await self.first.prepare("SELECT $1::int + 1, $2::text")
        rows = [list(await statement.fetchrow(i, f"text {i}")) for i in range(3)]
        server = await self.first.fetchval(
            "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%+ 1, $2::text'"
        )
        return {"rows": rows, "on_server": server}

    async def binary(self):
        # asyncpg knows no other format.
        return common.normal(await self.first.fetchrow(common.BINARY))

    async def copy(self):
        data, out = common.copy_text(), io.BytesIO()
        await self.first.execute("CREATE TEMP TABLE copied (id int PRIMARY KEY, value text)")
        status = await self.first.copy_to_table("copied", source=io.BytesIO(data))
        await self.first.copy_from_query("SELECT * FROM copied ORDER BY id", output=out)
        try:
            await self.first.copy_to_table("copied", source=io.BytesIO(b"word\tvalue\n"))
        except asyncpg.PostgresError as error:
            bad_row = error.sqlstate
        return {
            "rows_in": int(status.removeprefix("COPY ")),
            "out": common.digest(out.getvalue()),
            "same": out.getvalue() == data,
            "bad_row": bad_row,
        }

    async def notify(self):
        received = asyncio.get_running_loop().create_future()
        await self.first.add_listener("events", lambda _, pid, *notification: received.set_result(notification))
        other = await self.open()
        await other.execute("SELECT pg_notify('events', 'naïve ☃')")
        await other.close()
        channel, payload = await asyncio.wait_for(received, 30)
        await self.first.reset()
        return {"channel": channel, "payload": payload}

    async def cancel(self):
        running = asyncio.Event()
        listener = lambda connection, message: running.set()
        self.first.add_log_listener(listener)
        query = asyncio.create_task(self.first.execute(common.ENDLESS))
        await running.wait()
        # Sends a CancelRequest. The next query waits until the server has answered.
        query.cancel()
        try:
            await query
        except asyncio.CancelledError:
            return {"cancelled": True, "then": await self.first.fetchval("SELECT 1")}
        finally:
            self.first.remove_log_listener(listener)

    async def large_object(self):
        # asyncpg has no large object API: the server's functions.
        value = self.first.fetchval
        data = common.repeated(common.LARGE_OBJECT).encode()
        async with self.first.transaction():
            oid = await value("SELECT lo_create(0)")
            descriptor = await value("SELECT lo_open($1, x'60000'::int)", oid)
            written = await value("SELECT lowrite($1, $2)", descriptor, data)
            await value("SELECT lo_lseek($1, 500000, 0)", descriptor)
            middle = await value("SELECT loread($1, 31)", descriptor)
        content = await value("SELECT lo_get($1)", oid)
        await value("SELECT lo_unlink($1)", oid)
        try:
            await value("SELECT lo_get($1)", oid)
        except asyncpg.PostgresError as error:
            gone = error.sqlstate
        return {"written": written, "digest": common.digest(content), "middle": middle.decode(), "gone": gone}

    async def large_row(self):
        text = common.repeated(common.LARGE_ROW)
        out = await self.first.fetchval(f"SELECT {common.repeated_sql(common.LARGE_ROW)}")
        row = await self.first.fetchrow("SELECT length($1), md5($1)", text)
        return {"out": out == text, "in": list(row)}

    async def transaction(self):
        await self.first.execute("CREATE TEMP TABLE numbers (n int PRIMARY KEY)")
        async with self.first.transaction():
            await self.first.execute("INSERT INTO numbers VALUES (1)")
            try:
                async with self.first.transaction():
                    await self.first.execute("INSERT INTO numbers VALUES (2)")
                    try:
                        await self.first.execute("SELECT 1 / 0")
                    except asyncpg.DivisionByZeroError as error:
                        failed = error.sqlstate
                    await self.first.execute("SELECT 1")
            except asyncpg.InFailedSQLTransactionError as error:
                aborted = error.sqlstate
            await self.first.execute("INSERT INTO numbers VALUES (3)")
        rows = await self.first.fetch("SELECT n FROM numbers ORDER BY n")
        return {"error": failed, "aborted": aborted, "rows": [row["n"] for row in rows]}

    async def encoding(self):
        row = await self.first.fetchrow(
            "SELECT current_setting('client_encoding') AS client, $1::text AS text, octet_length($1) AS octets",
            common.UTF8,
        )
        return dict(row)

    async def reset_all(self):
        before = await self.first.fetch(common.SETTINGS)
        await self.first.execute("SET search_path = pg_catalog; SET jit = off; SET TimeZone = 'Asia/Tokyo'")
        changed = common.changed(before, await self.first.fetch(common.SETTINGS))
        # What the pool sends when a connection is given back, RESET ALL among it.
        await self.first.reset()
        return {"set": changed, "left": common.changed(before, await self.first.fetch(common.SETTINGS))}

    async def discard_all(self):
        await self.first.execute("CREATE TEMP TABLE discarded (); LISTEN events; SET jit = off")
        await self.first.prepare("SELECT 'kept until now'")
        await self.first.execute("DISCARD ALL")
        return {
            "left": await self.first.fetchval(
                "SELECT (SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'SELECT ''kept until%')"
                " + (SELECT count(*) FROM pg_listening_channels())"
                " + (to_regclass('pg_temp.discarded') IS NOT NULL)::int"
            ),
            "prepared_again": await (await self.first.prepare("SELECT 'kept until now'")).fetchval(),
        }

    async def pool(self):
        async with asyncpg.create_pool(**self.parameters_of_connection, min_size=1, max_size=1) as pool:
            async with pool.acquire() as connection:
                first = await connection.fetchval("SELECT pg_backend_pid()")
                await connection.execute("SET statement_timeout = '77s'; CREATE TEMP TABLE left_over ()")
            # The pool resets settings; what it leaves, a user discards.
            await pool.execute("DISCARD TEMP")
            async with pool.acquire() as connection:
                reused = await connection.fetchval("SELECT pg_backend_pid()") == first
                timeout = await connection.fetchval("SHOW statement_timeout")
                table = await connection.fetchval("SELECT to_regclass('pg_temp.left_over')::text")
        async with asyncpg.create_pool(**self.parameters_of_connection, min_size=4, max_size=4) as pool:
            squares = (pool.fetchval("SELECT $1::int * $1::int", i) for i in range(40))
            total = sum(await asyncio.gather(*squares))
        return {"reused": reused, "statement_timeout": timeout, "temp_table": table, "sum": total}

    async def timezone(self):
        connection = await self.open(TimeZone="Asia/Kolkata")
        text = await connection.fetchval(common.INSTANT)
        status = connection.get_settings().TimeZone
        await connection.close()
        return {"text": text, "status": status}

    async def latin1(self):
        connection = await self.open(client_encoding="LATIN1")
        try:
            unrepresentable = await connection.fetchval("SELECT chr(9731)")
        except asyncpg.PostgresError as error:
            unrepresentable = error.sqlstate
        row = await connection.fetchrow(
            "SELECT current_setting('client_encoding') AS client, $1::text AS text", common.LATIN1
        )
        await connection.close()
        return dict(row) | {"unrepresentable": unrepresentable}

    async def application_name(self):
        connection = await self.open(application_name=common.APPLICATION)
        row = await connection.fetchrow(
            "SELECT current_setting('application_name') AS show, application_name AS activity"
            " FROM pg_stat_activity WHERE pid = pg_backend_pid()"
        )
        await connection.close()
        return dict(row)

    async def options(self):
        connection = await self.open(options=common.OPTIONS)

        async def show():
            names = ("geqo", "statement_timeout", "search_path")
            return [await connection.fetchval(f"SHOW {name}") for name in names]

        at_start = await show()
        await connection.execute("SET geqo = on; SET statement_timeout = 0; SET search_path = public")
        await connection.execute("RESET ALL")
        after_reset = await show()
        await connection.close()
        return {"at_start": at_start, "after_reset": after_reset}

    async def connects(self):
        total = 0
        for i in range(common.CONNECTS):
            connection = await self.open()
            total += await connection.fetchval("SELECT $1::int", i)
            await connection.close()
        return {"sum": total}


def main():
    with asyncio.Runner() as runner:
        suite = runner.run(Suite.start(common.load()))
        common.report(suite.config, suite, lambda check: runner.run(check()))


main()
