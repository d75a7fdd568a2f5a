"""Names that other systems have for our fields, losses and estimators are answered with ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import ConfigError, compose, load
from skyrl.config.foundation import foreign_names
from skyrl.config.foundation.foreign_names import names_elsewhere, value_elsewhere
from skyrl.config.loading.kinds import KINDS, root_of
from skyrl.config.loading.presets import PRESETS
from skyrl.tree.classes import leaf_paths, table_paths

RL = {"trainer.policy.model.path": "m", "data.train_data": ["d"], "trainer.device": "cpu"}
SFT = {"kind": "sft", "model.path": "m", "train_datasets": ["d"], "device": "cpu"}
FILE = Path(foreign_names.__file__).with_suffix(".json")


def said(values: dict[str, Any], written: str) -> str:
    """The sentence about a path or value that is unknown, with the advice."""
    with pytest.raises(ConfigError) as caught:
        compose([], values)
    return " ".join(
        f"{problem.message}; {problem.hint}" for problem in caught.value.problems if problem.path == written
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("trainer.max_new_tokens", "generator.sampling_params.max_generate_length"),
        ("generator.sampling_params.max_new_tokens", "generator.sampling_params.max_generate_length"),
        ("generator.eval_sampling_params.max_new_tokens", "generator.eval_sampling_params.max_generate_length"),
        ("trainer.algorithm.kl_coef", "trainer.algorithm.kl_loss_coef"),
        ("trainer.algorithm.clip_range", "trainer.algorithm.eps_clip_low and trainer.algorithm.eps_clip_high"),
        ("trainer.clip_ratio", "trainer.algorithm.eps_clip_low and trainer.algorithm.eps_clip_high"),
        ("generator.num_generations", "generator.n_samples_per_prompt"),
        ("trainer.num_generations", "generator.n_samples_per_prompt"),
        (
            "trainer.gradient_accumulation_steps",
            "trainer.policy_mini_batch_size and trainer.micro_train_batch_size_per_gpu",
        ),
        ("trainer.save_steps", "trainer.ckpt_interval"),
        ("trainer.save_freq", "trainer.ckpt_interval"),
        ("trainer.test_freq", "trainer.eval_interval"),
        ("trainer.max_steps", "trainer.max_training_steps"),
        ("trainer.total_epochs", "trainer.epochs"),
        ("num_train_epochs", "trainer.epochs"),
        ("trainer.policy.model.lora.r", "trainer.policy.model.lora.rank"),
        ("trainer.batch_size", "trainer.train_batch_size"),
        ("batch_size", "trainer.train_batch_size"),
        ("trainer.critic_optimizer.lr", "trainer.critic.optimizer_config.lr"),
        ("trainer.experiment_name", "trainer.run_name"),
        ("trainer.report_to", "trainer.logger"),
        ("actor.path", "trainer.policy.model.path"),
        ("gconfig.n_samples", "generator.n_samples_per_prompt"),
        ("trainer.learning_rate", "trainer.policy.optimizer_config.lr"),
        ("trainer.critic.optimizer_config.learning_rate", "trainer.critic.optimizer_config.lr"),
        ("trainer.critic.model.lora.r", "trainer.critic.model.lora.rank"),
        ("trainer.nnodes", "trainer.placement.policy_num_nodes"),
    ],
)
def test_a_setting_of_another_system_is_answered_with_our_path(written: str, meant: str) -> None:
    assert f"use {meant} instead (" in said(RL | {written: 1}, written)


def test_the_model_of_another_kind_of_run_is_answered_with_those_of_this_one() -> None:
    message = said(RL | {"model.path": "m"}, "model.path")
    assert "use trainer.policy.model.path, trainer.ref.model.path or trainer.critic.model.path instead; " in message
    assert message.endswith("model belongs to kind = sft, reward_model and preference, and this is kind = rl")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lora_r", "model.lora.rank"),
        ("learning_rate", "optimizer_config.lr"),
        ("save_steps", "ckpt_interval"),
        ("eval_steps", "eval_interval"),
        ("num_train_epochs", "num_epochs"),
        ("max_steps", "num_steps"),
    ],
)
def test_supervised_runs_have_paths_of_their_own(written: str, meant: str) -> None:
    assert f"use {meant} instead (" in said(SFT | {written: 1}, written)


@pytest.mark.parametrize(
    ("field", "value", "advice"),
    [
        ("policy_loss_type", "ppo", "use regular instead (ppo of other systems)"),
        ("policy_loss_type", "ppo-clip", "use regular instead (ppo-clip of other systems)"),
        ("policy_loss_type", "clip", "use regular instead (clip of other systems)"),
        ("policy_loss_type", "vanilla", "use dual_clip instead (vanilla of verl)"),
        ("policy_loss_type", "geo_mean", "use gmpo instead (geo_mean of verl)"),
        (
            "policy_loss_type",
            "dr_grpo",
            "use trainer.algorithm.policy_loss_type = regular and trainer.algorithm.loss_reduction = "
            "seq_mean_token_sum_norm instead (dr_grpo of TRL)",
        ),
        ("advantage_estimator", "dr_grpo", "use extends = preset:dr-grpo instead (dr_grpo of other systems)"),
        ("advantage_estimator", "reinforce_plus_plus", "use reinforce++ instead (reinforce_plus_plus of verl)"),
        ("advantage_estimator", "group_norm", "use grpo instead (group_norm of OpenRLHF)"),
        ("policy_loss_type", "regulr", "did you mean regular?"),
    ],
)
def test_a_loss_or_estimator_of_another_system_is_answered_with_ours(field: str, value: str, advice: str) -> None:
    path = f"trainer.algorithm.{field}"
    assert said(RL | {path: value}, path) == f"{value!r} is unknown; {advice}"


@pytest.mark.parametrize("value", ["dpo", ["sft", "dpo"]])
def test_a_choice_of_another_system_is_answered_with_ours(value: object) -> None:
    assert said({"kind": "preference", "loss_type": value}, "loss_type").endswith(
        "; use sigmoid instead (dpo of other systems)"
    )


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("trainer.epoch", "trainer.epochs"),
        ("trainer.lr", "trainer.policy.optimizer_config.lr or trainer.critic.optimizer_config.lr"),
        ("trainer.run_nme", "trainer.run_name"),
    ],
)
def test_slips_and_names_of_our_own_come_first(written: str, meant: str) -> None:
    assert meant in said(RL | {written: 1}, written)


def test_an_option_and_a_path_to_explain_are_answered_too() -> None:
    option = CliRunner().invoke(cli, ["run", "--num-generations", "4"])
    assert "generator.n_samples_per_prompt=4" in option.output
    explained = CliRunner().invoke(cli, ["config", "explain", "trainer.num_generations"])
    assert "use generator.n_samples_per_prompt instead" in str(explained.exception)


def test_every_path_of_the_file_is_one_of_ours() -> None:
    tables = {table for kind in KINDS for table in table_paths(root_of(kind))}
    leaves = {leaf for kind in KINDS for leaf, _ in leaf_paths(root_of(kind))}
    for _, _, paths in json.loads(FILE.read_text(encoding="utf-8")):
        for path in paths:
            field, is_value, value = path.partition("=")
            if field == "extends":
                assert value.removeprefix("preset:") in PRESETS
            else:
                assert any(f"{field}.".startswith(f"{leaf}.") for leaf in leaves) or field in tables, path
            assert not is_value or not value_elsewhere(field, value), path  # which is a name of ours


def test_the_file_is_read_for_a_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> None:
        raise AssertionError("the file is read")

    monkeypatch.setattr(foreign_names, "_settings", read)
    load([], RL | {"trainer.epochs": 2})
    with pytest.raises(AssertionError, match="is read"):
        names_elsewhere(root_of("rl"), ("trainer", "num_generations"))
