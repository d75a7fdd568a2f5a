"""Random combinations of settings that are seldom used together, each a whole run that is killed once and goes on.

`pytest --long tests/experiments/test_rare_settings.py --seed 2` tries sixty others.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import compose
from skyrl.errors import ConfigError
from skyrl.tracking.recording import Recording
from tests.experiments.forked import run, tiny
from tests.experiments.phases import Fault
from tests.experiments.sameness import assert_same, assert_same_files
from tests.long_cases import long_except
from tests.nano_run import metrics

T, A, G = "trainer__", "trainer__algorithm__", "generator__"
CRITIC = {T + "critic__model__path": "{nano}/model", T + "critic__optimizer_config__lr": 1e-3}
TURNS = {
    "environment__env_class": "{nano}/echo.py:Echo",
    G + "max_turns": 2,
    G + "max_input_length": 40,
    A + "max_seq_len": 40,
}
ASYNC = {T + "fully_async__enabled": True, T + "deterministic": False, A + "policy_loss_type": "decoupled"}
CORRECTION = A + "off_policy_correction__"

AXES: dict[str, list[dict[str, Any]]] = {
    "stored": [
        {T + "recording": "jsonl"},
        {T + "recording": "jsonl.gz"},
        {T + "dump_data_batch": True},
        {T + "recording": "jsonl", T + "dump_data_batch": True},
    ],
    "pi_old": [{}, {A + "old_logprobs": "engine"}, {A + "old_logprobs": "interpolated", **ASYNC}, ASYNC],
    "estimator": [
        *({A + "advantage_estimator": name} for name in ("rloo", "maxrl", "reinforce++", "reinforce++-baseline")),
        *({A + "advantage_estimator": name} for name in ("remax", "opo", "gpg")),
        {A + "advantage_estimator": "gae", **CRITIC},
        CRITIC,
    ],
    "loss": [
        {A + "policy_loss_type": name}
        for name in (
            *("dual_clip", "gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov", "rollout_is", "dppo"),
            *("importance_sampling", "cross_entropy"),
        )
    ],
    "reduction": [
        {A + "loss_reduction": name}
        for name in ("token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
    ],
    "divergence": [
        {},
        {A + "use_kl_loss": True, T + "update_ref_every_epoch": True},
        {A + "use_kl_loss": True, A + "kl_estimator_type": "k1"},
        {A + "use_kl_in_reward": True, A + "kl_ctrl__type": "adaptive", A + "kl_ctrl__horizon": 50},
        {A + "use_entropy_loss": True},
    ],
    "correction": [
        {},
        {CORRECTION + "tis_ratio_type": "token"},
        {CORRECTION + "tis_ratio_type": "sequence", CORRECTION + "token_mask_is_threshold_high": 1.5},
        {CORRECTION + "sequence_mask_metric": "geometric", CORRECTION + "geo_mask_high": 1.1},
        {A + "max_importance_ratio": 1.2},
    ],
    "turns": [
        {},
        {},
        TURNS,
        {**TURNS, G + "step_wise_trajectories": True},
        {**TURNS, G + "step_wise_trajectories": True, G + "merge_stepwise_output": True},
        {**TURNS, G + "use_conversation_multi_turn": False},
    ],
    "shaping": [
        {},
        {A + "reward_shaping__overlong__buffer_len": 3, A + "reward_shaping__overlong__max_len": 6},
        {A + "reward_shaping__norm": {"mean_level": "group", "std_level": "batch"}, A + "reward_shaping__scale": 2.0},
        {A + "advantage_batch_normalize": True},
        {A + "advantage_norm": {"mean_level": "batch", "std_level": "batch"}},
    ],
    "groups": [
        {},
        {
            A + "dynamic_sampling__type": "filter",
            A + "dynamic_sampling__max_sample_batches": 300,
            T + "max_training_steps": 2,
        },
        {A + "dynamic_sampling__type": "replace", A + "dynamic_sampling__min_replace_ratio": 0.01},
        {A + "zero_variance_filter": True},
    ],
    "adapter": [{}, {T + "policy__model__lora": {"rank": 2, "alpha": 4}}],
    "updates": [{}, {T + "update_epochs_per_batch": 2}, {T + "policy_mini_batch_size": 4}],
    "layout": [
        {},
        {T + "use_sample_packing": False},
        {T + "share_group_prompts": False},
        {T + "max_tokens_per_microbatch": 60},
        {T + "recompute_activations": True},
    ],
    "sampling": [
        {},
        {G + "sampling_params__temperature": 0.7, G + "sampling_params__top_p": 0.9},
        {G + "sampling_params__frequency_penalty": 0.3, G + "sampling_params__min_new_tokens": 2},
        {G + "sampling_params__stop": ["a"], G + "sampling_params__repetition_penalty": 1.2},
        {G + "zero_reward_on_non_stop": True},
    ],
    "kept": [
        {},
        {T + "hf_save_interval": 1},
        {T + "max_ckpts_to_keep": 1},
        {T + "async_ckpt_save": False},
        {T + "eval_interval": 1, T + "dump_eval_results": True},
    ],
}
"""Settings that are drawn together: one of each list."""

ALWAYS = {T + "max_training_steps": 3, T + "epochs": 4, T + "ckpt_interval": 1, T + "eval_interval": -1}


def combination(nano: Path, seed: int) -> dict[str, dict[str, Any]]:
    """A choice from each list, without those that the refusal of the configuration names."""
    rng = random.Random(seed)
    chosen = {name: rng.choice(options) for name, options in AXES.items()}
    while chosen:
        try:
            compose([], tiny(nano, nano, **settings(nano, chosen)))
            return chosen
        except ConfigError as refused:
            message = str(refused)
        is_named = {
            name: any(path.replace("__", ".") in message for path in options) for name, options in chosen.items()
        }
        del chosen[rng.choice([name for name in chosen if is_named[name]] or [name for name in chosen if chosen[name]])]
    raise AssertionError("not even the defaults can run")


def settings(nano: Path, chosen: dict[str, dict[str, Any]]) -> dict[str, Any]:
    merged = {**ALWAYS, **{path: value for options in chosen.values() for path, value in options.items()}}
    filled: dict[str, Any] = json.loads(json.dumps(merged).replace("{nano}", str(nano)))
    return filled


@pytest.fixture(scope="module")
def world(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano model with an environment of two turns."""
    folder = tmp_path_factory.mktemp("world")
    for path in nano.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "echo.py").write_text(
        "from skyrl.envs import Env, EnvStep\n"
        "class Echo(Env):\n"
        "    turns = 0\n"
        "    def step(self, action):\n"
        "        self.turns += 1\n"
        "        reward = float(bool(action) and action.isascii())\n"
        "        told = ({'role': 'user', 'content': 'go'},)\n"
        "        return EnvStep(reward=reward, done=self.turns == 2, observations=told)\n",
        encoding="utf-8",
    )
    return folder


MOMENTS = ("optimizer", "forward", "sync", "save", "writing", "product")
"""Phases in which a run is killed: every run enters each at least once."""

COMBINATIONS = 60
SHORT = {T + "max_training_steps": 2}
"""The length of the one combination that is tried without `--long`; it is killed in its second save."""


@pytest.mark.long
@pytest.mark.parametrize("number", long_except(range(COMBINATIONS), 7))
def test_settings_that_are_seldom_used_together_run_and_go_on_after_a_kill(
    number: int, world: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seed = number + COMBINATIONS * (pytestconfig.getoption("--seed") - 1)
    chosen = combination(world, seed)
    is_short = not pytestconfig.getoption("--long")
    changes = settings(world, chosen) | (SHORT if is_short else {})
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    status, output = run(world, uninterrupted, **changes)
    assert (status, "Traceback" in output) == (0, False), f"{chosen}\n{output}"
    for row in metrics(uninterrupted)[1:]:
        assert all(value == value and abs(value) != float("inf") for value in row.values()), f"{chosen}\n{row}"
    if changes.get("trainer__recording"):
        recorded = Recording(uninterrupted / "run" / "recording")
        assert recorded.steps() == list(range(1, changes["trainer__max_training_steps"] + 1))
        assert all(recorded.computed(step).tensors for step in recorded.steps())
    draw = random.Random(seed)
    fault = Fault(phase="save", nth=2) if is_short else Fault(nth=draw.randint(1, 3), phase=draw.choice(MOMENTS))
    status, output = run(world, parts, fault, **changes)
    assert status == -9 or (status == 0 and fault.nth > 1), f"{chosen}\n{output}"  # it may have fewer of these moments
    status, output = run(world, parts, **changes)
    assert (status, "Traceback" in output) == (0, False), f"{chosen}\n{output}"
    if not changes.get("trainer__fully_async__enabled"):
        assert_same(uninterrupted, parts)
        assert_same_files(uninterrupted, parts)


STORED: dict[str, dict[str, Any]] = {
    "recording": {T + "recording": "jsonl", A + "old_logprobs": "engine"},
    "packed recording": {T + "recording": "jsonl.gz", A + "old_logprobs": "engine", **AXES["adapter"][1]},
    "dump": {T + "dump_data_batch": True, A + "old_logprobs": "engine"},
    "interpolated": {T + "recording": "jsonl", A + "old_logprobs": "interpolated", **ASYNC},
    "interpolated dump": {T + "dump_data_batch": True, A + "old_logprobs": "interpolated", **ASYNC},
}


@pytest.mark.long
@pytest.mark.parametrize("name", long_except(STORED, "recording"))
def test_a_batch_is_stored_whatever_its_old_log_probabilities_are(name: str, nano: Path, tmp_path: Path) -> None:
    status, output = run(nano, tmp_path, **STORED[name], trainer__max_training_steps=1, trainer__eval_interval=-1)
    assert (status, "Traceback" in output) == (0, False), output
