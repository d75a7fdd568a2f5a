"""Whatever a disk does to the JSON lines of a run, every reader leaves out the damaged lines and reads the others."""

from __future__ import annotations

import gzip
import json
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from skyrl.errors import DataError
from skyrl.storage.json_files import GrowingLines
from skyrl.sweeps.results import _best
from skyrl.tracking.jsonlines import JsonLines
from skyrl.tracking.recording import _rows
from skyrl.tracking.run_progress import RunProgress
from skyrl.tracking.services.run_files import SampleTables
from skyrl.tracking.timeline import chrome_trace
from skyrl.tracking.token_file import VERSION, TokenFiles
from skyrl.viewer.pages import Pages
from skyrl.viewer.report import _spread, report
from skyrl.viewer.sample_filter import SampleFilter
from skyrl.viewer.sample_index import SampleIndex

STORED = Path(__file__).parents[1] / "stored" / "0.1.0" / "run"

LINES = [
    {
        "step": step,
        "group": 0,
        "source": "letters",
        "prompt_id": f"0:{step}",
        "sample": 0,
        "prompt": [{"role": "user", "content": "one"}],
        "response": "eins",
        "response_ids": [1, 2],
        "earlier": [{"response": "uno", "response_ids": [3]}],
        "reward": 0.5,
        "reward/avg_raw_reward": 0.5,
        "timing/step": 1.5,
        "spans": [["step", 0.0, 1.5]],
    }
    for step in range(1, 6)
]
"""Records with what any of the files has."""

BETWEEN: dict[str, bytes] = {
    "a list": b"[1, 2]",
    "a text": b'"step"',
    "a number": b"7",
    "nothing": b"",
    "no step": b'{"reward/avg_raw_reward": 1.0}',
    "a step of text": b'{"step": "3"}',
    "a step beyond 64 bits": b'{"step": 1000000000000000000000000000000}',
    "a step that is true": b'{"step": true}',
    "a list as its reward": b'{"step": 3, "reward/avg_raw_reward": [1], "reward": [1]}',
    "a text as its time": b'{"step": 3, "timing/step": "soon"}',
    "a reward beyond a float": b'{"step": 3, "reward": 1' + b"0" * 400 + b"}",
    "a prompt of text": b'{"step": 3, "prompt": "one"}',
    "a message that is none": b'{"step": 3, "prompt": ["one"]}',
    "earlier turns that are none": b'{"step": 3, "earlier": [1]}',
    "an endless group": b'{"step": 3, "group": 1000000000000000000000000000000}',
    "a lone surrogate": b'{"step": 3, "response": "\\ud800", "source": "\\ud800"}',
    "an id that is none": b'{"step": 3, "prompt_id": ["0:1"], "sample": 1.5}',
    "an answer that is none": b'{"step": 3, "response": 7, "stop_reason": null}',
    "components that are none": b'{"step": 3, "components": [1], "metrics": "high"}',
    "components of no numbers": b'{"step": 3, "components": {"a": [1], "b": null, "c": 1' + b"0" * 400 + b"}}",
    "rewards of turns that are none": b'{"step": 3, "turn_rewards": 1, "failures": "many"}',
    "earlier turns without an answer": b'{"step": 3, "earlier": [{}]}',
    "an earlier answer that is none": b'{"step": 3, "earlier": [{"response": 1}]}',
    "malformed spans": b'{"step": 3, "spans": [["step", "a", 1], 7]}',
    "brackets without end": b"[" * 100_000,
    "zeros": b"\0" * 50,
    "no UTF-8": b'{"step": 3, "response": "\xff"}',
}
"""Lines that no run writes."""


def bytes_of(damage: int) -> bytes:
    """The file with a bit flipped, cut off, or overwritten, at a place that the number decides."""
    content = bytearray("".join(f"{json.dumps(line)}\n" for line in LINES).encode())
    draw = random.Random(damage)
    offset = draw.randrange(len(content))
    match damage % 4:
        case 0:
            content[offset] ^= 1 << draw.randrange(8)
        case 1:
            content[offset] ^= 0x80
        case 2:
            del content[offset:]
        case _:
            content[offset:] = bytes(len(content) - offset)
    return bytes(content)


def files() -> Iterator[bytes]:
    lines = [json.dumps(line).encode() for line in LINES]
    for line in BETWEEN.values():
        yield b"\n".join([*lines[:2], line, *lines[2:], b""])
    yield from map(bytes_of, range(200))


def read_by_index(file: Path) -> list[int]:
    index = SampleIndex(file, file.with_suffix(".index"))
    while index.update():
        pass
    rows = index.rows(SampleFilter())
    assert all(index.record(row["id"]) is not None for row in rows)
    return sorted(row["step"] for row in rows)


def read_by_progress(file: Path) -> list[int]:
    seen = list[int]()
    progress = RunProgress(file.parent)
    progress.on_step = lambda: seen.append(progress.step)
    progress.look()
    return seen


def read_after_forgetting(file: Path) -> list[int]:
    copy = file.with_name("copy.jsonl")
    copy.write_bytes(file.read_bytes())
    JsonLines(copy).forget_after(4)
    return [record["step"] for record in JsonLines(copy).read()]


def read_by_sweep(file: Path) -> list[int]:
    _best(file, "reward/avg_raw_reward", "max")
    return [record["step"] for record in JsonLines(file).read()]


READERS: dict[str, Callable[[Path], list[int]]] = {
    "records": lambda file: [record["step"] for record in JsonLines(file).read()],
    "resume": read_after_forgetting,
    "trackers": lambda file: [record["step"] for record in GrowingLines(file).new()],
    "tables": lambda file: [table.step for table in SampleTables(file, rows=4).before(99)],
    "watch": read_by_progress,
    "report": lambda file: [record["step"] for record in _spread(file, most=100)],
    "view": read_by_index,
    "timeline": lambda file: [len(chrome_trace(JsonLines(file).read())["traceEvents"])],
    "sweep": read_by_sweep,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_lines_survives_every_damage(
    reader: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for number, content in enumerate(files()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "metrics.jsonl").write_bytes(content)
        read = READERS[reader](folder / "metrics.jsonl")
        if number < len(BETWEEN) and reader not in ("timeline", "resume"):
            assert {1, 2, 4, 5} <= set(read), list(BETWEEN)[number]


@pytest.fixture(scope="module")
def with_odd_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an earlier release whose samples are those of `LINES`, with all the others among them."""
    folder = tmp_path_factory.mktemp("odd") / "run"
    shutil.copytree(STORED, folder)
    lines = [json.dumps(line).encode() for line in LINES]
    (folder / "trajectories.jsonl").write_bytes(b"\n".join([*lines[:2], *BETWEEN.values(), *lines[2:], b""]))
    return folder


def test_every_page_of_odd_samples_is_shown(with_odd_samples: Path, tmp_path: Path) -> None:
    index = SampleIndex(with_odd_samples / "trajectories.jsonl", tmp_path / "index")
    while index.update():
        pass
    pages, rows = Pages(with_odd_samples, index, TokenFiles(tmp_path)), index.rows(SampleFilter())
    assert len(rows) > len(LINES)
    for row in rows:
        for page in (pages.sample(row["id"], {}), pages.group(row["id"]), pages.prompt(row["prompt_id"])):
            assert page is not None and page.encode()


def test_a_report_of_odd_samples_is_written(with_odd_samples: Path) -> None:
    assert "uno" in report([with_odd_samples], samples=100).encode().decode()


def test_damaged_lines_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n\xff\n{"step": 3}\n[]\n{"step": 5}\n{"st')
    assert [record["step"] for record in JsonLines(file).read()] == [1, 3, 5]
    assert caplog.messages == [f"{file}: 2 damaged line(s) left out (line 2, 4)"]


def made(**changes: Any) -> dict[str, Any]:
    return {**LINES[0], **changes}


def test_a_line_that_is_cut_off_is_read_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines, growing = [f"{json.dumps(made(step=step))}\n" for step in (1, 2)], GrowingLines(file)
    file.write_text(lines[0] + lines[1][:20])
    assert [record["step"] for record in growing.new()] == [1]
    file.write_text("".join(lines))
    assert [record["step"] for record in growing.new()] == [2]


def test_a_recording_that_expands_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.data.bounds.FREE_BYTES", 1 << 20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b" " * (64 << 20)))
    with pytest.raises(DataError, match="a.jsonl.gz expands to more than 500 times its size"):
        list(_rows(tmp_path / "a.jsonl.gz"))


def test_a_file_of_tokens_that_expands_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.data.bounds.FREE_BYTES", 1 << 20)
    files = TokenFiles(tmp_path)
    schema = pa.schema({"ids": pa.list_(pa.null())}, {"skyrl.version": str(VERSION), "skyrl.pieces": "{}"})
    with pa.ipc.new_file(str(files.path(1)), schema) as writer:
        writer.write_batch(pa.record_batch({"ids": [[None] * 1_000_000]}, schema))
    with pytest.raises(DataError, match="expands to more than 500 times its size"):
        files.read(1, 0)
