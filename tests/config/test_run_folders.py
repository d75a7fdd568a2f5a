"""Folders of a run: one that is moved alone leaves the others in the folder of another run, which is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl.config import check, compose, load
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.errors import ConfigError

OLD_RUN = '[trainer]\nrun_path = "runs/old"\nckpt_path = "runs/old/checkpoints"\n'


@pytest.mark.parametrize(
    ("text", "arguments", "refused"),
    [
        (OLD_RUN, ["trainer.run_path=runs/new"], ["trainer.ckpt_path"]),
        (OLD_RUN, ["trainer.run_path=runs/new", "trainer.ckpt_path=runs/new/c"], []),
        (OLD_RUN, ["trainer.run_path=runs/new", "trainer.ckpt_path=runs/old/c"], []),  # said for this run itself
        (OLD_RUN, ["~trainer.ckpt_path", "trainer.run_path=runs/new"], []),
        (OLD_RUN, [], []),
        ('[trainer]\nckpt_path = "/shared/ckpts"', ["trainer.run_path=runs/new"], []),
        ('[trainer]\nrun_name = "a"\nexport_path = "runs/a/x"', ["trainer.run_path=runs/b"], ["trainer.export_path"]),
        ('[trainer]\nrun_name = "a"\nexport_path = "runs/ab"', ["trainer.run_path=runs/b"], []),
    ],
)
def test_a_run_path_that_is_overridden_alone_writes_into_no_other_runs_folder(
    text: str, arguments: list[str], refused: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(text)
    loaded = load([tmp_path / "run.toml"], arguments)
    run, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    problems = [problem for problem in check(run, origins) if "the folder of another run" in problem.message]
    assert [problem.path for problem in problems] == refused
    assert all(problem.location.startswith(str(tmp_path)) and problem.severity == "error" for problem in problems)


def test_a_base_file_and_one_on_top_of_it_are_two_layers(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(OLD_RUN)
    (tmp_path / "run.toml").write_text('extends = "base.toml"\n[trainer]\nrun_path = "runs/new"')
    with pytest.raises(ConfigError, match="runs/old/checkpoints is in the folder of another run"):
        compose([tmp_path / "run.toml"])
