"""TRL's arguments, in a program, on a command line or in YAML, become our tables, or the report says truly why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from skyrl.config import ConfigError, load
from skyrl.interop.report import Conversion, Line
from skyrl.interop.trl.convert import convert_keys, convert_trl
from skyrl.tree.sparse import as_toml_has_it
from tests.interop.corpora import RECORDED, option_sets

WHOLE: dict[str, Any] = {"model_name_or_path": "a/b", "num_processes": 1}
"""The least that is a run."""

IS_MODE = "vllm_importance_sampling_mode"
PROGRAM = """
import argparse
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

raise RuntimeError("it is not run")
parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=2e-6)
args = parser.parse_args()
LENGTH = 64
dataset = load_dataset("openai/gsm8k", "main", split="train")
config = GRPOConfig(
    learning_rate=args.learning_rate,
    max_completion_length=2 * LENGTH,
    num_generations=4,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    run_name=f"run-{LENGTH}",
    report_to=["wandb"],
)
peft = LoraConfig(r=32, target_modules="all-linear")
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct", args=config, train_dataset=dataset, reward_funcs=accuracy_reward,
    peft_config=peft,
)
"""

COMMAND = """
LR=3e-6
accelerate launch --num_processes 2 --config_file zero2.yaml grpo.py \\
    --model_name_or_path a/b --dataset_name c/d --learning_rate $LR --use_vllm \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps=4 --num_generations 8 \\
    --no_gradient_checkpointing --lora_target_modules q_proj v_proj --use_peft
"""


def loaded(conversion: Conversion, folder: Path) -> Any:
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    return load([file], environ={}).config


def line_of(keys: dict[str, Any], source: str) -> Line:
    return next(line for line in convert_keys(WHOLE | keys).lines if line.source == source)


def test_a_program_is_read_and_not_run(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    conversion = convert_trl(str(program))
    run = loaded(conversion, tmp_path)
    assert run.trainer.policy.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (run.trainer.policy.model.lora.rank, run.trainer.policy.model.lora.alpha) == (32, 8)  # peft's alpha
    assert run.trainer.policy.optimizer_config.lr == 2e-6
    assert run.generator.sampling_params.max_generate_length == 128
    assert run.data.train_data == ("openai/gsm8k:main:train",)
    assert run.environment.env_class == "trl.rewards:accuracy_reward"
    assert (run.trainer.train_batch_size, run.trainer.policy_mini_batch_size) == (4, 4)  # 16 samples in groups of 4
    refused = [line for line in conversion.lines if line.is_refused]
    assert [(line.source, line.reason) for line in refused] == [
        ("run_name", "computed by the program: replace it with its value")
    ]


def test_a_command_line_is_read_with_what_launches_it(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(COMMAND)
    run = loaded(convert_trl(str(script)), tmp_path)
    assert run.trainer.placement.policy_num_gpus_per_node == 2
    assert run.trainer.train_batch_size == 4  # 4 samples x 2 GPUs x 4 steps, in groups of 8
    assert run.trainer.policy.optimizer_config.lr == 3e-6
    assert run.trainer.gradient_checkpointing is False
    assert run.trainer.policy.model.lora.target_modules == ("q_proj", "v_proj")
    assert (run.generator.inference_engine.backend, run.generator.inference_engine.num_engines) == ("vllm", 2)
    assert run.data.train_data == ("c/d:train",)


def test_the_file_that_a_command_names_is_laid_under_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("model_name_or_path: a/b\nlearning_rate: 1e-5\nbeta: 0.1\n")
    script = tmp_path / "run.sh"
    script.write_text("trl grpo --config grpo.yaml --learning_rate 2e-5\n")
    run = loaded(convert_trl(str(script)), tmp_path)
    assert run.trainer.policy.optimizer_config.lr == 2e-5
    assert (run.trainer.algorithm.use_kl_loss, run.trainer.algorithm.kl_loss_coef) == (True, 0.1)


def test_trls_defaults_are_written_where_a_file_is_silent(tmp_path: Path) -> None:
    run = loaded(convert_keys(WHOLE), tmp_path)
    assert run.trainer.policy.optimizer_config.scheduler == "linear"
    assert run.trainer.policy.optimizer_config.weight_decay == 0.0
    assert (run.trainer.epochs, run.trainer.algorithm.use_kl_loss) == (3, False)
    assert (run.generator.n_samples_per_prompt, run.generator.inference_engine.backend) == (8, "torch")
    assert (run.trainer.train_batch_size, run.trainer.policy_mini_batch_size) == (1, 1)  # 8 samples, a group of 8


def test_shuffle_false_is_converted(tmp_path: Path) -> None:
    assert not loaded(convert_keys(WHOLE | {"shuffle_dataset": False}), tmp_path).data.shuffle


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"loss_type": "grpo"}, {"policy_loss_type": "regular", "loss_reduction": "sequence_mean"}),
        ({"loss_type": "bnpo"}, {"loss_reduction": "token_mean_legacy"}),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, {"max_seq_len": 512, "grpo_norm_by_std": False}),
        ({"epsilon": 0.1}, {"eps_clip_low": 0.1, "eps_clip_high": 0.1}),
        ({"epsilon": 0.1, "epsilon_high": 0.28}, {"eps_clip_low": 0.1, "eps_clip_high": 0.28}),
        ({"delta": 2.0}, {"policy_loss_type": "dual_clip", "clip_ratio_c": 2.0}),
        ({"importance_sampling_level": "sequence"}, {"policy_loss_type": "gspo"}),
        ({"beta": 0.04}, {"use_kl_loss": True, "kl_loss_coef": 0.04, "kl_estimator_type": "k3"}),
        ({"entropy_coef": 0.01}, {"use_entropy_loss": True, "entropy_loss_coef": 0.01}),
    ],
)
def test_the_objective_is_the_one_that_trl_computes(
    keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    algorithm = loaded(convert_keys(WHOLE | keys), tmp_path).trainer.algorithm
    assert {name: getattr(algorithm, name) for name in expected} == expected


def test_cispo_has_an_upper_bound_only(tmp_path: Path) -> None:
    run = loaded(convert_keys(WHOLE | {"loss_type": "cispo", "epsilon_high": 5.0}), tmp_path)
    cispo = run.trainer.algorithm.cispo
    assert (cispo.cispo_eps_clip_low, cispo.cispo_eps_clip_high) == (1.0, 4.0)  # weights in [0, 5]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"tis_ratio_type": "sequence", "sequence_mask_metric": "product", "product_mask_high": 3.0}),
        ({IS_MODE: "token_truncate"}, {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 3.0}),
        ({IS_MODE: "token_mask"}, {"token_mask_is_threshold_high": 3.0}),
        ({"vllm_importance_sampling_clip_max": 2.0}, {"sequence_tis_ratio_clip_high": 2.0, "product_mask_low": 0.0}),
        ({"vllm_importance_sampling_correction": False}, {"tis_ratio_type": None}),
    ],
)  # fmt: skip
def test_vllms_samples_are_corrected_as_trl_does(
    keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    run = loaded(convert_keys(WHOLE | {"use_vllm": True} | keys), tmp_path)
    correction = run.trainer.algorithm.off_policy_correction
    assert {name: getattr(correction, name) for name in expected} == expected


def test_optimizer_steps_are_counted_as_training_steps(tmp_path: Path) -> None:
    several = {"per_device_train_batch_size": 8, "steps_per_generation": 4, "max_steps": 100, "save_steps": 20}
    run = loaded(convert_keys(WHOLE | several), tmp_path)
    assert (run.trainer.train_batch_size, run.trainer.policy_mini_batch_size) == (4, 1)
    assert (run.trainer.max_training_steps, run.trainer.ckpt_interval) == (25, 5)  # 4 optimizer steps each
    assert line_of(several, "max_steps").reason == "in training steps of 4 optimizer steps"


def test_the_report_says_where_a_run_is_if_the_file_does_not() -> None:
    for kind, path in (("grpo", "trainer.run_path"), ("sft", "run_path")):
        [other] = convert_keys({**WHOLE, "run_name": "a"}, kind=kind).other_defaults
        assert (other.source_default, other.path, other.skyrl_default) == ("trainer_output", path, "runs/a")
        assert convert_keys({**WHOLE, "output_dir": "a"}, kind=kind).other_defaults == ()


def test_evaluation_draws_as_training_does(tmp_path: Path) -> None:
    drawn = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1}
    keys = drawn | {"generation_kwargs": {"length_penalty": 2}, "eval_strategy": "steps", "eval_steps": 10}
    generator = loaded(convert_keys(WHOLE | keys), tmp_path).generator
    assert {name: getattr(generator.eval_sampling_params, name) for name in drawn} == drawn
    assert generator.eval_sampling_params.additional_kwargs == {"length_penalty": 2}
    silent = loaded(convert_keys(WHOLE | {"eval_strategy": "steps", "eval_steps": 10}), tmp_path)
    assert silent.generator.eval_sampling_params.temperature == 1.0


@pytest.mark.parametrize(
    ("keys", "beginning"),
    [
        ({"max_prompt_length": 9, "loss_type": "dapo"}, "The arguments are those of TRL 0.27.2, as far"),
        ({"max_prompt_length": 9, "scale_rewards": "batch"}, "The arguments are those of TRL 0.27.2, as far"),
        ({"max_prompt_length": 9, "loss_type": "bnpo"}, "The arguments are those of TRL 0.18.0 or 0.27.2"),
        ({"loss_type": "dapo"}, "The arguments are those of TRL 0.27.2 or 1.16.0"),
        ({"loss_type": "bnpo", "scale_rewards": True}, ""),
    ],
)
def test_values_tell_the_version_whose_defaults_are_used(keys: dict[str, Any], beginning: str, tmp_path: Path) -> None:
    conversion = convert_keys(WHOLE | {"use_vllm": True} | keys)
    assert conversion.notice.startswith(beginning)
    assert bool(conversion.notice) == bool(beginning)
    assert loaded(conversion, tmp_path).trainer.algorithm.off_policy_correction.tis_ratio_type == "sequence"


def test_evaluation_is_that_of_trl(tmp_path: Path) -> None:
    keys = {
        "eval_strategy": "steps",
        "eval_steps": 10,
        "temperature": 0.7,
        "num_generations_eval": 2,
        "dataset_name": "c",
    }
    run = loaded(convert_keys(WHOLE | keys), tmp_path)
    assert (run.trainer.eval_interval, run.generator.eval_n_samples_per_prompt) == (10, 2)
    assert run.generator.eval_sampling_params.temperature == 0.7
    assert run.data.val_data == ("c:test",)


@pytest.mark.parametrize(
    ("keys", "source", "outcome", "reason"),
    [
        ({"loss_type": "luspo"}, "loss_type", "not yet", "loss 'luspo'"),
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size", "refused", "not whole groups of 8"),
        ({"use_vllm": True, "vllm_mode": "server"}, "vllm_mode", "not yet", "servers of `trl vllm-serve`"),
        ({"report_to": "trackio"}, "report_to", "not yet", "tracker trackio"),
        (
            {"reward_funcs": ["accuracy_reward", "cosine"]},
            "reward_funcs",
            "not yet",
            "reward cosine, which has no import",
        ),
        ({"reward_funcs": ["length"]}, "reward_funcs", "not yet", "write it as a function in a file"),
        ({"reward_funcs": ["org/model"]}, "reward_funcs", "not yet", "reward_model"),
        ({"lora_r": 8}, "lora_r", "needless", "only read with use_peft"),
        ({"use_peft": True, "lora_target_modules": None}, "lora_target_modules", "needless", "not set"),
        ({"vllm_gpu_memory_utilization": 0.5}, "vllm_gpu_memory_utilization", "needless", "only read with use_vllm"),
        ({"load_in_4bit": True}, "load_in_4bit", "not yet", "quantized weights"),
        ({"learning_rates": 1e-5}, "learning_rates", "refused", "not an argument of TRL 1.16"),
        ({"scale_rewards": "all"}, "scale_rewards", "refused", "TRL supports: group, batch, none"),
        ({"deepspeed": "zero3.json"}, "deepspeed", "needless", "trainer.strategy"),
    ],
)
def test_every_setting_that_is_left_out_has_its_reason(
    keys: dict[str, Any], source: str, outcome: str, reason: str
) -> None:
    line = line_of(keys, source)
    assert (line.outcome, line.targets) == (outcome, ())
    assert reason in line.reason


def test_float16_converts_to_param_dtype(tmp_path: Path) -> None:
    policy = loaded(convert_keys(WHOLE | {"fp16": True}), tmp_path).trainer.policy
    assert policy.fsdp_config.mixed_precision.param_dtype == "float16"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1500 + 500", 2000), ("2 * 1024 - 48", 2000), ("4001 // 2", 2000), ("A + 2 * B", 2000), ("A - -1000", 2000)],
)
def test_sums_of_constants_are_their_values(text: str, value: int, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(f"A = 1000\nB = 500\nconfig = GRPOConfig(max_completion_length={text})\n")
    run = convert_trl(str(program)).tables
    assert run["generator"]["sampling_params"]["max_generate_length"] == value


@pytest.mark.parametrize("text", ["1 / 0", "1 // 0", "1" + "0" * 400 + " * 1.5", "1" + "0" * 400 + " / 2"])
def test_a_sum_without_a_value_is_refused(text: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(f"config = GRPOConfig(max_completion_length={text})\n")
    [line] = convert_trl(str(program)).refused
    assert line.source == "max_completion_length" and "computed by the program" in line.reason


@pytest.mark.parametrize(("keys", "device"), [({}, "cuda"), ({"use_cpu": True}, "cpu"), ({"use_cpu": False}, "cuda")])
def test_a_run_is_on_the_device_that_trl_takes(keys: dict[str, Any], device: str) -> None:
    assert convert_keys({"model_name_or_path": "a/b", **keys}).tables["trainer"]["device"] == device


def test_computed_values_are_refused(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "from trl import GRPOConfig, GRPOTrainer\n"
        "def mine(completions, **columns): ...\n"
        "config = GRPOConfig(per_device_train_batch_size=size(), gradient_accumulation_steps=2, **more)\n"
        "GRPOTrainer('x', model='a/b', reward_funcs=[mine], args=config)\n"
    )
    conversion = convert_trl(str(program))
    whys = {line.source: line.reason for line in conversion.lost}
    assert set(whys) == {"per_device_train_batch_size", "gradient_accumulation_steps", "**more", "reward_funcs"}
    assert "a batch size is not a number in the file" in whys["gradient_accumulation_steps"]
    assert "a function of the program" in whys["reward_funcs"]
    assert "train_batch_size" not in conversion.tables["trainer"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.py", "from trl import BCOConfig\nBCOConfig()\n", "has arguments of bco: a trainer of preferences"),
        ("train.py", "print('trl')\n", "has no GRPOConfig"),
        ("train.py", "GRPOConfig()\nSFTConfig()\n", "of several trainers .grpo, sft."),
        ("train.py", "GRPOConfig(\n", "cannot be read as Python"),
        ("run.sh", "echo trl\n", "starts no program that trains with TRL"),
        ("train.py", "(" * 300, "cannot be read as Python"),
    ],
)
def test_a_file_without_arguments_of_grpo_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        convert_trl(str(tmp_path / name))


def test_the_report_remarks_on_what_is_outside_trls_arguments() -> None:
    remarks = " ".join(convert_keys({"model_name_or_path": "a/b"}).remarks)
    assert "num_processes" in remarks and "max_prompt_length" in remarks and "reward functions" in remarks


def test_every_field_of_trls_own_classes_is_known() -> None:
    fields = json.loads((RECORDED / "trl_fields_2026_07.json").read_text())
    lines = convert_keys(fields).lines
    assert [line.source for line in lines] == list(fields)
    assert [f"{line.source}: {line.reason}" for line in lines if line.is_refused] == []


def test_the_option_sets_of_examples_are_converted_or_refused_by_capability(tmp_path: Path) -> None:
    examples = {option_set.name: option_set.conversion for option_set in option_sets("trl")}
    assert len(examples) >= 12
    for name, conversion in examples.items():
        refused = [f"{line.source}: {line.reason}" for line in conversion.lines if line.outcome == "refused"]
        assert [line for line in refused if "not whole groups" not in line] == [], name
        if not conversion.lost:
            loaded(conversion, tmp_path)
    assert sum(not conversion.lost for conversion in examples.values()) >= 9
