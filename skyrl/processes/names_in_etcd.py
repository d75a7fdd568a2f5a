"""Names in etcd, through the JSON gateway that every server since 3.4 has: AReaL's name resolution of type `etcd3`.

The leases are etcd's own. https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/
"""

from __future__ import annotations

import base64
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from skyrl.errors import ProcessError
from skyrl.processes.names import Entry

_SECONDS = 5.0
_ROOT = "skyrl/names/"
_LONGEST_ANSWER = 4 << 20

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NamesInEtcd:
    """Name store in etcd, with one key for each name, attached to a lease of its owner."""

    def __init__(self, place: str) -> None:
        """`place` is host:port, or an http or https address of the server."""
        self._server = (place if "://" in place else f"http://{place}").rstrip("/")
        self._leases: dict[str, str] = {}  # owner -> id of its lease

    def add(self, name: str, entry: Entry, seconds: float) -> bool:
        lease = str(self._ask("lease/grant", {"TTL": math.ceil(seconds)})["ID"])
        key = _coded(_ROOT + name)
        value = _coded(json.dumps({"value": entry.value, "owner": entry.owner}))
        found = self._ask(
            "kv/txn",
            {
                "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
                "success": [{"request_put": {"key": key, "value": value, "lease": lease}}],
            },
        )
        if not found.get("succeeded"):
            self._ask("lease/revoke", {"ID": lease})
            return False
        self._leases[entry.owner] = lease
        return True

    def renew(self, name: str, entry: Entry, seconds: float) -> bool:
        lease = self._leases.get(entry.owner)
        if lease is None:
            return False
        kept = self._ask("lease/keepalive", {"ID": lease}).get("result", {})
        return int(kept.get("TTL", 0)) > 0 and self._entry(name) == entry

    def remove(self, name: str, owner: str) -> None:
        lease = self._leases.pop(owner, None)
        if lease is not None:
            self._ask("lease/revoke", {"ID": lease})  # its keys go with it

    def find(self, prefix: str) -> Mapping[str, str]:
        start = (_ROOT + prefix).encode()
        end = start[:-1] + bytes([start[-1] + 1])
        rows = self._ask("kv/range", {"key": _base64(start), "range_end": _base64(end)}).get("kvs", [])
        names = [base64.b64decode(row["key"]).decode().removeprefix(_ROOT) for row in rows]
        return dict(sorted((name, _read(row).value) for name, row in zip(names, rows, strict=True)))

    def get(self, name: str) -> str | None:
        found = self._entry(name)
        return None if found is None else found.value

    def _entry(self, name: str) -> Entry | None:
        rows = self._ask("kv/range", {"key": _coded(_ROOT + name)}).get("kvs", [])
        return _read(rows[0]) if rows else None

    def _ask(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Call the gateway and return its answer. Raises `ProcessError`."""
        request = urllib.request.Request(f"{self._server}/v3/{what}", json.dumps(body).encode(), method="POST")
        try:
            with _OPENER.open(request, timeout=_SECONDS) as response:
                found: dict[str, Any] = json.loads(response.read(_LONGEST_ANSWER))
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            error.close()
            if what.startswith("lease/revoke"):
                return {}  # the lease was over already
            raise ProcessError(f"etcd at {self._server} answered {error.code}: {said}") from None
        except (OSError, ValueError) as error:
            raise ProcessError(f"etcd at {self._server} cannot be reached: {error}") from None
        return found


def _read(row: Mapping[str, str]) -> Entry:
    found = json.loads(base64.b64decode(row["value"]))
    return Entry(found["value"], found["owner"])


def _coded(text: str) -> str:
    return _base64(text.encode())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
