"""What docs/coming-from/skyrl.md shows is what runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from skyrl.config import compose
from skyrl.envs import find_env
from skyrl.experiments.preflight import custom_algorithms_can_be_called
from tests.interop.corpora import RECORDED
from tests.page_files import write_files

PAGE = (RECORDED.parents[1] / "docs" / "coming-from" / "skyrl.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^skyrl run run\.toml (.+)$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the page shows, by the name in their first line."""
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_the_page_passes_the_check(words: str) -> None:
    assert len(COMMANDS) == 3
    composed = compose(["run.toml"], shlex.split(words))
    assert list(custom_algorithms_can_be_called(composed.config)) == []


def test_the_reward_of_the_page_scores_an_answer() -> None:
    rewards = [find_env("reward.py:score")({"reward_spec": {"ground_truth": "7"}}).step(text).reward for text in "87"]
    assert rewards == [0.0, 1.0]
