"""The program in the sandbox that runs one read-only query against one SQLite file.

Reads `{"db": path, "query": text, "rows": limit, "seconds": limit}` from standard input, and prints `{"columns": [...],
"rows": [...], "cut": bool}` or `{"error": text}`. Uses only the standard library.
"""

import json
import sqlite3
import sys
import time
import urllib.parse

LONGEST_VALUE = 1_000_000
"""Largest size of one text or blob in bytes; for a larger one, SQLite reports an error before it allocates memory."""

_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_DENIED = {"zeroblob", "randomblob", "load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
_PRAGMAS = {"table_info", "table_xinfo", "table_list", "index_list", "index_info", "index_xinfo", "foreign_key_list"}
"""Allowed pragmas: they describe tables and change nothing."""


def main() -> None:
    """Answer the request on standard input."""
    request = json.loads(sys.stdin.read())
    try:
        print(json.dumps(answer(**request)))
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}))


def answer(db: str, query: str, rows: int, seconds: float) -> dict[str, object]:
    """Columns and at most `rows` rows of the query's result, and whether rows were cut off."""
    connection = sqlite3.connect(f"file:{urllib.parse.quote(db)}?mode=ro&immutable=1", uri=True, isolation_level=None)
    for limit, value in (
        (sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 100_000),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 500),
        (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 50),
        (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000),
        (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
    ):
        connection.setlimit(limit, value)
    connection.execute("PRAGMA query_only = 1")
    connection.set_authorizer(allowed)
    end = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > end, 1000)
    cursor = connection.execute(query)
    result = cursor.fetchmany(rows + 1)
    columns = [column[0] for column in cursor.description or ()]
    return {
        "columns": columns,
        "rows": [[{"blob": item.hex()} if isinstance(item, bytes) else item for item in row] for row in result[:rows]],
        "cut": len(result) > rows,
    }


def allowed(action: int, first: object, second: object, *_: object) -> int:
    """SQLite authorizer: allows reading, descriptions of tables, and functions without outside effects; denies
    everything else.

    The size of a function's result is bounded by `LONGEST_VALUE`.
    """
    fine = (
        action in _READS
        or (action == sqlite3.SQLITE_FUNCTION and str(second).lower() not in _DENIED)
        or (action == sqlite3.SQLITE_PRAGMA and str(first).lower() in _PRAGMAS)
    )
    return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY


if __name__ == "__main__":
    main()
