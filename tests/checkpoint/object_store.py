"""A real S3 server of this machine, and a door before it that answers `503 Slow Down` at a seeded rate."""

from __future__ import annotations

import http.client
import logging
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "checkpoints"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


class ObjectStore:
    """moto's server with an empty bucket. `environment` is what its clients need; `refused` counts the failures, and
    `requests` has the method of each request.
    """

    def __init__(self, failures: float = 0.0, seed: int = 0) -> None:
        """`failures` is the share of requests that are answered by an error, half of them after they were done."""
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._failures, self._draw = failures, random.Random(seed)
        self.refused = 0
        self.requests: list[str] = []

    def __enter__(self) -> Self:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
        self._server.start()
        host, port = self._server.get_host_and_port()
        plain = f"http://{host}:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=plain,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()
        self._door = ThreadingHTTPServer(("127.0.0.1", 0), _door(self, host, port))
        self._thread = threading.Thread(target=self._door.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.environment = {
            **KEYS,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._door.server_address[1]}",
            "AWS_ALLOW_HTTP": "true",
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._door.shutdown()
        self._door.server_close()
        self._thread.join()
        self._server.stop()

    def verdict(self) -> str:
        """What happens to the next request: `done`, `refused`, or `lost`, which is done and answered by an error."""
        if self._draw.random() >= self._failures:
            return "done"
        self.refused += 1
        return self._draw.choice(["refused", "lost"])


def _door(store: ObjectStore, host: str, port: int) -> type[BaseHTTPRequestHandler]:
    class Door(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            store.requests.append(self.command)
            verdict = store.verdict()
            status, headers, answer = 503, [], b"<Error><Code>SlowDown</Code></Error>"
            if verdict != "refused":
                connection = http.client.HTTPConnection(host, port)
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                content = response.read()
                connection.close()
                if verdict == "done":
                    status, headers, answer = response.status, response.getheaders(), content
            self.send_response_only(status)
            length = {name.lower(): value for name, value in headers}.get("content-length")
            for name, value in headers:
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(length if self.command == "HEAD" and length else len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

        def log_message(self, format: str, *args: Any) -> None:
            """Nobody reads it."""

    return Door
