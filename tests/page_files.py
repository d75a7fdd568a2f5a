"""The files that a page shows, for tests that run its examples."""

from __future__ import annotations

import re
from pathlib import Path

RUN = (
    '[data]\ntrain_data = ["train.jsonl"]\n[trainer]\ndevice = "cpu"\nlogger = "console"\neval_interval = -1\n'
    '[generator.inference_engine]\nbackend = "torch"\n'
)
"""A run that the examples of a page change by overrides."""


def write_files(page: str, folder: Path) -> None:
    """Write each Python file of a page by the name in its first line, and `run.toml`."""
    for name, source in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL):
        (folder / name).write_text(source, encoding="utf-8")
    (folder / "run.toml").write_text(RUN)
