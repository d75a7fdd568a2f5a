"""The examples of docs/coming-from/verl.md work, and say the same as each other."""

from __future__ import annotations

from pathlib import Path

from skyrl.config import load
from skyrl.config.loading.resolve import resolve
from skyrl.envs import find_env
from skyrl.interop.verl.convert import convert_verl
from skyrl.tree import get_at
from tests.interop.corpora import RECORDED

PAGE = (RECORDED.parents[1] / "docs" / "coming-from" / "verl.md").read_text()


def block(language: str) -> str:
    return PAGE.partition(f"```{language}\n")[2].partition("```")[0]


def test_the_command_becomes_the_file(tmp_path: Path) -> None:
    script, toml_file = tmp_path / "run.sh", tmp_path / "run.toml"
    script.write_text(block("bash"))
    toml_file.write_text(block("toml"))
    conversion = convert_verl(str(script))
    run = resolve(load([toml_file], environ={}).config)
    assert conversion.refused == ()
    for line in conversion.lines:
        for path in line.targets:
            node = conversion.tables
            for name in path.split("."):
                node = node.get(name, {}) if isinstance(node, dict) else node
            value = get_at(run, path)
            assert node in ({}, list(value) if isinstance(value, tuple) else value), path


def test_the_reward_function_is_called(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(block("python"))
    make = find_env(f"{tmp_path / 'rewards.py'}:compute_score")
    env = make({"data_source": "a", "reward_model": {"ground_truth": "4"}})
    assert (env.step("it is 4").reward, env.get_metrics()) == (1.0, {"length": 7.0})
