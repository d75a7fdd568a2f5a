"""Former names of paths, in SkyRL or in earlier versions: followed with a warning, or refused with the reason.

There are three groups: SkyRL's Hydra files of 2025, in which engine settings were directly under `generator`; the
documents of mid-2025; and fields that SkyRL added after the version that this tree follows
(`newer_upstream_fields.py`).
"""

from __future__ import annotations

from typing import Any

from skyrl.config.loading.newer_upstream_fields import NEWER_UPSTREAM_FIELDS
from skyrl.tree.migrations import Migration

HYDRA, DOCUMENTS = "March 2026", "late 2025"
_ENGINE = "generator.inference_engine"

_SAME_NAME = (
    "model_dtype", "run_engines_locally", "backend", "weight_sync_backend", "weight_transfer_threshold_cuda_ipc_GB",
    "async_engine", "vllm_v1_disable_multiproc", "enable_prefix_caching", "enable_chunked_prefill",
    "max_num_batched_tokens", "enforce_eager", "fully_sharded_loras", "enable_ray_prometheus_stats",
    "gpu_memory_utilization", "max_num_seqs", "enable_http_endpoint", "http_endpoint_host", "http_endpoint_port",
    "served_model_name", "engine_init_kwargs", "override_existing_update_group", "external_proxy_url",
    "external_server_urls", "distributed_executor_backend",
)  # fmt: skip
"""Engine settings that moved one table down under their own name."""

_OTHER_NAME = {
    "num_inference_engines": "num_engines",
    "remote_inference_engine_urls": "remote_urls",
    **{f"inference_engine_{kind}_parallel_size": f"{kind}_parallel_size"
       for kind in ("tensor", "pipeline", "expert", "data")},
}  # fmt: skip


_IN_MODELS = {
    "model.model_path": "model.path",
    "model.lora_config": "model.lora",
    "model.model_config_kwargs": "model_config_kwargs",
    "ulysses_sequence_parallel_size": "sequence_parallel_size",
}
"""Spellings of the design that the tree came from, in the table of every model."""


def _k3_or_k1(value: object) -> object:
    return {True: "k3", False: "k1"}.get(value, value) if isinstance(value, bool) else value


def _moved(old: str, new: str, since: str, **more: Any) -> Migration:
    return Migration(old=old, new=new, since=since, **more)


def _removed_field(old: str, since: str, reason: str, *harmless: object) -> Migration:
    return Migration(old=old, since=since, reason=reason, harmless=harmless)


_NO_REWARD_MODEL = "rewards come from environments (environment.env_class); a reward model has no place in the tree"
_ABS_KL = "write trainer.algorithm.kl_estimator_type = abs (with use_kl_estimator_k3 it changed nothing)"
_GAE_ONLY_WARMUP = "the critic has its own: trainer.critic.optimizer_config.num_warmup_steps"

_IN_MEMORY = "engines keep the weights that did not change in the memory of their host"
_SPEED = "how fast files are written and read, not what is in them; each holds about 256 MB"
_DELTAS = {
    **dict.fromkeys(("local_checkpoint_dir", "checkpoint_load_format"), _IN_MEMORY),
    **dict.fromkeys(
        ("max_file_size_in_gb", "cloud_download_workers", "publish_num_workers", "publish_staging_dir",
         "multi_thread_safetensors_max_workers"),
        _SPEED,
    ),
}  # fmt: skip

_LANGUAGE = "a learner is the language model alone, where transformers has one for the checkpoint"

MIGRATIONS: tuple[Migration, ...] = (
    # SkyRL's Hydra era
    *(_moved(f"generator.{name}", f"{_ENGINE}.{name}", HYDRA) for name in _SAME_NAME),
    *(_moved(f"generator.{old}", f"{_ENGINE}.{new}", HYDRA) for old, new in _OTHER_NAME.items()),
    Migration(old="generator.model_name", since=HYDRA, reason="the engines serve the policy's model, and its name to "
              "requests is generator.inference_engine.served_model_name"),
    # the documents that the tree came from
    *(_moved(f"{_ENGINE}.{old}", f"{_ENGINE}.{new}", DOCUMENTS) for old, new in _OTHER_NAME.items()),
    *(_moved(f"{_ENGINE}.{name}", f"generator.{name}", DOCUMENTS)
      for name in ("n_samples_per_prompt", "batched", "max_input_length")),
    *(_moved(f"trainer.{model}.{old}", f"trainer.{model}.{new}", DOCUMENTS)
      for model in ("policy", "ref", "critic") for old, new in _IN_MODELS.items()),
    *(_moved(f"trainer.algorithm.{name}", f"trainer.{name}", DOCUMENTS)
      for name in ("policy_mini_batch_size", "critic_mini_batch_size")),
    _moved("trainer.use_torch_compile", "trainer.policy.use_torch_compile", DOCUMENTS),
    _moved("trainer.record_memory", "trainer.policy.record_memory", DOCUMENTS),
    # the overview of mid-2025
    _moved("trainer.num_warmup_steps", "trainer.policy.optimizer_config.num_warmup_steps", DOCUMENTS,
           reason=_GAE_ONLY_WARMUP),
    _moved("trainer.algorithm.ppo_loss_type", "trainer.algorithm.policy_loss_type", DOCUMENTS),
    _moved("trainer.algorithm.use_kl_estimator_k3", "trainer.algorithm.kl_estimator_type", DOCUMENTS,
           convert=_k3_or_k1),
    _removed_field("trainer.algorithm.use_abs_kl", DOCUMENTS, _ABS_KL, False),
    _moved("trainer.algorithm.normalize_reward", "trainer.algorithm.normalize_values", DOCUMENTS),
    _removed_field("trainer.placement.colocate_critic_reward", DOCUMENTS, _NO_REWARD_MODEL, False),
    _removed_field("trainer.placement.reward_num_nodes", DOCUMENTS, _NO_REWARD_MODEL),
    _removed_field("trainer.placement.reward_num_gpus_per_node", DOCUMENTS, _NO_REWARD_MODEL),
    _removed_field("trainer.reward", DOCUMENTS, _NO_REWARD_MODEL),
    _removed_field("deepspeed_config", DOCUMENTS, "give each model its own: trainer.policy.deepspeed_config"),
    _removed_field("hydra", HYDRA, "Hydra is not used: logs and run folders have fields of their own "
                   "(trainer.run_path), and a file names those that it is written on top of (extends)"),
    _removed_field("defaults", HYDRA, 'name the file that this one is written on top of: extends = "base.toml"'),
    # SkyRL's own later names
    _moved("trainer.remove_microbatch_padding", "trainer.use_sample_packing", ""),
    _moved("trainer.tags", "trainer.trackers.tags", "", harmless=(None,)),
    *(_moved(f"trainer.{model}.megatron_config.moe_enable_routing_replay", f"trainer.{model}.moe_enable_routing_replay",
             "") for model in ("policy", "ref")),
    _moved(f"{_ENGINE}.delta_weight_sync.sync_dir", f"{_ENGINE}.weight_sync_path", ""),
    *(Migration(old=f"{_ENGINE}.delta_weight_sync.{name}", needless=True, reason=reason)
      for name, reason in _DELTAS.items()),
    _removed_field(f"{_ENGINE}.delta_weight_sync", "", "its fields are those of the engines: weight_sync_path", None),
    *(Migration(old=f"trainer.{model}.language_model_only", needless=True, reason=_LANGUAGE)
      for model in ("policy", "ref")),
    *NEWER_UPSTREAM_FIELDS,
)  # fmt: skip
"""All migrations. The first entry for a path counts; an entry for a table applies to every path in it without its own
entry."""
