"""The notebook of examples/notebook: its code, its outputs, and that it runs."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import skyrl
from tests.api.python_cells import run_cells

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "notebook" / "first_run.ipynb"
CELLS: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_it_has_fewer_than_thirty_lines_of_code() -> None:
    assert sum(bool(line.strip()) for source in CODE for line in source.splitlines()) < 30


def test_it_was_executed_and_its_outputs_are_small() -> None:
    cells = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = json.dumps([cell["outputs"] for cell in cells])
    assert "<svg" in outputs and "<progress" in outputs and "error" not in outputs
    assert FILE.stat().st_size < 50_000


def test_it_names_only_what_is_public() -> None:
    names = {
        node.attr
        for source in CODE
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "skyrl"
    }
    assert names == {"train", "evaluate"} <= {*skyrl.__all__}


def quick_start(nano: Path, folder: Path) -> None:
    """What `prepare.py` makes, with the nano model and its letters, and the file of the run with small batches."""
    base = folder / "runs" / "quickstart-base"
    shutil.copytree(nano / "model", base / "model")
    for name in ("train", "validation"):
        lines = (nano / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        pq.write_table(pa.Table.from_pylist([json.loads(line) for line in lines]), base / f"{name}.parquet")
    shutil.copytree(ROOT / "examples" / "quickstart", folder / "examples" / "quickstart")
    file = folder / "examples" / "quickstart" / "grpo.toml"
    text = re.sub(
        r"^(train_batch_size|policy_mini_batch_size|n_samples_per_prompt) *=.*", r"\1 = 2", file.read_text(), flags=re.M
    )
    text = re.sub(r"^(max_generate_length) *=.*", r"\1 = 3", text, flags=re.M)
    file.write_text(re.sub(r"^(epochs) *=.*", r"\1 = 3", text, flags=re.M))
    (folder / "examples" / "notebook").mkdir()


@pytest.mark.long
def test_it_trains_looks_changes_the_reward_resumes_and_evaluates(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_start(nano, tmp_path)
    values = run_cells(CODE, tmp_path / "examples" / "notebook", monkeypatch)
    first, resumed, scores = values[1], values[4], values[5]
    assert isinstance(first, skyrl.Run) and isinstance(resumed, skyrl.Run) and isinstance(scores, tuple)
    assert [len(run.metrics) for run in (first, resumed)] == [13, 25]
    assert 0 <= scores[0] <= 1
