"""Names in etcd, through the JSON gateway that every server since 3.4 has: AReaL's name resolution of type `etcd3`.

The leases are etcd's own. https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/
"""

from __future__ import annotations

import base64
import json
import math
import urllib.error
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

from attrs import frozen

from skyrl.errors import ProcessError
from skyrl.processes.answers import BadAnswer, display_value, posted, read
from skyrl.processes.naming.names import Entry

_SECONDS = 5.0
_ROOT = "skyrl/names/"
_LONGEST_ANSWER = 4 << 20

T = TypeVar("T")


@frozen
class _Lease:
    ID: str | int


@frozen
class _Outcome:
    succeeded: bool = False


@frozen
class _TTL:
    TTL: str | int = 0


@frozen
class _LeaseGranted:
    result: _TTL = _TTL()


@frozen
class _Row:
    key: str
    value: str


@frozen
class _Rows:
    kvs: tuple[_Row, ...] = ()


@frozen
class _Nothing:
    """An answer that says nothing."""


class _Refused(ProcessError):
    """A call that etcd refuses."""


class NamesInEtcd:
    """Name store in etcd, with one key for each name, attached to a lease of its owner."""

    def __init__(self, address: str) -> None:
        """`address` is host:port, or an http or https address of the server."""
        self._server = (address if "://" in address else f"http://{address}").rstrip("/")
        self._leases: dict[str, str] = {}  # owner -> id of its lease

    def add(self, name: str, entry: Entry, seconds: float) -> bool:
        lease = str(self._ask(_Lease, "lease/grant", {"TTL": math.ceil(seconds)}).ID)
        key = _coded(_ROOT + name)
        value = _coded(json.dumps({"value": entry.value, "owner": entry.owner}))
        answer = self._ask(
            _Outcome,
            "kv/txn",
            {
                "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
                "success": [{"request_put": {"key": key, "value": value, "lease": lease}}],
            },
        )
        if not answer.succeeded:
            self._revoke(lease)
            return False
        self._leases[entry.owner] = lease
        return True

    def renew(self, name: str, entry: Entry, seconds: float) -> bool:
        lease = self._leases.get(entry.owner)
        if lease is None:
            return False
        kept = self._ask(_LeaseGranted, "lease/keepalive", {"ID": lease}).result
        left = str(kept.TTL)
        return left.isdecimal() and int(left) > 0 and self._entry(name) == entry

    def remove(self, name: str, owner: str) -> None:
        lease = self._leases.pop(owner, None)
        if lease is not None:
            self._revoke(lease)  # its keys go with it

    def find(self, prefix: str) -> Mapping[str, str]:
        start = (_ROOT + prefix).encode()
        end = start[:-1] + bytes([start[-1] + 1])
        rows = self._ask(_Rows, "kv/range", {"key": _base64(start), "range_end": _base64(end)}).kvs
        return dict(sorted((self._text(row.key).removeprefix(_ROOT), self._read(row).value) for row in rows))

    def get(self, name: str) -> str | None:
        entry = self._entry(name)
        return None if entry is None else entry.value

    def _entry(self, name: str) -> Entry | None:
        rows = self._ask(_Rows, "kv/range", {"key": _coded(_ROOT + name)}).kvs
        return self._read(rows[0]) if rows else None

    def _revoke(self, lease: str) -> None:
        """End a lease, or leave it if it was over already."""
        with suppress(_Refused):
            self._ask(_Nothing, "lease/revoke", {"ID": lease})

    def _ask(self, kind: type[T], method: str, body: Mapping[str, object]) -> T:
        """The gateway's answer to a call. Raises `ProcessError`."""
        try:
            url = f"{self._server}/v3/{method}"
            return read(posted(url, body, {}, seconds=_SECONDS, longest=_LONGEST_ANSWER), kind)
        except urllib.error.HTTPError as error:
            answer = error.read(500).decode(errors="replace")
            error.close()
            raise _Refused(f"etcd at {self._server} answered {error.code}: {answer}") from None
        except BadAnswer as error:
            raise ProcessError(f"etcd at {self._server} answers {error} ({method})") from None
        except OSError as error:
            raise ProcessError(f"etcd at {self._server} cannot be reached: {error}") from None

    def _read(self, row: _Row) -> Entry:
        """The entry of a row. Raises `ProcessError` for one that skyrl has not written."""
        try:
            return read(json.loads(self._text(row.value)), Entry)
        except (ValueError, RecursionError) as error:
            raise ProcessError(f"etcd at {self._server} holds something else under skyrl/names: {error}") from None

    def _text(self, coded: str) -> str:
        try:
            return base64.b64decode(coded, validate=True).decode()
        except ValueError as error:
            raise ProcessError(
                f"etcd at {self._server} answers {display_value(coded)} for a text in base64: {error}"
            ) from None


def _coded(text: str) -> str:
    return _base64(text.encode())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
