"""Every old name and what becomes of it: written out once more, so that no entry can lead elsewhere unnoticed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from skyrl.config import ConfigError, SkyRLTrainConfig, load
from skyrl.config.loading.migrations import MIGRATIONS
from skyrl.config.loading.newer_upstream_fields import FEATURES, NEWER_UPSTREAM_FIELDS
from skyrl.tree import get_at
from skyrl.tree.access import default_at
from tests.config.leaves import OTHERS, each, other_values

ENGINE = "generator.inference_engine."

MOVED = dict(
    line.split()
    for line in """
    generator.model_dtype                               generator.inference_engine.model_dtype
    generator.run_engines_locally                       generator.inference_engine.run_engines_locally
    generator.backend                                   generator.inference_engine.backend
    generator.weight_sync_backend                       generator.inference_engine.weight_sync_backend
    generator.weight_transfer_threshold_cuda_ipc_GB     generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB
    generator.async_engine                              generator.inference_engine.async_engine
    generator.vllm_v1_disable_multiproc                 generator.inference_engine.vllm_v1_disable_multiproc
    generator.enable_prefix_caching                     generator.inference_engine.enable_prefix_caching
    generator.enable_chunked_prefill                    generator.inference_engine.enable_chunked_prefill
    generator.max_num_batched_tokens                    generator.inference_engine.max_num_batched_tokens
    generator.enforce_eager                             generator.inference_engine.enforce_eager
    generator.fully_sharded_loras                       generator.inference_engine.fully_sharded_loras
    generator.enable_ray_prometheus_stats               generator.inference_engine.enable_ray_prometheus_stats
    generator.gpu_memory_utilization                    generator.inference_engine.gpu_memory_utilization
    generator.max_num_seqs                              generator.inference_engine.max_num_seqs
    generator.enable_http_endpoint                      generator.inference_engine.enable_http_endpoint
    generator.http_endpoint_host                        generator.inference_engine.http_endpoint_host
    generator.http_endpoint_port                        generator.inference_engine.http_endpoint_port
    generator.served_model_name                         generator.inference_engine.served_model_name
    generator.engine_init_kwargs                        generator.inference_engine.engine_init_kwargs
    generator.override_existing_update_group            generator.inference_engine.override_existing_update_group
    generator.external_proxy_url                        generator.inference_engine.external_proxy_url
    generator.external_server_urls                      generator.inference_engine.external_server_urls
    generator.distributed_executor_backend              generator.inference_engine.distributed_executor_backend
    generator.num_inference_engines                     generator.inference_engine.num_engines
    generator.remote_inference_engine_urls              generator.inference_engine.remote_urls
    generator.inference_engine_tensor_parallel_size     generator.inference_engine.tensor_parallel_size
    generator.inference_engine_pipeline_parallel_size   generator.inference_engine.pipeline_parallel_size
    generator.inference_engine_expert_parallel_size     generator.inference_engine.expert_parallel_size
    generator.inference_engine_data_parallel_size       generator.inference_engine.data_parallel_size
    generator.inference_engine.num_inference_engines    generator.inference_engine.num_engines
    generator.inference_engine.remote_inference_engine_urls  generator.inference_engine.remote_urls
    generator.inference_engine.inference_engine_tensor_parallel_size    generator.inference_engine.tensor_parallel_size
    generator.inference_engine.inference_engine_pipeline_parallel_size generator.inference_engine.pipeline_parallel_size
    generator.inference_engine.inference_engine_expert_parallel_size    generator.inference_engine.expert_parallel_size
    generator.inference_engine.inference_engine_data_parallel_size      generator.inference_engine.data_parallel_size
    generator.inference_engine.n_samples_per_prompt     generator.n_samples_per_prompt
    generator.inference_engine.batched                  generator.batched
    generator.inference_engine.max_input_length         generator.max_input_length
    trainer.policy.model.model_path                     trainer.policy.model.path
    trainer.policy.model.lora_config.rank               trainer.policy.model.lora.rank
    trainer.policy.model.model_config_kwargs            trainer.policy.model_config_kwargs
    trainer.policy.ulysses_sequence_parallel_size       trainer.policy.sequence_parallel_size
    trainer.ref.model.model_path                        trainer.ref.model.path
    trainer.ref.model.lora_config.rank                  trainer.ref.model.lora.rank
    trainer.ref.model.model_config_kwargs               trainer.ref.model_config_kwargs
    trainer.ref.ulysses_sequence_parallel_size          trainer.ref.sequence_parallel_size
    trainer.critic.model.model_path                     trainer.critic.model.path
    trainer.critic.model.lora_config.rank               trainer.critic.model.lora.rank
    trainer.critic.model.model_config_kwargs            trainer.critic.model_config_kwargs
    trainer.critic.ulysses_sequence_parallel_size       trainer.critic.sequence_parallel_size
    trainer.algorithm.policy_mini_batch_size            trainer.policy_mini_batch_size
    trainer.algorithm.critic_mini_batch_size            trainer.critic_mini_batch_size
    trainer.use_torch_compile                           trainer.policy.use_torch_compile
    trainer.record_memory                               trainer.policy.record_memory
    trainer.num_warmup_steps                            trainer.policy.optimizer_config.num_warmup_steps
    trainer.algorithm.ppo_loss_type                     trainer.algorithm.policy_loss_type
    trainer.algorithm.use_kl_estimator_k3               trainer.algorithm.kl_estimator_type
    trainer.algorithm.normalize_reward                  trainer.algorithm.normalize_values
    trainer.remove_microbatch_padding                   trainer.use_sample_packing
    trainer.tags                                        trainer.trackers.tags
    trainer.policy.megatron_config.moe_enable_routing_replay    trainer.policy.moe_enable_routing_replay
    trainer.ref.megatron_config.moe_enable_routing_replay       trainer.ref.moe_enable_routing_replay
    generator.inference_engine.delta_weight_sync.sync_dir       generator.inference_engine.weight_sync_path
    """.strip().splitlines()
)
"""Old path -> the path that its value has here."""

GONE: dict[str, tuple[Any, str]] = {
    "generator.model_name": ("m", "generator.inference_engine.served_model_name"),
    "trainer.algorithm.use_abs_kl": (True, "trainer.algorithm.kl_estimator_type = abs"),
    "trainer.placement.colocate_critic_reward": (True, "environment.env_class"),
    "trainer.placement.reward_num_nodes": (1, "environment.env_class"),
    "trainer.placement.reward_num_gpus_per_node": (1, "environment.env_class"),
    "trainer.reward": ("m", "environment.env_class"),
    "deepspeed_config": ("d", "trainer.policy.deepspeed_config"),
    "generator.inference_engine.delta_weight_sync": ("d", "weight_sync_path"),
    "hydra": ("h", "trainer.run_path"),
    "defaults": ("d", "extends"),
}
"""Old path -> a value that is refused, and what the refusal names instead."""

NEEDLESS: dict[str, str] = {
    **dict.fromkeys(
        (ENGINE + f"delta_weight_sync.{name}" for name in ("local_checkpoint_dir", "checkpoint_load_format")),
        "in the memory of their host",
    ),
    **dict.fromkeys(
        (
            ENGINE + f"delta_weight_sync.{name}"
            for name in (
                *("max_file_size_in_gb", "cloud_download_workers", "publish_num_workers", "publish_staging_dir"),
                "multi_thread_safetensors_max_workers",
            )
        ),
        "how fast files are written",
    ),
    **dict.fromkeys(
        (f"trainer.{model}.language_model_only" for model in ("policy", "ref")), "is the language model alone"
    ),
}
"""Old path -> why nothing has to be said about it."""

HARMLESS = ("trainer.algorithm.use_abs_kl", "trainer.placement.colocate_critic_reward")
"""Those of which false asks for what happens anyway."""


def test_every_migration_is_in_one_of_the_tables() -> None:
    ours = {migration.old for migration in MIGRATIONS if migration not in NEWER_UPSTREAM_FIELDS}
    tables = {old.removesuffix(".rank") if "lora_config" in old else old for old in MOVED}
    assert ours == tables | set(GONE) | set(NEEDLESS)


def test_a_value_under_an_old_name_arrives_under_the_new_one_and_nowhere_else() -> None:
    wrong = {}
    for old, new in MOVED.items():
        value = False if old.endswith("use_kl_estimator_k3") else OTHERS[new]
        translated = "k1" if old.endswith("use_kl_estimator_k3") else value
        loaded, expected = load([], {old: value}), load([], {new: translated})
        warned = [problem.message for problem in loaded.warnings]
        if loaded.config != expected.config or not any(f"is called {new} in skyrl" in message for message in warned):
            wrong[old] = (get_at(loaded.config, new), warned)
    assert wrong == {}


@pytest.mark.parametrize(("written", "tags"), [("null", ()), ('["a", "b"]', ("a", "b"))])
def test_tags_of_a_later_skyrl_are_those_of_trackers(written: str, tags: tuple[str, ...]) -> None:
    assert load([], [f"trainer.tags={written}"]).config.trainer.trackers.tags == tags


@pytest.mark.parametrize(("written", "estimator"), [("true", "k3"), ("false", "k1"), ("abs", "abs")])
def test_the_switch_of_the_third_kl_estimator_becomes_the_name_of_one(written: str, estimator: str) -> None:
    loaded = load([], [f"trainer.algorithm.use_kl_estimator_k3={written}"])
    assert loaded.config.trainer.algorithm.kl_estimator_type == estimator


def test_a_name_that_is_gone_is_refused_with_what_takes_its_place() -> None:
    for old, (value, instead) in GONE.items():
        with pytest.raises(ConfigError) as refused:
            load([], {old: value})
        [problem] = refused.value.problems
        assert "no such field" in problem.message, old
        assert instead in problem.hint, old


@pytest.mark.parametrize("old", HARMLESS)
def test_a_name_that_is_gone_and_asks_for_nothing_is_left_out_with_a_warning(old: str) -> None:
    loaded = load([], {old: False})
    assert loaded.config == load([]).config
    assert "would change nothing" in loaded.warnings[0].message


@pytest.mark.parametrize(("old", "reason"), NEEDLESS.items())
def test_a_name_that_is_not_needed_is_left_out_with_the_reason_whatever_its_value(old: str, reason: str) -> None:
    for value in (None, True, "x"):
        loaded = load([], {old: value})
        assert loaded.config == SkyRLTrainConfig()
        [warning] = loaded.warnings
        assert "ignored" in warning.message
        assert reason in warning.hint


SOMETHING: dict[str, Any] = {
    f"{ENGINE}router_init_kwargs": {"policy": "x"},
    f"{ENGINE}speculative_config": {"num_speculative_tokens": 2},
    f"{ENGINE}fp8_weight_sync_mode": "blockwise",
    **{f"trainer.{model}.model.lora.max_loras": 2 for model in ("policy", "ref", "critic")},
    **{f"trainer.{model}.model.lora.max_cpu_loras": 2 for model in ("policy", "ref", "critic")},
    **{f"trainer.num_logger_{rows}_samples": 4 for rows in ("eval", "train")},
}
"""Switch of a feature that SkyRL added later -> a value that asks for the feature, where that is not true."""

SWITCHES = [(feature, path) for feature in FEATURES for path in feature.switches]
NEWER_NEEDLESS = [field for field in NEWER_UPSTREAM_FIELDS if field.needless]
NEWER_MOVED = {
    "trainer.policy.megatron_config.async_dist_ckpt_save": (False, "trainer.async_ckpt_save"),
    **{
        f"{table}.{name}": (value, f"{table}.transformer_config_kwargs.{name}")
        for table in ("trainer.policy.megatron_config", "trainer.ref.megatron_config")
        for name, value in (("moe_aux_loss_coeff", 0.5), ("moe_router_dtype", "fp64"))
    },
}  # fmt: skip
"""Path of a later SkyRL -> a value, and the path that it has here."""


def test_every_field_that_skyrl_added_later_is_in_one_of_the_tables() -> None:
    tables = [path for _, path in SWITCHES] + [field.old for field in NEWER_NEEDLESS] + [*NEWER_MOVED]
    assert sorted([*tables, "trainer.fully_async.sample_full_batch"]) == sorted(
        {migration.old for migration in NEWER_UPSTREAM_FIELDS}
    )
    assert all(feature.source for feature in FEATURES if feature.settings)


def test_a_feature_that_skyrl_added_later_is_refused_by_its_name_and_left_out_while_it_is_off() -> None:
    for feature, path in SWITCHES:
        for value in feature.nothing:
            loaded = load([], {path: value})
            assert [warning.path for warning in loaded.warnings] == [path]
            assert loaded.config == SkyRLTrainConfig()
        with pytest.raises(ConfigError, match=re.escape(f"not implemented yet: {feature.name}")):
            load([], {path: SOMETHING.get(path, True)})


def test_a_setting_that_only_a_refused_feature_reads_is_left_out_whatever_its_value() -> None:
    for migration in NEWER_NEEDLESS:
        for value in (None, True, "x", 7):
            loaded = load([], {migration.old: value})
            assert loaded.config == SkyRLTrainConfig()
            assert [warning.hint for warning in loaded.warnings] == [migration.reason]


def test_a_field_that_skyrl_added_later_and_that_exists_here_is_followed() -> None:
    for old, (value, new) in NEWER_MOVED.items():
        assert load([], {old: value}).config == load([], {new: value}).config != SkyRLTrainConfig()


@pytest.mark.parametrize(("written", "type_"), [(True, "filter"), (False, None)])
def test_full_batches_are_dynamic_sampling(written: bool, type_: str | None) -> None:
    loaded = load([], {"trainer.fully_async.sample_full_batch": written})
    assert loaded.config.trainer.algorithm.dynamic_sampling.type == type_


def both(old: str, new: str, agree: bool) -> dict[str, Any]:
    """Both names of one field, with one value or with two."""
    if old.endswith("use_kl_estimator_k3"):
        return {old: False, new: "k1" if agree else "k3"}
    value, default = OTHERS[new], default_at(SkyRLTrainConfig, new)
    apart = next((other for other in other_values(SkyRLTrainConfig, new) if other != value), default)
    if isinstance(value, dict):
        apart = {"key": 2}
    return {old: value, new: value if agree else apart}


def refused(files: Any, overrides: Any) -> list[str]:
    try:
        load(files, overrides)
    except ConfigError as error:
        return [f"{problem.path}: {problem.message}; {problem.hint}" for problem in error.problems]
    return []


@each(MOVED.items())
def test_two_values_under_both_names_of_a_field_are_refused_wherever_they_are_written(
    names: tuple[str, str], tmp_path: Path
) -> None:
    (old, new), file = names, tmp_path / "run.json"
    for agree in (True, False):
        values = both(old, new, agree)
        words = [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in values.items()]
        file.write_text(json.dumps(nested(values)), encoding="utf-8")
        for messages in (refused([], values), refused([], words), refused([], words[::-1]), refused([file], [])):
            assert [message.partition(":")[0].removesuffix(".key") for message in messages] == ([] if agree else [old])
            assert agree or f"both names are the same field; keep only {new}" in messages[0]


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        table, names = tree, path.split(".")
        for name in names[:-1]:
            table = table.setdefault(name, {})
        table[names[-1]] = value
    return tree


def test_a_later_layer_may_use_the_other_name_and_so_may_what_is_added_to_a_list(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[trainer]\nuse_sample_packing = false\ntrackers.tags = ['a']\n", "utf-8")
    changes = ["trainer.remove_microbatch_padding=true", "trainer.trackers.tags=['b']", "trainer.tags+=c"]
    trainer = load([tmp_path / "run.toml"], changes).config.trainer
    assert (trainer.use_sample_packing, trainer.trackers.tags) == (True, ("b", "c"))


def test_both_names_are_refused_where_one_is_taken_from_a_variable() -> None:
    words = ["trainer.use_sample_packing=env:PACKS", "trainer.remove_microbatch_padding=true"]
    with pytest.raises(ConfigError, match="true contradicts trainer.use_sample_packing = false"):
        load([], words, environ={"PACKS": "false"})
