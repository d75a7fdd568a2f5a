"""A server with SGLang's routes that fails as it is told to: what a network and other people's programs do.

Its samples are a function of their seeds, so that a test knows the right answer of every request.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Self

VOCABULARY = 258

FAULTS = (
    *("hang up", "half open", "silent", "not json", "truncated", "slow", "unknown token", "too few", "too many"),
    *("no log-probabilities", "positive", "other version", "nameless version", "busy", "broken", "redirect", "list"),
    *("aborted", "unfinished", "refused", "not finite", "null", "huge number"),
)
"""What a request for a sample may meet instead of its answer."""


def sample(seed: int, count: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a seed."""
    return [(seed * 31 + index * 7) % 200 for index in range(count)], [
        -(1 + (seed + index) % 5) / 4 for index in range(count)
    ]


class FaultServer:
    """`async with FaultServer(faults) as server:` fails its first requests for samples in this order, and then keeps
    to `always`, if it is given. Everything else it answers as it should.
    """

    def __init__(
        self,
        faults: Iterable[str] = (),
        *,
        always: str = "",
        tls: ssl.SSLContext | None = None,
        port: int = 0,
        copies: bool = False,
    ) -> None:
        """With `tls` it speaks HTTPS. `port` 0: any that is free. With `copies` all samples are those of one seed."""
        self._copies = copies
        self._tls, self._port = tls, port
        self._faults, self._always = deque(faults), always
        self._version, self._silent = "default", False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.url, self.answered = "", 0
        self.seen: list[dict[str, str]] = []
        """Headers of the requests for samples, with their names in lower case."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, ssl=self._tls)
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        # A server that closes loses connections that the loop has accepted and not given to `_accept` yet: they come
        # first, two turns of the loop later.
        for listener in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        for _turn in range(3):
            await asyncio.sleep(0)
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fall_silent(self) -> None:
        """Answer nothing from now on."""
        self._silent = True

    def speak_again(self) -> None:
        """Answer new requests, and none of those that came meanwhile."""
        self._silent = False

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection. It is closed here and not in `_serve`, which does not run if it is cancelled at once."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(first.split()[1].partition("?")[0], headers, json.loads(body or b"{}"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def _answer(
        self, path: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        if self._silent:
            await asyncio.Event().wait()
        if path == "/generate":
            self.seen.append(headers)
            await self._generate(self._faults.popleft() if self._faults else self._always, body, writer)
            return
        if path == "/update_weight_version":
            self._version = body["new_version"]
        if path == "/update_weights_from_disk":
            self._version = body["weight_version"]
        _write(writer, {"success": True, "model_path": "a model", "weight_version": self._version})

    async def _generate(self, fault: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if fault == "silent":
            self._silent = True
        if fault in ("half open", "silent"):
            await asyncio.Event().wait()
        if fault == "hang up":
            raise ConnectionError
        if fault in ("busy", "broken", "refused"):
            _write(writer, {"error": "out of memory"}, status={"busy": 503, "broken": 500, "refused": 400}[fault])
        elif fault == "redirect":
            _write(writer, {}, status=307, more="location: http://192.0.2.1/generate\r\n")
        else:
            await self._sample(fault, body, writer)

    async def _sample(self, fault: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        settings = body["sampling_params"]
        seed = 1 if self._copies else settings["sampling_seed"]
        tokens, logprobs = sample(seed, settings["max_new_tokens"])
        self.answered += not fault
        version = {"other version": "77", "nameless version": "default"}.get(fault, self._version)
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "weight_version": version}
        meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)]
        answer: Any = {"output_ids": tokens, "meta_info": meta}
        listed = meta["output_token_logprobs"]
        first = listed[0]
        changes: dict[str, Callable[[], Any]] = {
            "unknown token": lambda: [first.__setitem__(1, VOCABULARY), tokens.__setitem__(0, VOCABULARY)],
            "too few": lambda: [entries.pop() for entries in (listed, tokens)],
            "too many": lambda: [entries.__iadd__(entries[:1]) for entries in (listed, tokens)],
            "no log-probabilities": lambda: meta.pop("output_token_logprobs"),
            "positive": lambda: first.__setitem__(0, 2.5),
            "not finite": lambda: first.__setitem__(0, float("nan")),
            "null": lambda: first.__setitem__(0, None),
            "huge number": lambda: first.__setitem__(0, -(10**400)),
            "aborted": lambda: meta.update(finish_reason={"type": "abort"}),
            "unfinished": lambda: meta.update(finish_reason={"type": "stop"}),
        }
        changes.get(fault, lambda: None)()
        if body.get("stream"):
            await self._stream(fault, answer, writer)
            return
        text = json.dumps([answer] if fault == "list" else answer)
        _write(writer, "<html>" + text if fault == "not json" else text, cut=fault in ("truncated", "slow"))
        if fault == "truncated":
            raise ConnectionError
        if fault == "slow":
            await asyncio.Event().wait()

    async def _stream(self, fault: str, answer: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Two events of the beginning, one of the whole, and the end; the stream breaks off before what is missing."""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        tokens = answer["output_ids"]
        for count in (1, 3):
            part = {"output_ids": tokens[:count], "meta_info": {"finish_reason": None, "completion_tokens": count}}
            _write_chunk(writer, f"data: {json.dumps(part)}\n\n")
        await writer.drain()
        if fault == "truncated":
            raise ConnectionError
        if fault == "error event":
            _write_chunk(writer, 'data: {"error": {"message": "out of memory"}}\n\n')
            return
        if fault == "not json":
            _write_chunk(writer, "data: {half\n\n")
            return
        _write_chunk(writer, f"data: {json.dumps([answer] if fault == 'list' else answer)}\n\n")
        if fault != "no last event":
            _write_chunk(writer, "data: [DONE]\n\n")
        _write_chunk(writer, "")


def _write_chunk(writer: asyncio.StreamWriter, text: str) -> None:
    content = text.encode()
    writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


def _write(writer: asyncio.StreamWriter, answer: Any, *, status: int = 200, more: str = "", cut: bool = False) -> None:
    content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
    head = (
        f"HTTP/1.1 {status} An answer\r\ncontent-type: application/json\r\n{more}content-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + (content[: len(content) // 2] if cut else content))


async def _main() -> None:
    async with FaultServer() as server:
        sys.stdout.write(server.url + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
