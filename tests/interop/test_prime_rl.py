"""prime-rl's files of reinforcement learning: what each setting becomes, teachers above all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.config import SkyRLTrainConfig, load
from skyrl.errors import ConfigError
from skyrl.interop.prime_rl.convert import convert_prime_rl
from skyrl.interop.report import Conversion
from skyrl.tree.sparse import as_toml_has_it

SOURCE = {
    "name": "reverse",
    "env": {"taskset": {"id": "reverse-text"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}},
}
RL: dict[str, Any] = {
    "max_steps": 20,
    "seq_len": 2048,
    "model": {"name": "a/b"},
    "orchestrator": {
        "batch_size": 128,
        "group_size": 16,
        "renderer": {"name": "prime-qwen3"},
        "train": {"sampling": {"max_completion_tokens": 128}, "source": [SOURCE]},
        "eval": {"interval": 5, "num_examples": 64, "source": [SOURCE]},
    },
    "trainer": {"optim": {"lr": 3e-6}},
    "ckpt": {},
    "inference": {"vllm": {"gpu_memory_utilization": 0.5}},
}
"""The form of configs/basic/reverse-text/rl.toml of August 2026."""

TEACHER = {"name": "c/d", "base_url": "http://localhost:8001/v1"}


def changed(**changes: Any) -> dict[str, Any]:
    """The file with other values, by paths in which `__` stands for a dot."""
    values = json.loads(json.dumps(RL))
    for path, value in changes.items():
        *names, last = path.split("__")
        table = values
        for name in names:
            table = table.setdefault(name, {})
        table[last] = value
    return dict(values)


def converted(folder: Path, **changes: Any) -> Conversion:
    file = folder / "rl.toml"
    file.write_text(tomli_w.dumps(changed(**changes)))
    return convert_prime_rl(str(file))


def loaded(conversion: Conversion, folder: Path) -> SkyRLTrainConfig:
    file = folder / "converted.toml"
    file.write_text(tomli_w.dumps(as_toml_has_it(conversion.tables, conversion.root)))
    run = load([file], environ={}).config
    assert isinstance(run, SkyRLTrainConfig)
    return run


def why(conversion: Conversion, source: str) -> str:
    return next(line.reason for line in conversion.lines if line.source == source)


def test_the_settings_of_a_file_are_ours_and_its_environments_are_named(tmp_path: Path) -> None:
    conversion = converted(tmp_path)
    run = loaded(conversion, tmp_path)
    trainer, optimizer = run.trainer, run.trainer.policy.optimizer_config
    assert (trainer.policy.model.path, trainer.max_training_steps, trainer.max_prompt_length) == ("a/b", 20, 1920)
    assert (trainer.train_batch_size, trainer.policy_mini_batch_size, run.generator.n_samples_per_prompt) == (8, 8, 16)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.max_grad_norm, optimizer.scheduler) == (
        3e-6,
        0.01,
        1.0,
        "constant",
    )
    algorithm = trainer.algorithm
    assert (algorithm.advantage_estimator, algorithm.grpo_norm_by_std, algorithm.loss_reduction) == (
        "grpo",
        False,
        "token_mean",
    )
    assert (algorithm.policy_loss_type, algorithm.dppo.delta_low, algorithm.dppo.delta_high) == ("dppo", 0.2, 0.2)
    assert (trainer.fully_async.enabled, trainer.fully_async.max_staleness_steps) == (True, 8)
    assert run.generator.sampling_params.max_generate_length == 128
    refused = {line.source for line in conversion.refused}
    tasks = {f"orchestrator.{split}.source[0].env.taskset.id" for split in ("train", "eval")}
    assert refused == {*tasks, "orchestrator.eval.num_examples"}
    assert "set environment.env_class" in why(conversion, "orchestrator.train.source[0].env.taskset.id")
    assert "kl_tau" in conversion.remarks[0]


def test_opd_is_the_advantage_of_a_served_teacher(tmp_path: Path) -> None:
    conversion = converted(tmp_path, orchestrator__algo={"type": "opd", "teacher": TEACHER})
    run = loaded(conversion, tmp_path)
    settings = run.trainer.algorithm.distillation
    assert run.trainer.teacher.endpoint.url == "http://localhost:8001"
    assert (settings.type, settings.coef, settings.task_coef) == ("advantage", 1.0, 0.0)
    assert "keeps tokens that the teacher prefers" in why(conversion, "orchestrator.algo.type")
    headers = {**TEACHER, "headers": {"X-Team": "a"}}
    conversion = converted(tmp_path, orchestrator__algo={"type": "opd", "teacher": headers})
    assert "the setting headers.X-Team of a teacher" in why(conversion, "orchestrator.algo.teacher.headers.X-Team")


def test_a_teacher_for_each_source_is_found_by_its_name(tmp_path: Path) -> None:
    def source(name: str, **algorithm: Any) -> dict[str, Any]:
        return {**SOURCE, "name": name, "algo": algorithm}

    two = [
        source("one", type="opd", teacher=TEACHER),
        source("two", type="opd", teacher={**TEACHER, "base_url": "http://localhost:8002/v1"}),
    ]
    conversion = converted(tmp_path, orchestrator__train__source=two)
    run = loaded(conversion, tmp_path)
    assert dict(run.trainer.teacher.endpoint.sources) == {
        "one": "http://localhost:8001",
        "two": "http://localhost:8002",
    }
    assert run.trainer.algorithm.distillation.task_coef == 0
    assert "data_source" in conversion.remarks[0]
    mixed = converted(tmp_path, orchestrator__train__source=[two[0], {**SOURCE, "name": "two"}])
    assert "an algorithm for each source" in why(mixed, "orchestrator.train.source[0].algo.type")


def test_opsd_is_the_policy_with_a_demonstration(tmp_path: Path) -> None:
    conversion = converted(tmp_path, orchestrator__algo={"type": "opsd", "demo_key": "answer"})
    settings = loaded(conversion, tmp_path).trainer.algorithm.distillation
    assert (settings.self_teacher, settings.task_coef, settings.hint.source, settings.hint.column) == (
        True,
        0.0,
        "column",
        "answer",
    )
    assert settings.hint.template.endswith("<demonstration>\n{hint}\n</demonstration>\n\n{prompt}")


@pytest.mark.parametrize(
    ("changes", "source", "reason"),
    [
        ({"orchestrator__algo": {"type": "rae"}}, "orchestrator.algo.type", "baselines of each agent"),
        ({"orchestrator__group_size": 7}, "orchestrator.batch_size", "no whole number of groups of 7"),
        ({"trainer__loss": {"kl_tau": 1e-3}}, "trainer.loss.kl_tau", "the square of the log-ratio"),
        ({"trainer__loss": {"type": "ipo"}}, "trainer.loss.type", "the loss ipo"),
        ({"trainer__optim": {"type": "sgd"}}, "trainer.optim.type", "SGD with momentum"),
        ({"trainer__scheduler": {"type": ["linear"]}}, "trainer.scheduler.type", "the schedule ['linear']"),
        ({"orchestrator__token_batch_size": 5}, "orchestrator.token_batch_size", "batches counted in tokens"),
        ({"seq_len": 64}, "seq_len", "prompt and answer together"),
        ({"resume": {"step": 5}}, "resume.step", "cannot be resumed here"),
        ({"orchestrator__nonsense": 1}, "orchestrator.nonsense", "not a setting of prime-rl"),
    ],
)
def test_what_has_no_equivalent_is_named(changes: dict[str, Any], source: str, reason: str, tmp_path: Path) -> None:
    assert reason in why(converted(tmp_path, **changes), source)


def test_schedules_layouts_and_adapters_are_ours(tmp_path: Path) -> None:
    conversion = converted(
        tmp_path,
        trainer__scheduler={"type": "linear", "warmup_steps": 5, "decay_steps": 9, "min_lr": 3e-7},
        trainer__optim={"type": "muon", "lr": 3e-6, "mu": 0.9, "betas1": 0.8},
        trainer__model={"lora": {"rank": 8, "alpha": 32.0}, "cp": 2, "attn": "flash_attention_3"},
        deployment={"num_train_gpus": 2, "num_infer_gpus": 4},
        inference={"vllm": {"tensor_parallel_size": 2, "max_model_len": 4096}},
        weight_broadcast={"type": "nccl"},
    )
    run = loaded(conversion, tmp_path)
    policy = run.trainer.policy
    optimizer = policy.optimizer_config
    assert (optimizer.scheduler, optimizer.num_warmup_steps, optimizer.num_decay_steps) == ("warmup_stable_decay", 5, 9)
    assert optimizer.min_lr_ratio == pytest.approx(0.1)
    assert (optimizer.optimizer, optimizer.muon_momentum, optimizer.adam_betas) == ("muon", 0.9, (0.8, 0.95))
    assert (policy.model.lora.rank, policy.sequence_parallel_size) == (8, 2)
    assert (run.trainer.placement.policy_num_gpus_per_node, run.generator.inference_engine.num_engines) == (2, 2)
    assert run.generator.inference_engine.engine_init_kwargs["max_model_len"] == 4096
    assert run.generator.inference_engine.weight_sync_backend == "nccl"


def test_the_command_recognises_the_file_and_a_script_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(tomli_w.dumps(changed(orchestrator__train__source=[])))
    result = CliRunner().invoke(cli, ["config", "convert", str(file), "--keep-going"])
    assert result.exit_code == 0, result.output
    assert "is a file of prime-rl, by its settings" in result.stderr
    script = tmp_path / "rl.sh"
    script.write_text("uv run rl @ rl.toml\n")
    with pytest.raises(ConfigError, match="convert the TOML file that it names after @"):
        convert_prime_rl(str(script))
