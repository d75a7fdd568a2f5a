"""`skyrl view` over 100,000 trajectories: time to the first page, to a search, and memory.

    python benchmarks/view.py [--trajectories 100000] [--tokens 100]

A run folder of synthetic samples is written, and the command is started on it twice: without an index, and with the
one that the first left. Prints one JSON line: seconds from the start of the command to its first page, of further
pages, and the largest resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from skyrl.tracking.jsonlines import json_line

WORDS = [
    f"{first}{second}" for first in "bdfgklmnprst" for second in ("ab", "eck", "id", "ollow", "umble", "ark", "est")
]
PAGES: Mapping[str, str] = {
    "list": "/",
    "last page": "/?page=1999",
    "search for a rare word": "/?" + urlencode({"words": "needle"}),
    "search for a common word": "/?" + urlencode({"words": WORDS[0]}),
    "search for a phrase": "/?" + urlencode({"words": f'"{WORDS[0]} {WORDS[1]}"'}),
    "filter by reward and length": "/?" + urlencode({"least_reward": 0.5, "least_length": 90, "order": "longest"}),
    "sample": "/sample/{middle}",
    "group": "/group/{middle}",
    "prompt over the steps": "/prompt?id=0:7",
    "groups with different rewards": "/?mixed=1",
    "run and curves": "/run",
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=100, help="words of each answer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        write_run(run, options.trajectories, options.tokens)
        size = (run / "trajectories.jsonl").stat().st_size
        without, indexed = (measure(run, middle=options.trajectories // 2) for _ in range(2))
        index = (run / "trajectories.index").stat().st_size
    sizes = {"trajectories": options.trajectories, "samples_mb": round(size / 1e6), "index_mb": round(index / 1e6)}
    print(json.dumps({**sizes, "without_index": without, "indexed": indexed}))


def write_run(run: Path, trajectories: int, words: int) -> None:
    """Steps of 1,024 samples in groups of 8, of which one holds the word `needle`."""
    draw = random.Random(0)
    with (run / "trajectories.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(trajectories):
            text = draw.choices(WORDS, k=words) + (["needle"] if number == trajectories // 3 else [])
            lines.write(json_line(sample(number, " ".join(text), draw)))


def sample(number: int, text: str, draw: random.Random) -> dict[str, Any]:
    """A line of `trajectories.jsonl`."""
    group = number // 8
    return {
        "step": number // 1024 + 1,
        "group": group % 128,
        "source": ("math", "code", "letters")[group % 3],
        "prompt_id": f"0:{group % 4096}",
        "sample": number % 8,
        "prompt": [{"role": "user", "content": f"Question {group % 4096}?"}],
        "ground_truth": str(group % 4096),
        "columns": {"reward_spec": {"ground_truth": str(group % 4096)}},
        "response": text,
        "reward": round(draw.random(), 3),
        "stop_reason": "stop",
        "response_ids": [draw.randrange(150_000) for _ in range(len(text) // 6)],
        "weight_version": number // 1024,
    }


def measure(run: Path, middle: int) -> dict[str, float]:
    """Seconds of each page, and the command's largest memory in MB; `middle` is the number of a sample."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "skyrl.cli", "view", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ExitStack() as ending:
        ending.callback(process.terminate)  # unlike an interrupt, it ends one that was started in the background
        assert process.stdout is not None
        opened = process.stdout.readline().split(" at ")[1].split()[0]
        address = opened.partition("/?")[0]
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        figures = {"command_to_first_page": seconds(browser, opened, began), "its_cpu": cpu_seconds(process.pid)}
        while not json.loads(browser.open(address + "/status").read())["complete"]:
            time.sleep(0.2)
        figures["all_indexed"] = time.perf_counter() - began
        for name, path in PAGES.items():
            page = address + path.format(middle=middle)
            figures[name] = statistics.median(seconds(browser, page, time.perf_counter()) for _ in range(5))
        status = Path(f"/proc/{process.pid}/status").read_text()
        figures["memory_mb"] = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return {name: round(value, 3) for name, value in figures.items()}


def cpu_seconds(process: int) -> float:
    """CPU time that a process has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def seconds(browser: urllib.request.OpenerDirector, address: str, began: float) -> float:
    """Seconds since `began` when the page is there."""
    with browser.open(address) as response:
        response.read()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
