"""The common checks with psycopg 3 and psycopg_pool."""

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
from psycopg import conninfo, errors
from psycopg_pool import ConnectionPool

import common


def parameters_of(config: dict) -> str:
    tls = {"sslmode": "verify-full", "sslrootcert": config["ca"]} if config.get("ca") else {}
    return conninfo.make_conninfo(
        host=config["host"], port=config["port"], user=config["user"],
        password=config.get("password"), dbname=config["database"], **tls,
    )  # fmt: skip


class Suite:
    def __init__(self, config: dict):
        self.conninfo = parameters_of(config)
        self.first = self.open()

    def open(self, **parameters) -> psycopg.Connection:
        return psycopg.connect(self.conninfo, autocommit=True, **parameters)

    def value(self, query: str, *parameters, connection=None):
        return (connection or self.first).execute(query, parameters or None).fetchone()[0]

    def connect(self):
        row = self.first.execute("SELECT current_user, session_user, current_database(), 1").fetchone()
        return {
            "row": list(row),
            "client_settings": dict(self.first.execute(common.CLIENT_SETTINGS).fetchall()),
        }

    def parameters(self):
        status = {name: self.first.info.parameter_status(name) for name in common.PARAMETERS}
        return {name: value for name, value in status.items() if value is not None}

    def prepared(self):
        rows = [
            list(self.first.execute("SELECT %s::int + 1, %s::text", (i, f"text {i}"), prepare=True).fetchone())
            for i in range(3)
        ]
        server = self.value("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%+ 1, $2::text%'")
        return {"rows": rows, "on_server": server}

    def binary(self):
        cursor = self.first.cursor(binary=True)
        row = cursor.execute(common.BINARY).fetchone()
        assert all(cursor.pgresult.fformat(i) == 1 for i in range(7)), "the results are not binary"
        return common.normal(row)

    def copy(self):
        data = common.copy_text()
        self.first.execute("CREATE TEMP TABLE copied (id int PRIMARY KEY, value text)")
        with self.first.cursor() as cursor:
            with cursor.copy("COPY copied FROM STDIN") as copy:
                copy.write(data)
            rows_in = cursor.rowcount
            with cursor.copy("COPY (SELECT * FROM copied ORDER BY id) TO STDOUT") as copy:
                out = b"".join(copy)
            try:
                with cursor.copy("COPY copied FROM STDIN") as copy:
                    copy.write(b"word\tvalue\n")
            except psycopg.Error as error:
                bad_row = error.sqlstate
        return {"rows_in": rows_in, "out": common.digest(out), "same": out == data, "bad_row": bad_row}

    def notify(self):
        self.first.execute("LISTEN events")
        with self.open() as other:
            other.execute("SELECT pg_notify('events', 'naïve ☃')")
        (notification,) = self.first.notifies(timeout=30, stop_after=1)
        return {"channel": notification.channel, "payload": notification.payload}

    def cancel(self):
        running = threading.Event()
        self.first.add_notice_handler(lambda notice: running.set())
        canceller = threading.Thread(target=lambda: running.wait() and self.first.cancel_safe())
        canceller.start()
        try:
            self.first.execute(common.ENDLESS)
        except errors.QueryCanceled:
            return {"cancelled": True, "then": self.value("SELECT 1")}
        finally:
            running.set()
            canceller.join()

    def large_object(self):
        # psycopg has no large object API: the server's functions.
        data = common.repeated(common.LARGE_OBJECT).encode()
        with self.first.transaction():
            oid = self.value("SELECT lo_create(0)")
            descriptor = self.value("SELECT lo_open(%s, x'60000'::int)", oid)
            written = self.value("SELECT lowrite(%s, %s)", descriptor, data)
            self.value("SELECT lo_lseek(%s, 500000, 0)", descriptor)
            middle = self.value("SELECT loread(%s, 31)", descriptor)
        content = self.value("SELECT lo_get(%s)", oid)
        self.value("SELECT lo_unlink(%s)", oid)
        try:
            self.value("SELECT lo_get(%s)", oid)
        except psycopg.Error as error:
            gone = error.sqlstate
        return {"written": written, "digest": common.digest(content), "middle": middle.decode(), "gone": gone}

    def large_row(self):
        text = common.repeated(common.LARGE_ROW)
        out = self.value(f"SELECT {common.repeated_sql(common.LARGE_ROW)}")
        length, digest = self.first.execute("SELECT length(%(text)s), md5(%(text)s)", {"text": text}).fetchone()
        return {"out": out == text, "in": [length, digest]}

    def transaction(self):
        self.first.execute("CREATE TEMP TABLE numbers (n int PRIMARY KEY)")
        with self.first.transaction():
            self.first.execute("INSERT INTO numbers VALUES (1)")
            try:
                with self.first.transaction():
                    self.first.execute("INSERT INTO numbers VALUES (2)")
                    try:
                        self.first.execute("SELECT 1 / 0")
                    except errors.DivisionByZero as error:
                        failed = error.sqlstate
                    self.first.execute("SELECT 1")
            except errors.InFailedSqlTransaction as error:
                aborted = error.sqlstate
            self.first.execute("INSERT INTO numbers VALUES (3)")
        rows = self.first.execute("SELECT n FROM numbers ORDER BY n").fetchall()
        return {"error": failed, "aborted": aborted, "rows": [n for (n,) in rows]}

    def encoding(self):
        return {
            "client": self.value("SHOW client_encoding"),
            "text": self.value("SELECT %s::text", common.UTF8),
            "octets": self.value("SELECT octet_length(%s::text)", common.UTF8),
        }

    def reset_all(self):
        before = self.first.execute(common.SETTINGS).fetchall()
        self.first.execute("SET search_path = pg_catalog; SET jit = off; SET TimeZone = 'Asia/Tokyo'")
        changed = common.changed(before, self.first.execute(common.SETTINGS).fetchall())
        self.first.execute("RESET ALL")
        return {"set": changed, "left": common.changed(before, self.first.execute(common.SETTINGS).fetchall())}

    def discard_all(self):
        self.first.execute("CREATE TEMP TABLE discarded (); LISTEN events; SET jit = off")
        self.first.execute("SELECT 'kept until now'", prepare=True)
        self.first.execute("DISCARD ALL")
        return {
            "left": self.value(
                "SELECT (SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'SELECT ''kept until%')"
                " + (SELECT count(*) FROM pg_listening_channels())"
                " + (to_regclass('pg_temp.discarded') IS NOT NULL)::int"
            ),
            "prepared_again": self.first.execute("SELECT 'kept until now'", prepare=True).fetchone()[0],
        }

    def pool(self):
        reset = lambda connection: connection.execute("DISCARD ALL")
        # psycopg does not notice that its prepared statements are discarded as well.
        options = {"kwargs": {"autocommit": True, "prepare_threshold": None}, "reset": reset}
        with ConnectionPool(self.conninfo, min_size=1, max_size=1, **options) as pool:
            with pool.connection() as connection:
                first = self.value("SELECT pg_backend_pid()", connection=connection)
                connection.execute("SET statement_timeout = '77s'; CREATE TEMP TABLE left_over ()")
            with pool.connection() as connection:
                reused = self.value("SELECT pg_backend_pid()", connection=connection) == first
                timeout = self.value("SHOW statement_timeout", connection=connection)
                table = self.value("SELECT to_regclass('pg_temp.left_over')::text", connection=connection)
        with ConnectionPool(self.conninfo, min_size=4, max_size=4, **options) as pool:

            def square(i: int) -> int:
                with pool.connection() as connection:
                    return self.value("SELECT %s::int * %s::int", i, i, connection=connection)

            with ThreadPoolExecutor(8) as threads:
                total = sum(threads.map(square, range(40)))
        return {"reused": reused, "statement_timeout": timeout, "temp_table": table, "sum": total}

    def timezone(self):
        with self.open(options="-c TimeZone=Asia/Kolkata") as connection:
            return {
                "text": self.value(common.INSTANT, connection=connection),
                "status": connection.info.parameter_status("TimeZone"),
            }

    def latin1(self):
        with self.open(client_encoding="LATIN1") as connection:
            text = self.value("SELECT %s::text", common.LATIN1, connection=connection)
            try:
                self.value("SELECT chr(9731)", connection=connection)
            except psycopg.Error as error:
                unrepresentable = error.sqlstate
            return {
                "client": self.value("SHOW client_encoding", connection=connection),
                "text": text,
                "unrepresentable": unrepresentable,
            }

    def application_name(self):
        with self.open(application_name=common.APPLICATION) as connection:
            return {
                "show": self.value("SHOW application_name", connection=connection),
                "activity": self.value(
                    "SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()",
                    connection=connection,
                ),
            }

    def options(self):
        with self.open(options=common.OPTIONS) as connection:
            show = lambda: [
                self.value(f"SHOW {name}", connection=connection)
                for name in ("geqo", "statement_timeout", "search_path")
            ]
            at_start = show()
            connection.execute("SET geqo = on; SET statement_timeout = 0; SET search_path = public")
            connection.execute("RESET ALL")
            return {"at_start": at_start, "after_reset": show()}

    def connects(self):
        total = 0
        for i in range(common.CONNECTS):
            with self.open() as connection:
                total += self.value("SELECT %s::int", i, connection=connection)
        return {"sum": total}


def main():
    config = common.load()
    suite = Suite(config)
    common.report(config, suite)


main()
