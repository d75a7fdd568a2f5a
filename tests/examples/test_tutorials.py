"""The notebooks of examples/tutorials: their code, their outputs, and that they run."""

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
FILES = sorted((ROOT / "examples" / "tutorials").glob("*.ipynb"))


def code_cells(file: Path) -> list[dict[str, Any]]:
    """The cells of a notebook that have code."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def code(file: Path) -> list[str]:
    """The code of each cell."""
    return ["".join(cell["source"]) for cell in code_cells(file)]


def test_there_are_six_and_the_page_lists_them() -> None:
    page = (FILES[0].parent / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((.+ipynb)\)", page) == [file.name for file in FILES]
    assert len(FILES) == 6


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_was_executed_and_is_short(file: Path) -> None:
    cells = code_cells(file)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = json.dumps([cell["outputs"] for cell in cells])
    assert '"output_type": "error"' not in outputs and '"stderr"' not in outputs
    assert str(ROOT) not in outputs and "/tmp" not in outputs
    assert sum(bool(line.strip()) for source in code(file) for line in source.splitlines()) <= 80
    assert file.stat().st_size < 60_000


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_notebook_names_only_what_is_public(file: Path) -> None:
    names = {
        node.attr
        for source in code(file)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "skyrl"
    }
    assert names <= {*skyrl.__all__}


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
    (folder / "examples" / "tutorials").mkdir()


@pytest.fixture
def folder(nano: Path, tmp_path: Path) -> Path:
    """A folder with the quick start and the examples that notebooks use, from which their `../..` leads to its root."""
    quick_start(nano, tmp_path)
    return tmp_path / "examples" / "tutorials"


def tutorial(number: int) -> list[str]:
    """The code of a notebook."""
    return code(FILES[number - 1])


@pytest.mark.long
def test_the_first_run_trains_looks_changes_the_reward_resumes_and_evaluates(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = run_cells(tutorial(1), folder, monkeypatch)
    first, resumed, scores = values[1], values[4], values[5]
    assert isinstance(first, skyrl.Run) and isinstance(resumed, skyrl.Run) and isinstance(scores, tuple)
    assert [len(run.metrics) for run in (first, resumed)] == [13, 25]
    assert 0 <= scores[0] <= 1


@pytest.mark.long
def test_the_policy_learns_to_use_the_tool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = run_cells(tutorial(2), folder, monkeypatch)
    assert values[3][2].reward == 1.0  # type: ignore[index]  # of the episode played by hand
    run = values[4]
    assert isinstance(run, skyrl.Run)
    rewards = [step["reward/avg_raw_reward"] for step in run.metrics[1:]]
    assert rewards[-1] > rewards[0] + 0.2
    assert run.metrics[-1]["environment/found"] > run.metrics[1]["environment/found"]


@pytest.mark.long
@pytest.mark.parametrize("number", [4, 5])
def test_a_notebook_runs(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = run_cells(tutorial(number), folder, monkeypatch)
    assert values[-1] is not None
