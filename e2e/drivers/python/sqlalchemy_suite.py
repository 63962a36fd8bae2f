"""The common checks with SQLAlchemy's engine on psycopg 3, its default driver."""

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
from sqlalchemy import URL, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, QueuePool

import common


def url_of(config: dict) -> URL:
    tls = {"sslmode": "verify-full", "sslrootcert": config["ca"]} if config.get("ca") else {}
    return URL.create(
        "postgresql+psycopg", config["user"], config.get("password"), config["host"], config["port"],
        config["database"], query=tls,
    )  # fmt: skip


def reset_connection(connection, record, state):
    """The recipe of SQLAlchemy's documentation, for a pool made with pool_reset_on_return=None."""
    if not state.terminate_only:
        connection.rollback()
        connection.autocommit = True
        connection.execute("DISCARD ALL")
        connection.autocommit = False


class Suite:
    def __init__(self, config: dict):
        self.url = url_of(config)
        self.engine = self.engine_of()
        self.first = self.engine.connect()
        # The psycopg connection, for what SQLAlchemy leaves to the driver.
        self.driver = self.first.connection.driver_connection

    def engine_of(self, **parameters):
        return create_engine(self.url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=parameters)

    def value(self, query: str, connection=None, **parameters):
        return (connection or self.first).execute(text(query), parameters).scalar()

    def connect(self):
        row = self.first.execute(text("SELECT current_user, session_user, current_database(), 1")).one()
        settings = self.first.execute(text(common.CLIENT_SETTINGS)).all()
        return {"row": list(row), "client_settings": dict(map(tuple, settings))}

    def parameters(self):
        status = {name: self.driver.info.parameter_status(name) for name in common.PARAMETERS}
        return {name: value for name, value in status.items() if value is not None}

    def prepared(self):
        # The driver prepares what has been executed more often than its threshold.
        self.driver.prepare_threshold = 0
        query = text("SELECT CAST(:i AS int) + 1, CAST(:value AS text)")
        rows = [list(self.first.execute(query, {"i": i, "value": f"text {i}"}).one()) for i in range(3)]
        self.driver.prepare_threshold = 5
        server = self.value("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%+ 1, CAST($2%'")
        return {"rows": rows, "on_server": server}

    def binary(self):
        cursor = self.driver.cursor(binary=True)
        row = cursor.execute(common.BINARY).fetchone()
        assert all(cursor.pgresult.fformat(i) == 1 for i in range(7)), "the results are not binary"
        return common.normal(row)

    def copy(self):
        data = common.copy_text()
        self.first.execute(text("CREATE TEMP TABLE copied (id int PRIMARY KEY, value text)"))
        with self.driver.cursor() as cursor:
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
        self.first.execute(text("LISTEN events"))
        with self.engine.connect() as other:
            other.execute(text("SELECT pg_notify('events', 'naïve ☃')"))
        (notification,) = self.driver.notifies(timeout=30, stop_after=1)
        return {"channel": notification.channel, "payload": notification.payload}

    def cancel(self):
        running = threading.Event()
        self.driver.add_notice_handler(lambda notice: running.set())
        canceller = threading.Thread(target=lambda: running.wait() and self.driver.cancel_safe())
        canceller.start()
        try:
            self.first.execute(text(common.ENDLESS))
        except DBAPIError as error:
            assert error.orig.sqlstate == "57014", error
            return {"cancelled": True, "then": self.value("SELECT 1")}
        finally:
            running.set()
            canceller.join()

    def large_object(self):
        # Neither SQLAlchemy nor psycopg has a large object API: the server's functions.
        data = common.repeated(common.LARGE_OBJECT).encode()
        with self.engine_of().execution_options(isolation_level="READ COMMITTED").begin() as connection:
            value = lambda query, **parameters: self.value(query, connection, **parameters)
            oid = value("SELECT lo_create(0)")
            descriptor = value("SELECT lo_open(:oid, x'60000'::int)", oid=oid)
            written = value("SELECT lowrite(:descriptor, :data)", descriptor=descriptor, data=data)
            value("SELECT lo_lseek(:descriptor, 500000, 0)", descriptor=descriptor)
            middle = value("SELECT loread(:descriptor, 31)", descriptor=descriptor)
        content = self.value("SELECT lo_get(:oid)", oid=oid)
        self.value("SELECT lo_unlink(:oid)", oid=oid)
        try:
            self.value("SELECT lo_get(:oid)", oid=oid)
        except DBAPIError as error:
            gone = error.orig.sqlstate
        return {"written": written, "digest": common.digest(content), "middle": middle.decode(), "gone": gone}

    def large_row(self):
        data = common.repeated(common.LARGE_ROW)
        out = self.value(f"SELECT {common.repeated_sql(common.LARGE_ROW)}")
        row = self.first.execute(text("SELECT length(:data), md5(:data)"), {"data": data}).one()
        return {"out": out == data, "in": list(row)}

    def transaction(self):
        engine = self.engine_of().execution_options(isolation_level="READ COMMITTED")
        with engine.begin() as connection:
            execute = lambda query: connection.execute(text(query))
            execute("CREATE TEMP TABLE numbers (n int PRIMARY KEY) ON COMMIT PRESERVE ROWS")
            execute("INSERT INTO numbers VALUES (1)")
            savepoint = connection.begin_nested()
            execute("INSERT INTO numbers VALUES (2)")
            try:
                execute("SELECT 1 / 0")
            except DBAPIError as error:
                failed = error.orig.sqlstate
            try:
                execute("SELECT 1")
            except DBAPIError as error:
                aborted = error.orig.sqlstate
            savepoint.rollback()
            execute("INSERT INTO numbers VALUES (3)")
            rows = execute("SELECT n FROM numbers ORDER BY n").scalars().all()
        return {"error": failed, "aborted": aborted, "rows": list(rows)}

    def encoding(self):
        row = self.first.execute(
            text(
                "SELECT current_setting('client_encoding') AS client, CAST(:value AS text) AS text,"
                " octet_length(CAST(:value AS text)) AS octets"
            ),
            {"value": common.UTF8},
        ).one()
        return row._asdict()

    def settings(self):
        return self.first.execute(text(common.SETTINGS)).all()

    def reset_all(self):
        before = self.settings()
        self.first.execute(text("SET search_path = pg_catalog; SET jit = off; SET TimeZone = 'Asia/Tokyo'"))
        changed = common.changed(before, self.settings())
        self.first.execute(text("RESET ALL"))
        return {"set": changed, "left": common.changed(before, self.settings())}

    def discard_all(self):
        self.first.execute(text("CREATE TEMP TABLE discarded (); LISTEN events; SET jit = off"))
        self.driver.execute("SELECT 'kept until now'", prepare=True)
        self.first.execute(text("DISCARD ALL"))
        return {
            "left": self.value(
                "SELECT (SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'SELECT ''kept until%')"
                " + (SELECT count(*) FROM pg_listening_channels())"
                " + (to_regclass('pg_temp.discarded') IS NOT NULL)::int"
            ),
            "prepared_again": self.driver.execute("SELECT 'kept until now'", prepare=True).fetchone()[0],
        }

    def pool(self):
        def pooled(size: int):
            engine = create_engine(
                self.url, poolclass=QueuePool, pool_size=size, max_overflow=0, pool_reset_on_return=None,
                # psycopg does not notice that its prepared statements are discarded as well.
                connect_args={"prepare_threshold": None},
            )  # fmt: skip
            event.listen(engine, "reset", reset_connection)
            return engine

        engine = pooled(1)
        with engine.begin() as connection:
            first = self.value("SELECT pg_backend_pid()", connection)
            connection.execute(text("SET statement_timeout = '77s'; CREATE TEMP TABLE left_over ()"))
        with engine.begin() as connection:
            reused = self.value("SELECT pg_backend_pid()", connection) == first
            timeout = self.value("SHOW statement_timeout", connection)
            table = self.value("SELECT to_regclass('pg_temp.left_over')::text", connection)
        engine.dispose()
        engine = pooled(4)

        def square(i: int) -> int:
            with engine.begin() as connection:
                return self.value("SELECT CAST(:i AS int) * CAST(:i AS int)", connection, i=i)

        with ThreadPoolExecutor(8) as threads:
            total = sum(threads.map(square, range(40)))
        engine.dispose()
        return {"reused": reused, "statement_timeout": timeout, "temp_table": table, "sum": total}

    def timezone(self):
        with self.engine_of(options="-c TimeZone=Asia/Kolkata").connect() as connection:
            return {
                "text": self.value(common.INSTANT.replace(":", r"\:"), connection),
                "status": connection.connection.driver_connection.info.parameter_status("TimeZone"),
            }

    def latin1(self):
        with self.engine_of(client_encoding="LATIN1").connect() as connection:
            try:
                unrepresentable = self.value("SELECT chr(9731)", connection)
            except DBAPIError as error:
                unrepresentable = error.orig.sqlstate
            return {
                "client": self.value("SHOW client_encoding", connection),
                "text": self.value("SELECT CAST(:value AS text)", connection, value=common.LATIN1),
                "unrepresentable": unrepresentable,
            }

    def application_name(self):
        with self.engine_of(application_name=common.APPLICATION).connect() as connection:
            return {
                "show": self.value("SHOW application_name", connection),
                "activity": self.value(
                    "SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()", connection
                ),
            }

    def options(self):
        with self.engine_of(options=common.OPTIONS).connect() as connection:
            names = ("geqo", "statement_timeout", "search_path")
            show = lambda: [self.value(f"SHOW {name}", connection) for name in names]
            at_start = show()
            connection.execute(text("SET geqo = on; SET statement_timeout = 0; SET search_path = public"))
            connection.execute(text("RESET ALL"))
            return {"at_start": at_start, "after_reset": show()}

    def connects(self):
        total = 0
        for i in range(common.CONNECTS):
            # Without a pool each one is a connection.
            with self.engine.connect() as connection:
                total += self.value("SELECT CAST(:i AS int)", connection, i=i)
        return {"sum": total}


def main():
    config = common.load()
    suite = Suite(config)
    common.report(config, suite)


main()
