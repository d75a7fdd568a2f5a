"""Servers that misbehave in generated ways: types, sizes, order and time of their answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from attrs import frozen

from tests.inference.fault_server import FaultServer, sample

Sent = tuple[tuple[object, ...], tuple[object, ...]]
"""Tokens and log-probabilities of an answer."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 5, 257, 258, 2**63, 10**30, 10**400, 1.5, -2.5, -1e308, float("nan"), float("inf")),
    *("", "x", "0", "1.0", "-1", "\xb2", "9" * 5000, "stop", "token_id:7", "\ud800", "a" * 100_000),
    *([], {}, [[]], [None], {"": None}, [5], ["x"], {"0": 5}, [-1.0] * 3000, {str(n): n for n in range(500)}),
)
"""What may stand in place of any value of an answer."""

KINDS = (
    "value",
    "value",
    "value",
    "value",
    "missing",
    "twice",
    "order",
    "deep",
    "raw",
    "status",
    "cut",
    "swap",
    "hang",
)
ROUTES = ("samples", "samples", "samples", "control", "control")
WHEN = ("always", "first", "later", "some")

BODIES: tuple[bytes, ...] = (
    *(b"", b"null", b"5", b"[]", b"{}", b"\x00\xff\xfe", b"<html>hi</html>", b'{"a"', b"[" * 100_000, b"9" * 5000),
    *(b'"' + b"a" * 200_000 + b'"', b"\xef\xbb\xbf{}", b'{"a":1}{"a":2}', b"NaN", b"-Infinity"),
)
HEADS: tuple[bytes, ...] = (
    *(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"),
    *(b"SSH-2.0-OpenSSH_9.9\r\n", b"HTTP/1.1 204 No Content\r\n", b"HTTP/1.1 999 X\r\n", b"HTTP/9.9 200 OK\r\n"),
    *(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 500_000 + b"\r\n", b"HTTP/1.1 200 OK\r\n" + b"x: a\r\n" * 500),
    *(b"HTTP/1.1 100 Continue\r\n\r\n" * 50 + b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n"),
    *(b"HTTP/1.1 302 X\r\nlocation: http://[bad\r\n", b"HTTP/1.1 301 X\r\nlocation: \xff\r\n"),
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json; charset=\xff\r\n",
)
WAITS = ("0", "1e9", "\xb2", "-5", "soon", "Wed, 21 Oct 2015 07:28:00 GMT", "Thu, 99 Foo 9999", "")


@frozen(kw_only=True)
class Misbehaviour:
    """What a server does wrong, where and how often; a function of its seed."""

    seed: int
    dialect: str
    """`sglang` or `vllm`."""

    kind: str
    route: str
    """`samples`, or `control`: every other route."""

    when: str

    @classmethod
    def of(cls, seed: int) -> Misbehaviour:
        draws = random.Random(seed)
        return cls(
            seed=seed,
            dialect=draws.choice(("sglang", "vllm")),
            kind=draws.choice(KINDS),
            route=draws.choice(ROUTES),
            when=draws.choice(WHEN),
        )

    def happens(self, count: int) -> bool:
        """Whether the request of this number on its kind of route meets it."""
        match self.when:
            case "always":
                return True
            case "first":
                return count < 2
            case "later":
                return count >= 2
        return random.Random(self.seed * 1000 + count).random() < 0.4


class MisbehavingServer(FaultServer):
    """A server of either dialect that answers as it should, but for one misbehaviour."""

    def __init__(self, misbehaviour: Misbehaviour | None = None, *, dialect: str = "sglang") -> None:
        super().__init__()
        self._wrong, self._dialect = misbehaviour, misbehaviour.dialect if misbehaviour else dialect
        self._counts: dict[str, int] = defaultdict(int)
        self._waiting: list[tuple[asyncio.Future[dict[str, Any]], dict[str, Any]]] = []
        self.sent: dict[int, list[Sent]] = defaultdict(list)
        """What was sent in answer to the request of each seed."""

    async def _answer(
        self, path: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        draws = path in ("/generate", "/inference/v1/generate")
        answer: Any = self._sampled(body) if draws else self._told(path, body)
        route, wrong = "samples" if draws else "control", self._wrong
        count = self._counts[route]
        self._counts[route] += 1
        status, content = "200 OK", b""
        if body.get("method") == "skyrl_patch_sampler":  # a server without the extension reads weights from files
            status, answer = "500 X", {"error": "the worker has no attribute 'skyrl_patch_sampler'"}
        if wrong is not None and wrong.route == route and path != "/health" and wrong.happens(count):
            chance = random.Random(f"{wrong.seed} {count}")
            match wrong.kind:
                case "hang":
                    await asyncio.Event().wait()
                case "raw":
                    content = chance.choice(BODIES)
                case "status":
                    code, wait = chance.randint(200, 599), chance.choice(WAITS)
                    head = f"HTTP/1.1 {code} X\r\nretry-after: {wait}\r\ncontent-length: 2\r\n\r\n{{}}"
                    writer.write(head.encode("latin-1"))
                    return
                case "cut":
                    writer.write(chance.choice(HEADS) + b"\r\n" + json.dumps(answer).encode()[: chance.randint(0, 60)])
                    raise ConnectionError
                case "swap":
                    answer = await self._swapped(answer)
                case kind:
                    answer = changed(answer, kind, chance)
        content = content or text_of(answer).encode(errors="surrogatepass")
        if draws:
            self.sent[seed_of(body)].append(sent_in(content))
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)

    async def _swapped(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer of another request that waits, if one comes in time."""
        if self._waiting:
            other, other_answer = self._waiting.pop()
            other.set_result(answer)
            return other_answer
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, answer))
        await asyncio.wait([future], timeout=0.05)
        if future.done():
            return future.result()
        self._waiting.remove((future, answer))
        return answer

    def _sampled(self, body: dict[str, Any]) -> dict[str, Any]:
        settings = body["sampling_params"]
        count = settings.get("max_new_tokens") or settings["max_tokens"]
        tokens, logprobs = sample(seed_of(body), count)
        pairs = list(zip(logprobs, tokens, strict=True))
        spans = [{"version": self._version, "start": 0, "end": count}]
        if self._dialect == "sglang":
            meta = {"finish_reason": {"type": "length"}, "weight_version": self._version}
            listed = [[value, token, None] for value, token in pairs]
            return {"output_ids": tokens, "meta_info": meta | {"output_token_logprobs": listed}}
        content = [{"token": f"token_id:{token}", "logprob": value} for value, token in pairs]
        choice = {"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": "length"}
        return {"choices": [choice | {"weight_versions": spans}]}

    def _told(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._version = body.get("new_version") or body.get("weight_version") or self._version
        return {
            "success": True,
            "model_path": "a model",
            "weight_version": self._version,
            "results": [None],
            "data": [{"id": "a model", "root": "a model", "max_model_len": 64}],
        }


def seed_of(body: dict[str, Any]) -> int:
    """The seed of a request for a sample."""
    settings = body["sampling_params"]
    return int(settings.get("sampling_seed", settings.get("seed")))


def text_of(answer: Any) -> str:
    """JSON of an answer, in which `DEEP` stands for many brackets."""
    return json.dumps(answer).replace('"DEEP"', "[" * 2000 + "]" * 2000)


def sent_in(content: bytes) -> Sent:
    """Tokens and log-probabilities that an answer has, read without a check; none if it has no such form."""
    try:
        answer = json.loads(content)
        if "choices" in answer:
            choice = answer["choices"][0]
            return tuple(choice["token_ids"]), tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
        listed = answer["meta_info"]["output_token_logprobs"]
        return tuple(entry[1] for entry in listed), tuple(entry[0] for entry in listed)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return (), ()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in an answer, itself included."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


def changed(answer: Any, kind: str, chance: random.Random) -> Any:
    """The answer with one thing changed."""
    path = chance.choice(list(places(answer)))
    if not path:
        return chance.choice(VALUES) if kind == "value" else "DEEP" if kind == "deep" else [answer]
    copy = json.loads(json.dumps(answer))
    inside = copy
    for key in path[:-1]:
        inside = inside[key]
    key = path[-1]
    changes: dict[str, Callable[[], object]] = {
        "value": lambda: inside.__setitem__(key, chance.choice(VALUES)),
        "deep": lambda: inside.__setitem__(key, "DEEP"),
        "missing": lambda: inside.pop(key),
        "twice": lambda: (
            inside.append(inside[key]) if isinstance(inside, list) else inside.__setitem__("0", inside[key])
        ),
        "order": lambda: inside.reverse() if isinstance(inside, list) else inside.__setitem__(key, [inside[key]] * 2),
    }
    changes[kind]()
    return copy
