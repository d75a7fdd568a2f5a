"""Answering about a TOML file is cheap: nothing heavy is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.leaves import RUNNABLE
from tests.fresh_process import run_program

HEAVY = (
    "torch",
    "ray",
    "transformers",
    "rich",
    "yaml",
    "numpy",
    "pyarrow",
    "tomli_w",
    "hypothesis",
    "difflib",
    "pydoc",
)

COMMANDS = {
    "load, resolve and check": "from skyrl.config import compose; compose([sys.argv[1]])",
    "store": "import cattrs; from skyrl.config import load; cattrs.unstructure(load([sys.argv[1]]).config)",
    "skyrl config check": "import skyrl.cli.main as m; m.cli(['config', 'check', sys.argv[1]], standalone_mode=False)",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_toml_file_is_answered_without_heavy_imports(command: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("\n".join(f"{path} = {value!r}" for path, value in RUNNABLE.items()))
    program = f"import sys; {command}; print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)"
    result = run_program(program, file)
    assert result.stderr.strip() == ""
