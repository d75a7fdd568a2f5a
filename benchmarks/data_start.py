"""What a start costs before the first step, by the number of rows: rows in memory, on disk, and streamed.

    python examples/quickstart/prepare.py
    python -m benchmarks.data_start [--kinds rl sft] [--rows 1000 1000000] [--ways memory stored streamed mapped]

Rows are those of the quick start, in one parquet file: prompts for RL, chats for SFT; `mapped` are tokens in an Arrow
file, which SFT reads where they lie. Each start is a process of its own: it imports the library, reads the rows, checks
them, draws the first batch and makes the state of a checkpoint. `stored` starts twice, the second time with the rows
that the first has written. Prints one JSON line for each start: CPU-seconds and peak resident memory of the process,
in MB.
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
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

TOML = "examples/quickstart/grpo.toml"
MODEL = "runs/quickstart-base/model"
AT_A_TIME = 10_000

WAYS: dict[str, tuple[str, ...]] = {
    "memory": ("memory",),
    "stored": ("stored first", "stored again"),
    "streamed": ("streamed",),
    "mapped": ("mapped",),
}
"""Way of reading rows -> the starts that show it."""


def main() -> None:
    """One start after the other."""
    parser = argparse.ArgumentParser(description="Start on many rows.")
    parser.add_argument("--kinds", nargs="+", choices=("rl", "sft"), default=["rl", "sft"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--start", nargs=3, metavar=("KIND", "WAY", "FOLDER"), help="of one process")
    args = parser.parse_args()
    if args.start:
        print(json.dumps(start(args.start[0], args.start[1], Path(args.start[2]))))
        return
    for rows in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            for kind in args.kinds:
                write_rows(Path(folder), kind, rows, args.ways)
                for mode in args.ways:
                    for name in WAYS[mode] if kind == "sft" or mode != "mapped" else ():
                        figures = in_a_process(kind, mode, folder)
                        print(json.dumps({"kind": kind, "rows": rows, "start": name, **figures}), flush=True)


def write_rows(folder: Path, kind: str, count: int, modes: Sequence[str]) -> None:
    """Rows of words such as `hgdbha`, which are to be sorted: in a parquet file, and those of SFT as tokens, too."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(0)
    make = prompt if kind == "rl" else chat
    with ExitStack() as files:
        writers: dict[str, Any] = {}
        for begin in range(0, count, AT_A_TIME):
            size = min(AT_A_TIME, count - begin)
            words = ["".join(draw.choices("abcdefgh", k=draw.randint(3, 7))) for _ in range(size)]
            tables = {"parquet": pa.Table.from_pylist(list(map(make, words)))}
            if kind == "sft" and "mapped" in modes:
                tables["arrow"] = tokens(words)
            for form, table in tables.items():
                if form not in writers:
                    opened = pq.ParquetWriter if form == "parquet" else pa.ipc.new_stream
                    writers[form] = files.enter_context(opened(folder / f"{kind}.{form}", table.schema))
                writers[form].write_table(table)


def prompt(word: str) -> dict[str, Any]:
    """One row of RL."""
    truth = {"method": "rule", "ground_truth": "".join(sorted(word))}
    return {"prompt": [{"role": "user", "content": f"sort: {word}"}], "reward_spec": truth, "data_source": "sort"}


def chat(word: str) -> dict[str, Any]:
    """One row of SFT."""
    texts = {"user": f"sort: {word}", "assistant": "".join(sorted(word))}
    return {"messages": [{"role": role, "content": text} for role, text in texts.items()]}


def tokens(words: Sequence[str]) -> pa.Table:
    """The same in numbers, whatever their meaning."""
    import pyarrow as pa

    ids = [[*map(ord, f"{word}{''.join(sorted(word))}")] for word in words]
    masks = [[index * 2 >= len(row) for index in range(len(row))] for row in ids]
    columns = {"input_ids": pa.array(ids, pa.list_(pa.int32())), "loss_mask": pa.array(masks, pa.list_(pa.bool_()))}
    return pa.table(columns)


def in_a_process(kind: str, mode: str, folder: str) -> dict[str, Any]:
    """The figures of a start."""
    command: Sequence[str] = [sys.executable, "-m", "benchmarks.data_start", "--start", kind, mode, folder]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    figures: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return figures


def start(kind: str, mode: str, folder: Path) -> dict[str, Any]:
    """Start in this process."""
    file = folder / f"{kind}.{'arrow' if mode == 'mapped' else 'parquet'}"
    changes: dict[str, Any] = {
        "streaming": mode == "streamed",
        "tokenized_path": str(folder / f"tokens-{kind}") if mode == "stored" else None,
    }
    cursor: Any = cursor_of_prompts(file, changes) if kind == "rl" else cursor_of_rows(file, changes)
    cursor.take()
    cursor.state()
    return {
        "cpu_seconds": round(time.process_time(), 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "processor": platform.processor() or platform.machine(),
    }


def cursor_of_prompts(file: Path, changes: dict[str, Any]) -> object:
    """The prompts of a run of RL, checked as before its first step."""
    from skyrl.config import compose
    from skyrl.experiments.ppo import BasePPOExp
    from skyrl.experiments.sampling import prompt_cursor, stream_cursor
    from skyrl.runs.inputs import check_data

    of_data = {f"data.{name}": value for name, value in changes.items()}
    values = {"data.train_data": [str(file)], "trainer.run_path": str(file.parent / "run"), **of_data}
    experiment = BasePPOExp(compose([TOML], values).config)
    run, dataset = experiment.cfg, experiment.train_dataset
    check_data(run, dataset, None)
    return stream_cursor(run, experiment.tokenizer) if run.data.streaming else prompt_cursor(run, dataset)


def cursor_of_rows(file: Path, changes: dict[str, Any]) -> object:
    """The same of SFT."""
    from skyrl.config import SFTConfig, compose
    from skyrl.experiments.sft import SFTExp

    values = {"model.path": MODEL, "train_datasets": (str(file),), "batch_size": 16, "num_steps": 100, "device": "cpu"}
    experiment = SFTExp(compose([], {**values, "run_path": str(file.parent / "run"), **changes}, SFTConfig).config)
    experiment.check_inputs()
    return experiment.get_cursor()


if __name__ == "__main__":
    main()
