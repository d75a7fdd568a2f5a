"""AReaL's experiment files: every key maps to ours, or is listed with what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from skyrl.config import SkyRLTrainConfig, load
from skyrl.interop.areal.convert import convert_areal, convert_keys
from skyrl.interop.report import Conversion, Line
from skyrl.tree import get_at
from skyrl.tree.sparse import as_toml_has_it
from tests.interop.corpora import Converted, areal_files


@pytest.fixture(scope="module")
def files(reference: Path) -> tuple[Converted, ...]:
    """AReaL's examples of 2025."""
    return areal_files(reference, "areal_yaml_keys.json")


def loaded(conversion: Conversion, folder: Path) -> Any:
    """As the command writes it and `skyrl run` reads it."""
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    run = load([file]).config
    assert type(run) is conversion.root
    return run


def line_of(keys: dict[str, Any], source: str) -> Line:
    return next(line for line in convert_keys(keys).lines if line.source == source)


def test_evaluation_draws_as_training_does_unless_it_has_settings(tmp_path: Path) -> None:
    drawn: dict[str, Any] = {"gconfig.stop": ["x"], "gconfig.frequency_penalty": 0.5, "gconfig.min_new_tokens": 2}
    run = loaded(convert_keys({"actor.path": "a/b", **drawn}), tmp_path)
    evaluation = run.generator.eval_sampling_params
    assert (evaluation.stop, evaluation.frequency_penalty, evaluation.min_new_tokens) == (("x",), 0.5, 2)
    assert evaluation.temperature == 1.0  # the default of AReaL's training
    own = loaded(convert_keys({"actor.path": "a/b", **drawn, "eval_gconfig.temperature": 0.6}), tmp_path)
    assert (own.generator.eval_sampling_params.stop, own.generator.eval_sampling_params.temperature) == (None, 0.6)


def test_every_key_of_every_file_has_a_fate_and_a_loadable_result(files: tuple[Converted, ...], tmp_path: Path) -> None:
    for file in files:
        lines = file.conversion.lines
        assert [line.source for line in lines] == list(file.facts)
        assert [line for line in lines if line.outcome == "refused"] == []
        assert all(line.reason for line in lines if line.outcome in ("not yet", "needless"))
        loaded(file.conversion, tmp_path)


def test_renamed_settings_are_written_to_our_paths(files: tuple[Converted, ...], tmp_path: Path) -> None:
    for file in files:
        keys, run = file.facts, loaded(file.conversion, tmp_path)
        if run.kind != "rl":
            continue
        expected = {
            "trainer.seed": keys.get("seed", 42),
            "trainer.policy.model.path": keys.get("actor.path", SkyRLTrainConfig().trainer.policy.model.path),
            "trainer.train_batch_size": keys.get("train_dataset.batch_size", keys.get("dataset.train_bs_n_seqs"))
            if "gconfig.n_samples" in keys or "group_size" in keys
            else None,
            "generator.n_samples_per_prompt": keys.get("gconfig.n_samples", keys.get("group_size")),
            "trainer.policy.optimizer_config.lr": float(keys.get("actor.optimizer.lr", 1e-6)),
        }
        for path, value in expected.items():
            assert value is None or get_at(run, path) == value, (file.name, path)


def test_allocation_mode_converts_to_engines_and_learners_on_separate_gpus(tmp_path: Path) -> None:
    run = loaded(convert_keys({"allocation_mode": "sglang.d4t2+megatron.d2p2t4", "n_gpus_per_node": 8}), tmp_path)
    engine, placement = run.generator.inference_engine, run.trainer.placement
    assert (engine.num_engines, engine.tensor_parallel_size, placement.colocate_all) == (4, 2, False)
    assert (placement.policy_num_nodes, placement.policy_num_gpus_per_node) == (2, 8)
    megatron = run.trainer.policy.megatron_config
    assert run.trainer.strategy == "megatron"
    assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size) == (4, 2)


def test_fsdp_learners_keep_their_degrees(tmp_path: Path) -> None:
    run = loaded(convert_keys({"actor.backend": "fsdp:d2t2c2", "rollout.backend": "vllm:d4"}), tmp_path)
    policy = run.trainer.policy
    assert (run.trainer.strategy, policy.tensor_parallel_size, policy.sequence_parallel_size) == ("fsdp2", 2, 2)
    assert run.trainer.placement.policy_num_gpus_per_node == 8


def test_copies_that_differ_from_their_original_are_refused() -> None:
    keys = {"gconfig.n_samples": 4, "actor.group_size": 8}
    assert line_of(keys, "actor.group_size").outcome == "refused"
    assert line_of(keys | {"actor.group_size": "${gconfig.n_samples}"}, "actor.group_size").outcome == "needless"


def test_kl_ctl_converts_to_a_penalty_in_the_reward(tmp_path: Path) -> None:
    algorithm = loaded(convert_keys({"actor.kl_ctl": 0.05}), tmp_path).trainer.algorithm
    assert (algorithm.use_kl_in_reward, algorithm.use_kl_loss, algorithm.kl_loss_coef) == (True, False, 0.05)
    assert algorithm.kl_estimator_type == "k1"


def test_reward_settings_convert_to_reward_shaping(tmp_path: Path) -> None:
    keys = {"actor.reward_scaling": 10.0, "actor.reward_bias": -0.5, "actor.reward_clip": 20.0}
    overlong = {"actor.overlong_reward_penalty": True, "actor.overlong_tokens": 512, "actor.overlong_penalty_factor": 2}
    norm = {"actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": "none"}
    shaping = loaded(convert_keys(keys | overlong | norm), tmp_path).trainer.algorithm.reward_shaping
    assert (shaping.scale, shaping.bias, shaping.clip) == (10.0, -0.5, 20.0)
    assert (shaping.overlong.buffer_len, shaping.overlong.penalty_factor, shaping.overlong.floor) == (512, 2.0, False)
    assert (shaping.norm.mean_level, shaping.norm.std_level) == ("group", None)


def test_reward_bias_of_the_older_system_is_negated(tmp_path: Path) -> None:
    run = loaded(convert_keys({"ppo.reward_output_bias": -0.5, "ppo.reward_output_scaling": 5}), tmp_path)
    assert (run.trainer.algorithm.reward_shaping.bias, run.trainer.algorithm.reward_shaping.scale) == (0.5, 5.0)


@pytest.mark.parametrize(("decoupled", "loss", "switch"), [(True, "decoupled", True), (False, "dual_clip", False)])
def test_c_clip_converts_for_the_chosen_loss(decoupled: bool, loss: str, switch: bool, tmp_path: Path) -> None:
    keys = {"actor.c_clip": 3.0, "actor.use_decoupled_loss": decoupled, "actor.behav_imp_weight_cap": 5.0}
    algorithm = loaded(convert_keys(keys), tmp_path).trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.decoupled.dual_clip, algorithm.clip_ratio_c) == (loss, switch, 3.0)
    assert algorithm.decoupled.behav_imp_weight_cap == 5.0


def test_dynamic_sampling_filters_uniform_groups_without_replacement(tmp_path: Path) -> None:
    algorithm = loaded(convert_keys({"actor.dynamic_sampling": True}), tmp_path).trainer.algorithm
    assert (algorithm.zero_variance_filter, algorithm.dynamic_sampling.type) == (True, None)


def test_micro_batches_are_counted_in_tokens(tmp_path: Path) -> None:
    keys = {"actor.mb_spec.max_tokens_per_mb": 8192, "ref.mb_spec.max_tokens_per_mb": 10240}
    assert loaded(convert_keys(keys), tmp_path).trainer.max_tokens_per_microbatch == 8192
    assert "one setting for all models" in line_of(keys, "ref.mb_spec.max_tokens_per_mb").reason


def test_numbers_written_as_text_are_converted(tmp_path: Path) -> None:
    run = loaded(convert_keys({"actor.optimizer.lr": "2e-6", "actor.optimizer.beta2": "0.95"}), tmp_path)
    assert run.trainer.policy.optimizer_config.lr == 2e-6
    assert run.trainer.policy.optimizer_config.adam_betas == (0.9, 0.95)


def test_absurd_numbers_are_converted_and_reported() -> None:
    conversion = convert_keys({"train_dataset.max_length": 2**64 - 1024})
    assert [(line.source, line.outcome) for line in conversion.lines] == [("train_dataset.max_length", "renamed")]
    assert [problem.path for problem in conversion.problems] == ["trainer.algorithm.max_seq_len"]


def test_optimizer_eps_converts_to_adam_eps(tmp_path: Path) -> None:
    run = loaded(convert_keys({"actor.optimizer.eps": "1e-5"}), tmp_path)
    assert run.trainer.policy.optimizer_config.adam_eps == 1e-5


def test_mini_batches_are_counted_in_prompts(tmp_path: Path) -> None:
    keys = {"train_dataset.batch_size": 256, "actor.ppo_n_minibatches": 4}
    assert loaded(convert_keys(keys), tmp_path).trainer.policy_mini_batch_size == 64
    assert line_of(keys | {"actor.ppo_n_minibatches": 3}, "actor.ppo_n_minibatches").outcome == "refused"


def test_steps_epochs_and_seconds_convert_to_one_interval(tmp_path: Path) -> None:
    keys = {"saver.freq_epochs": 1, "saver.freq_steps": None, "saver.freq_secs": None, "recover.freq_steps": None}
    keys |= {"evaluator.freq_epochs": 2, "evaluator.freq_steps": 10, "exp_ctrl.ckpt_freq_secs": 600}
    trainer = loaded(convert_keys(keys), tmp_path).trainer
    assert trainer.hf_save_interval == "1 epoch"
    assert trainer.eval_interval == (10, "2 epochs")
    assert trainer.ckpt_interval == "600s"
    assert line_of(keys, "saver.freq_secs").outcome == "needless"
    assert loaded(convert_keys({"recover.freq_steps": None}), tmp_path).trainer.ckpt_interval == -1


@pytest.mark.parametrize(
    ("key", "value", "outcome", "reason"),
    [
        ("actor.optimizer.type", "adam_bf16", "not yet", "other optimizers"),
        ("actor.optimizer.type", "adam", "needless", "AdamW is the default optimizer"),
        ("actor.mb_spec.n_mbs", 1, "needless", "the number of micro-batches is derived"),
        ("ref.mb_spec.n_mbs", 4, "needless", "one setting for all models: trainer.min_microbatches"),
        ("actor.disable_dropout", True, "needless", "dropout is off by default"),
        ("actor.disable_dropout", False, "needless", "acts only if the model's configuration sets dropout"),
        ("ref.disable_dropout", False, "needless", "dropout is off in models that are not trained"),
        ("actor.overlong_tokens", 512, "needless", "only read with actor.overlong_reward_penalty, which is off"),
        ("stats.freq_secs", 3600, "not yet", "intervals other than"),
        ("actor.optimizer.nesterov", True, "refused", "not known to this converter"),
        ("actor.optimizr.lr", 1e-5, "refused", "not known to this converter; did you mean actor.optimizer.lr?"),
        ("recover.mode", "sometimes", "refused", "unknown recovery mode 'sometimes'"),
        ("recover.mode", [], "refused", "unknown recovery mode []"),
        ("actor.optimizer.lr", "fast", "refused", "'fast' is not a number"),
    ],
)
def test_one_setting_converts_to_the_expected_outcome(key: str, value: Any, outcome: str, reason: str) -> None:
    line = line_of({key: value}, key)
    assert line.outcome == outcome
    assert reason in line.reason


@pytest.mark.parametrize(
    ("path", "split", "source"),
    [
        ("a/b", "train[:100]", "a/b:train[:100]"),
        ("a/b", None, "a/b"),
        ("a/b:test", "train", "a/b:test"),
        ("a.jsonl", "train", "a.jsonl"),
    ],
)
def test_a_split_is_appended_to_its_data_source(path: str, split: str | None, source: str) -> None:
    for table, field in (("train_dataset", "train_data"), ("valid_dataset", "val_data")):
        conversion = convert_keys({f"{table}.path": path, f"{table}.split": split})
        assert conversion.tables["data"] == {field: [source]}
        assert [line for line in conversion.lines if line.is_refused] == []


def test_sgd_and_min_microbatches_are_converted(tmp_path: Path) -> None:
    keys = {"actor.optimizer.type": "sgd", "actor.mb_spec.n_mbs": 4, "actor.mb_spec.max_tokens_per_mb": 4096}
    trainer = loaded(convert_keys(keys), tmp_path).trainer
    assert (trainer.policy.optimizer_config.optimizer, trainer.min_microbatches) == ("sgd", 4)


def test_a_separate_tokenizer_path_is_converted(tmp_path: Path) -> None:
    assert (
        loaded(convert_keys({"actor.path": "a/b", "tokenizer_path": "c/d"}), tmp_path).trainer.tokenizer_path == "c/d"
    )
    followed = convert_keys({"actor.path": "a/b", "tokenizer_path": "a/b"})
    assert loaded(followed, tmp_path).trainer.tokenizer_path is None


def test_init_from_scratch_is_converted(tmp_path: Path) -> None:
    keys = {"actor.init_from_scratch": True, "ref.init_from_scratch": True, "critic.init_from_scratch": False}
    trainer = loaded(convert_keys(keys), tmp_path).trainer
    assert [role.model.init_from_scratch for role in (trainer.policy, trainer.ref, trainer.critic)] == [
        True,
        True,
        False,
    ]


def test_a_file_is_read_with_its_references(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "gconfig: {n_samples: 4, temperature: 0.9}\nactor:\n  path: a/b\n  temperature: ${gconfig.temperature}\n"
        "  optimizer: {lr: 1e-5}\nref: {path: '${actor.path}'}\n"
    )
    conversion = convert_areal(str(file))
    assert {line.source for line in conversion.lines if line.outcome == "derived"} == {"actor.temperature", "ref.path"}
    assert loaded(conversion, tmp_path).trainer.policy.optimizer_config.lr == 1e-5


def test_the_report_remarks_on_the_training_script() -> None:
    converted = convert_keys({"train_dataset.path": "openai/gsm8k", "train_dataset.batch_size": 8})
    assert "set environment.env_class to the reward" in converted.report()
    assert converted.remarks and not convert_keys({"seed": 1}).remarks


HALF = {"actor.dtype": "float16", "ref.dtype": "float16", "actor.path": "m", "actor.kl_ctl": 0.1, "ref.path": "m"}


def test_float16_converts_to_param_dtype_with_loss_scaling(tmp_path: Path) -> None:
    keys = HALF | {"allocation_mode": "sglang:d4+fsdp:d4", "actor.optimizer.initial_loss_scale": 1024.0}
    trainer = loaded(convert_keys(keys), tmp_path).trainer
    for model in (trainer.policy, trainer.ref):
        assert model.fsdp_config.mixed_precision.param_dtype == "float16"
    assert trainer.policy.optimizer_config.initial_loss_scale == 1024.0
    in_bf16 = keys | {"actor.dtype": "bfloat16", "ref.dtype": "bfloat16"}
    assert line_of(in_bf16, "actor.optimizer.initial_loss_scale").outcome == "needless"


def test_float16_with_megatron_is_unsupported() -> None:
    keys = HALF | {"allocation_mode": "sglang:d4+megatron:d4", "actor.optimizer.initial_loss_scale": 1024.0}
    for source in ("actor.dtype", "actor.optimizer.initial_loss_scale"):
        line = line_of(keys, source)
        assert (line.outcome, line.reason) == ("not yet", "float16 training with Megatron")


CUT = {"actor.path": "m", "actor.ds_auto_tp.autotp_size": 2}


@pytest.mark.parametrize(
    "shares", [{"allocation_mode": "sglang:d4+fsdp:d4"}, {"actor.backend": "fsdp:d4", "rollout.backend": "sglang:d4"}]
)
@pytest.mark.parametrize("order", [1, -1])
def test_autotp_becomes_tensor_parallelism_of_deepspeed(shares: dict[str, Any], order: int, tmp_path: Path) -> None:
    trainer = loaded(convert_keys(dict(list((CUT | shares).items())[::order])), tmp_path).trainer
    assert (trainer.strategy, trainer.policy.tensor_parallel_size) == ("deepspeed", 2)


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({"actor.ds_auto_tp.autotp_size": 1}, "needless", "no effect at this value"),
        ({"actor.backend": "megatron:d4"}, "needless", "the backend is megatron"),
        ({"actor.backend": "fsdp:d2t2"}, "renamed", ""),
        ({"actor.backend": "fsdp:d1t4"}, "refused", "whose tensor-parallel size is 4"),
    ],
)
def test_autotp_that_contradicts_the_backend_is_refused(changes: dict[str, Any], outcome: str, reason: str) -> None:
    line = line_of(CUT | changes, "actor.ds_auto_tp.autotp_size")
    assert (line.outcome, reason in line.reason) == (outcome, True), line


@pytest.mark.parametrize("key", ["rollout.return_routed_experts", "sglang.enable_return_routed_experts"])
def test_return_routed_experts_is_converted(key: str, tmp_path: Path) -> None:
    keys = {"actor.path": "m", "allocation_mode": "sglang:d4+fsdp:d4"}
    engine = loaded(convert_keys(keys | {key: True}), tmp_path).generator.inference_engine
    assert engine.enable_return_routed_experts
    assert line_of(keys | {key: False}, key).outcome == "needless"
