"""The common checks with psql, driven as a person would: by its standard input, with its commands."""

import json
import os
import pty
import re
import signal
import subprocess
import tempfile
import tty
from pathlib import Path

import common
from common import Unsupported

OPTIONS = ["--no-psqlrc", "--no-align", "--tuples-only", "--quiet", "--no-password", "--pset=pager=off"]
END = "end of the answer"


def environment_of(config: dict, **variables: str) -> dict:
    given = {
        "PGHOST": config["host"], "PGPORT": str(config["port"]), "PGUSER": config["user"],
        "PGDATABASE": config["database"], "LC_ALL": "C.UTF-8",
        "PATH": os.environ["PATH"], "HOME": os.environ["HOME"],
    }  # fmt: skip
    if config.get("password"):
        given["PGPASSWORD"] = config["password"]
    if config.get("ca"):
        given |= {"PGSSLMODE": "verify-full", "PGSSLROOTCERT": config["ca"]}
    return given | variables


class Psql:
    """A psql that runs. Its errors show their SQLSTATE only."""

    def __init__(self, config: dict, encoding="utf-8", **variables: str):
        self.process = subprocess.Popen(
            ["psql", *OPTIONS, "--set=VERBOSITY=sqlstate"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding=encoding, env=environment_of(config, **variables),
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.communicate()

    def answer(self, commands: str) -> str:
        """What psql prints for the commands."""
        # \warn because it is not buffered.
        self.process.stdin.write(f"{commands}\n\\warn {END}\n")
        self.process.stdin.flush()
        lines = []
        while (line := self.process.stdout.readline()) != f"{END}\n":
            if not line:
                raise EOFError(f"psql ended: {''.join(lines)}")
            lines.append(line)
        return "".join(lines).removesuffix("\n")

    def lines(self, commands: str) -> list[str]:
        return self.answer(commands).splitlines()

    def json(self, query: str):
        return json.loads(self.answer(f"SELECT to_json(answer) FROM ({query}) AS answer;"))

    def error(self, commands: str) -> str:
        answer = self.answer(commands)
        assert answer.startswith("ERROR:  "), answer
        return answer.removeprefix("ERROR:  ")


class Suite:
    def __init__(self, config: dict):
        self.config = config
        self.first = Psql(config)
        # So that a connection that is refused ends the program.
        self.first.answer("")

    def open(self, **options) -> Psql:
        return Psql(self.config, **options)

    def settings(self) -> dict:
        return self.first.json(f"SELECT json_object_agg(name, setting) AS all FROM ({common.SETTINGS}) s")["all"]

    def connect(self):
        row = self.first.json("SELECT current_user, session_user, current_database(), 1 AS one")
        settings = self.first.lines(common.CLIENT_SETTINGS + ";")
        return {"row": list(row.values()), "client_settings": dict(line.split("|") for line in settings)}

    def parameters(self):
        # psql keeps these two of what the server reports.
        encoding, version = self.first.lines("\\warn :ENCODING\n\\warn :SERVER_VERSION_NAME")
        return {"client_encoding": encoding, "server_version": version}

    def prepared(self):
        self.first.answer("PREPARE added (int, text) AS SELECT $1 + 1 AS n, $2 AS value;")
        rows = [self.first.answer(f"EXECUTE added ({i}, 'text {i}');").split("|") for i in range(3)]
        server = self.first.answer("SELECT count(*) FROM pg_prepared_statements WHERE name = 'added';")
        return {"rows": [[int(n), text] for n, text in rows], "on_server": int(server)}

    def binary(self):
        raise Unsupported("psql asks for text results only")

    def copy(self):
        with tempfile.TemporaryDirectory() as directory:
            file, out, bad = (Path(directory, name) for name in ("in", "out", "bad"))
            file.write_bytes(common.copy_text())
            bad.write_bytes(b"word\tvalue\n")
            self.first.answer("CREATE TEMP TABLE copied (id int PRIMARY KEY, value text);")
            rows_in = self.first.answer(f"\\copy copied from '{file}'\n\\warn :ROW_COUNT")
            self.first.answer(f"\\copy (SELECT * FROM copied ORDER BY id) to '{out}'")
            return {
                "rows_in": int(rows_in),
                "out": common.digest(out.read_bytes()),
                "same": out.read_bytes() == file.read_bytes(),
                "bad_row": self.first.error(f"\\copy copied from '{bad}'"),
            }

    def notify(self):
        self.first.answer("LISTEN events;")
        with self.open() as other:
            other.answer("SELECT pg_notify('events', 'naïve ☃');")
        # psql shows what has arrived after a command.
        answer = self.first.answer("SELECT 1;")
        pattern = r'Asynchronous notification "(.*)" with payload "(.*)" received from server process with PID \d+\.'
        channel, payload = re.search(pattern, answer).groups()
        # One that came later would stand between the answers of other checks.
        self.first.answer("UNLISTEN *;")
        return {"channel": channel, "payload": payload}

    def cancel(self):
        # Without a terminal psql ends when it is interrupted.
        controller, terminal = pty.openpty()
        tty.setraw(terminal)
        process = subprocess.Popen(
            ["psql", *OPTIONS, "--no-readline", "--set=PROMPT1=", "--set=PROMPT2=", "--set=VERBOSITY=terse"],
            stdin=terminal, stdout=terminal, stderr=terminal, env=environment_of(self.config),
        )  # fmt: skip
        os.close(terminal)
        with open(controller, "r+b", buffering=0) as screen:
            screen.write(f"{common.ENDLESS};\n".encode())
            assert screen.readline() == b"NOTICE:  running\n"
            process.send_signal(signal.SIGINT)
            screen.write(b"SELECT 1;\n")
            lines = [screen.readline().strip() for _ in range(3)]
            screen.write(b"\\quit\n")
            process.wait()
        assert lines[0] == b"Cancel request sent", lines
        cancelled = lines[1] == b"ERROR:  canceling statement due to user request"
        return {"cancelled": cancelled, "then": int(lines[2])}

    def large_object(self):
        data = common.repeated(common.LARGE_OBJECT).encode()
        with tempfile.TemporaryDirectory() as directory:
            file, out = Path(directory, "in"), Path(directory, "out")
            file.write_bytes(data)
            oid = self.first.answer(f"\\lo_import '{file}'\n\\warn :LASTOID").splitlines()[-1]
            middle = self.first.answer(f"SELECT convert_from(lo_get({oid}, 500000, 31), 'UTF8');")
            self.first.answer(f"\\lo_export {oid} '{out}'\n\\lo_unlink {oid}")
            content = out.read_bytes()
        gone = self.first.error(f"SELECT lo_get({oid});")
        return {"written": len(content), "digest": common.digest(content), "middle": middle, "gone": gone}

    def large_row(self):
        text = common.repeated(common.LARGE_ROW)
        out = self.first.answer(f"SELECT {common.repeated_sql(common.LARGE_ROW)};")
        row = self.first.json(f"SELECT length(t), md5(t) FROM (SELECT '{text}' AS t) AS given")
        return {"out": out == text, "in": list(row.values())}

    def transaction(self):
        self.first.answer(
            "CREATE TEMP TABLE numbers (n int PRIMARY KEY); BEGIN; INSERT INTO numbers VALUES (1);"
            " SAVEPOINT inner_one; INSERT INTO numbers VALUES (2);"
        )
        failed = self.first.error("SELECT 1 / 0;")
        aborted = self.first.error("SELECT 1;")
        self.first.answer("ROLLBACK TO SAVEPOINT inner_one; INSERT INTO numbers VALUES (3); COMMIT;")
        rows = self.first.lines("SELECT n FROM numbers ORDER BY n;")
        return {"error": failed, "aborted": aborted, "rows": [int(n) for n in rows]}

    def encoding(self):
        return self.first.json(
            "SELECT current_setting('client_encoding') AS client,"
            f" '{common.UTF8}' AS text, octet_length('{common.UTF8}') AS octets"
        )

    def reset_all(self):
        before = self.settings()
        self.first.answer("SET search_path = pg_catalog; SET jit = off; SET TimeZone = 'Asia/Tokyo';")
        changed = common.changed(before.items(), self.settings().items())
        self.first.answer("RESET ALL;")
        return {"set": changed, "left": common.changed(before.items(), self.settings().items())}

    def discard_all(self):
        prepare = "PREPARE kept AS SELECT 'kept until now';"
        self.first.answer(f"CREATE TEMP TABLE discarded (); LISTEN events; SET jit = off; {prepare}")
        self.first.answer("DISCARD ALL;")
        left = self.first.answer(
            "SELECT (SELECT count(*) FROM pg_prepared_statements)"
            " + (SELECT count(*) FROM pg_listening_channels())"
            " + (to_regclass('pg_temp.discarded') IS NOT NULL)::int;"
        )
        return {"left": int(left), "prepared_again": self.first.answer(f"{prepare} EXECUTE kept;")}

    def pool(self):
        raise Unsupported("psql has no pool")

    def timezone(self):
        with self.open(PGTZ="Asia/Kolkata") as psql:
            return {"text": psql.answer(common.INSTANT + ";"), "status": psql.answer("SHOW TimeZone;")}

    def latin1(self):
        with self.open(encoding="latin-1", PGCLIENTENCODING="LATIN1") as psql:
            return {
                "client": psql.answer("\\warn :ENCODING"),
                "text": psql.answer(f"SELECT '{common.LATIN1}';"),
                "unrepresentable": psql.error("SELECT chr(9731);"),
            }

    def application_name(self):
        with self.open(PGAPPNAME=common.APPLICATION) as psql:
            return {
                "show": psql.answer("SHOW application_name;"),
                "activity": psql.answer("SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid();"),
            }

    def options(self):
        show = "SHOW geqo; SHOW statement_timeout; SHOW search_path;"
        with self.open(PGOPTIONS=common.OPTIONS) as psql:
            at_start = psql.lines(show)
            psql.answer("SET geqo = on; SET statement_timeout = 0; SET search_path = public; RESET ALL;")
            return {"at_start": at_start, "after_reset": psql.lines(show)}

    def connects(self):
        with self.open() as psql:
            total = sum(int(psql.answer(f"\\connect\nSELECT {i};")) for i in range(common.CONNECTS))
        return {"sum": total}


def main():
    config = common.load()
    suite = Suite(config)
    common.report(config, suite)
    suite.first.process.communicate()


main()
