"""The training service under load, and what its record on the disk costs.

    python benchmarks/training_service.py [--clients 200] [--seconds 60] [--steps 40]

`crowd`: many clients of `skyrl serve-training` on a tiny model, a process of its own. One in ten trains an adapter,
pass and step in turn, the others sample; each asks again as soon as it is answered, and 1 s after a 429, as the public
client does. Answers by status and kind, latency from the first try to the result in seconds, the server's CPU-seconds,
and its resident memory before, at its largest and after. Any status but 200 and 429 ends the benchmark with an error.

`journal`: a service in this process with one adapter of rank 16 on the quick start's architecture: CPU-seconds of an
optimizer step (a pass and the step of Adam), and the share that storing requests, results, journal and state adds, with
one row of 64 tokens and with rows of 512 tokens.

One JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import numpy as np
import psutil
from attrs import Factory, define

from benchmarks.many_adapters import TOKENS, VOCABULARY, bank_on, stored_model
from skyrl.config import TrainingServiceConfig
from skyrl.endpoint.fields import Fields
from skyrl.starter.tiny_chat import byte_tokenizer, save, small_qwen2
from skyrl.training_service.backend import AdamSettings, AdapterSpec, PassRequest, PassResult, ServedModel
from skyrl.training_service.messages import FLOAT32, INT64, new_message
from skyrl.training_service.model_bank import ModelBank
from skyrl.training_service.service import TrainingService
from skyrl.training_service.store import Store

P = ParamSpec("P")
R = TypeVar("R")

PROTOBUF = {"content-type": "application/x-protobuf"}
SAMPLES_AT_ONCE = 16
"""Requests that the engines work on together; four times as many are accepted."""


def pass_body(model_id: str, seq: int, rows: int) -> bytes:
    """A cross-entropy pass over rows of random tokens."""
    ids = np.random.default_rng(seq).integers(0, VOCABULARY - 10, (rows, TOKENS + 1))
    data = [
        new_message(
            "Datum",
            model_input=[{"encoded_text": {"tokens": row[:-1].astype("<i4").tobytes()}}],
            loss_fn_inputs={
                "target_tokens": new_message("Tensor", dense=row[1:].astype("<i8").tobytes(), dtype=INT64),
                "weights": new_message("Tensor", dense=np.ones(TOKENS, "<f4").tobytes(), dtype=FLOAT32),
            },
        )
        for row in ids
    ]
    body: bytes = new_message(
        "ForwardBackwardRequest", model_id=model_id, seq_id=seq, data=data, loss_fn="cross_entropy"
    ).SerializeToString()
    return body


# The crowd


@define
class Load:
    """What the clients saw."""

    answers: Counter[str] = Factory(Counter)
    seconds: dict[str, list[float]] = Factory(dict)


@define
class Client:
    """One client, with a session of its own."""

    http: httpx.AsyncClient
    load: Load
    base: str
    until: float

    async def run(self, number: int) -> None:
        """Train or sample until the time is up."""
        session = (await self.sent("create_session", {}))["session_id"]
        await (self.train(session) if number % 10 == 0 else self.sample(session))

    async def train(self, session: str) -> None:
        """Passes and steps of a model."""
        request = {"session_id": session, "model_seq_id": 0, "base_model": self.base, "lora_config": {"rank": 4}}
        model = (await self.done("create_model", request))["model_id"]
        seq = 0
        while time.perf_counter() < self.until:
            seq += 2
            passed = self.done("forward_backward", pass_body(model, seq - 1, 1))
            step = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 1e-3}}
            await asyncio.gather(passed, self.done("optim_step", step))

    async def sample(self, session: str) -> None:
        """Samples of the base model."""
        create_request = {"session_id": session, "sampling_session_seq_id": 0, "base_model": self.base}
        sampler = (await self.sent("create_sampling_session", create_request))["sampling_session_id"]
        prompt = {"chunks": [{"tokens": list(range(16))}]}
        sample_request = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 16}}
        seq = 0
        while time.perf_counter() < self.until:
            await self.done("asample", {**sample_request, "seq_id": seq})
            seq += 1

    async def done(self, route: str, body: Mapping[str, Any] | bytes) -> dict[str, Any]:
        """Send a request and wait for its result; what is no JSON is left out."""
        start = time.perf_counter()
        request_id = (await self.sent(route, body))["request_id"]
        while True:
            answer = await self.sent("retrieve_future", {"request_id": request_id})
            if answer.get("type") != "try_again":
                break
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self.load.seconds.setdefault(route, []).append(time.perf_counter() - start)
        return answer

    async def sent(self, route: str, body: Mapping[str, Any] | bytes) -> dict[str, Any]:
        """The answer to a request, which is sent again after a 429."""
        content = body if isinstance(body, bytes) else json.dumps(body)
        headers = PROTOBUF if isinstance(body, bytes) else {"content-type": "application/json"}
        while True:
            answer = await self.http.post(f"/api/v1/{route}", content=content, headers=headers)
            is_json = answer.headers.get("content-type") == "application/json"
            read: dict[str, Any] = answer.json() if is_json else {}
            waits = read.get("type") == "try_again"
            self.load.answers[f"{answer.status_code}{' try_again' if waits else ''}"] += 1
            if answer.status_code == 200:
                return read
            if answer.status_code != 429:
                raise RuntimeError(f"{route}: {answer.status_code} {answer.text}")
            await asyncio.sleep(1)


async def largest_memory(process: psutil.Process) -> int:
    """The largest resident memory of the server, in bytes, up to the cancellation."""
    largest = 0
    try:
        while True:
            largest = max(largest, process.memory_info().rss)
            await asyncio.sleep(0.5)
    except asyncio.CancelledError:
        return largest


async def crowd_at(url: str, pid: int, clients: int, seconds: float) -> dict[str, Any]:
    """Run the clients against a server."""
    load, process = Load(), psutil.Process(pid)
    limits = httpx.Limits(max_connections=2 * clients, max_keepalive_connections=2 * clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as http:
        capabilities = (await http.get("/api/v1/get_server_capabilities")).json()
        base = capabilities["supported_models"][0]["model_name"]
        for number in (0, 1):  # what is made once is made
            await Client(http, Load(), base, time.perf_counter() + 0.1).run(number)
        before, until = process.memory_info().rss, time.perf_counter() + seconds
        spent = process.cpu_times()
        watching = asyncio.create_task(largest_memory(process))
        await asyncio.gather(*(Client(http, load, base, until).run(number) for number in range(clients)))
        watching.cancel()
        largest, after, now = await watching, process.memory_info().rss, process.cpu_times()
    times = {route: sorted(values) for route, values in load.seconds.items()}
    return {
        "clients": clients,
        "seconds": seconds,
        "answers": dict(load.answers),
        "results": {route: len(values) for route, values in times.items()},
        "p50_seconds": {route: round(values[len(values) // 2], 3) for route, values in times.items()},
        "p99_seconds": {route: round(values[int(len(values) * 0.99)], 3) for route, values in times.items()},
        "server_cpu_seconds": round(now.user + now.system - spent.user - spent.system, 1),
        "rss_mb_before": before >> 20,
        "rss_mb_largest": largest >> 20,
        "rss_mb_after": after >> 20,
    }


def crowd(folder: Path, clients: int, seconds: float) -> dict[str, Any]:
    """Start a server and run the clients."""
    tokenizer = byte_tokenizer(length=128)
    save(small_qwen2(tokenizer, hidden_size=64, layers=2), tokenizer, folder / "model")
    settings = [f"trainer.policy.model.path={folder / 'model'}", f"trainer.run_path={folder / 'service'}"]
    settings += ["generator.inference_engine.backend=torch", "trainer.device=cpu", "training_service.port=0"]
    settings += [f"training_service.client_models={clients}", f"training_service.max_samples={SAMPLES_AT_ONCE}"]
    settings += ["trainer.max_prompt_length=64", "generator.sampling_params.max_generate_length=32"]
    command = [sys.executable, "-m", "skyrl.cli", "serve-training", *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().rsplit(" ", 1)[-1].strip()
        reading = threading.Thread(target=deque, args=(server.stdout, 0))  # a full pipe would block the server
        reading.start()
        try:
            return asyncio.run(crowd_at(url, server.pid, clients, seconds))
        finally:
            server.terminate()
            reading.join()


# The journal


class Spent:
    """CPU-seconds of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def of(self, call: Callable[P, R]) -> Callable[P, R]:
        """The call, whose time is counted once, however deep it calls others that are counted."""

        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.process_time()
            self._depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.process_time() - start

        return counted


def with_ends_counted(block: Callable[P, AbstractContextManager[None]], spent: Spent) -> Callable[P, object]:
    """The context manager, of which begin and end are counted."""

    @contextmanager
    def counted(*args: P.args, **kwargs: P.kwargs) -> Iterator[None]:
        manager = block(*args, **kwargs)
        spent.of(manager.__enter__)()
        try:
            yield
        except BaseException:
            manager.__exit__(*sys.exc_info())
            raise
        spent.of(manager.__exit__)(None, None, None)

    return counted


class Learning:
    """The backend of a service whose models learn and are never sampled."""

    def __init__(self, bank: ModelBank) -> None:
        self._bank = bank
        self.learning, self.saving = Spent(), Spent()

    async def create(self, model_id: str, spec: AdapterSpec | None) -> None:
        self._bank.create(model_id, spec)

    async def passes(self, requests: Sequence[PassRequest]) -> Sequence[PassResult | Exception]:
        return self.learning.of(self._bank.passes)(requests)

    async def optimizer_step(self, model_id: str, settings: AdamSettings) -> Mapping[str, float]:
        return self.learning.of(self._bank.optimizer_step)(model_id, settings)

    async def save(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        self.saving.of(self._bank.save)(model_id, folder, optimizer=optimizer)


async def journal(bank: ModelBank, folder: Path, rows: int, steps: int) -> dict[str, float]:
    """CPU-seconds of a step, and what storing adds."""
    backend: Any = Learning(bank)
    served = ServedModel(names=("model",), context=1024, vocabulary=VOCABULARY, tokenizer="model")
    service = TrainingService(backend, folder, TrainingServiceConfig(), served)
    await service.start()
    session = service.new_session("one", Fields({}))
    request = {"session_id": session, "model_seq_id": rows, "base_model": "model", "lora_config": {"rank": 16}}
    create = json.dumps(request).encode()
    model = service.create("one", "create", Fields(json.loads(create)), create).id.rpartition(":")[0]
    await service.wait(f"{model}:0", 60)
    stored = Spent()
    names = ("add_request", "request", "add_tick", "finish", "run", "set_state")
    counted: dict[str, Any] = {name: stored.of(getattr(Store, name)) for name in names}
    counted["transaction"] = with_ends_counted(Store.transaction, stored)
    step = json.dumps({"adam_params": {"learning_rate": 1e-3}}).encode()
    with mock.patch.multiple(Store, **counted):
        for number in range(steps):
            seq = 2 * number + 1
            service.submit("one", "pass", model, seq, rows * TOKENS, pass_body(model, seq, rows))
            service.submit("one", "step", model, seq + 1, 0, step)
            await service.wait(f"{model}:{seq + 1}", 60)
    await service.stop()
    learning, storing = backend.learning.seconds, stored.seconds + backend.saving.seconds
    return {
        "step_seconds": round(learning / steps, 5),
        "stored_seconds": round(storing / steps, 5),
        "share": round(storing / learning, 4),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps with which the journal is measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bank = bank_on(stored_model(folder / "3M"))
        asyncio.run(journal(bank, folder / "warm", 2, 1))
        costs = {
            label: asyncio.run(journal(bank, folder / label, rows, args.steps))
            for label, rows in (("short", 1), ("full", 8))
        }
        print(json.dumps({"journal": costs, "crowd": crowd(folder, args.clients, args.seconds)}))


if __name__ == "__main__":
    main()
