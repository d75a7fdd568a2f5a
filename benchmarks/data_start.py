"""What a start costs before the first step, by the number of rows: prompts in memory, on disk, and streamed.

    python examples/quickstart/prepare.py
    python -m benchmarks.data_start [--rows 1000 1000000] [--ways memory stored streamed]

Rows are those of the quick start, in one parquet file. Each start is a process of its own: it imports the library,
reads the prompts, checks them, draws the first batch and makes the state of a checkpoint. `stored` starts twice, the
second time with the prompts that the first has written. Prints one JSON line for each start: CPU-seconds and peak
resident memory of the process, in MB.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOML = "examples/quickstart/grpo.toml"
AT_A_TIME = 10_000

WAYS: dict[str, tuple[str, ...]] = {
    "memory": ("memory",),
    "stored": ("stored first", "stored again"),
    "streamed": ("streamed",),
}
"""Way of reading prompts -> the starts that show it."""


def main() -> None:
    """One start after the other."""
    parser = argparse.ArgumentParser(description="Start on many rows.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--start", nargs=2, metavar=("WAY", "FOLDER"), help="of one process")
    asked = parser.parse_args()
    if asked.start:
        print(json.dumps(start(asked.start[0], Path(asked.start[1]))))
        return
    for rows in asked.rows:
        with tempfile.TemporaryDirectory() as folder:
            write_rows(Path(folder) / "train.parquet", rows)
            for way in asked.ways:
                for name in WAYS[way]:
                    print(json.dumps({"rows": rows, "start": name, **in_a_process(way, folder)}), flush=True)


def write_rows(file: Path, count: int) -> None:
    """Prompts such as `sort: hgdbha`, with their answers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(0)
    writer = None
    for start in range(0, count, AT_A_TIME):
        words = [
            "".join(draw.choices("abcdefgh", k=draw.randint(3, 7))) for _ in range(start, min(start + AT_A_TIME, count))
        ]
        table = pa.Table.from_pylist(list(map(row, words)))
        writer = writer or pq.ParquetWriter(file, table.schema)
        writer.write_table(table)
    assert writer is not None, "there are rows"
    writer.close()


def row(word: str) -> dict[str, Any]:
    """One row."""
    truth = {"method": "rule", "ground_truth": "".join(sorted(word))}
    return {"prompt": [{"role": "user", "content": f"sort: {word}"}], "reward_spec": truth, "data_source": "sort"}


def in_a_process(way: str, folder: str) -> dict[str, Any]:
    """The figures of a start."""
    command: Sequence[str] = [sys.executable, "-m", "benchmarks.data_start", "--start", way, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def start(way: str, folder: Path) -> dict[str, Any]:
    """Start in this process."""
    from skyrl.config import compose
    from skyrl.experiments.ppo import BasePPOExp
    from skyrl.experiments.sampling import prompt_cursor, stream_cursor
    from skyrl.runs.inputs import check_data

    changes: dict[str, Any] = {
        "data.train_data": [str(folder / "train.parquet")],
        "data.streaming": way == "streamed",
        "data.tokenized_path": str(folder / "tokens") if way == "stored" else None,
        "trainer.run_path": str(folder / "run"),
    }
    experiment = BasePPOExp(compose([TOML], changes).config)
    run, dataset = experiment.cfg, experiment.train_dataset
    check_data(run, dataset, None)
    cursor: Any = stream_cursor(run, experiment.tokenizer) if way == "streamed" else prompt_cursor(run, dataset)
    cursor.take()
    cursor.state()
    return {
        "cpu_seconds": round(time.process_time(), 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "processor": platform.processor() or platform.machine(),
    }


if __name__ == "__main__":
    main()
