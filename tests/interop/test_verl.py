"""verl's scripts and files become our tables, or the report says truly why a setting does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from skyrl.config import load
from skyrl.interop.report import Conversion, Line
from skyrl.interop.verl.convert import convert_keys, convert_verl
from skyrl.tree.sparse import as_toml_has_it
from tests.interop.corpora import RECORDED, option_sets

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
CORRECTION = "algorithm.rollout_correction."
BYPASS = CORRECTION + "bypass_mode"
REF_DTYPES = "actor_rollout_ref.ref.fsdp_config.mixed_precision."
WHOLE: dict[str, Any] = {"actor_rollout_ref.model.path": "a/b", "algorithm.adv_estimator": "grpo"}
"""The least that is a run."""

PPO = {"algorithm.adv_estimator": "gae"}

SCRIPT = """#!/bin/bash
# python3 -m verl.trainer.main_ppo trainer.total_epochs=99
model=Qwen/Qwen2.5-0.5B-Instruct
max_response_length=$((1024 * 2))
GPUS=${GPUS:-4}
exp="grpo_$(date +%s)"
ARGS=(
    data.train_batch_size=64  # prompts
    data.max_response_length=${max_response_length}
)
python3 -m verl.trainer.main_ppo "${ARGS[@]}" \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path="$model" \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.max_num_batched_tokens=$((512 + max_response_length)) \\
    +actor_rollout_ref.model.override_config.rope_theta=10000 \\
    trainer.logger='["console","wandb"]' \\
    trainer.experiment_name=${exp} \\
    trainer.n_gpus_per_node=$GPUS $@
"""


def loaded(conversion: Conversion, folder: Path) -> Any:
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    return load([file], environ={}).config


def line_of(keys: dict[str, Any], source: str) -> Line:
    return next(line for line in convert_keys(WHOLE | keys).lines if line.source == source)


def test_a_script_is_read_with_its_variables_sums_and_arrays(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    run = loaded(convert_verl(str(script)), tmp_path)
    assert run.trainer.policy.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert run.generator.sampling_params.max_generate_length == 2048
    assert run.generator.inference_engine.max_num_batched_tokens == 2560
    assert run.generator.inference_engine.num_engines == 2  # 4 GPUs, and verl's default of 2 for each engine
    assert (run.trainer.train_batch_size, run.trainer.epochs) == (64, 30)
    assert run.trainer.policy.model_config_kwargs["rope_theta"] == 10000
    assert run.trainer.logger == ("console", "wandb")


def test_verls_defaults_are_written_where_a_script_is_silent(tmp_path: Path) -> None:
    conversion = convert_keys(WHOLE)
    run = loaded(conversion, tmp_path)
    algorithm = run.trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.use_kl_loss) == ("dual_clip", False)
    assert (run.generator.n_samples_per_prompt, run.generator.sampling_params.max_generate_length) == (1, 512)
    assert (run.trainer.ckpt_interval, run.trainer.eval_interval) == (-1, -1)
    assert {line.source for line in conversion.defaults} >= {ROLLOUT + "n", "trainer.total_epochs"}


def test_only_gae_selects_a_critic(tmp_path: Path) -> None:
    keys = {"actor_rollout_ref.model.path": "a/b", "critic.model.path": "c/d"}
    run = loaded(convert_keys(keys), tmp_path)
    assert run.trainer.algorithm.advantage_estimator == "gae"
    assert run.trainer.critic.model.path == "c/d"
    assert run.trainer.critic.optimizer_config.lr == 1e-5
    assert run.trainer.placement.critic_num_gpus_per_node == 8
    assert line_of({"critic.enable": True}, "critic.enable").outcome == "refused"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({ACTOR + "clip_ratio_low": 0.1, ACTOR + "clip_ratio_high": 0.3}, {"eps_clip_low": 0.1, "eps_clip_high": 0.3}),
        ({ACTOR + "clip_ratio": 0.4}, {"eps_clip_low": 0.2, "eps_clip_high": 0.2}),
        ({ACTOR + "clip_ratio": 0.4, ACTOR + "clip_ratio_low": None}, {"eps_clip_low": 0.4, "eps_clip_high": 0.2}),
        ({ACTOR + "policy_loss.loss_mode": "gspo"}, {"policy_loss_type": "gspo", "loss_reduction": "sequence_mean"}),
        ({ACTOR + "loss_agg_mode": "seq-mean-token-mean"}, {"loss_reduction": "sequence_mean"}),
        ({ACTOR + "loss_agg_mode": "seq-mean-token-sum"}, {"max_seq_len": 1}),
        ({ACTOR + "loss_agg_mode": "seq-mean-token-sum-norm"}, {"max_seq_len": 512}),
        ({ACTOR + "entropy_coeff": 0.01}, {"use_entropy_loss": True, "entropy_loss_coef": 0.01}),
        ({ACTOR + "use_kl_loss": True, ACTOR + "kl_loss_coef": 0.2}, {"use_kl_loss": True, "kl_loss_coef": 0.2}),
        ({ACTOR + "use_kl_loss": True, ACTOR + "kl_loss_type": "k3+"}, {"kl_estimator_type": "k2"}),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": 0.3},
            {"use_kl_in_reward": True, "kl_estimator_type": "k1", "kl_loss_coef": 0.3},
        ),
        ({"algorithm.kl_ctrl.kl_coef": 0.3}, {"kl_loss_coef": 0.001}),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, {"advantage_estimator": "reinforce++"}),
    ],
)
def test_the_objective_is_the_one_that_verl_computes(
    keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    algorithm = loaded(convert_keys(WHOLE | keys), tmp_path).trainer.algorithm
    assert {name: getattr(algorithm, name) for name in expected} == expected


def test_in_bypass_mode_the_ratio_is_to_the_engine_and_nothing_else_is_corrected(tmp_path: Path) -> None:
    keys = {BYPASS: True, CORRECTION + "loss_type": "ppo_clip"}
    keys |= {CORRECTION + "rollout_is": "token", CORRECTION + "rollout_is_threshold": 5.0}
    algorithm = loaded(convert_keys(WHOLE | keys), tmp_path).trainer.algorithm
    assert (algorithm.old_logprobs, algorithm.off_policy_correction.tis_ratio_type) == ("engine", None)
    corrected = loaded(convert_keys(WHOLE | keys | {BYPASS: False}), tmp_path).trainer.algorithm
    assert (corrected.old_logprobs, corrected.off_policy_correction.tis_ratio_type) == ("learner", "token")
    assert corrected.off_policy_correction.token_tis_ratio_clip_high == 5.0


def test_dtypes_that_differ_from_the_usual_ones_are_carried_over(tmp_path: Path) -> None:
    usual = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    keys = {f"{ACTOR}fsdp_config.mixed_precision.{name}": dtype for name, dtype in usual.items()}
    assert loaded(convert_keys(WHOLE | keys), tmp_path).trainer.policy.fsdp_config.mixed_precision is None
    keys |= {ACTOR + "fsdp_config.dtype": "float16", ACTOR + "fsdp_config.mixed_precision.reduce_dtype": "bf16"}
    precision = loaded(convert_keys(WHOLE | keys), tmp_path).trainer.policy.fsdp_config.mixed_precision
    assert (precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype) == ("float16", "bf16", "fp32")


@pytest.mark.parametrize(
    ("of_data", "of_engines", "longest"),
    [(None, None, 512), (1024, None, 1024), (1024, 300, 300), (None, 300, 300), (300, 300, 300), (1024, "ref", 1024)],
)
def test_the_longest_answer_is_the_one_that_verls_engines_read(
    of_data: int | None, of_engines: int | str | None, longest: int, tmp_path: Path
) -> None:
    reference = "${oc.select:data.max_response_length,512}"
    lengths = {
        "data.max_response_length": of_data,
        ROLLOUT + "response_length": reference if of_engines == "ref" else of_engines,
        ACTOR + "loss_agg_mode": "seq-mean-token-sum-norm",
    }
    conversion = convert_keys(WHOLE | {key: value for key, value in lengths.items() if value is not None})
    run = loaded(conversion, tmp_path)
    assert run.generator.sampling_params.max_generate_length == longest
    assert run.trainer.algorithm.max_seq_len == longest
    lines = {line.source: line for line in (*conversion.lines, *conversion.defaults)}
    for line in lines.values():
        if line.reason.startswith("set by") and line.source in lengths:
            assert lines[line.reason.removeprefix("set by ")].targets


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("role", ["actor_rollout_ref.", "critic."])
def test_dropout_of_a_models_configuration_acts_in_updates(role: str, share: float, tmp_path: Path) -> None:
    keys = WHOLE | PPO | {"critic.model.path": "c/d", ACTOR + "use_kl_loss": True}
    keys |= {role + "model.override_config.attention_dropout": share}
    conversion = convert_keys(keys)
    trainer = loaded(conversion, tmp_path).trainer
    learner = trainer.critic if role == "critic." else trainer.policy
    assert learner.model_config_kwargs == {"attention_dropout": share}
    assert learner.use_dropout is (share > 0)
    assert not [problem for problem in conversion.problems if "model_config_kwargs" in problem.path]


def test_under_megatron_the_models_configuration_is_that_of_megatron(tmp_path: Path) -> None:
    keys = WHOLE | {"model_engine": "megatron", "actor_rollout_ref.model.override_config.rms_norm_eps": 1e-5}
    policy = loaded(convert_keys(keys), tmp_path).trainer.policy
    assert policy.megatron_config.model_config_kwargs == {"rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("keys", "temperature", "is_told"),
    [
        ({"temperature": 0.7}, 0.7, True),
        ({"temperature": 0.7, "do_sample": False}, 0.7, True),
        ({"temperature": 0.7, "do_sample": True}, 0.7, False),
        ({"temperature": 0, "do_sample": False}, 0, False),
        ({"do_sample": False}, None, False),
    ],
)
def test_evaluation_samples_at_the_temperature_of_verl(
    keys: dict[str, Any], temperature: float | None, is_told: bool, tmp_path: Path
) -> None:
    values = {f"{ROLLOUT}val_kwargs.{name}": value for name, value in keys.items()} | {"trainer.test_freq": 5}
    conversion = convert_keys(WHOLE | values | {"data.val_files": "b.parquet"})
    sampling = loaded(conversion, tmp_path).generator.eval_sampling_params
    assert (sampling and sampling.temperature) == temperature
    assert any("Earlier versions are greedy" in remark for remark in conversion.remarks) is is_told
    assert not [problem for problem in conversion.problems if "eval_sampling_params" in problem.path]


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_a_seed_of_an_order_matters_only_with_one(is_shuffled: bool) -> None:
    line = line_of({"data.seed": 3, "data.shuffle": is_shuffled}, "data.seed")
    assert line.is_refused is is_shuffled


@pytest.mark.parametrize(
    ("name", "value", "outcome"),
    [
        ("amsgrad", False, "needless"),
        ("amsgrad", True, "not yet"),
        ("fused", True, "needless"),
        ("a", False, "not yet"),
    ],
)
def test_arguments_of_an_optimizer_that_are_torchs_defaults_need_nothing(name: str, value: bool, outcome: str) -> None:
    key = f"{ACTOR}optim.override_optimizer_config.{name}"
    assert line_of({key: value}, key).outcome == outcome


def test_the_report_says_where_checkpoints_are_if_the_file_does_not() -> None:
    saving = WHOLE | {"trainer.save_freq": 5, "trainer.experiment_name": "x"}
    [other] = convert_keys(saving).other_defaults
    assert (other.source, other.source_default) == ("trainer.default_local_dir", "checkpoints/verl_examples/x")
    assert (other.path, other.skyrl_default) == ("trainer.ckpt_path", "runs/x/checkpoints")
    assert convert_keys(saving | {"trainer.default_local_dir": "a"}).other_defaults == ()
    supervised = {"model.path": "a/b", "optim.lr": 1e-5, "trainer.save_freq": 5}
    [other] = convert_keys(supervised).other_defaults
    assert (other.source_default, other.path) == ("checkpoints/gsm8k-sft/test", "ckpt_path")


def test_shuffle_false_is_converted(tmp_path: Path) -> None:
    assert not loaded(convert_keys(WHOLE | {"data.shuffle": False}), tmp_path).data.shuffle


def test_cispos_bounds_are_those_of_its_weight(tmp_path: Path) -> None:
    keys = {ACTOR + "policy_loss.loss_mode": "cispo", ACTOR + "clip_ratio_low": 10, ACTOR + "clip_ratio_high": 0.2}
    cispo = loaded(convert_keys(WHOLE | keys), tmp_path).trainer.algorithm.cispo
    assert (cispo.cispo_eps_clip_low, cispo.cispo_eps_clip_high) == (10, 0.2)


@pytest.mark.parametrize(
    ("keys", "source", "outcome", "reason"),
    [
        ({"trainer.resume_from_path": "a"}, "trainer.resume_from_path", "needless", "resume_mode is not resume_path"),
        (
            {"trainer.resume_from_path": "a", "trainer.resume_mode": "disable"},
            "trainer.resume_from_path",
            "needless",
            "resume_mode is not resume_path",
        ),
        ({ACTOR + "kl_loss_coef": 0.1}, ACTOR + "kl_loss_coef", "needless", "use_kl_loss is off"),
        ({ACTOR + "clip_ratio": 0.3}, ACTOR + "clip_ratio", "needless", "which default to 0.2"),
        ({ACTOR + "tau_pos": 2.0}, ACTOR + "tau_pos", "needless", "no effect: the loss is vanilla"),
        ({ROLLOUT + "name": "trtllm"}, ROLLOUT + "name", "not yet", "engine 'trtllm'"),
        ({BYPASS: False}, BYPASS, "needless", "off"),
        *(
            (PPO | {"critic.loss_agg_mode": mode}, "critic.loss_agg_mode", outcome, reason)
            for mode, outcome, reason in (
                ("token-mean", "needless", "the value loss is averaged over tokens"),
                ("${oc.select:actor_rollout_ref.actor.loss_agg_mode,token-mean}", "needless", "averaged over tokens"),
                ("seq-mean-token-mean", "not yet", "a value loss reduced by 'seq-mean-token-mean'"),
                ("seq-mean-token-sum", "not yet", "a value loss reduced by 'seq-mean-token-sum'"),
                ("seq-mean-token-sum-norm", "not yet", "a value loss reduced by 'seq-mean-token-sum-norm'"),
            )
        ),
        ({"critic.loss_agg_mode": "seq-mean-token-sum"}, "critic.loss_agg_mode", "needless", "no critic is trained"),
        (
            PPO | {ACTOR + "policy_loss.loss_mode": "gspo", ACTOR + "loss_agg_mode": "seq-mean-token-sum"},
            ACTOR + "loss_agg_mode",
            "not yet",
            "a value loss reduced by 'seq-mean-token-sum'",
        ),
        (
            {BYPASS: True, CORRECTION + "loss_type": "reinforce"},
            CORRECTION + "loss_type",
            "not yet",
            "loss 'reinforce' of bypass mode",
        ),
        (
            {REF_DTYPES + "reduce_dtype": "bf16"},
            REF_DTYPES + "reduce_dtype",
            "needless",
            "the reference model has no gradients",
        ),
        ({"data.truncation": "left"}, "data.truncation", "not yet", "truncating prompts"),
        ({"data.truncation": "error"}, "data.truncation", "needless", "longer prompts are skipped"),
        (
            {"trainer.resume_mode": "never"},
            "trainer.resume_mode",
            "refused",
            "verl supports: auto, disable, resume_path",
        ),
        ({"trainer.logger": ["clearml"]}, "trainer.logger", "not yet", "tracker clearml"),
        ({"trainer.total_epoch": 3}, "trainer.total_epoch", "refused", "not known to this converter"),
        ({"reward_model.enable": True}, "reward_model.enable", "not yet", "reward models that verl serves"),
        (
            {ROLLOUT + "tensor_model_parallel_size": 3},
            ROLLOUT + "tensor_model_parallel_size",
            "refused",
            "8 GPUs cannot",
        ),
        ({"trainer.nnodes": "$NODES"}, "trainer.nnodes", "refused", "not a number of nodes"),
        (
            {"algorithm.adv_estimator": "grpo_passk"},
            "algorithm.adv_estimator",
            "not yet",
            "advantage estimator 'grpo_passk'",
        ),
    ],
)
def test_every_setting_that_is_left_out_has_its_reason(
    keys: dict[str, Any], source: str, outcome: str, reason: str
) -> None:
    line = line_of(keys, source)
    assert (line.outcome, line.targets) == (outcome, ())
    assert reason in line.reason


@pytest.mark.parametrize(
    ("keys", "is_told"),
    [
        (PPO | {ACTOR + "loss_agg_mode": "seq-mean-token-sum"}, True),
        (PPO | {ACTOR + "loss_agg_mode": "seq-mean-token-sum-norm"}, True),
        (PPO | {ACTOR + "loss_agg_mode": "seq-mean-token-mean"}, True),
        (PPO | {ACTOR + "loss_agg_mode": "token-mean"}, False),
        (PPO | {ACTOR + "loss_agg_mode": "seq-mean-token-sum", "critic.loss_agg_mode": "token-mean"}, False),
        ({ACTOR + "loss_agg_mode": "seq-mean-token-sum"}, False),
    ],
)
def test_a_reduction_that_verls_critic_takes_over_is_told(keys: dict[str, Any], is_told: bool) -> None:
    assert ("the critic's loss" in line_of(keys, ACTOR + "loss_agg_mode").reason) == is_told


def test_a_reward_function_of_verls_is_called_as_it_is(tmp_path: Path) -> None:
    keys = {"custom_reward_function.path": "rewards.py", "custom_reward_function.name": "score"}
    conversion = convert_keys(WHOLE | keys)
    assert loaded(conversion, tmp_path).environment.env_class == "rewards.py:score"
    assert conversion.remarks == ()
    assert "data_source" in convert_keys(WHOLE).remarks[0]


def test_megatrons_sizes_convert_and_the_strategy_follows(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' "
        "actor_rollout_ref.model.path=a/b actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2\n"
    )
    conversion = convert_verl(str(script))
    assert conversion.refused == ()
    assert conversion.tables["trainer"]["policy"]["megatron_config"] == {"tensor_model_parallel_size": 2}
    assert conversion.tables["trainer"]["strategy"] == "megatron"
    assert "trainer.strategy" not in {problem.path for problem in conversion.problems}


def test_the_report_names_the_file_that_a_script_overrides(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo --config-name=my_base actor_rollout_ref.model.path=a/b\n")
    assert "my_base.yaml" in convert_verl(str(script)).remarks[-1]


def test_every_field_of_verls_own_configuration_is_known() -> None:
    fields = json.loads((RECORDED / "verl_fields_2026_01.json").read_text())
    lines = convert_keys(fields | {ROLLOUT + "name": "vllm"}).lines
    assert [line.source for line in lines] == list(fields)
    assert [f"{line.source}: {line.reason}" for line in lines if line.is_refused] == []


def test_the_option_sets_of_examples_are_converted_or_refused_by_capability(tmp_path: Path) -> None:
    examples = {option_set.name: option_set.conversion for option_set in option_sets("verl")}
    assert len(examples) >= 12
    for name, conversion in examples.items():
        refused = [f"{line.source}: {line.reason}" for line in conversion.lines if line.outcome == "refused"]
        assert [line for line in refused if "replace it with its value" not in line] == [], name
        if not conversion.lost:
            loaded(conversion, tmp_path)


def test_most_of_the_examples_become_runs() -> None:
    complete = [
        option_set.name
        for option_set in option_sets("verl")
        if not option_set.conversion.refused and not errors(option_set.conversion)
    ]
    assert len(complete) == 10


def errors(conversion: Conversion) -> list[str]:
    return [problem.message for problem in conversion.problems if problem.severity == "error"]


def test_the_experts_of_a_rollout_are_replayed_where_verl_replays_them() -> None:
    replay = ACTOR + "router_replay.mode"
    line = line_of({replay: "R3"}, replay)
    assert line.targets == (
        "trainer.policy.moe_enable_routing_replay",
        "generator.inference_engine.enable_return_routed_experts",
    )
    assert line_of({replay: "disabled"}, replay).outcome == "needless"
    assert line_of({replay: "R2"}, replay).outcome == "not yet"
    returned = ROLLOUT + "enable_rollout_routing_replay"
    assert line_of({returned: True}, returned).targets == ("generator.inference_engine.enable_return_routed_experts",)
