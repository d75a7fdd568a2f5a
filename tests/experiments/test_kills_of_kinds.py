"""Runs of every kind, killed at moments that are drawn, the writing of what they leave at their end included.

`pytest --long tests/experiments/test_kills_of_kinds.py --kills 20 --seed 7` kills the runs of each kind 20 times.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from tests.experiments.forked import run_of, tiny
from tests.experiments.phases import Fault
from tests.experiments.sameness import assert_same, assert_same_files, assert_same_learning
from tests.experiments.test_kills import AHEAD, MOST, ON_RAY, assert_every_prompt_is_trained_on_twice
from tests.supervised_run import settings as supervised
from tests.supervised_run import write

pytestmark = pytest.mark.xdist_group("forked")

T, A, G = "trainer__", "trainer__algorithm__", "generator__"
LORA: dict[str, Any] = {T + "policy__model__lora__rank": 2}
TURNS: dict[str, Any] = {
    "environment__env_class": "{nano}/echo.py:Echo",
    G + "max_turns": 3,
    G + "max_input_length": 50,
    A + "max_seq_len": 50,
    G + "step_wise_trajectories": True,
}
ECHO = """
from skyrl.envs import Env, EnvStep


class Echo(Env):
    turns = 0

    def step(self, action):
        self.turns += 1
        told = ({"role": "user", "content": "go"},)
        return EnvStep(reward=float(bool(action) and action.isascii()), done=self.turns == 3, observations=told)
"""
SUPERVISED_MOST = {"start": 1, "forward": 8, "backward": 8, "optimizer": 3, "save": 1, "writing": 3}
PRODUCTS = 12
"""Changes of files at the end among which is drawn: the fewest that a run has there, of all kinds."""

IN_A_CHAIN = 4


def taught_rows(count: int) -> list[dict[str, Any]]:
    """Rows of four tokens, with a teacher's three likeliest tokens at the last two."""
    draw = random.Random(0)
    tokens = range(3, 200)
    return [
        {
            "input_ids": draw.sample(tokens, 4),
            "loss_mask": [0, 0, 1, 1],
            "teacher_ids": [draw.sample(tokens, 3) for _ in range(2)],
            "teacher_logprobs": [[-0.5, -1.5, -2.5]] * 2,
        }
        for _ in range(count)
    ]


@frozen
class Kind:
    """Runs of one kind."""

    changes: Mapping[str, Any]
    """Paths and values beside those of a small run; `{nano}` is the folder of the nano model."""

    kind: str = "rl"

    def values(self, nano: Path, out: Path) -> dict[str, Any]:
        """Paths and values of a run below `out`."""
        out.mkdir(parents=True, exist_ok=True)
        changes = {
            name: value.replace("{nano}", str(nano)) if isinstance(value, str) else value
            for name, value in self.changes.items()
        }
        if self.kind == "rl":
            return tiny(nano, out, **changes)
        checkpoints = str(out / "checkpoints")
        defaults = {"deterministic": True, "ckpt_interval": 2, "ckpt_path": checkpoints}
        return supervised(nano, out, self.kind, **{**defaults, **changes})

    @property
    def phases(self) -> dict[str, int]:
        """The latest entry that is drawn, of each phase that its runs have."""
        if self.kind != "rl":
            return {**SUPERVISED_MOST, "product": PRODUCTS}
        known = {**MOST, "product": PRODUCTS}
        has_turns = "environment__env_class" in self.changes  # its environment does not tell when it is asked
        return {phase: most for phase, most in known.items() if not (has_turns and phase == "reward")}


KINDS = {
    "GRPO": Kind({}),
    "PPO with a critic": Kind(
        {
            A + "advantage_estimator": "gae",
            T + "critic__model__path": "{nano}/model",
            T + "critic__optimizer_config__lr": 1e-3,
            T + "critic_mini_batch_size": 2,
        }
    ),
    "LoRA": Kind(LORA),
    "moving reference": Kind({A + "use_kl_loss": True, T + "update_ref_every_epoch": True}),
    "adaptive KL in the reward": Kind(
        {A + "use_kl_in_reward": True, A + "kl_ctrl__type": "adaptive", A + "kl_ctrl__horizon": 50}
    ),
    "moving teacher": Kind(
        {
            T + "teacher__model__path": "{nano}/model",
            A + "distillation__teacher_update_rate": 0.1,
            A + "distillation__teacher_sync_steps": 2,
        }
    ),
    "dynamic sampling": Kind({A + "dynamic_sampling__type": "filter", T + "max_training_steps": 8, T + "epochs": 8}),
    "turns": Kind(TURNS),
    "exports": Kind({T + "hf_save_interval": 3, T + "max_ckpts_to_keep": 2, T + "dump_eval_results": True}),
    "saves in the foreground": Kind({T + "async_ckpt_save": False}),
    "recording": Kind({T + "recording": "jsonl.gz", T + "dump_data_batch": True}),
    "asynchronous": Kind(AHEAD),
    "asynchronous LoRA": Kind({**AHEAD, **LORA}),
    "SFT": Kind({}, "sft"),
    "SFT with LoRA": Kind({"model__lora__rank": 2}, "sft"),
    "SFT with a stored teacher": Kind(
        {"train_datasets": '["{nano}/taught.jsonl"]', "distillation__stored": True, "distillation__task_coef": 0.5},
        "sft",
    ),
    "SFT with a teacher beside it": Kind({"distillation__teacher_path": "{nano}/mixture"}, "sft"),
    "reward model": Kind({}, "reward_model"),
    "reward model with LoRA": Kind({"model__lora__rank": 2}, "reward_model"),
    "Ray": Kind(ON_RAY),
    "asynchronous on Ray": Kind({**ON_RAY, **AHEAD}),
    "LoRA on Ray": Kind({**ON_RAY, **LORA}),
}


def moments(kind: Kind, count: int, seed: int) -> list[Fault]:
    """Moments at which runs are killed, the last of each chain among the writing of what the run leaves at its end."""
    draw, most = random.Random(seed), kind.phases
    anywhere = [phase for phase in most if phase != "product"]
    are_last = [number % IN_A_CHAIN == IN_A_CHAIN - 1 or number == count - 1 for number in range(count)]
    phases = ["product" if is_last else draw.choice(anywhere) for is_last in are_last]
    return [
        Fault(phase=phase, nth=draw.randint(1, most[phase]), delay=draw.choice([0.0, draw.uniform(0, 0.02)]))
        for phase in phases
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_killed_run_of_each_kind_ends_like_one_that_was_not(
    name: str, nano: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    kind = KINDS[name]
    (nano / "echo.py").write_text(ECHO, encoding="utf-8")
    write(nano / "taught.jsonl", taught_rows(32))
    count = pytestconfig.getoption("--kills") or IN_A_CHAIN
    faults = moments(kind, count, pytestconfig.getoption("--seed"))
    uninterrupted = tmp_path / "whole"
    status, output = run_of(kind.values(nano, uninterrupted), uninterrupted)
    assert status == 0, output
    hit = 0
    for start in range(0, count, IN_A_CHAIN):
        killed = tmp_path / str(start)
        for fault in faults[start : start + IN_A_CHAIN]:
            status, output = run_of(kind.values(nano, killed), killed, fault)
            # What is left to do after the kills before it may be too little to reach the moment.
            assert status in (-signal.SIGKILL, 0), (fault, output)
            assert "Traceback" not in output, (fault, output)
            hit += status != 0
        status, output = run_of(kind.values(nano, killed), killed)
        assert status == 0 and "Traceback" not in output, output
        assert_as_undisturbed(kind, killed, uninterrupted)
    assert hit > 0
    print(f"{name}: {hit} kills of {count}")


def assert_as_undisturbed(kind: Kind, killed: Path, uninterrupted: Path) -> None:
    if "trainer__fully_async" in kind.changes:
        assert_every_prompt_is_trained_on_twice(killed)
        assert (killed / "run" / "model" / "model.safetensors").is_file()
        lora = any("lora" in name for name in kind.changes)
        assert (killed / "run" / "adapter").is_dir() == lora
        assert (killed / "run" / "reward_curve.png").is_file()
        return
    (assert_same if kind.kind == "rl" else assert_same_learning)(killed, uninterrupted)
    assert_same_files(killed, uninterrupted)
