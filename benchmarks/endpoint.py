"""The endpoint under load: many clients at once ask a tiny model for a minute.

    python benchmarks/endpoint.py [--clients 500] [--seconds 60]

Every client asks again as soon as it is answered, and waits as long as `Retry-After` says where it is refused. The
server is a process of its own, `skyrl serve` on the torch engine; the clients share another. One JSON line: answers by
status, errors, latency of accepted requests in seconds, the server's CPU time for each of them, and its resident memory
before and at its largest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
from attrs import Factory, define

from skyrl.starter.tiny_chat import byte_tokenizer, save, small_qwen2

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
AT_ONCE = 64
"""Answers that the engine samples together; twice as many are sampled or wait."""


@define
class Load:
    """What the clients saw."""

    statuses: Counter[str] = Factory(Counter)
    seconds: list[float] = Factory(list)


async def client(http: httpx.AsyncClient, until: float, load: Load) -> None:
    """Ask again and again."""
    while (start := time.perf_counter()) < until:
        try:
            answer = await http.post("/v1/chat/completions", json=BODY)
        except httpx.HTTPError as error:
            load.statuses[type(error).__name__] += 1
            continue
        load.statuses[str(answer.status_code)] += 1
        if answer.status_code == 200:
            load.seconds.append(time.perf_counter() - start)
        else:
            await asyncio.sleep(float(answer.headers.get("retry-after", 1)))


async def watch(process: psutil.Process, until: float) -> int:
    """The largest resident memory of the server, in bytes."""
    largest = 0
    while time.perf_counter() < until:
        largest = max(largest, process.memory_info().rss)
        await asyncio.sleep(0.5)
    return largest


async def measure(url: str, pid: int, clients: int, seconds: float) -> dict[str, Any]:
    """Run the clients against a server."""
    load, process = Load(), psutil.Process(pid)
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as http:
        (await http.post("/v1/chat/completions", json=BODY)).raise_for_status()  # what is made once is made
        before, until = process.memory_info().rss, time.perf_counter() + seconds
        used = process.cpu_times()
        watching = asyncio.create_task(watch(process, until))
        await asyncio.gather(*(client(http, until, load) for _ in range(clients)))
        largest, now = await watching, process.cpu_times()
    latencies = sorted(load.seconds)
    return {
        "clients": clients,
        "seconds": seconds,
        "answers": dict(load.statuses),
        "p50_seconds": round(latencies[len(latencies) // 2], 3),
        "p99_seconds": round(latencies[int(len(latencies) * 0.99)], 3),
        "cpu_seconds_per_answer": round((now.user + now.system - used.user - used.system) / len(latencies), 4),
        "rss_mb_before": before >> 20,
        "rss_mb_largest": largest >> 20,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = byte_tokenizer(length=128)
        save(small_qwen2(tokenizer, hidden_size=64, layers=2), tokenizer, Path(folder))
        settings = ["generator.inference_engine.backend=torch", "trainer.device=cpu"]
        settings += ["generator.sampling_params.max_generate_length=16"]
        settings += [f"generator.inference_engine.max_num_seqs={AT_ONCE}"]
        command = [sys.executable, "-m", "skyrl.cli", "serve", folder, "--port", "0", *settings]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        ) as server:
            assert server.stdout is not None
            url = server.stdout.readline().rsplit(" ", 1)[-1].strip().removesuffix("/v1")
            print(json.dumps(asyncio.run(measure(url, server.pid, arguments.clients, arguments.seconds))))
            server.terminate()


if __name__ == "__main__":
    main()
