"""The outputs in README.md, docs/configuration.md and docs/coming-from/README.md are what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"

FILES = {
    "base.toml": 'extends = "preset:dapo"\n\n[data]\ntrain_data = ["train.parquet"]\n'
    'val_data = ["validation.parquet"]\n\n[trainer]\ndevice = "cpu"\nlogger = "console"\n'
    "train_batch_size = 64\npolicy_mini_batch_size = 32\n"
    '[trainer.policy.optimizer_config]\nlr = 1e-6\n[generator.inference_engine]\nbackend = "torch"\n',
    "run.toml": 'extends = "base.toml"\n\n[trainer]\nrun_name = "long-answers"\nepochs = "env:EPOCHS"\n\n'
    "[generator.sampling_params]\ntemperature = 0.7\nmax_generate_length = 2048\n",
    "wrong_base.toml": '[trainer]\nlogger = "console"\ndevice = "cpu"\ntrain_batch_size = 1000\nepoch = 2\n\n'
    '[trainer.policy.optimizer_config]\nlr = "fast"\n',
    "wrong.yaml": "extends: wrong_base.toml\ntrainer:\n  max_seq_len: 4096\n  resume_mode: sometimes\n  algorithm:\n"
    "    kl_estimator_type: k4\ngenerator:\n  inference_engine:\n    backend: torch\n  top_p: 0.9\n",
    "grpo.yaml": "experiment_name: gsm8k-grpo\ngconfig: {n_samples: 4, temperature: 0.9}\nactor:\n"
    "  path: Qwen/Qwen2.5-1.5B\n  group_size: ${gconfig.n_samples}\n  temperature: ${gconfig.temperature}\n"
    "  reward_scaling: 10.0\n  kl_ctl: 0.0\n  adv_norm: {mean_level: group, std_level: group}\n"
    "  optimizer: {lr: 2e-6, type: adam, eps: 1e-5}\nlauncher: {inference_server_cpus_per_gpu: 4}\n",
    "own.toml": 'extends = "base.toml"\n\n[trainer.algorithm]\nclass = "mine.py:Bonus"\nbrevity = 0.001\n',
}

SHOWN = re.compile(r"\$ ((?:EPOCHS=3 )?skyrl [^\n]+)\n(.*?)(?=\n\$ |\n```)", re.DOTALL)
"""A command and what follows it in its block."""

EXAMPLES = [
    (page, *example)
    for page in ("configuration.md", "coming-from/README.md", "../README.md")
    for example in SHOWN.findall((DOCS / page).read_text())
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the pages talk about."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    [source] = re.findall(r"```python\n(# mine\.py\n.*?)```", (DOCS / "configuration.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EPOCHS", "3")
    return tmp_path


def test_pages_hold_several_examples() -> None:
    assert len(EXAMPLES) >= 6


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("page", "command", "output"), EXAMPLES, ids=lambda value: value[:40])
def test_an_example_prints_what_its_page_shows(page: str, command: str, output: str) -> None:
    words = shlex.split(command.removeprefix("EPOCHS=3 "))[1:]
    result = CliRunner().invoke(cli, words)
    if isinstance(result.exception, ConfigError):
        printed = str(result.exception)
    else:
        printed = result.stderr if words[:2] == ["config", "convert"] else result.stdout
    assert stripped(printed).startswith(stripped(output)), page


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())
