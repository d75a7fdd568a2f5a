"""verl's asynchronous trainers become the asynchronous run that they are; its rewards are found under each name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from skyrl.config import load
from skyrl.interop.report import Conversion, Line
from skyrl.interop.verl.convert import convert_keys, convert_verl
from skyrl.tree.sparse import as_toml_has_it

MODEL = {"actor_rollout_ref.model.path": "a/b", "algorithm.adv_estimator": "grpo"}
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
ROLLOUT = "actor_rollout_ref.rollout."
V1 = "trainer.v1."
SEPARATE = {
    **MODEL,
    V1 + "trainer_mode": "separate_async",
    "data.train_batch_size": 64,
    MINI: 16,
    ROLLOUT + "nnodes": 1,
    ROLLOUT + "n_gpus_per_node": 4,
    "trainer.n_gpus_per_node": 4,
}
FULLY = {**MODEL, MINI: 32, ROLLOUT + "tensor_model_parallel_size": 1}


def loaded(conversion: Conversion, folder: Path) -> Any:
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    return load([file], environ={}).config


def line_of(conversion: Conversion, source: str) -> Line:
    return next(line for line in conversion.lines if line.source == source)


def test_separate_async_has_engines_of_its_own_and_verls_bound(tmp_path: Path) -> None:
    run = loaded(convert_keys(SEPARATE), tmp_path)
    asynchronous = run.trainer.fully_async
    assert (asynchronous.enabled, asynchronous.max_staleness_steps, asynchronous.steps_per_sync) == (True, 7, 1)
    assert asynchronous.queue_size == 128  # one batch ahead of the one that a step waits for
    assert (run.generator.inference_engine.num_engines, run.trainer.placement.colocate_all) == (2, False)
    assert run.trainer.placement.policy_num_gpus_per_node == 4
    assert (run.trainer.train_batch_size, run.trainer.policy_mini_batch_size) == (64, 16)


def test_colocate_async_takes_turns_on_the_same_gpus(tmp_path: Path) -> None:
    keys = {**MODEL, V1 + "trainer_mode": "colocate_async", V1 + "sampler.max_off_policy_threshold": 3}
    run = loaded(convert_keys(keys | {V1 + "colocate_async.num_warmup_batches": 2}), tmp_path)
    asynchronous = run.trainer.fully_async
    assert (asynchronous.enabled, asynchronous.max_staleness_steps, asynchronous.queue_size) == (True, 2, 3 * 1024)
    assert run.trainer.placement.colocate_all


@pytest.mark.parametrize(
    "keys",
    [
        {V1 + "trainer_mode": "sync"},
        {V1 + "sampler.max_off_policy_threshold": 3},
        {"trainer.use_v1": False, V1 + "trainer_mode": "separate_async"},
        {V1 + "separate_async.num_warmup_batches": 3},
        {ROLLOUT + "nnodes": 2},
    ],
)
def test_without_an_asynchronous_mode_the_run_takes_turns(keys: dict[str, Any], tmp_path: Path) -> None:
    conversion = convert_keys(MODEL | keys)
    assert conversion.refused == ()
    assert not loaded(conversion, tmp_path).trainer.fully_async.enabled


@pytest.mark.parametrize(
    ("keys", "source", "reason"),
    [
        ({V1 + "sampler.max_off_policy_threshold": None}, V1 + "sampler.max_off_policy_threshold", "without a bound"),
        ({V1 + "sampler.max_off_policy_threshold": 0}, V1 + "sampler.max_off_policy_threshold", "a whole number"),
        ({V1 + "separate_async.parameter_sync_step": 2}, V1 + "separate_async.parameter_sync_step", "verl needs"),
        ({V1 + "sampler.custom_sampler.path": "a.py"}, V1 + "sampler.custom_sampler.path", "custom samplers"),
        (
            {V1 + "separate_async.hybrid_rollout.enable_switch": True},
            V1 + "separate_async.hybrid_rollout.enable_switch",
            "GPUs that change",
        ),
        ({V1 + "trainer_mode": "mine"}, V1 + "trainer_mode", "the trainer 'mine'"),
        ({ROLLOUT + "n_gpus_per_node": 3}, ROLLOUT + "n_gpus_per_node", "cannot be split into engines of 2"),
    ],
)
def test_what_v1_asks_for_and_is_not_there_is_refused_by_its_name(
    keys: dict[str, Any], source: str, reason: str
) -> None:
    line = line_of(convert_keys(SEPARATE | keys), source)
    assert line.is_refused and reason in line.reason


def test_warm_up_of_separate_async_is_counted_in_its_mini_batches(tmp_path: Path) -> None:
    optimizer = loaded(
        convert_keys(SEPARATE | {"actor_rollout_ref.actor.optim.lr_warmup_steps": 8}), tmp_path
    ).trainer.policy.optimizer_config
    assert (optimizer.num_warmup_steps, optimizer.schedule_unit) == (8, "optimizer_step")


@pytest.mark.parametrize(
    ("staleness", "sync", "bound", "queue"),
    [(0, 1, 0, None), (0, 4, 3, None), (0.5, 2, 2, None), (1, 1, 1, None), (0.5, 4, 5, None), (0.1, 4, 4, 140)],
)
def test_fully_async_starts_a_share_of_samples_ahead(
    staleness: float, sync: int, bound: int, queue: int | None, tmp_path: Path
) -> None:
    keys = {"async_training.staleness_threshold": staleness, "async_training.trigger_parameter_sync_step": sync}
    run = loaded(convert_keys(FULLY | keys, program="fully_async_main"), tmp_path)
    asynchronous = run.trainer.fully_async
    assert (asynchronous.max_staleness_steps, asynchronous.steps_per_sync) == (bound, sync)
    assert asynchronous.queue_size == queue
    assert (run.trainer.train_batch_size, run.trainer.algorithm.old_logprobs) == (32, "engine")


def test_a_script_of_fully_async_has_the_defaults_of_its_program(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python -m verl.experimental.fully_async_policy.fully_async_main data.train_batch_size=0 "
        "actor_rollout_ref.model.path=a/b algorithm.adv_estimator=grpo actor_rollout_ref.actor.ppo_mini_batch_size=32 "
        "async_training.require_batches=4 async_training.partial_rollout=False rollout.nnodes=2 trainer.test_freq=10 "
        "rollout.n_gpus_per_node=4 rollout.total_rollout_steps=5120\n"
    )
    conversion = convert_verl(str(script))
    run = loaded(conversion, tmp_path)
    assert conversion.refused == ()
    assert (run.trainer.train_batch_size, run.trainer.policy_mini_batch_size) == (128, 32)
    assert (run.trainer.fully_async.steps_per_sync, run.trainer.fully_async.interrupt_generation) == (4, False)
    assert (run.trainer.max_training_steps, run.trainer.eval_interval) == (40, 40)
    assert run.generator.inference_engine.num_engines == 4


@pytest.mark.parametrize(
    ("keys", "old"),
    [
        ({}, "engine"),
        ({"algorithm.rollout_correction.bypass_mode": False}, "learner"),
        ({"async_training.use_rollout_log_probs": True}, "engine"),
        ({"async_training.use_rollout_log_probs": False}, "learner"),
        ({"async_training.use_rollout_log_probs": True, "async_training.compute_prox_log_prob": True}, "learner"),
    ],
)
def test_the_old_policy_of_fully_async_is_the_one_that_its_version_takes(
    keys: dict[str, Any], old: str, tmp_path: Path
) -> None:
    correction = {"algorithm.rollout_correction.rollout_is": "token"}
    conversion = convert_keys(FULLY | correction | keys, program="fully_async_main")
    algorithm = loaded(conversion, tmp_path).trainer.algorithm
    assert conversion.refused == ()
    assert (algorithm.old_logprobs, algorithm.off_policy_correction.tis_ratio_type) == (
        (old, "token") if old == "learner" else (old, None)
    )


def test_intervals_and_epochs_of_the_table_rollout_count(tmp_path: Path) -> None:
    keys = {"rollout.total_epochs": 7, "rollout.test_freq": 5, "trainer.total_epochs": 1, "trainer.test_freq": 1}
    run = loaded(convert_keys(FULLY | keys, program="fully_async_main"), tmp_path)
    assert (run.trainer.epochs, run.trainer.eval_interval) == (7, 20)


def test_one_step_off_is_one_step_off(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.experimental.one_step_off_policy.main_ppo --config-name=one_step_off_ppo_trainer.yaml "
        "actor_rollout_ref.model.path=a/b algorithm.adv_estimator=grpo rollout.n_gpus_per_node=2 "
        "trainer.n_gpus_per_node=6\n"
    )
    conversion = convert_verl(str(script))
    run = loaded(conversion, tmp_path)
    assert (conversion.refused, conversion.remarks[1:]) == ((), ())
    asynchronous = run.trainer.fully_async
    assert (asynchronous.enabled, asynchronous.max_staleness_steps, asynchronous.interrupt_generation) == (
        True,
        1,
        False,
    )
    assert (run.generator.inference_engine.num_engines, run.trainer.placement.colocate_all) == (1, False)


@pytest.mark.parametrize("table", ["", "reward."])
def test_a_reward_function_is_found_under_both_names(table: str, tmp_path: Path) -> None:
    keys = {f"{table}custom_reward_function.path": "rewards.py"}
    conversion = convert_keys(MODEL | keys)
    assert loaded(conversion, tmp_path).environment.env_class == "rewards.py:compute_score"
    assert conversion.remarks == ()
    arguments = f"{table}custom_reward_function.reward_kwargs.scale"
    assert "arguments of a reward function" in line_of(convert_keys(MODEL | keys | {arguments: 2}), arguments).reason


@pytest.mark.parametrize(
    ("manager", "kwargs"),
    [
        ("reward_model.reward_manager", "reward_model.reward_kwargs."),
        ("reward.reward_manager.name", "reward.reward_kwargs."),
    ],
)
def test_the_penalty_on_long_answers_belongs_to_the_manager_dapo(manager: str, kwargs: str, tmp_path: Path) -> None:
    overlong = {"enable": True, "len": 64, "penalty_factor": 1.0}
    keys = {f"{kwargs}overlong_buffer_cfg.{name}": value for name, value in overlong.items()} | {
        kwargs + "max_resp_len": 300
    }
    shaping = loaded(convert_keys(MODEL | keys | {manager: "dapo"}), tmp_path).trainer.algorithm.reward_shaping.overlong
    assert (shaping.buffer_len, shaping.max_len) == (64, 300)
    naive = line_of(convert_keys(MODEL | keys), kwargs + "overlong_buffer_cfg.len")
    assert naive.outcome == "needless" and "not dapo" in naive.reason
    filtered = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "reward", manager: "dapo"}
    metric = line_of(convert_keys(MODEL | keys | filtered), "algorithm.filter_groups.metric")
    assert metric.outcome == "not yet" and "penalty on long answers" in metric.reason


@pytest.mark.parametrize(
    ("keys", "source", "reason"),
    [
        ({"reward.reward_model.enable": True}, "reward.reward_model.enable", "reward models that verl serves"),
        ({"reward.reward_manager.name": "gdpo"}, "reward.reward_manager.name", "reward manager 'gdpo'"),
        ({"reward.sandbox_fusion.url": "http://a"}, "reward.sandbox_fusion.url", "Sandbox Fusion"),
        ({"reward.reward_manager.source": "importlib"}, "reward.reward_manager.source", "custom reward managers"),
    ],
)
def test_what_a_reward_asks_for_and_is_not_there_is_refused(keys: dict[str, Any], source: str, reason: str) -> None:
    line = line_of(convert_keys(MODEL | keys), source)
    assert line.is_refused and reason in line.reason


@pytest.mark.parametrize(
    ("of_model", "of_optimizer", "extra_keys", "expected"),
    [
        (0.5, None, {}, 0.5),
        (None, 0.4, {}, 0.4),
        (0.5, 1.0, {}, 0.5),
        (1.0, 0.4, {"trainer.use_v1": True}, 0.4),
        (0.5, 0.4, {"model_engine": "megatron"}, 0.4),
    ],
)
def test_gradients_are_clipped_by_the_setting_that_the_version_reads(
    of_model: float | None, of_optimizer: float | None, extra_keys: dict[str, Any], expected: float, tmp_path: Path
) -> None:
    actor = "actor_rollout_ref.actor."
    keys = {actor + "grad_clip": of_model, actor + "optim.clip_grad": of_optimizer}
    clip_keys = {key: value for key, value in keys.items() if value is not None}
    run = loaded(convert_keys(MODEL | clip_keys | extra_keys), tmp_path)
    assert run.trainer.policy.optimizer_config.max_grad_norm == expected


@pytest.mark.parametrize(("engine", "rank"), [("fsdp", 8), ("megatron", 16)])
def test_adapters_are_those_that_the_strategy_reads(engine: str, rank: int, tmp_path: Path) -> None:
    keys = {"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.lora.rank": 16, "model_engine": engine}
    run = loaded(convert_keys(MODEL | keys), tmp_path)
    assert (run.trainer.policy.model.lora.rank, run.trainer.strategy) == (rank, engine)


def test_megatrons_optimizer_options_are_carried_over(tmp_path: Path) -> None:
    optim = "actor_rollout_ref.actor.optim."
    keys = {optim + "override_optimizer_config.optimizer_cpu_offload": True, optim + "lr_decay_style": "cosine"}
    keys |= {optim + "min_lr": 1e-7, optim + "lr": 1e-6, "model_engine": "megatron"}
    policy = loaded(convert_keys(MODEL | keys), tmp_path).trainer.policy
    assert policy.megatron_config.optimizer_config_kwargs["optimizer_cpu_offload"] is True
    assert (policy.optimizer_config.scheduler, policy.optimizer_config.min_lr_ratio) == ("cosine", pytest.approx(0.1))
    option = optim + "override_optimizer_config.amsgrad"
    assert line_of(convert_keys(MODEL | {option: True}), option).is_refused


@pytest.mark.parametrize(
    ("engine", "overrides", "replaced", "expected"),
    [
        ("fsdp", {"lr": 3e-6}, {"lr": 1e-6}, {"lr": 3e-6}),
        ("fsdp", {"lr": "3e-6"}, {}, {"lr": 3e-6}),
        ("fsdp", {"weight_decay": 0.1}, {"weight_decay": 0.2}, {"weight_decay": 0.1}),
        ("fsdp", {"betas": [0.9, 0.95]}, {"betas": [0.8, 0.9]}, {"adam_betas": (0.9, 0.95)}),
        ("fsdp", {"eps": 1e-7}, {}, {"adam_eps": 1e-7}),
        ("megatron", {"lr": 3e-6}, {"lr": 1e-6}, {"lr": 3e-6}),
        ("megatron", {"adam_beta2": 0.95, "adam_eps": 1e-7}, {}, {"adam_betas": (0.9, 0.95), "adam_eps": 1e-7}),
        ("megatron", {"adam_beta1": 0.8}, {"betas": [0.7, 0.9]}, {"adam_betas": (0.8, 0.999)}),
        ("megatron", {"clip_grad": 0.5}, {"clip_grad": 0.2}, {"max_grad_norm": 0.5}),
        ("megatron", {"lr": 1e-5, "min_lr": 1e-6}, {"min_lr": 1e-7}, {"lr": 1e-5, "min_lr_ratio": pytest.approx(0.1)}),
        ("megatron", {"optimizer": "adam"}, {"optimizer": "sgd"}, {"optimizer": "adamw"}),
    ],
)
@pytest.mark.parametrize(("table", "model"), [("actor_rollout_ref.actor", "policy"), ("critic", "critic")])
def test_an_argument_of_the_optimizer_is_our_field_and_replaces_verls_setting(
    engine: str,
    overrides: dict[str, Any],
    replaced: dict[str, Any],
    expected: dict[str, Any],
    table: str,
    model: str,
    tmp_path: Path,
) -> None:
    keys = {f"{table}.optim.override_optimizer_config.{name}": value for name, value in overrides.items()}
    plain = {f"{table}.optim.{name}": value for name, value in replaced.items()}
    with_critic = {"critic.model.path": "a/b", "algorithm.adv_estimator": "gae"} if model == "critic" else {}
    conversion = convert_keys(MODEL | with_critic | keys | plain | {"model_engine": engine})
    optimizer = getattr(loaded(conversion, tmp_path).trainer, model).optimizer_config
    assert {name: getattr(optimizer, name) for name in expected} == expected
    assert conversion.refused == ()
    assert [problem for problem in conversion.problems if problem.severity == "error"] == []
    for name in plain:
        line = line_of(conversion, name)
        assert line.outcome == "needless" and "override_optimizer_config." in line.reason


def test_the_weight_decay_of_megatron_is_the_one_that_its_schedule_sets(tmp_path: Path) -> None:
    optim = "actor_rollout_ref.actor.optim."
    both = {optim + "weight_decay": 0.2, optim + "override_optimizer_config.weight_decay": 0.1}
    conversion = convert_keys(MODEL | both | {"model_engine": "megatron"})
    assert loaded(conversion, tmp_path).trainer.policy.optimizer_config.weight_decay == 0.2
    line = line_of(conversion, optim + "override_optimizer_config.weight_decay")
    assert (line.outcome, line.reason.partition(":")[0]) == ("needless", "verl uses optim.weight_decay instead")


def test_a_reference_model_has_the_policys_overrides(tmp_path: Path) -> None:
    keys = {"actor_rollout_ref.model.override_config.rope_theta": 10000, "actor_rollout_ref.actor.use_kl_loss": True}
    trainer = loaded(convert_keys(MODEL | keys), tmp_path).trainer
    assert trainer.ref.model_config_kwargs == trainer.policy.model_config_kwargs == {"rope_theta": 10000}


def test_a_critic_has_the_policys_mini_batch(tmp_path: Path) -> None:
    keys = {"actor_rollout_ref.model.path": "a/b", MINI: 32, "critic.model.path": "a/b"}
    assert loaded(convert_keys(keys), tmp_path).trainer.critic_mini_batch_size == 32
    epochs = line_of(convert_keys(keys | {"critic.ppo_epochs": 2}), "critic.ppo_epochs")
    assert "only the critic has" in epochs.reason
    without = line_of(convert_keys(MODEL | {"critic.optim.lr": 1e-4}), "critic.optim.lr")
    assert without.outcome == "needless" and "no critic" in without.reason
