"""The source of a run's own code is known by digests: a change is seen at the next start, by diff and by bisect."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import SkyRLTrainConfig, compose
from skyrl.config.loading.code_digests import changed_code, code_digests, stored_digests
from skyrl.config.loading.stored import stored_form
from skyrl.errors import Problem
from skyrl.experiments.folder_checks import code_is_unchanged
from tests.config.leaves import RUNNABLE

REWARD = "import json\nfrom helper import parsed\ndef f(completion, **others): return parsed(completion)\n"


def run_with(env_class: str, out: Path | None = None) -> SkyRLTrainConfig:
    folder = {"trainer.run_path": str(out)} if out else {}
    run: SkyRLTrainConfig = compose([], {**RUNNABLE, "environment.env_class": env_class, **folder}).config
    return run


def written(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def store(out: Path, run: SkyRLTrainConfig) -> Path:
    out.mkdir()
    (out / "config.json").write_text(json.dumps(stored_form(run) | {"code": code_digests(run)}))
    return out


def test_the_named_file_and_what_it_imports_from_its_folder_have_a_digest_and_nothing_is_imported(
    tmp_path: Path,
) -> None:
    folder = written(tmp_path, reward=REWARD, helper="import reward\n1 / 0\n", other="x = 1\n")
    assert code_digests(run_with(f"{folder}/reward.py:f")) == {
        "environment.env_class: helper.py": sha256(b"import reward\n1 / 0\n").hexdigest(),
        "environment.env_class: reward.py": sha256(REWARD.encode()).hexdigest(),
    }
    assert code_digests(run_with("gsm8k")) == {}
    assert code_digests(run_with(f"{folder}/nowhere.py:f")) == {}


def test_a_module_is_followed_inside_its_own_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = written(tmp_path / "digested", __init__="", tasks="import json, beside\nfrom . import parts\n", parts="")
    written(package / "deep", __init__="from ..parts import x\n")
    written(tmp_path, beside="")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [name.partition(": ")[2] for name in code_digests(run_with("digested.tasks:f"))]
    assert names == ["digested/parts.py", "digested/tasks.py"]
    names = [name.partition(": ")[2] for name in code_digests(run_with("digested.deep:f"))]
    assert names == ["digested/deep/__init__.py", "digested/parts.py"]
    assert "digested" not in sys.modules


def test_a_changed_file_is_a_warning_at_the_next_start_and_the_same_one_is_none(tmp_path: Path) -> None:
    folder = written(tmp_path / "code", reward=REWARD, helper="a = 1\n")
    run = run_with(f"{folder}/reward.py:f", tmp_path / "run")
    store(tmp_path / "run", run)
    assert list(code_is_unchanged(run)) == []
    written(folder, helper="a = 2\n")
    (problem,) = code_is_unchanged(run)
    assert isinstance(problem, Problem)
    assert (problem.path, problem.severity) == ("environment.env_class", "warning")
    assert problem.message.startswith("helper.py has changed since the run in ")


def test_diff_and_bisect_of_two_runs_name_the_files_that_differ(tmp_path: Path) -> None:
    folder = written(tmp_path / "code", reward="a = 1\n")
    run = run_with(f"{folder}/reward.py:f")
    one = store(tmp_path / "one", run)
    written(folder, reward="a = 2\n")
    other = store(tmp_path / "other", run)
    before, after = (sha256(text).hexdigest()[:12] for text in (b"a = 1\n", b"a = 2\n"))
    result = CliRunner().invoke(cli, ["config", "diff", str(one), str(other)])
    assert result.exit_code == 1
    assert result.output == f'environment.env_class: reward.py  "{before}"  ->  "{after}"\n'
    assert CliRunner().invoke(cli, ["config", "diff", str(one), str(one)]).exit_code == 0
    result = CliRunner().invoke(cli, ["bisect", str(one), str(other)])
    assert f"code: environment.env_class: reward.py is {before} in A, {after} in B\n" in result.output


def test_a_run_of_an_earlier_version_has_no_digests_and_nothing_is_said(tmp_path: Path) -> None:
    run = run_with("gsm8k")
    (tmp_path / "config.json").write_text(json.dumps(stored_form(run)))
    assert stored_digests(str(tmp_path)) == {}
    assert changed_code({}, {"reward.py": "1"}) == {}
    assert changed_code({"a": "1", "b": "2"}, {"a": "1"}) == {"b": ("2", None)}
