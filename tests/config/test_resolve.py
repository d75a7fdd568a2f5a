"""Derivation: what follows is filled in, by rules that say what they read, and nothing written is changed.

The seeds are versions of SkyRL, whose configuration skyrl reads.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
from functools import reduce
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import AlgorithmConfig, SamplingParams, SkyRLTrainConfig, load, make_config, resolve
from skyrl.config.derive.rules import RULES
from skyrl.config.loading.resolve import resolve_with_origins
from skyrl.config.loading.stored import stored_form
from skyrl.tree import FrozenDict, differences, evolve_at, frozen, get_at, thaw
from skyrl.tree.classes import table_paths
from skyrl.tree.rules import Rule, paths_read
from tests.config.leaves import LEAVES, OTHERS, RUNNABLE, each

PATHS = set(LEAVES) | set(table_paths(SkyRLTrainConfig))

_MEGATRON = "megatron_config."
MODELS = ("policy", "critic", "ref", "teacher")
ALLOCATED: dict[str, dict[str, Any]] = {
    "vllm:d2t2p3+fsdp:d8t2c3e2": {
        "generator.inference_engine.num_engines": 2,
        "generator.inference_engine.tensor_parallel_size": 2,
        "generator.inference_engine.pipeline_parallel_size": 3,
        "trainer.placement.colocate_all": False,
        **{f"trainer.placement.{model}_num_nodes": 6 for model in MODELS},
        **{f"trainer.placement.{model}_num_gpus_per_node": 8 for model in MODELS},
        **{f"trainer.{model}.tensor_parallel_size": 2 for model in MODELS},
        **{f"trainer.{model}.sequence_parallel_size": 3 for model in MODELS},
        **{f"trainer.{model}.expert_parallel_size": 2 for model in MODELS},
    },
    "vllm:d24+megatron:(attn:d2p2t2c3|ffn:p2t3e2)": {
        "trainer.strategy": "megatron",
        **{f"trainer.{model}.{_MEGATRON}tensor_model_parallel_size": 2 for model in MODELS},
        **{f"trainer.{model}.{_MEGATRON}pipeline_model_parallel_size": 2 for model in MODELS},
        **{f"trainer.{model}.{_MEGATRON}context_parallel_size": 3 for model in MODELS},
        **{f"trainer.{model}.{_MEGATRON}expert_model_parallel_size": 2 for model in MODELS},
        **{f"trainer.{model}.{_MEGATRON}expert_tensor_parallel_size": 3 for model in MODELS},
    },
    "vllm[rollout]:d1+fsdp[actor]:d2+fsdp[ref]:d4": {"trainer.placement.colocate_policy_ref": False},
    "sglang:d1+fsdp:d1": {"generator.inference_engine.backend": "sglang"},
}
"""Allocation strings with the fields that they stand for."""

GYM = "environment.skyrl_gym.reasoning_gym"

EXAMPLES: list[tuple[dict[str, Any], str, Any]] = [
    *(
        ({"trainer.placement.allocation": text}, path, value)
        for text, fields in ALLOCATED.items()
        for path, value in fields.items()
    ),
    # written, path, derived
    (
        {"environment.env_class": "reasoning_gym:chain_sum", f"{GYM}.train_rows": 10, f"{GYM}.eval_rows": 5},
        "data.train_data",
        ("reasoning_gym://chain_sum?skip=5&rows=10&system_prompt=default&seed=0&size=60",),
    ),
    (
        {"environment.env_class": "reasoning_gym:chain_sum", f"{GYM}.train_rows": 10, f"{GYM}.eval_rows": 5},
        "data.val_data",
        ("reasoning_gym://chain_sum?skip=0&rows=5&system_prompt=default&seed=0&size=60",),
    ),
    (
        {"environment.env_class": "reasoning_gym", f"{GYM}.tasks": {"chain_sum": {}, "dice": {"weight": 2}}},
        "data.train_weights",
        (1.0, 2.0),
    ),
    ({"trainer.device": "cpu"}, "generator.inference_engine.enforce_eager", True),
    ({"trainer.device": "cuda"}, "generator.inference_engine.enforce_eager", False),
    (
        {"generator.sampling_params.max_generate_length": 300},
        "trainer.algorithm.reward_shaping.overlong.max_len",
        300,
    ),
    (
        {
            "generator.sampling_params.logprobs": None,
            "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low": 0.5,
        },
        "generator.sampling_params.logprobs",
        1,
    ),
    ({"trainer.device": "cuda"}, "trainer.compute_dtype", "bfloat16"),
    ({"trainer.device": "cuda", "trainer.bf16": False}, "trainer.compute_dtype", "float32"),
    ({"trainer.device": "cpu"}, "trainer.compute_dtype", "float32"),
    ({"trainer.device": "cuda", "trainer.flash_attn": False}, "trainer.attention", "sdpa"),
    ({"trainer.device": "cpu"}, "trainer.use_liger_kernel", False),
    ({"trainer.device": "cpu"}, "trainer.attention", "sdpa"),
    ({"trainer.device": "cuda"}, "trainer.recompute_activations", True),
    ({"trainer.device": "cpu"}, "trainer.recompute_activations", False),
    ({"generator.inference_engine.backend": "torch"}, "trainer.placement.executor", "in_process"),
    (
        {
            "generator.inference_engine.backend": "http",
            "generator.inference_engine.external_server_urls": ["http://127.0.0.1:1"],
            "generator.inference_engine.weight_sync_backend": "gloo",
        },
        "trainer.placement.executor",
        "ray",
    ),
    ({"generator.inference_engine.backend": "vllm"}, "trainer.placement.executor", "ray"),
    (
        {"generator.inference_engine.backend": "torch", "generator.inference_engine.num_engines": 2},
        "trainer.placement.executor",
        "ray",
    ),
    (
        {"generator.inference_engine.backend": "torch", "trainer.placement.policy_num_nodes": 2},
        "trainer.placement.executor",
        "ray",
    ),
    ({"trainer.placement.ref_num_gpus_per_node": 2}, "trainer.placement.executor", "ray"),
    (
        {
            "generator.inference_engine.backend": "torch",
            "trainer.placement.ref_num_gpus_per_node": 2,
            "trainer.algorithm.use_kl_loss": False,
        },
        "trainer.placement.executor",
        "in_process",
    ),
    (
        {
            "generator.inference_engine.backend": "torch",
            "trainer.placement.critic_num_nodes": 2,
            "trainer.critic.model.path": "critic",
        },
        "trainer.placement.executor",
        "ray",
    ),
    ({"trainer.run_name": "mine"}, "trainer.run_path", "runs/mine"),
    ({"trainer.run_name": "mine"}, "trainer.log_path", "runs/mine/logs"),
    ({"trainer.run_path": "/here"}, "trainer.log_path", "/here/logs"),
    ({"trainer.run_path": "/here/"}, "trainer.ckpt_path", "/here/checkpoints"),
    ({"trainer.run_name": "mine"}, "trainer.ckpt_path", "runs/mine/checkpoints"),
    ({"trainer.run_path": "/here"}, "trainer.export_path", "/here/exports"),
    ({}, "trainer.logger", "console"),
    ({"trainer.policy.model.path": "my/model"}, "trainer.ref.model.path", "my/model"),
    ({"trainer.max_prompt_length": 77}, "generator.max_input_length", 77),
    (
        {
            "trainer.max_prompt_length": 77,
            "generator.sampling_params.max_generate_length": 10,
            "environment.agent.command": ["agent"],
        },
        "generator.max_input_length",
        137,
    ),
    ({"generator.sampling_params.temperature": 0.7}, "trainer.algorithm.temperature", 0.7),
    (
        {"generator.sampling_params.max_generate_length": 99, "generator.sampling_params.top_p": 0.5},
        "generator.eval_sampling_params",
        SamplingParams(temperature=0.0, max_generate_length=99),
    ),
    ({"generator.sampling_params.temperature": 0.5}, "generator.eval_sampling_params.temperature", 0.0),
    (
        {"generator.sampling_params.max_generate_length": 99},
        "generator.eval_sampling_params.max_generate_length",
        99,
    ),
    (
        {"trainer.max_prompt_length": 100, "generator.sampling_params.max_generate_length": 28},
        "trainer.algorithm.max_seq_len",
        128,
    ),
    ({"generator.max_input_length": 1000}, "trainer.algorithm.max_seq_len", 2024),
    (
        {"trainer.policy_mini_batch_size": 16, "generator.n_samples_per_prompt": 3},
        "trainer.policy_mini_batch_size_in_samples",
        48,
    ),
    (
        {"trainer.critic_mini_batch_size": 8, "generator.n_samples_per_prompt": 3},
        "trainer.critic_mini_batch_size_in_samples",
        24,
    ),
    ({"trainer.algorithm.use_tis": True}, "trainer.algorithm.off_policy_correction.tis_ratio_type", "token"),
    (
        {"trainer.algorithm.use_tis": True, "trainer.algorithm.tis_imp_ratio_cap": 3},
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
        3.0,
    ),
    (
        {"trainer.algorithm.use_tis": True, "trainer.algorithm.tis_imp_ratio_cap": 0.5},
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
        0.5,
    ),
    (
        {"trainer.algorithm.tis_imp_ratio_cap": 3},
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
        2.0,
    ),
    (
        {"trainer.algorithm.use_tis": True, "generator.sampling_params.logprobs": None},
        "generator.sampling_params.logprobs",
        1,
    ),
    ({"generator.sampling_params.logprobs": None}, "generator.sampling_params.logprobs", None),
    (
        {
            "trainer.max_prompt_length": 100,
            "generator.max_input_length": 300,
            "generator.sampling_params.max_generate_length": 20,
            "generator.eval_sampling_params.max_generate_length": 50,
        },
        "trainer.longest_row",
        350,
    ),
    ({"trainer.rope_theta": 1e4}, "generator.rope_theta", 1e4),
    ({"trainer.rope_scaling": {"factor": 2}}, "generator.rope_scaling", {"factor": 2}),
    ({"trainer.deterministic": True}, "generator.inference_engine.deterministic", True),
    (
        {
            "generator.inference_engine.backend": "vllm",
            "trainer.fully_async.enabled": True,
            "trainer.fully_async.clear_kv_cache_on_weight_sync": False,
        },
        "generator.inference_engine.enable_prefix_caching",
        False,
    ),
    *(
        ({"generator.inference_engine.backend": "vllm", **more}, "generator.inference_engine.async_engine", value)
        for more, value in (
            ({}, False),
            ({"trainer.placement.colocate_all": False}, True),
            ({"trainer.placement.executor": "in_process"}, True),
            ({"generator.inference_engine.tensor_parallel_size": 2}, True),
            ({"generator.inference_engine.enable_ray_prometheus_stats": True}, True),
        )
    ),
    ({"trainer.device": "cuda"}, "generator.inference_engine.weight_sync_backend", "nccl"),
    ({"trainer.device": "cpu"}, "generator.inference_engine.weight_sync_backend", "gloo"),
    (
        {"trainer.device": "cpu", "generator.inference_engine.backend": "torch"},
        "generator.inference_engine.logprob_parity_bound",
        1e-3,
    ),
    (
        {"trainer.device": "cuda", "generator.inference_engine.backend": "torch"},
        "generator.inference_engine.logprob_parity_bound",
        0.2,
    ),
    (
        {
            "trainer.device": "cpu",
            "generator.inference_engine.backend": "torch",
            "generator.inference_engine.rollout_dtype": "bf16",
        },
        "generator.inference_engine.logprob_parity_bound",
        0.2,
    ),
    (
        {
            "trainer.device": "cpu",
            "generator.inference_engine.backend": "torch",
            "generator.inference_engine.rollout_dtype": "int8",
        },
        "generator.inference_engine.logprob_parity_bound",
        0.3,
    ),
    (
        {
            "trainer.device": "cpu",
            "generator.inference_engine.backend": "vllm",
            "generator.inference_engine.model_dtype": "float16",
        },
        "generator.inference_engine.logprob_parity_bound",
        0.05,
    ),
    (
        {
            "trainer.device": "cuda",
            "generator.inference_engine.backend": "vllm",
            "generator.inference_engine.model_dtype": "float32",
        },
        "generator.inference_engine.logprob_parity_bound",
        0.2,
    ),
    (  # the learner computes in float32 there, but vLLM's engine in bfloat16, unless told otherwise
        {"trainer.device": "cpu", "generator.inference_engine.backend": "vllm"},
        "generator.inference_engine.logprob_parity_bound",
        0.2,
    ),
    (
        {
            "trainer.device": "cpu",
            "generator.inference_engine.backend": "vllm",
            "generator.inference_engine.model_dtype": "float32",
        },
        "generator.inference_engine.logprob_parity_bound",
        1e-3,
    ),
]


@frozen
class Own(AlgorithmConfig):
    own: int = 1


def written(values: dict[str, Any]) -> SkyRLTrainConfig:
    """The tree of these overrides."""
    return load([], values).config


VARIED = OTHERS | {
    "environment.env_class": "reasoning_gym",
    f"{GYM}.tasks": FrozenDict({"chain_sum": FrozenDict(), "dice": FrozenDict({"weight": 2})}),
}


def variants(rule: Rule[Any]) -> list[SkyRLTrainConfig]:
    """Trees that differ in up to three of the values that the rule reads, so that all its branches are taken. A table
    that may be absent has no other value of its own.
    """
    trees = [SkyRLTrainConfig(), resolve(SkyRLTrainConfig()), resolve(written(RUNNABLE | {"trainer.device": "cuda"}))]
    changed = chain.from_iterable(
        combinations([path for path in rule.reads if path in VARIED], count) for count in range(4)
    )
    return [
        reduce(lambda run, path: evolve_at(run, path, VARIED[path]), paths, tree) for paths in changed for tree in trees
    ]


# The rules


@pytest.mark.long
@each(RULES)
def test_a_rule_reads_what_it_says(rule: Rule[Any]) -> None:
    assert set().union(*(paths_read(rule.compute, tree) for tree in variants(rule))) == set(rule.reads)


@each(RULES)
def test_the_paths_of_a_rule_exist(rule: Rule[Any]) -> None:
    assert {*rule.reads, rule.writes} <= PATHS


def test_a_rule_comes_after_those_that_write_what_it_reads() -> None:
    order = {rule.writes: number for number, rule in enumerate(RULES)}
    assert len(order) == len(RULES)
    late = [rule.name for number, rule in enumerate(RULES) if any(order.get(path, -1) >= number for path in rule.reads)]
    assert late == []


@each(RULES)
def test_a_rule_says_in_a_sentence_what_follows(rule: Rule[Any]) -> None:
    assert rule.compute.__doc__
    assert rule.name.count("_") >= 2


@each(EXAMPLES)
def test_what_follows_can_be_redone_by_hand(case: tuple[dict[str, Any], str, Any]) -> None:
    values, path, derived = case
    value = get_at(resolve(written(values)), path)
    assert (type(value), value) == (type(derived), derived) or value == derived == {"factor": 2}


def test_every_rule_has_an_example() -> None:
    assert {rule.writes for rule in RULES} - {path for _, path, _ in EXAMPLES} == {"trainer.device"}


@pytest.mark.parametrize(
    ("device", "installed", "fuses"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_fused_kernels_serve_where_there_is_a_gpu_and_their_package(
    device: str, installed: bool, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["skyrl.config.derive.every_kind"], "has_liger_kernel", lambda: installed)
    assert resolve(written({"trainer.device": device})).trainer.use_liger_kernel is fuses


@pytest.mark.parametrize(("installed", "attention"), [(True, "flash_attention_2"), (False, "sdpa")])
def test_attention_on_cuda_is_what_is_installed(
    installed: bool, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["skyrl.config.derive.every_kind"], "has_flash_attention", lambda: installed)
    assert resolve(written({"trainer.device": "cuda"})).trainer.attention == attention
    on_a_cpu = resolve(written({"trainer.device": "cpu"}))
    assert on_a_cpu.trainer.attention == "sdpa"


@pytest.mark.parametrize(("has_device", "device"), [(True, "cuda"), (False, "cpu")])
def test_the_device_is_what_the_machine_has(has_device: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["skyrl.config.derive.every_kind"], "has_cuda_device", lambda: has_device)
    assert resolve(SkyRLTrainConfig()).trainer.device == device
    assert resolve(written({"trainer.device": "cpu"})).trainer.device == "cpu"


# The pass


def test_the_defaults_of_the_seeds_hold_after_derivation_where_they_run(reference: Path) -> None:
    facts = json.loads((reference / "skyrl_config_fields.json").read_text())["constructed_defaults"]
    resolved = resolve(written({"trainer.device": "cuda"}))
    ours = {path: thaw(get_at(resolved, path)) for path in facts}
    others = {path: ours[path] for path in facts if json.dumps(ours[path]) != json.dumps(facts[path])}
    assert others == {
        "trainer.ckpt_path": "runs/test_run/checkpoints",  # what a run leaves lies in a folder of its own
        "trainer.export_path": "runs/test_run/exports",
        "trainer.log_path": "runs/test_run/logs",
        "generator.inference_engine.async_engine": False,  # it takes turns with the learner on one GPU
        "trainer.logger": "console",  # where W&B cannot be had
        "trainer.algorithm.cispo.cispo_eps_clip_low": 1.0,  # corrected by SkyRL itself
        "trainer.algorithm.cispo.cispo_eps_clip_high": 4.0,
        "generator.inference_engine.enforce_eager": False,
    }


def test_on_a_cpu_one_default_of_the_seeds_more_does_not_run(reference: Path) -> None:
    facts = json.loads((reference / "skyrl_config_fields.json").read_text())["constructed_defaults"]
    on = {device: resolve(written({"trainer.device": device})) for device in ("cuda", "cpu")}
    others = {path for path in facts if get_at(on["cuda"], path) != get_at(on["cpu"], path)}
    assert others == {f"generator.inference_engine.{name}" for name in ("weight_sync_backend", "enforce_eager")}


@pytest.mark.long
@each([{}, RUNNABLE, OTHERS, *(values for values, _, _ in EXAMPLES)])
def test_resolving_again_changes_nothing(values: dict[str, Any]) -> None:
    once = resolve(written(values))
    assert differences(once, resolve(once)) == {}


@each(RULES)
def test_what_a_person_wrote_stays(rule: Rule[Any]) -> None:
    value = OTHERS[rule.writes]
    loaded = load([], {rule.writes: value})
    resolved, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    assert get_at(resolved, rule.writes) == get_at(loaded.config, rule.writes)
    written = [chain for path, chain in origins.items() if f"{path}.".startswith(f"{rule.writes}.")]
    assert {origin.kind for chain in written for origin in chain} == {"python"}


def test_a_written_value_that_equals_the_default_is_not_replaced_by_an_older_spelling() -> None:
    path = "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high"
    older = {"trainer.algorithm.use_tis": True, "trainer.algorithm.tis_imp_ratio_cap": 3.0}
    loaded = load([], older | {path: 2.0})
    assert get_at(resolve_with_origins(loaded.config, loaded.origins)[0], path) == 2.0


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("generator.inference_engine.weight_sync_backend", "nccl"),
        ("trainer.log_path", "/tmp/skyrl-logs"),
    ],
)
def test_a_tree_that_was_loaded_keeps_a_default_that_was_written_and_one_made_in_python_cannot(
    path: str, value: str
) -> None:
    loaded = load([], {"trainer.device": "cpu", path: value})
    for copied in (loaded.config, pickle.loads(pickle.dumps(loaded.config)), copy.deepcopy(loaded.config)):
        assert get_at(resolve(copied), path) == value
    assert get_at(resolve(evolve_at(loaded.config, "trainer.seed", 7)), path) == value
    assert get_at(resolve(evolve_at(written({"trainer.device": "cpu"}), path, value)), path) != value


@pytest.mark.parametrize(
    ("written_leaves", "expected"),
    [
        ({"top_p": 0.95}, SamplingParams(temperature=0.0, max_generate_length=8192, top_p=0.95)),
        ({"temperature": 1.0}, SamplingParams(temperature=1.0, max_generate_length=8192)),
        ({"max_generate_length": 1024}, SamplingParams(temperature=0.0, max_generate_length=1024)),
    ],
)
def test_evaluation_sampling_is_derived_leaf_by_leaf(
    written_leaves: dict[str, Any], expected: SamplingParams, tmp_path: Path
) -> None:
    leaves = {f"generator.eval_sampling_params.{name}": value for name, value in written_leaves.items()}
    run = resolve(load([], {"generator.sampling_params.max_generate_length": 8192} | leaves))
    assert run.generator.eval_sampling_params == expected
    (tmp_path / "config.json").write_text(json.dumps(stored_form(run)))
    shorter = load([tmp_path], ["generator.sampling_params.max_generate_length=99"])
    sampling = resolve(shorter).generator.eval_sampling_params
    length = 1024 if "max_generate_length" in written_leaves else 99
    assert sampling == evolve_at(expected, "max_generate_length", length)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.5)])
def test_evaluation_sampling_that_is_given_as_an_instance_stands(params: SamplingParams) -> None:
    loaded = load([], {"generator.eval_sampling_params": params})
    assert resolve(loaded).generator.eval_sampling_params == params
    assert resolve(loaded.config).generator.eval_sampling_params == params


def test_an_empty_table_of_evaluation_sampling_is_derived_too() -> None:
    run = resolve(load([], {"generator.eval_sampling_params": {}}))
    assert run.generator.eval_sampling_params == SamplingParams(temperature=0.0)


def test_a_run_path_that_is_written_is_followed_even_where_it_would_be_derived(tmp_path: Path) -> None:
    written_path = {"trainer.run_name": "mine", "trainer.run_path": "runs/mine"}
    run = resolve(load([], written_path))
    assert (run.trainer.ckpt_path, run.trainer.export_path) == ("runs/mine/checkpoints", "runs/mine/exports")
    (tmp_path / "config.json").write_text(json.dumps(stored_form(run)))
    assert resolve(load([tmp_path])) == run
    other = resolve(load([tmp_path], ["trainer.run_path=runs/other"])).trainer
    assert (other.ckpt_path, other.export_path, other.log_path) == (
        "runs/other/checkpoints", "runs/other/exports", "runs/other/logs",
    )  # fmt: skip


def test_the_origin_of_a_derived_value_is_its_rule() -> None:
    loaded = load([], ["trainer.run_name=mine"])
    _, origins, _ = resolve_with_origins(loaded.config, loaded.origins)
    default, rule = origins["trainer.run_path"]
    assert (default.kind, rule.kind, rule.where) == ("default", "rule", "run_path_follows_run_name")
    assert rule.reads == ("trainer.run_name",)


def test_only_rules_write() -> None:
    changed = differences(SkyRLTrainConfig(), resolve(SkyRLTrainConfig()))
    allowed = {rule.writes for rule in RULES} | {rule.table for rule in RULES if rule.table}
    assert {path for path in changed if path not in allowed and path.rpartition(".")[0] not in allowed} == set()


def test_a_tree_of_ones_own_classes_is_resolved_like_ours() -> None:
    root = make_config(algorithm_cls=Own)
    resolved = resolve(root())
    assert type(resolved) is root
    assert isinstance(resolved.trainer.algorithm, Own)
    assert resolved.trainer.algorithm.temperature == 1.0
