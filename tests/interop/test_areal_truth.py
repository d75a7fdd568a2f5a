"""A conversion of AReaL's files keeps the algorithm, or says truthfully what it does not keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from skyrl.config import PreferenceConfig, SFTConfig, SkyRLTrainConfig, load, resolve
from skyrl.interop.areal.convert import convert_keys
from skyrl.interop.areal.defaults import NO_REFERENCE, age, left_out
from skyrl.interop.areal.same_settings import is_known, known_names
from skyrl.interop.report import Conversion, Line
from skyrl.tree import get_at
from skyrl.tree.sparse import as_toml_has_it
from tests.interop.corpora import Converted, areal_files, total

GRPO_EXAMPLE: dict[str, Any] = {
    "actor.path": "a/b",
    "gconfig.n_samples": 4,
    "actor.kl_ctl": 0.0,
    "actor.reward_norm.mean_level": "group",
    "actor.reward_norm.std_level": "group",
    "actor.adv_norm.mean_level": "batch",
    "actor.adv_norm.std_level": "batch",
}
"""The objective of AReaL's GRPO example of May 2026."""


@pytest.fixture(scope="module")
def files(reference: Path) -> tuple[Converted, ...]:
    """AReaL's own experiment files of May 2026."""
    return areal_files(reference)


def loaded(conversion: Conversion, folder: Path) -> Any:
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    return load([file], environ={}).config


def line_of(keys: dict[str, Any], source: str) -> Line:
    return next(line for line in convert_keys(keys).lines if line.source == source)


@pytest.mark.long
def test_unknown_settings_are_refused_as_unknown(files: tuple[Converted, ...]) -> None:
    for file in files:
        assert [line.source for line in file.conversion.lines] == list(file.facts)
        for line in file.conversion.lines:
            assert "no such setting" not in line.reason
            if line.reason.startswith("not known to this converter"):
                assert not is_known(line.source)
            elif "does not convert" in line.reason:
                assert is_known(line.source)


def test_most_settings_of_the_2026_files_are_converted(files: tuple[Converted, ...], tmp_path: Path) -> None:
    for file in files:
        loaded(file.conversion, tmp_path)
    outcomes = total(files)
    assert outcomes["refused"] < 0.03 * outcomes.total()


def test_every_field_of_areals_classes_is_known(reference: Path) -> None:
    classes = json.loads((reference / "areal_fields_2026_05.json").read_text())
    for cls, table in (("actor", "PPOActorConfig"), ("actor", "TrainEngineConfig"), ("critic", "PPOCriticConfig")):
        assert all(is_known(f"{cls}.{field}") for field in classes[table]["fields"])
    assert all(is_known(f"vllm.{field}") for field in classes["vLLMConfig"]["fields"])
    assert is_known("actor.scheduling_spec[0].env_vars.ANY") and not is_known("actor.optimizr.lr")
    assert len(known_names()) > 700


def test_every_known_setting_has_a_true_line_of_its_own() -> None:
    names = [name for name in known_names() if name not in ("actor.beta", "actor.loss_type")]  # which make it DPO
    lines = {line.source: line for line in convert_keys(dict.fromkeys(names, "something")).lines}
    assert {*names} <= {*lines}
    assert not any("not known" in line.reason for line in lines.values())


def test_backends_of_each_engine_are_converted(tmp_path: Path) -> None:
    keys = {"actor.backend": "megatron:d1p2t4", "rollout.backend": "vllm:d2t4", "cluster.n_gpus_per_node": 8}
    run = loaded(convert_keys(keys), tmp_path)
    engine, placement = run.generator.inference_engine, run.trainer.placement
    assert (engine.num_engines, engine.tensor_parallel_size, placement.colocate_all) == (2, 4, False)
    assert (run.trainer.strategy, placement.policy_num_gpus_per_node) == ("megatron", 8)
    assert run.trainer.policy.megatron_config.tensor_model_parallel_size == 4
    assert line_of({"actor.backend": "megatron:(attn:d1|ffn:d1)"}, "actor.backend").outcome == "renamed"
    assert line_of({"actor.backend": "megatron:(attn:d1|ffn:d2)"}, "actor.backend").outcome == "not yet"


def test_options_of_the_other_engine_have_no_effect(tmp_path: Path) -> None:
    keys = {"rollout.backend": "vllm:d1", "vllm.gpu_memory_utilization": 0.8, "sglang.mem_fraction_static": 0.5}
    assert loaded(convert_keys(keys), tmp_path).generator.inference_engine.gpu_memory_utilization == 0.8
    assert line_of(keys, "sglang.mem_fraction_static").reason == "no effect: the engine is vllm"


@pytest.mark.parametrize(("staleness", "enabled"), [(2, True), (0, False)])
def test_stale_samples_make_a_run_asynchronous(staleness: int, enabled: bool, tmp_path: Path) -> None:
    asynchronous = loaded(convert_keys({"rollout.max_head_offpolicyness": staleness}), tmp_path).trainer.fully_async
    assert (asynchronous.enabled, asynchronous.max_staleness_steps) == (enabled, staleness)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("order", [1, -1])
def test_the_kl_estimator_is_the_one_that_is_written(estimator: str, order: int, tmp_path: Path) -> None:
    keys = dict(list({"actor.kl_estimator": estimator, "actor.kl_ctl": 0.1}.items())[::order])
    assert loaded(convert_keys(keys), tmp_path).trainer.algorithm.kl_estimator_type == estimator


@pytest.mark.parametrize(
    ("changes", "estimator", "levels"),
    [
        ({}, "grpo", ("batch", "batch")),
        ({"actor.adv_norm.std_level": None}, "grpo", ("batch", None)),
        ({"actor.adv_norm.mean_level": "none", "actor.adv_norm.std_level": "none"}, "grpo", (None, None)),
        ({"actor.reward_norm.mean_level": None}, "reinforce++", ("batch", "batch")),
        ({"actor.reward_norm.mean_level": None, "actor.adv_norm.mean_level": None}, "reinforce++", (None, "batch")),
        ({"actor.kl_ctl": 0.001, "ref.path": "a/b"}, "reinforce++", ("batch", "batch")),
        ({"actor.discount": 0.9}, "reinforce++", ("batch", "batch")),
        ({"actor.reward_norm.mean_level": None, "actor.adv_norm.mean_level": "group"}, "grpo", ("group", "batch")),
        ({"critic.path": "c/d"}, "gae", ("batch", "batch")),
        ({"critic.path": "c/d", "actor.adv_norm.std_level": None}, "gae", ("batch", None)),
    ],
)
def test_the_estimator_follows_from_the_norms_the_kl_and_the_critic(
    changes: dict[str, Any], estimator: str, levels: tuple[Any, Any], tmp_path: Path
) -> None:
    conversion = convert_keys(GRPO_EXAMPLE | changes)
    algorithm = loaded(conversion, tmp_path).trainer.algorithm
    assert algorithm.advantage_estimator == estimator
    assert (algorithm.advantage_norm.mean_level, algorithm.advantage_norm.std_level) == levels
    assert algorithm.grpo_norm_by_std is (estimator != "grpo")
    assert algorithm.whiten_advantages is (estimator == "grpo")  # where it does nothing
    assert conversion.lost == ()


def test_advantages_without_any_norm_are_plain_returns(tmp_path: Path) -> None:
    conversion = convert_keys({"actor.path": "a", "actor.kl_ctl": 0.0})
    algorithm = loaded(conversion, tmp_path).trainer.algorithm
    assert (algorithm.advantage_estimator, algorithm.whiten_advantages) == ("reinforce++", False)
    assert (algorithm.advantage_norm.mean_level, algorithm.advantage_norm.std_level) == (None, None)
    assert conversion.lost == ()


@pytest.mark.parametrize("keys", [{}, {"actor.kl_ctl": 0.01}])
def test_a_kl_weight_without_a_reference_is_refused(keys: dict[str, Any]) -> None:
    [line] = convert_keys({"actor.path": "a"} | keys).lost
    assert (line.source, line.reason) == ("actor.kl_ctl", NO_REFERENCE)


def test_metrics_of_interpolation_alone_are_missing() -> None:
    keys = {"actor.use_decoupled_loss": True, "actor.prox_logp_method": "metrics"}
    line = line_of(keys, "actor.prox_logp_method")
    assert (line.outcome, line.reason) == (
        "not yet",
        "metrics that compare interpolated with recomputed log-probabilities",
    )


def test_a_batch_that_cannot_be_split_evenly_is_one_mini_batch_and_reported(tmp_path: Path) -> None:
    conversion = convert_keys({"actor.path": "a", "actor.kl_ctl": 0.0, "train_dataset.batch_size": 6})
    assert loaded(conversion, tmp_path).trainer.policy_mini_batch_size == 6
    assert [
        (row.source_default, row.skyrl_default) for row in conversion.other_defaults if row.source.startswith("actor")
    ] == [(4, 6)]


def test_a_critic_selects_gae_instead_of_grpo() -> None:
    keys = {"actor.path": "a", "actor.backend": "megatron:d1p2t4", "rollout.backend": "vllm:d2t4", "critic.path": "a"}
    conversion = convert_keys(keys)
    assert conversion.tables["trainer"]["algorithm"]["advantage_estimator"] == "gae"
    assert [line.source for line in conversion.lost] == ["actor.kl_ctl"]


def test_a_critic_brings_its_optimizer_and_its_batches(tmp_path: Path) -> None:
    keys = GRPO_EXAMPLE | {
        "critic.path": "c/d",
        "critic.optimizer.lr": "3e-6",
        "critic.eps_clip": 0.5,
        "critic.ppo_n_minibatches": 2,
        "train_dataset.batch_size": 64,
        "actor.gae_lambda": 0.95,
    }
    trainer = loaded(convert_keys(keys), tmp_path).trainer
    assert (trainer.critic.model.path, trainer.critic.optimizer_config.lr) == ("c/d", 3e-6)
    assert (trainer.critic_mini_batch_size, trainer.algorithm.value_clip, trainer.algorithm.lambd) == (32, 0.5, 0.95)


@pytest.mark.parametrize(
    ("keys", "path", "value"),
    [
        ({"actor.importance_sampling_level": "sequence"}, "policy_loss_type", "gspo"),
        ({"actor.use_sapo_loss": True, "actor.sapo_tau_neg": 1.2}, "policy_loss_type", "sapo"),
        (
            {
                "actor.use_decoupled_loss": True,
                "actor.rejection_sampling.metric": "ratio",
                "actor.rejection_sampling.upper": 4.0,
            },
            "decoupled",
            4.0,
        ),
        ({"actor.use_cispo_loss": True, "actor.eps_clip_higher": 4.0}, "policy_loss_type", "cispo"),
    ],
)
def test_supported_losses_are_converted(keys: dict[str, Any], path: str, value: object, tmp_path: Path) -> None:
    conversion = convert_keys(keys)
    converted = getattr(loaded(conversion, tmp_path).trainer.algorithm, path)
    assert (converted.behav_imp_weight_cap if path == "decoupled" else converted) == value
    assert conversion.lost == ()


def test_adapter_settings_are_converted(tmp_path: Path) -> None:
    keys = {"actor.use_lora": True, "actor.peft_type": "lora", "actor.lora_rank": 8, "actor.lora_alpha": 32}
    conversion = convert_keys(keys | {"actor.target_modules": ["all-linear"], "rollout.use_lora": True})
    lora = loaded(conversion, tmp_path).trainer.policy.model.lora
    assert (lora.rank, lora.alpha, lora.target_modules, conversion.lost) == (8, 32, "all-linear", ())
    assert line_of({"actor.use_lora": False, "actor.lora_rank": 8}, "actor.lora_rank").reason == (
        "only read with actor.use_lora, which is off"
    )


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("actor.m2_threshold", 0.04, "M2PO"),
        ("actor.rejection_sampling.level", "sequence", "rejection per sequence"),
        ("actor.enable_tree_training", True, "tree training"),
        ("actor.made_up", 1, "not known to this converter"),
        ("rollout.api_url", "http://x", "training on responses from another provider"),
    ],
)
def test_a_refusal_that_changes_the_training_has_its_true_reason(key: str, value: object, reason: str) -> None:
    [line] = convert_keys({key: value, "actor.use_decoupled_loss": True}).lost
    assert reason in line.reason


@pytest.mark.parametrize("key", ["actor.scheduling_spec[0].cmd", "scheduler.type", "stats_logger.swanlab.mode"])
def test_a_refusal_about_processes_and_logs_does_not_change_the_training(key: str) -> None:
    conversion = convert_keys({key: "something"})
    assert [line.outcome for line in conversion.lines] == ["not yet"]
    assert conversion.lost == ()


@pytest.mark.parametrize("keys", [{"actor.beta": 0.1}, {"train_dataset.type": "dpo"}])
def test_a_dpo_experiment_is_a_kind_of_run(keys: dict[str, Any]) -> None:
    assert convert_keys({"actor.path": "a/b"} | keys).root is PreferenceConfig


def test_a_supervised_experiment_of_2026_has_an_actor(tmp_path: Path) -> None:
    keys = {"actor.path": "a/b", "actor.backend": "fsdp:d8", "train_dataset.type": "sft", "actor.optimizer.lr": 1e-5}
    conversion = convert_keys(keys)
    run = loaded(conversion, tmp_path)
    assert isinstance(run, SFTConfig)
    assert (run.model.path, run.placement.num_gpus_per_node, run.optimizer_config.lr) == ("a/b", 8, 1e-5)
    assert [line.source for line in conversion.lines] == list(keys)


CLASSES = {
    "": "GRPOConfig",
    "actor": "PPOActorConfig",
    "critic": "PPOCriticConfig",
    "actor.optimizer": "OptimizerConfig",
    "critic.optimizer": "OptimizerConfig",
    "actor.adv_norm": "NormConfig",
    "actor.reward_norm": "NormConfig",
    "gconfig": "GenerationHyperparameters",
    "eval_gconfig": "GenerationHyperparameters",
    "stats_logger.wandb": "WandBConfig",
    "rollout": "InferenceEngineConfig",
    "train_dataset": "TrainDatasetConfig",
}
DEFAULTS_OF_2025: dict[str, Any] = {
    "async_training": True,
    "actor.optimizer.lr": 2e-5,
    "actor.optimizer.weight_decay": 0.05,
    "actor.optimizer.beta2": 0.95,
    "actor.optimizer.eps": 1e-5,
    "critic.optimizer.lr": 2e-5,
    "critic.optimizer.weight_decay": 0.05,
    "critic.optimizer.beta2": 0.95,
    "critic.optimizer.eps": 1e-5,
    "actor.adv_norm.std_unbiased": False,
    "actor.reward_norm.std_unbiased": False,
}
"""What was different in September 2025."""

MINIMAL: dict[int, dict[str, Any]] = {
    2025: {"actor.path": "a/b", "allocation_mode": "sglang:d4+fsdp:d4"},
    2026: {"actor.path": "a/b", "actor.backend": "fsdp:d4", "rollout.backend": "vllm:d4"},
}


@pytest.mark.parametrize("year", [2025, 2026])
def test_settings_that_are_left_out_have_the_defaults_of_areals_classes(year: int, reference: Path) -> None:
    classes = json.loads((reference / "areal_fields_2026_05.json").read_text())
    base_keys = MINIMAL[year] | {"critic.path": "c", "actor.adv_norm.group_size": 1, "actor.reward_norm.group_size": 1}
    assert age(base_keys) == year
    defaults = left_out(base_keys | {"train_dataset.batch_size": 64})
    older = DEFAULTS_OF_2025 if year == 2025 else {}
    assert defaults.pop("train_dataset.max_length") == 32768 - 16384  # what a context has beside a whole answer
    for key, value in defaults.items():
        table, _, field = key.rpartition(".")
        assert value == (older[key] if key in older else _default_of(classes, CLASSES[table], field)), key
    assert older.keys() <= defaults.keys() and len(defaults) > 30


def _default_of(classes: dict[str, Any], cls: str, field: str) -> object:
    definition = classes[cls]["fields"].get(field)
    bases = [base for base in classes[cls]["bases"] if base in classes]
    return definition["default"] if definition else _default_of(classes, bases[0], field)


REQUIRED: dict[int, dict[str, Any]] = {
    2025: {"actor.path": "a/b", "ref.path": "a/b", "allocation_mode": "sglang:d4+fsdp:d4"},
    2026: {"actor.path": "a/b", "ref.path": "a/b", "rollout.backend": "vllm:d4"}
    | {f"{model}.backend": "fsdp:d4" for model in ("actor", "ref")},
}
"""Nothing but what a file has to name, and a reference, without which AReaL's default weight of the KL is refused."""

INTERPOLATED = {"actor.use_decoupled_loss": True, "actor.prox_logp_method": "loglinear"}

TRIAL = {"experiment_name": "e", "trial_name": "t"}
CRITIC = {"critic.path": "a/b", "critic.backend": "fsdp:d4", "actor.optimizer.lr": 3e-5}
REJECTION = {"actor.use_decoupled_loss": True, "actor.rejection_sampling.metric": "ratio"}
EXPERTS = "trainer.policy.megatron_config.expert_tensor_parallel_size"

MEANING: dict[str, tuple[Any, Any]] = {
    # the objective
    "trainer.algorithm.use_kl_in_reward": (True, True),
    "trainer.algorithm.use_kl_loss": (False, False),
    "trainer.algorithm.kl_loss_coef": (0.1, 0.1),
    "trainer.algorithm.kl_estimator_type": ("k1", "k1"),
    "trainer.algorithm.advantage_estimator": ("reinforce++", "reinforce++"),
    "trainer.algorithm.whiten_advantages": (False, False),
    "trainer.algorithm.advantage_norm.mean_level": (None, None),
    "trainer.algorithm.advantage_norm.std_level": (None, None),
    "trainer.algorithm.gamma": (1.0, 1.0),
    "trainer.algorithm.reward_shaping.clip": (20.0, 20.0),
    "trainer.algorithm.reward_shaping.scale": (1.0, 1.0),
    "trainer.algorithm.old_logprobs": ("engine", "engine"),
    "trainer.algorithm.policy_loss_type": ("regular", "regular"),
    "trainer.algorithm.eps_clip_low": (0.2, 0.2),
    "trainer.algorithm.eps_clip_high": (0.2, 0.2),
    "trainer.algorithm.loss_reduction": ("token_mean", "token_mean"),
    "trainer.algorithm.dynamic_sampling.type": (None, None),
    "trainer.algorithm.temperature": (1.0, 1.0),
    # the optimizer
    "trainer.policy.optimizer_config.optimizer": ("adamw", "adamw"),
    "trainer.policy.optimizer_config.lr": (2e-5, 1e-3),
    "trainer.policy.optimizer_config.weight_decay": (0.05, 0.01),
    "trainer.policy.optimizer_config.adam_betas": ((0.9, 0.95), (0.9, 0.999)),
    "trainer.policy.optimizer_config.adam_eps": (1e-5, 1e-8),
    "trainer.policy.optimizer_config.scheduler": ("constant_with_warmup", "constant_with_warmup"),
    "trainer.policy.optimizer_config.warmup_steps_proportion": (0.001, 0.001),
    "trainer.policy.optimizer_config.max_grad_norm": (1.0, 1.0),
    "trainer.policy.use_dropout": (False, False),
    # batches, samples and data
    "trainer.seed": (1, 1),
    "trainer.epochs": (1, 1),
    "trainer.train_batch_size": (1, 1),
    "trainer.policy_mini_batch_size": (1, 1),
    "trainer.max_prompt_length": (16384, 16384),
    "trainer.fully_async.enabled": (True, False),
    "trainer.fully_async.max_staleness_steps": (0, 0),
    "generator.n_samples_per_prompt": (1, 1),
    "generator.sampling_params.max_generate_length": (16384, 16384),
    "generator.sampling_params.min_new_tokens": (0, 0),
    "generator.sampling_params.temperature": (1.0, 1.0),
    "generator.sampling_params.top_p": (1.0, 1.0),
    "generator.sampling_params.top_k": (-1, -1),
    "generator.eval_sampling_params.temperature": (1.0, 1.0),
    "generator.zero_reward_on_non_stop": (False, False),
    "generator.apply_overlong_filtering": (False, False),
    "data.shuffle": (True, True),
    "data.epoch_tail": ("drop", "drop"),
    # around it
    "trainer.bf16": (True, True),
    "trainer.logger": ("console", "console"),
    "trainer.hf_save_interval": (-1, -1),
}
"""Path here -> AReaL's meaning in September 2025 and in May 2026."""


@pytest.mark.parametrize("year", [2025, 2026])
def test_a_file_of_required_settings_gets_areals_defaults(year: int, tmp_path: Path) -> None:
    conversion = convert_keys(REQUIRED[year])
    run = resolve(loaded(conversion, tmp_path))
    assert {path: get_at(run, path) for path in MEANING} == {path: both[year - 2025] for path, both in MEANING.items()}
    assert conversion.refused == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("keys", "path", "value"),
    [
        ({"actor.recompute_logprob": True}, "trainer.algorithm.old_logprobs", "learner"),
        ({"actor.use_decoupled_loss": True}, "trainer.algorithm.old_logprobs", "learner"),
        ({"actor.behave_imp_weight_cap": 5.0}, "trainer.algorithm.decoupled.behav_imp_weight_cap", 5.0),
        ({"actor.behave_imp_weight_mode": "token_truncate"}, "trainer.algorithm.decoupled.cap_mode", "clamp"),
        ({"ppo.early_stop_imp_ratio": 5.0}, "trainer.algorithm.max_importance_ratio", 5.0),
        (INTERPOLATED, "trainer.algorithm.old_logprobs", "interpolated"),
        ({**INTERPOLATED, "actor.recompute_logprob": True}, "trainer.algorithm.old_logprobs", "interpolated"),
        ({"actor.prox_logp_method": "loglinear"}, "trainer.algorithm.old_logprobs", "engine"),
        ({"gconfig.temperature": 0.7}, "generator.eval_sampling_params.temperature", 0.7),
        ({"eval_gconfig.max_new_tokens": 100}, "generator.eval_sampling_params.temperature", 1.0),
        ({"eval_gconfig.n_samples": 3}, "generator.eval_n_samples_per_prompt", 3),
        ({"gconfig.max_new_tokens": 1024, "gconfig.max_tokens": 4096}, "trainer.max_prompt_length", 3072),
        ({"train_dataset.max_length": 30000}, "generator.sampling_params.max_tokens", 32768),
        ({"train_dataset.max_length": 1024}, "generator.sampling_params.max_tokens", None),
        ({"stats_logger.wandb.mode": "online"}, "trainer.logger", ("console", "wandb")),
        ({"actor.disable_dropout": True}, "trainer.policy.use_dropout", False),
        ({"train_dataset.shuffle": False}, "data.shuffle", False),
        ({"train_dataset.drop_last": False}, "data.epoch_tail", "short"),
        ({"train_dataset.drop_last": False, "rollout.max_head_offpolicyness": 2}, "data.epoch_tail", "carry"),
        ({"success_rate_lb": 0.05}, "trainer.algorithm.dynamic_sampling.min_success_rate", 0.05),
        ({"success_rate_ub": 0.95}, "trainer.algorithm.dynamic_sampling.max_success_rate", 0.95),
        ({"success_rate_ub": 1.0}, "trainer.algorithm.dynamic_sampling.type", None),
        ({"rollout.scheduling_strategy.type": "colocation"}, "trainer.placement.colocate_all", True),
        ({"ref.scheduling_strategy.type": "colocation"}, "trainer.placement.colocate_policy_ref", True),
        ({}, "trainer.placement.colocate_policy_ref", False),
        (TRIAL | {"cluster.fileroot": "/x/"}, "trainer.ckpt_path", "/x/checkpoints/e/t"),
        (
            TRIAL | {"cluster.fileroot": "/x", "experiment_name": "${trial_name}"},
            "trainer.ckpt_path",
            "/x/checkpoints/t/t",
        ),
        (TRIAL | {"cluster.fileroot": "/x", "trial_name": "${oc.env:T,u}"}, "trainer.ckpt_path", "/x/checkpoints/e/u"),
        ({"cluster.fileroot": "/x"}, "trainer.ckpt_path", SkyRLTrainConfig().trainer.ckpt_path),
        (CRITIC | {"critic.optimizer": "${actor.optimizer}"}, "trainer.critic.optimizer_config.lr", 3e-5),
        (CRITIC | {"critic.optimizer": "${actor.optimizer}"}, "trainer.critic.optimizer_config.weight_decay", 0.01),
        ({"eval_gconfig": "${gconfig}", "gconfig.top_p": 0.5}, "generator.eval_sampling_params.top_p", 0.5),
        (REJECTION, "trainer.algorithm.decoupled.behav_imp_weight_cap", 5.0),
        (REJECTION | {"actor.rejection_sampling.upper": 3}, "trainer.algorithm.decoupled.behav_imp_weight_cap", 3.0),
        ({"cluster.n_gpus_per_node": 0}, "trainer.device", "cpu"),
        ({"actor.scheduling_spec[0].gpu": 0}, "trainer.device", "cpu"),
        ({"cluster.n_gpus_per_node": 1}, "trainer.device", "cuda"),
        ({"actor.backend": "megatron:(attn:d4t2|ffn:d4e2)"}, EXPERTS, 1),
        ({"actor.backend": "megatron:d4t2e2"}, EXPERTS, 1),
        ({"actor.backend": "megatron:(attn:d2t4|ffn:d2t2e2)"}, EXPERTS, 2),
        ({"actor.backend": "megatron:d4e2"}, EXPERTS, None),
        ({"actor.mask_no_eos_with_zero": True}, "generator.zero_reward_on_non_stop", True),
        ({"actor.mask_no_eos_with_zero": True, "actor.reward_scaling": 10}, "generator.zero_reward_on_non_stop", True),
        ({"actor.mask_no_eos_with_zero": True, "actor.reward_bias": -0.5}, "generator.zero_reward_on_non_stop", False),
        (
            {"actor.mask_no_eos_with_zero": True, "actor.reward_norm.mean_level": "group"},
            "generator.zero_reward_on_non_stop",
            False,
        ),
    ],
)
def test_a_setting_beside_the_required_ones_means_what_it_means_in_areal(
    keys: dict[str, Any], path: str, value: object, tmp_path: Path
) -> None:
    assert get_at(loaded(convert_keys(REQUIRED[2026] | keys), tmp_path), path) == value


def test_a_cluster_without_an_allocation_is_shared_by_everything(tmp_path: Path) -> None:
    keys = {"actor.path": "a/b", "ref.path": "a/b", "cluster.n_nodes": 2, "cluster.n_gpus_per_node": 4}
    conversion = convert_keys(keys)
    placement = loaded(conversion, tmp_path).trainer.placement
    assert (placement.colocate_all, placement.policy_num_nodes, placement.policy_num_gpus_per_node) == (True, 2, 4)
    assert conversion.tables["generator"]["inference_engine"]["num_engines"] == 8
    assert conversion.cluster == {"slurm": {"nodes": 2, "gpus_per_node": 4}}


def test_defaults_that_were_written_are_reported_with_their_place() -> None:
    conversion = convert_keys(GRPO_EXAMPLE | {"seed": 1, "gconfig.max_new_tokens": 1024})
    sources = [line.source for line in conversion.defaults]
    assert "actor.reward_clip" in sources and "actor.optimizer.lr" in sources
    assert {"seed", "gconfig.max_new_tokens", "actor.kl_ctl"} & {*sources} == set()
    assert f"written with the original system's defaults ({len(sources)}):" in conversion.report()
    assert "  actor.reward_clip = 20.0  ->  trainer.algorithm.reward_shaping.clip" in conversion.report()


def test_defaults_that_change_no_training_are_listed_where_they_differ() -> None:
    rows = convert_keys(GRPO_EXAMPLE | {"recover.freq_secs": 60, "train_dataset.batch_size": 8}).other_defaults
    assert [row.source for row in rows] == [
        "evaluator.eval_before_train",
        "recover.mode",
        "evaluator.freq_steps",
        "sglang.disable_radix_cache",
    ]


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({"attention_dropout": 0.1}, True),
        ({"resid_pdrop": 0.1, "attn_pdrop": 0.0}, True),
        ({"attention_dropout": 0.0}, False),
        ({"hidden_size": 8}, False),
        ([], False),
        (None, False),
    ],
)
def test_a_model_drops_as_its_own_configuration_says(settings: object, own: bool, tmp_path: Path) -> None:
    if settings is not None:
        (tmp_path / "config.json").write_text(json.dumps(settings))
    keys = REQUIRED[2026] | {"actor.path": str(tmp_path)}
    for variant in (keys, keys | {"actor.disable_dropout": False}):
        assert loaded(convert_keys(variant), tmp_path).trainer.policy.use_dropout is own
    supervised = {"model.path": str(tmp_path), "model.disable_dropout": False}
    assert loaded(convert_keys(supervised), tmp_path).use_dropout is own


@pytest.mark.parametrize("kind", ["sft", "rw"])
def test_supervised_files_are_read_with_their_variables(kind: str) -> None:
    keys = {"train_dataset.type": kind, "model.path": "${oc.env:MODEL}", "seed": "${oc.env:SEED,7}"}
    conversion = convert_keys(keys | TRIAL | {"cluster.fileroot": "/x"})
    assert conversion.tables["model"]["path"] == "env:MODEL"
    assert (conversion.tables["seed"], conversion.tables["ckpt_path"]) == (7, "/x/checkpoints/e/t")
    unknown = convert_keys(keys | {"experiment_name": "e", "trial_name": "${oc.env:T}", "cluster.fileroot": "/x"})
    assert "ckpt_path" not in unknown.tables


@pytest.mark.parametrize(("length", "outcome"), [(512, "needless"), (256, "refused")])
def test_prompts_of_evaluation_have_the_length_of_those_of_training(length: int, outcome: str) -> None:
    line = line_of({"train_dataset.max_length": 512, "valid_dataset.max_length": length}, "valid_dataset.max_length")
    assert line.outcome == outcome
