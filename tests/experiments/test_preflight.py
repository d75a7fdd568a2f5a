"""What a machine lacks is reported before anything starts."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import transformers
from click.testing import CliRunner

from skyrl.cli.main import cli
from skyrl.cli.preparing.doctor import machine_facts
from skyrl.config import SkyRLTrainConfig, check, load
from skyrl.config.loading.kinds import kind_of
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.config.settings.trackers import TRACKERS, is_installed
from skyrl.errors import ConfigError
from skyrl.experiments import preflight
from skyrl.experiments.model_checks import (
    engine_reuses_prompts,
    expert_ranks_divide_experts,
    megatron_degrees_divide_model,
    router_settings_need_experts,
    sequence_ranks_divide_heads,
    tensor_ranks_divide_matrices,
)
from skyrl.experiments.preflight import (
    a_compiler_is_there,
    flash_attention_is_installed,
    gpus_are_available,
    keys_are_there,
    packages_are_installed,
    the_trackers_are_there,
)
from skyrl.inference.torch.fused_decoder import FusedDecoder
from skyrl.installation import install_command


def resolved(**overrides: Any) -> SkyRLTrainConfig:
    loaded = load([], {path.replace("__", "."): value for path, value in overrides.items()})
    return resolve_with_origins(loaded.config, loaded.origins)[0]


@pytest.mark.parametrize(
    ("overrides", "missing", "path"),
    [
        ({}, "torch", "trainer.policy.model.path"),
        ({"generator__inference_engine__backend": "vllm"}, "vllm", "generator.inference_engine.backend"),
        ({"trainer__placement__executor": "ray"}, "ray", "trainer.placement.executor"),
        ({"trainer__strategy": "deepspeed"}, "deepspeed", "trainer.strategy"),
        ({"trainer__strategy": "megatron"}, "megatron", "trainer.strategy"),
    ],
)
def test_a_package_that_is_not_there_is_told_with_its_extra(
    overrides: dict[str, Any], missing: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else ModuleSpec(name, None, origin=name)
    )
    run = resolved(trainer__device="cpu", **overrides)
    [problem] = packages_are_installed(run)
    assert problem.path == path
    assert re.search(r" install .*\[\w+\]'$", problem.hint)


def test_a_machine_without_a_compiler_cannot_compile(tmp_path: Path) -> None:
    run = resolved(trainer__device="cpu", trainer__policy__use_torch_compile=True)
    [problem] = a_compiler_is_there({"PATH": str(tmp_path)})(run)
    assert (problem.path, problem.hint) == ("trainer.policy.use_torch_compile", "install g++, or set it to false")
    own = tmp_path / "my-cxx"
    own.touch(mode=0o755)
    assert list(a_compiler_is_there({"PATH": str(tmp_path), "CXX": str(own)})(run)) == []


def test_a_run_that_takes_more_gpus_than_there_are_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(["gpu0"]))
    four = {f"trainer__placement__{model}_num_gpus_per_node": 4 for model in ("policy", "ref")}
    run = resolved(trainer__device="cuda", generator__inference_engine__num_engines=4, **four)
    [problem] = gpus_are_available(run)
    assert problem.message == "this run needs 4 GPUs, but this machine has 1"
    monkeypatch.setattr("skyrl.experiments.preflight.version", lambda name: "2.13.0")
    cpu = 'set trainer.device = "auto" or "cpu"'
    cluster = "join a cluster with trainer.placement.ray_address, use fewer (see `skyrl plan`), or "
    assert [problem.hint for problem in gpus_are_available(run)] == [cluster + cpu]
    local_run = resolved(
        trainer__device="cuda", trainer__placement__executor="in_process", generator__inference_engine__backend="torch"
    )
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    [problem] = gpus_are_available(local_run)
    assert (problem.path, problem.message) == ("trainer.device", "this run needs 1 GPU, but this machine has none")
    assert problem.hint == cpu
    monkeypatch.setattr("skyrl.experiments.preflight.version", lambda name: "2.13.0+cpu")
    [problem] = gpus_are_available(local_run)
    assert problem.hint == f"{cpu}; the installed torch 2.13.0+cpu is built without CUDA"
    assert list(gpus_are_available(resolved(trainer__device="cpu"))) == []
    elsewhere = resolved(trainer__device="cuda", trainer__placement__ray_address="host:6379", **four)
    assert list(gpus_are_available(elsewhere)) == []


@pytest.mark.parametrize(
    ("heads", "gpus", "sharing", "hint"),
    [
        (4, 2, 2, None),
        (12, 8, 8, "nearest sizes that can: 4"),
        (4, 6, 3, "nearest sizes that can: 2"),
        (None, 3, 3, None),
    ],
)
def test_ranks_that_share_sequences_divide_the_heads(
    heads: int | None, gpus: int, sharing: int, hint: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_attention_heads": heads}))
    (tmp_path / "tokenizer.json").write_text("{}")
    run = resolved(
        trainer__policy__model__path=str(tmp_path),
        trainer__policy__sequence_parallel_size=sharing,
        trainer__placement__policy_num_gpus_per_node=gpus,
    )
    problems = list(sequence_ranks_divide_heads(run))
    assert [problem.hint for problem in problems] == ([] if hint is None else [hint])
    assert [problem.path for problem in problems] == ["trainer.policy.sequence_parallel_size"] * len(problems)


@pytest.mark.parametrize(
    ("cutting", "sharing", "message", "hint"),
    [
        (2, 2, None, None),
        (4, 1, "4 ranks cannot share the 2 key and value heads of", "nearest sizes that can: 2"),
        (2, 4, "4 ranks cannot share the 2 attention heads that each of 2 ranks has", "nearest sizes that can: 2"),
    ],
)
def test_ranks_that_cut_matrices_divide_what_is_in_them(
    cutting: int, sharing: int, message: str | None, hint: str | None, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 257}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    (tmp_path / "tokenizer.json").write_text("{}")
    run = resolved(
        trainer__policy__model__path=str(tmp_path),
        trainer__policy__tensor_parallel_size=cutting,
        trainer__policy__sequence_parallel_size=sharing,
        trainer__placement__policy_num_gpus_per_node=8,
    )
    problems = [*tensor_ranks_divide_matrices(run), *sequence_ranks_divide_heads(run)]
    assert [problem.hint for problem in problems] == ([] if hint is None else [hint])
    assert all(message is not None and problem.message.startswith(message) for problem in problems)


@pytest.mark.parametrize(
    ("sizes", "path", "message"),
    [
        ({"tensor_parallel_size": 2, "sequence_parallel_size": 2}, None, None),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size", "4 ranks cannot share the 2 key and value heads of"),
        ({"sequence_parallel_size": 8}, "sequence_parallel_size", "8 ranks cannot share the 4 attention heads of"),
        ({"expert_parallel_size": 2}, "expert_parallel_size", "the model"),  # which has no experts
    ],
)
def test_ranks_of_a_supervised_run_divide_what_they_share(
    sizes: dict[str, int], path: str | None, message: str | None, tmp_path: Path
) -> None:
    model = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 257}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **model}))
    (tmp_path / "tokenizer.json").write_text("{}")
    values = {"kind": "sft", "model.path": str(tmp_path), "train_datasets": ["rows.jsonl"], "batch_size": 8, **sizes}
    loaded: Any = load([], {**values, "placement.executor": "ray", "placement.num_gpus_per_node": 8})
    run: Any = resolve_with_origins(loaded.config, loaded.origins)[0]
    checks = [
        sequence_ranks_divide_heads,
        tensor_ranks_divide_matrices,
        expert_ranks_divide_experts,
    ]
    assert set(checks) <= set(kind_of(run).preflight_checks())
    problems = [problem for check in checks for problem in check(run)]
    assert [problem.path for problem in problems] == ([] if path is None else [path])
    assert all(message is not None and problem.message.startswith(message) for problem in problems)


@pytest.mark.parametrize(
    ("name", "size", "message", "hint"),
    [
        ("tensor", 4, "4 ranks cannot share the 2 key and value heads of", "nearest sizes that can: 2"),
        ("pipeline", 4, "4 ranks cannot share the 6 layers of", "nearest sizes that can: 2"),
        ("pipeline", 2, None, None),
    ],
)
def test_degrees_of_megatron_divide_heads_and_layers(
    name: str, size: int, message: str | None, hint: str | None, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    (tmp_path / "tokenizer.json").write_text("{}")
    run = resolved(
        trainer__strategy="megatron",
        trainer__policy__model__path=str(tmp_path),
        trainer__placement__policy_num_gpus_per_node=8,
        **{f"trainer__policy__megatron_config__{name}_model_parallel_size": size},
    )
    problems = list(megatron_degrees_divide_model(run))
    path = f"trainer.policy.megatron_config.{name}_model_parallel_size"
    assert [(problem.path, problem.hint) for problem in problems] == ([] if hint is None else [(path, hint)])
    assert all(message is not None and problem.message.startswith(message) for problem in problems)


@pytest.mark.parametrize(
    ("sizes", "experts", "cutting", "expected"),
    [
        ({"num_experts": 8}, 8, 2, []),
        ({"num_experts": 6}, 4, 1, [("expert_model", "4 ranks cannot share the 6 experts", "sizes that can: 2")]),
        ({"num_experts": 8}, 2, 5, [("expert_tensor", "5 ranks cannot share the 24 features of", "that can: 4 and 8")]),
        ({}, 2, 1, [("expert_model", "the model", "set it to 1")]),
    ],
)
def test_degrees_of_experts_under_megatron_divide_them(
    sizes: dict[str, int], experts: int, cutting: int, expected: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    config = {"num_attention_heads": 4, "intermediate_size": 7, "moe_intermediate_size": 24, "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **config, **sizes}))
    (tmp_path / "tokenizer.json").write_text("{}")
    table = "trainer__policy__megatron_config__"
    run = resolved(
        trainer__strategy="megatron",
        trainer__policy__model__path=str(tmp_path),
        trainer__placement__policy_num_gpus_per_node=8,
        **{f"{table}expert_model_parallel_size": experts, f"{table}expert_tensor_parallel_size": cutting},
    )
    problems = list(megatron_degrees_divide_model(run))
    assert len(problems) == len(expected)
    for problem, (name, message, hint) in zip(problems, expected, strict=True):
        assert problem.path == f"trainer.policy.megatron_config.{name}_parallel_size"
        assert problem.message.startswith(message) and problem.hint.endswith(hint)


@pytest.mark.parametrize(
    ("experts", "size", "problem"),
    [
        ({"num_experts": 8}, 4, None),
        ({"num_experts": 6}, 4, ("4 ranks cannot share the 6 experts of the model", "nearest sizes that can: 2")),
        ({"num_local_experts": 8}, 3, ("3 ranks cannot share the 8 experts", "nearest sizes that can: 2 and 4")),
        ({}, 2, ("the model", "set it to 1")),
        ({"num_local_experts": 0}, 2, ("the model", "set it to 1")),  # a dense model of a family that has mixtures
    ],
)
def test_ranks_that_spread_experts_divide_them(
    experts: dict[str, int], size: int, problem: tuple[str, str] | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **experts}))
    (tmp_path / "tokenizer.json").write_text("{}")
    run = resolved(
        trainer__policy__model__path=str(tmp_path),
        trainer__policy__expert_parallel_size=size,
        trainer__placement__policy_num_gpus_per_node=8,
    )
    findings = list(expert_ranks_divide_experts(run))
    assert len(findings) == (problem is not None)
    for finding in findings:
        assert problem is not None
        assert finding.message.startswith(problem[0])
        assert finding.hint == problem[1]


@pytest.mark.parametrize(("experts", "count"), [({}, 1), ({"num_experts": 8}, 0)])
def test_a_model_without_experts_has_no_routers(experts: dict[str, int], count: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **experts}))
    (tmp_path / "tokenizer.json").write_text("{}")
    settings: dict[str, float | bool] = {
        "trainer.policy.router_aux_loss_coef": 0.01,
        "trainer.policy.router_z_loss_coef": 0.01,
        "trainer.policy.moe_enable_routing_replay": True,
        "generator.inference_engine.enable_return_routed_experts": True,
    }
    for path, value in settings.items():
        run = resolved(**{"trainer__policy__model__path": str(tmp_path), path.replace(".", "__"): value})
        problems = list(router_settings_need_experts(run))
        assert [problem.path for problem in problems] == [path] * count
        assert router_settings_need_experts in kind_of(run).preflight_checks()


@pytest.mark.parametrize(
    ("kind", "settings", "is_told"),
    [
        ("llama", {}, False),
        ("qwen2", {}, False),
        ("qwen3", {}, False),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, True),
        ("gemma2", {}, True),
        ("mistral", {}, True),
    ],
)
def test_prefix_caching_is_told_where_the_torch_engine_has_none_for_the_model(
    kind: str, settings: dict[str, Any], is_told: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **sizes, **heads, **settings)
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert FusedDecoder.supports(model) is not is_told
    torch_engine = {"trainer__policy__model__path": str(tmp_path), "generator__inference_engine__backend": "torch"}
    assert list(engine_reuses_prompts(resolved(**torch_engine))) == []  # on by default: nobody asked for it
    run = resolved(**torch_engine, generator__inference_engine__enable_prefix_caching=True)
    problems = [(problem.path, problem.severity) for problem in engine_reuses_prompts(run)]
    assert problems == [("generator.inference_engine.enable_prefix_caching", "warning")] * is_told
    assert engine_reuses_prompts in kind_of(run).preflight_checks()


def test_without_flash_attn_a_cuda_run_starts_and_says_what_it_takes_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl.config.derive.every_kind.has_flash_attention", lambda: False)
    monkeypatch.setattr(preflight, "has_flash_attention", lambda: False)
    values = {"kind": "sft", "model.path": "m", "train_datasets": ["rows.jsonl"], "device": "cuda"}
    tuned: Any = load([], values)
    supervised: Any = resolve_with_origins(tuned.config, tuned.origins)[0]
    for run, path in ((resolved(trainer__device="cuda"), "trainer.flash_attn"), (supervised, "flash_attn")):
        [problem] = flash_attention_is_installed(run)
        assert (problem.path, problem.severity) == (path, "warning")
        assert problem.message == "the package flash-attn is not installed: attention falls back to PyTorch's sdpa"
        assert flash_attention_is_installed in kind_of(run).preflight_checks()
    assert ("compute", "bfloat16, attention by sdpa") in machine_facts(resolved(trainer__device="cuda"))
    assert list(flash_attention_is_installed(resolved(trainer__device="cuda", trainer__flash_attn=False))) == []
    assert list(flash_attention_is_installed(resolved(trainer__device="cpu"))) == []


def test_doctor_names_what_the_preset_for_cuda_makes_faster() -> None:
    fast: Any = load(["preset:cuda"], {"trainer.attention": "sdpa"})
    quick: Any = resolve_with_origins(fast.config, fast.origins)[0]
    assert not [text for _, text in machine_facts(quick) if "preset" in text]
    slow = resolved(trainer__device="cuda", trainer__max_tokens_per_microbatch=4096, trainer__flash_attn=False)
    [line] = [text for _, text in machine_facts(slow) if "preset" in text]
    assert line == 'extends = "preset:cuda" has faster settings for: trainer.max_tokens_per_microbatch'
    assert not [text for _, text in machine_facts(resolved(trainer__device="cpu")) if "preset" in text]


def test_wandb_wants_a_key_unless_it_is_offline(tmp_path: Path) -> None:
    run = resolved(trainer__logger=["console", "wandb"])
    home = {"HOME": str(tmp_path)}
    [problem] = keys_are_there(home)(run)
    assert problem.path == "trainer.logger" and problem.message == "wandb needs a key, but none is set"
    assert "WANDB_API_KEY" in problem.hint and "trainer.logger = console" in problem.hint
    assert list(keys_are_there(home | {"WANDB_API_KEY": "x"})(run)) == []
    assert list(keys_are_there(home | {"WANDB_MODE": "offline"})(run)) == []
    offline = resolved(trainer__logger="wandb", trainer__trackers__wandb__mode="offline")
    assert list(keys_are_there(home)(offline)) == []
    assert list(keys_are_there(home)(resolved(trainer__logger="console"))) == []
    (tmp_path / ".netrc").write_text("machine api.wandb.ai")
    assert list(keys_are_there(home)(run)) == []


@pytest.mark.parametrize("name", [name for name, facts in TRACKERS.items() if facts.package])
def test_a_tracker_without_its_package_is_refused_with_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    environ = {f"{name.upper()}_API_KEY": "x"}
    [problem] = keys_are_there(environ)(resolved(trainer__logger=name))
    assert problem.path == "trainer.logger"
    assert problem.message == f"the package {name} is not installed"
    assert problem.hint == f"{install_command(name)}, or set trainer.logger = console"
    elsewhere = resolved(trainer__logger=name, trainer__trackers__python=sys.executable)
    assert list(keys_are_there(environ)(elsewhere)) == []


def test_a_folder_that_wandb_left_is_not_taken_for_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_tracker_that_is_not_installed" / "offline-run-1").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("a_tracker_that_is_not_installed") is not None
    assert not is_installed("a_tracker_that_is_not_installed")


def test_an_interpreter_for_trackers_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = resolved(trainer__logger="tensorboard", trainer__trackers__python=str(tmp_path / "python"))
    [problem] = keys_are_there({})(run)
    assert problem.path == "trainer.trackers.python"


def test_trackers_of_supervised_runs_are_believed_by_check_and_looked_for_before_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"kind": "sft", "model.path": "m", "train_datasets": ["rows.jsonl"], "logger": ["console", "tensorboard"]}
    loaded: Any = load([], values)
    run = resolve_with_origins(loaded.config, loaded.origins)[0]
    assert [problem for problem in check(run) if problem.path == "logger"] == []
    assert list(the_trackers_are_there(run)) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    [problem] = the_trackers_are_there(run)
    assert problem.path == "logger" and install_command("tensorboard") in problem.hint


def test_a_judge_at_openai_wants_a_key() -> None:
    judged = {"environment__env_class": "llm_as_a_judge", "trainer__logger": "console"}
    run = resolved(**judged)
    [problem] = keys_are_there({})(run)
    assert problem.path == "environment.skyrl_gym.llm_as_a_judge.base_url"
    assert list(keys_are_there({"OPENAI_API_KEY": "x"})(run)) == []
    own = {"environment__skyrl_gym__llm_as_a_judge__base_url": "http://127.0.0.1:9000/v1"}
    assert list(keys_are_there({})(resolved(**judged, **own))) == []


def test_a_tracker_that_is_named_is_believed_by_check_alone_and_a_default_one_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    named = resolved(trainer__logger=["console", "wandb"])
    assert [problem for problem in check(named) if problem.path == "trainer.logger"] == []
    assert resolved(trainer__logger="wandb").trainer.logger == "wandb"
    assert resolved().trainer.logger == "console"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert resolved().trainer.logger == "wandb"


@pytest.mark.parametrize("command", [["config", "check"], ["plan"], ["run"], ["doctor"]])
def test_megatron_without_cuda_is_refused_in_words_by_every_command(command: list[str]) -> None:
    words = [
        "trainer.strategy=megatron",
        "trainer.device=cpu",
        "trainer.policy.model.path=m",
        "data.train_data=['x.jsonl']",
    ]
    result = CliRunner().invoke(cli, [*command, *words])
    assert isinstance(result.exception, ConfigError)
    assert "megatron needs the device cuda, but trainer.device is cpu" in str(result.exception)
