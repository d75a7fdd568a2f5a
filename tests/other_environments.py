"""Environments with packages that do not fit beside constraints.txt: each is made once, by pip."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[1]


def python_with(name: str, packages: Sequence[str], *, made_for: object = None) -> str:
    """The interpreter of the environment `.venv-<name>` with these packages. It is kept until they, or `made_for`,
    change.
    """
    folder = ROOT / f".venv-{name}"
    expected = json.dumps([list(packages), made_for])
    stamp, python = folder / "made", folder / "bin" / "python"
    with FileLock(f"{folder}.lock"):
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != expected:
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
            stamp.write_text(expected, encoding="utf-8")
    return str(python)
