"""The service's record on disk: one SQLite file with clients, sessions, models, requests, results and the journal.

    request stored -> acknowledged -> executed -> its tick and its results stored in one transaction -> result fetched

A tick is one call of the backend that changed a model: a joint pass, an optimizer step, a new, loaded or unloaded
model. What is not in a tick has not happened: a killed service executes it again. Every now and then the state of all
models is stored in folders (`state_tick`); the ticks after it are the journal, which is replayed after a crash.

The file is in WAL mode: a commit survives the end of the process, and after a power failure the last commits may be
missing, but never a part of one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from attrs import asdict, field, frozen

from skyrl.errors import StorageError, UserError

DATABASE = "service.sqlite"
"""Name of the file in the service's folder."""

KEY_PREFIX = "tml-"
"""Start of every token, which the client requires."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS clients (name TEXT PRIMARY KEY, digest TEXT UNIQUE NOT NULL, created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, client TEXT NOT NULL, project TEXT, display_name TEXT, tags TEXT NOT NULL,
    metadata TEXT NOT NULL, created REAL NOT NULL, finished TEXT, detail TEXT);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, client TEXT NOT NULL, session TEXT NOT NULL, spec TEXT, metadata TEXT,
    next_seq INTEGER NOT NULL, alive INTEGER NOT NULL, last_request REAL NOT NULL, steps INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, seq INTEGER NOT NULL, client TEXT NOT NULL,
    tokens INTEGER NOT NULL, created REAL NOT NULL, tick INTEGER, done INTEGER, done_at REAL, read_at REAL,
    result BLOB, media TEXT, failed INTEGER);
CREATE TABLE IF NOT EXISTS bodies (id TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS requests_done ON requests (owner, done);
CREATE INDEX IF NOT EXISTS requests_done_at ON requests (done_at);
CREATE INDEX IF NOT EXISTS requests_tick ON requests (tick);
CREATE TABLE IF NOT EXISTS ticks (number INTEGER PRIMARY KEY, kind TEXT NOT NULL, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS states (model TEXT PRIMARY KEY, folder TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, model TEXT NOT NULL, client TEXT NOT NULL, kind TEXT NOT NULL, folder TEXT NOT NULL,
    size INTEGER NOT NULL, spec TEXT, metadata TEXT, optimizer INTEGER NOT NULL, step INTEGER NOT NULL,
    created REAL NOT NULL, expires REAL);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, client TEXT NOT NULL, session TEXT NOT NULL, folder TEXT, path TEXT, inflight TEXT,
    model TEXT, step INTEGER, clones INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value NOT NULL);
"""


@frozen(kw_only=True)
class Outcome:
    """How a request ended."""

    body: bytes
    media: str = "application/json"
    failed: bool = False


@frozen(kw_only=True)
class StoredRequest:
    """A request as it was acknowledged."""

    id: str
    kind: str
    owner: str
    """Id of its model or sampling session, in which `seq` is its number."""

    seq: int
    client: str
    tokens: int = 0
    body: bytes = field(default=b"", repr=False)
    """Left out of requests that wait for their turn: the file has it."""


@frozen(kw_only=True)
class Tick:
    """One call of the backend that changed models."""

    number: int
    kind: str
    content: Mapping[str, Any]


class Store:
    """The SQLite file of one running service. All calls come from one thread."""

    def __init__(self, folder: Path) -> None:
        """Open or create the file. Raises `UserError` if another service uses the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "service.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(f"another training service runs in {folder}: stop it, or choose another folder") from None
        self._connection = _connect(folder)
        self._finished = self.one("SELECT COALESCE(MAX(done), 0) FROM requests")[0]

    def close(self) -> None:
        self._connection.close()
        os.close(self._lock)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Changes that happen together or not at all. Raises `StorageError` for a disk that is full or broken."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise StorageError(f"the service cannot write {DATABASE}: {error}") from error

    def all(self, sql: str, *values: object) -> list[sqlite3.Row]:
        """The rows of a query."""
        return self._connection.execute(sql, values).fetchall()

    def fetch_one(self, sql: str, *values: object) -> sqlite3.Row | None:
        """The first row of a query."""
        row: sqlite3.Row | None = self._connection.execute(sql, values).fetchone()
        return row

    def one(self, sql: str, *values: object) -> sqlite3.Row:
        """The first row of a query that always has one."""
        row = self.fetch_one(sql, *values)
        assert row is not None
        return row

    def run(self, sql: str, *values: object) -> None:
        """A change, in the transaction that is open or in one of its own."""
        try:
            self._connection.execute(sql, values)
        except sqlite3.OperationalError as error:
            raise StorageError(f"the service cannot write {DATABASE}: {error}") from error

    def insert(self, table: str, row: Mapping[str, object], *, instead: str = "") -> None:
        """A new row, as values by column. `instead` is IGNORE or REPLACE, for a key that is there already."""
        verb = f"INSERT OR {instead}" if instead else "INSERT"
        self.run(f"{verb} INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", *row.values())

    def add_request(self, request: StoredRequest) -> None:
        """Store a request before it is acknowledged."""
        with self.transaction():
            row = asdict(request)
            self.insert("bodies", {"id": request.id, "body": row.pop("body")})
            self.insert("requests", row | {"created": time.time()})

    def request(self, request_id: str) -> StoredRequest:
        """A stored request that is not forgotten."""
        return _stored_request(self.one("SELECT * FROM requests LEFT JOIN bodies USING (id) WHERE id = ?", request_id))

    def unfinished(self) -> list[StoredRequest]:
        """Acknowledged requests without a result, in the order of their arrival."""
        rows = self.all("SELECT * FROM requests LEFT JOIN bodies USING (id) WHERE done IS NULL ORDER BY requests.rowid")
        return [_stored_request(row) for row in rows]

    def finish(self, request_id: str, outcome: Outcome, tick: int | None = None) -> None:
        """Store how a request ended, in the open transaction. The body stays as long as its tick may be replayed."""
        self._finished += 1
        self.run(
            "UPDATE requests SET done = ?, done_at = ?, result = ?, media = ?, failed = ?, tick = ? WHERE id = ?",
            self._finished,
            time.time(),
            outcome.body,
            outcome.media,
            outcome.failed,
            tick,
            request_id,
        )
        if tick is None:
            self.run("DELETE FROM bodies WHERE id = ?", request_id)

    def add_tick(self, kind: str, content: Mapping[str, Any]) -> int:
        """Append to the journal, in the open transaction; returns the tick's number."""
        number: int = self.one("SELECT MAX(?, COALESCE((SELECT MAX(number) FROM ticks), 0)) + 1", self.state_tick)[0]
        self.run("INSERT INTO ticks VALUES (?, ?, ?)", number, kind, json.dumps(content))
        return number

    def journal(self) -> list[Tick]:
        """Ticks after the stored state, in order."""
        rows = self.all("SELECT * FROM ticks WHERE number > ? ORDER BY number", self.state_tick)
        return [Tick(number=row["number"], kind=row["kind"], content=json.loads(row["content"])) for row in rows]

    @property
    def state_tick(self) -> int:
        """The last tick that the stored state contains."""
        row = self.fetch_one("SELECT value FROM facts WHERE name = 'state_tick'")
        return 0 if row is None else int(row["value"])

    def bind_base_model(self, model: str) -> None:
        """Note whose models the folder holds. Raises `UserError` if they are those of another base model."""
        self.run("INSERT OR IGNORE INTO facts VALUES ('model', ?)", model)
        known = self.one("SELECT value FROM facts WHERE name = 'model'")["value"]
        if known != model:
            raise UserError(f"the folder holds models on {known}, and not on {model}: choose another folder")

    def set_state(self, tick: int, folders: Mapping[str, str], dropped: Iterable[str]) -> None:
        """The state of all models after a tick is stored: `folders` are those of models that changed since the last
        time, and models in `dropped` are gone. Forgets the journal up to there.
        """
        with self.transaction():
            for model, folder in folders.items():
                self.run("INSERT OR REPLACE INTO states VALUES (?, ?)", model, folder)
            for model in dropped:
                self.run("DELETE FROM states WHERE model = ?", model)
            self.run("INSERT OR REPLACE INTO facts VALUES ('state_tick', ?)", tick)
            self.run("DELETE FROM bodies WHERE id IN (SELECT id FROM requests WHERE tick <= ?)", tick)
            self.run("UPDATE requests SET tick = NULL WHERE tick <= ?", tick)
            self.run("DELETE FROM ticks WHERE number <= ?", tick)

    def forget_results(self, *, read_before: float, done_before: float, most_bytes: int) -> None:
        """Drop results that were read, or finished, before a time, and the oldest ones beyond `most_bytes`."""
        with self.transaction():
            self.run(
                "UPDATE requests SET result = NULL WHERE result IS NOT NULL AND (read_at < ? OR done_at < ?)",
                read_before,
                done_before,
            )
            self.run(
                "UPDATE requests SET result = NULL WHERE id IN (SELECT id FROM (SELECT id, SUM(LENGTH(result)) OVER "
                "(ORDER BY done DESC) AS kept FROM requests WHERE result IS NOT NULL) WHERE kept > ?)",
                most_bytes,
            )
            self.run("DELETE FROM requests WHERE done IS NOT NULL AND result IS NULL AND tick IS NULL")

    def forget_samplers(self, model: str, most: int) -> None:
        """Drop the sampling sessions of a model's snapshots without a name, all but the newest ones."""
        unnamed = "FROM samplers WHERE model = ? AND path IS NULL AND inflight IS NULL"
        self.run(
            f"DELETE FROM samplers WHERE id IN (SELECT id {unnamed} ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
            model,
            most,
        )

    def folders(self) -> set[str]:
        """Folders that something still needs: stored states, checkpoints, samplers, and loads in the journal."""
        rows = self.all(
            "SELECT folder FROM states UNION SELECT folder FROM checkpoints "
            "UNION SELECT folder FROM samplers WHERE folder IS NOT NULL"
        )
        loaded = {tick.content["folder"] for tick in self.journal() if "folder" in tick.content}
        return {row["folder"] for row in rows} | loaded


def add_client(folder: Path, name: str) -> str:
    """A new token for a client, which is returned and nowhere stored: the file holds its digest. A service that was
    started when there were clients knows it at once; one that is started from now on answers nobody without a token.
    Raises `UserError` if the name is taken.
    """
    if not name or not name.isprintable() or len(name) > 100:
        raise UserError(f"{name[:100]!r} is no name for a client: needed are 1 to 100 printable characters")
    token = KEY_PREFIX + secrets.token_urlsafe(32)
    folder.mkdir(parents=True, exist_ok=True)
    with closing(_connect(folder)) as connection:
        try:
            connection.execute("INSERT INTO clients VALUES (?, ?, ?)", (name, _digest(token), time.time()))
        except sqlite3.IntegrityError:
            raise UserError(f"there is a client {name!r} already: remove it first, or choose another name") from None
    return token


def remove_client(folder: Path, name: str) -> None:
    """Make a client's token invalid; its checkpoints stay. Raises `UserError` if there is no such client."""
    with closing(_connect(folder)) as connection:
        if not connection.execute("DELETE FROM clients WHERE name = ?", (name,)).rowcount:
            raise UserError(f"there is no client {name!r}: {', '.join(_names(connection)) or 'there are none'}")


def client_names(folder: Path) -> tuple[str, ...]:
    """Names of the clients that have a token."""
    if not (folder / DATABASE).exists():
        return ()
    with closing(_connect(folder)) as connection:
        return _names(connection)


def client_of(store: Store, token: str | None) -> str | None:
    """Name of the client that a token belongs to."""
    row = store.fetch_one("SELECT name FROM clients WHERE digest = ?", _digest(token or ""))
    return None if row is None else str(row["name"])


def _names(connection: sqlite3.Connection) -> tuple[str, ...]:
    return tuple(row["name"] for row in connection.execute("SELECT name FROM clients ORDER BY name"))


def _digest(token: str) -> str:
    """Digest of a token. It is random and long, so that a fast digest does."""
    return hashlib.sha256(token.encode()).hexdigest()


def _connect(folder: Path) -> sqlite3.Connection:
    path = folder / DATABASE
    path.touch(mode=0o600)
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint = 8000")  # pages of 4 kB: each checkpoint waits for the disk
    connection.executescript(_SCHEMA)
    return connection


def _stored_request(row: sqlite3.Row) -> StoredRequest:
    names = ("id", "kind", "owner", "seq", "client", "tokens")
    return StoredRequest(body=row["body"] or b"", **{name: row[name] for name in names})
