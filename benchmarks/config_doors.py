"""The slowest input of a configuration: one JSON line.

    pip install -e '.[dev]'; python -m benchmarks.config_doors [INPUTS]

CPU seconds of the slowest of INPUTS (2,000) generated inputs, each given to one of the doors that the property tests
know, and of inputs made to be slow, each as large as the bounds of files, arguments, values and overrides allow.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from property_tests.doors import knock
from skyrl.config import compose
from skyrl.config.loading.load import MOST_OVERRIDES
from skyrl.errors import SkyRLError
from skyrl.tree.files import MOST_BYTES, MOST_PARTS
from skyrl.tree.types import MOST_VALUES

ROOM = MOST_BYTES - 200
DEEP = "b." * (MOST_PARTS - 2)
FREE = "generator.chat_template_kwargs.a="


def main(inputs: int) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        knocks = knock(inputs, seed=1, folder=Path(folder))
        times = {name: seconds_of(name, content, Path(folder)) for name, content in hostile()}
    slowest = max(times, key=lambda name: times[name])
    result = {
        "benchmark": "config_doors",
        "inputs": inputs,
        "accepted": knocks.accepted.total(),
        "refused": knocks.refused.total(),
        "slowest_generated_cpu_s": [round(knocks.slowest[0], 3), knocks.slowest[1]],
        "slowest_hostile_cpu_s": [round(times[slowest], 3), slowest],
        "hostile_cpu_s": {name: round(seconds, 3) for name, seconds in times.items()},
    }
    print(json.dumps(result))


def seconds_of(name: str, content: str | list[str], folder: Path) -> float:
    """CPU seconds that composing it takes: a file, whose suffix begins its name, or overrides."""
    file = folder / f"run.{name.partition(' ')[0]}"
    if isinstance(content, str):
        file.write_text(content, encoding="utf-8")
    began = time.process_time()
    with suppress(SkyRLError):
        compose(*([str(file)], []) if isinstance(content, str) else ([], content))
    return time.process_time() - began


def repeated(piece: Callable[[int], str], start: str = "", end: str = "", most: int = MOST_VALUES) -> str:
    """`piece(0)`, `piece(1)` and so on, as many as a file has room for."""
    pieces, length = [start], len(start) + len(end)
    for number in range(most):
        length += len(text := piece(number))
        if length > ROOM:
            break
        pieces.append(text)
    return "".join([*pieces, end])


def hostile() -> Iterator[tuple[str, str | list[str]]]:
    """A name and a text, or overrides, that is slow to read for its size."""
    yield from tables()
    yield from values()
    for number, opening in enumerate(("[", "{a: ", "- ", "? ")):
        yield f"yaml deep {number}", opening * (ROOM // len(opening))
    yield "yaml anchors", repeated(lambda n: f"k{n}: &a{n} 1\n")
    yield "yaml aliases", repeated(lambda n: f"k{n}: *a\n", start="a: &a [1, 2]\n", most=MOST_VALUES // 4)
    yield "json keys", repeated(lambda n: f'"k{n}":1,', start="{", end='"z":1}')
    yield "json deep", "[" * ROOM
    for word in ("data.train_data+=a", "data.train_data+=['a','b']", "trainer.seed=1", "trainer.sead=1", FREE + "1"):
        yield f"argv {word}", [word] * MOST_OVERRIDES
    assignment = "data.train_data=[" + "'a'," * 4_000 + "]"
    yield "argv items", [assignment, *(f"data.train_data.{n % 4_000}=b" for n in range(MOST_OVERRIDES - 1))]


def tables() -> Iterator[tuple[str, str]]:
    """TOML of many tables, keys and dots."""
    yield "toml keys", repeated(lambda n: f"k{n}=1\n")
    yield "toml tables", repeated(lambda n: f"[k{n}]\n")
    yield "toml arrays of tables", repeated(lambda n: "[[k]]\na=1\n")
    yield "toml dotted keys", repeated(lambda n: f"a{n}.b.b.b.b=1\n")
    yield "toml dotted headers", repeated(lambda n: f"[a{n}.b.b.b.b]\n")
    yield "toml deep keys", repeated(lambda n: f"{DEEP}c{n}=1\n")
    yield "toml deep headers", repeated(lambda n: f"[{DEEP}c{n}]\n")
    yield "toml keys under a deep header", repeated(lambda n: f"k{n}=1\n", start=f"[{DEEP}b]\n")
    yield "toml inline tables", repeated(lambda n: f"a{n}={{b={{b={{b=1}}}}}}\n")


def values() -> Iterator[tuple[str, str | list[str]]]:
    """Long texts, numbers and lists, where they fit and where they do not."""
    for number, piece in enumerate(("x", "://a", "sk-", "bearer ", "?token", "\\n", "1 epoch or ")):
        for field in ("seed", "ckpt_interval", "run_name"):
            yield f"toml text {number} {field}", f'[trainer]\n{field}="{piece * (ROOM // len(piece))}"'
    yield "toml list", repeated(lambda n: "1,", start="data={train_data=[", end="1]}", most=ROOM)
    yield "yaml list", "[" + "1," * (ROOM // 2)
    yield "yaml words", "a: " + "b\n " * (ROOM // 3)
    for number, piece in enumerate(("-", "(", "[", "1", "1,", "'',")):
        text = piece * (ROOM // len(piece))
        yield f"argv text {number}", [FREE + text]
        yield f"argv list {number}", [f"{FREE}[{text}]"]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2_000)
