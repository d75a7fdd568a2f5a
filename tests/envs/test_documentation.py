"""What docs/environments.md and its further pages show is what runs."""

from __future__ import annotations

import random
import re
import runpy
import shlex
from pathlib import Path

import pytest

from skyrl.config import compose
from skyrl.envs import EnvStep, find_env, registered_names
from skyrl.envs.group_rewards import GroupReward
from tests.page_files import write_files

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join(
    (DOCS / page).read_text(encoding="utf-8")
    for page in ("environments.md", "tools.md", "turns.md", "built-in-environments.md")
)
ROW = {"reward_spec": {"ground_truth": "7"}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the page shows, by the name in their first line."""
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)


def test_the_environment_of_the_page_takes_less_than_20_lines_and_plays() -> None:
    assert len(Path("guess.py").read_text().strip().splitlines()) < 20
    env = find_env("guess.py:Guess")(ROW)
    first = env.step("is it 5?")
    assert (first.reward, first.done, first.observations[0]["content"]) == (0.0, False, "no, try again")
    assert env.step("is it 7?") == EnvStep(reward=1.0, done=True)


def test_the_command_of_the_page_names_it() -> None:
    (command,) = re.findall(r"skyrl run run\.toml (.*guess\.py.*)", PAGE)
    run = compose(["run.toml"], shlex.split(command)).config
    assert (run.environment.env_class, run.generator.max_turns) == ("guess.py:Guess", 3)


def test_the_tools_of_the_page_are_called() -> None:
    env = find_env("sums.py:Sums")(ROW)
    assert [schema["function"]["name"] for schema in env.tool_schemas()] == ["add", "python"]
    step = env.step('<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>')
    assert step.observations[0]["content"] == "7"
    assert env.step("7").reward == 1.0


def test_some_examples_of_the_page_call_rightly_and_others_get_no_weight() -> None:
    page = runpy.run_path("prepare.py")
    rng, right = random.Random(0), 0
    for _ in range(300):
        _, asked, call, reply, answer = (message["content"] for message in page["example"](rng))
        is_right = call == page["OPENING"] + asked + page["CLOSING"]
        assert (reply == answer) == is_right and (reply == page["UNKNOWN"]) != is_right and answer.isdigit()
        right += is_right
    assert 130 < right < 190  # 0.3, and a third of the others by chance


def test_the_reward_function_of_groups_of_the_page_compares() -> None:
    reward = find_env("brevity.py:shortest")
    assert isinstance(reward, GroupReward)
    assert reward.rewards([], ["long", "a"], ROW) == [0.0, 1.0]


def test_every_built_in_environment_is_in_the_table() -> None:
    assert set(re.findall(r"^\| `(\w+)` \| \d", PAGE, re.MULTILINE)) == {
        name for name in registered_names() if not name.startswith("tests-")
    }
