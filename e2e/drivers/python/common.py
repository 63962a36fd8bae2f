"""What the Python programs share: the configuration, the values of the checks, the output."""

import hashlib
import json
import sys
import traceback

# The period is prime, so that a lost or doubled buffer shows.
PATTERN = "0123456789abcdefghijklmnopqrstu"
LARGE_ROW = 64 * 1024 * 1024
LARGE_OBJECT = 1024 * 1024
CONNECTS = 1000
LATIN1 = "naïve"
UTF8 = "naïve ☃ 𝄞"
INSTANT = "SELECT '2024-01-02 03:04:05Z'::timestamptz::text"
APPLICATION = "branchpool drivers"
OPTIONS = r'-c geqo=off -c statement_timeout=54321 -c search_path=one,"two\ three"'
# Runs until it is cancelled, and says when it has begun.
ENDLESS = "DO $$ BEGIN RAISE NOTICE 'running'; PERFORM pg_sleep(600); END $$"
BINARY = (
    "SELECT int8 '-9223372036854775808', float8 '0.1', true, text 'naïve ☃', bytea '\\x00ff10',"
    " timestamptz '2024-01-02 03:04:05.678Z', '{1,NULL,3}'::int4[]"
)
CLIENT_SETTINGS = (
    "SELECT name, reset_val FROM pg_settings"
    " WHERE name IN ('DateStyle', 'IntervalStyle', 'TimeZone', 'client_encoding', 'extra_float_digits', 'search_path') ORDER BY name"
)
SETTINGS = "SELECT name, setting FROM pg_settings WHERE name <> 'application_name'"
PARAMETERS = [
    "DateStyle", "IntervalStyle", "TimeZone", "application_name", "client_encoding",
    "default_transaction_read_only", "in_hot_standby", "integer_datetimes", "is_superuser",
    "scram_iterations", "search_path", "server_encoding", "server_version",
    "session_authorization", "standard_conforming_strings",
]  # fmt: skip
# What every suite has, in the order of its run.
CHECKS = [
    "connect", "parameters", "prepared", "binary", "copy", "notify", "cancel", "large_object",
    "large_row", "transaction", "encoding", "reset_all", "discard_all", "pool", "timezone", "latin1",
    "application_name", "options", "connects",
]  # fmt: skip


class Unsupported(Exception):
    """What this driver cannot do, and why."""


def load() -> dict:
    return json.load(sys.stdin)


def repeated(size: int) -> str:
    return (PATTERN * (size // len(PATTERN) + 1))[:size]


def repeated_sql(size: int) -> str:
    return f"left(repeat('{PATTERN}', {size // len(PATTERN) + 1}), {size})"


def digest(data: bytes | str) -> str:
    return hashlib.md5(data.encode() if isinstance(data, str) else data).hexdigest()


def copy_text() -> bytes:
    """A thousand rows in COPY's text format, with NULLs, escapes and more than ASCII."""
    value = lambda i: r"\N" if i % 10 == 0 else rf"line {i} ☃\twith\ttabs\nand a newline"
    return "".join(f"{i}\t{value(i)}\n" for i in range(1, 1001)).encode()


def normal(row) -> dict:
    """The row of BINARY in JSON's types."""
    int8, float8, boolean, text, bytea, timestamptz, int4s = row
    return {
        "int8": str(int8), "float8": float8, "bool": boolean, "text": text, "bytea": bytea.hex(),
        "timestamptz": round(timestamptz.timestamp() * 1000), "int4[]": int4s,
    }  # fmt: skip


def changed(before, after) -> list[str]:
    before, after = dict(map(tuple, before)), dict(map(tuple, after))
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def report(config: dict, suite, call=lambda check: check()) -> None:
    """Runs the suite's checks in order and prints one JSON object: name -> result."""
    results = {}
    for name in CHECKS:
        if config.get("only") and name not in config["only"]:
            continue
        try:
            results[name] = call(getattr(suite, name))
        except Unsupported as reason:
            results[name] = {"unsupported": str(reason)}
        except Exception as error:
            traceback.print_exc()
            results[name] = {"failed": f"{type(error).__name__}: {error}"}
    json.dump(results, sys.stdout, ensure_ascii=False, sort_keys=True)
    print()
