"""AReaL's experiment files as our tables. Copies of other keys (`${gconfig.temperature}`) are left to derivation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.interop.areal_allocation import Part, read_allocation
from skyrl.interop.areal_keys import INTERVALS, KEYS
from skyrl.interop.areal_settings import Tables, apply, convert_setting
from skyrl.interop.areal_supervised import convert_supervised, is_supervised
from skyrl.interop.areal_values import ALGORITHM, Becomes, number
from skyrl.interop.report import Conversion
from skyrl.interop.values import flat_file, without_references
from skyrl.interop.writing import Writing

_ENGINE = "generator.inference_engine."
_TOGETHER = ("allocation_mode", "cluster.n_nodes", "cluster.n_gpus_per_node", "n_nodes", "n_gpus_per_node")
_MINI_BATCHES = ("actor.ppo_n_minibatches", "ppo.ppo_n_minibatches")
_PENALTY = ("actor.overlong_tokens", "actor.overlong_penalty_factor")
_DUAL_CLIP = ("actor.c_clip", "ppo.c_clip")
_COPIES = {
    "actor.group_size": "gconfig.n_samples",
    "actor.adv_norm.group_size": "gconfig.n_samples",
    "actor.reward_norm.group_size": "gconfig.n_samples",
    "actor.max_new_tokens": "gconfig.max_new_tokens",
    "rollout.consumer_batch_size": "train_dataset.batch_size",
    "tokenizer_path": "actor.path",
    "ref.dtype": "actor.dtype",
    "ref.bf16": "actor.bf16",
    "ref.gradient_checkpointing": "actor.gradient_checkpointing",
    "sglang.model_path": "actor.path",
    "sglang.random_seed": "seed",
}
"""Settings that must be what another one is: we have one place for both."""

_TABLES = Tables(keys=KEYS, copies=_COPIES, intervals=INTERVALS)

_BATCH = ("train_dataset.batch_size", "dataset.train_bs_n_seqs")


def convert_areal(name: str) -> Conversion:
    """A YAML file. Raises `ConfigError` if it cannot be read."""
    return convert_keys(flat_file(name, areal=True), name)


def convert_keys(keys: Mapping[str, Any], where: str = "experiment") -> Conversion:
    """Flat dotted keys and their values, as they stand in the file."""
    values, copies = without_references(keys)
    if is_supervised(values):
        return convert_supervised(values, copies, where)
    writing = Writing(where)
    for key, value in values.items():
        if key in _TOGETHER:
            _machines(writing, key, value, values)
        elif key in _MINI_BATCHES:
            _mini_batches(writing, key, value, values)
        elif key in _PENALTY and not values.get("actor.overlong_reward_penalty"):
            apply(writing, key, value, Becomes(needless="the penalty is off"))
        elif key in _DUAL_CLIP and value is not None:
            apply(writing, key, value, _dual_clip(value, values))
        else:
            convert_setting(writing, _TABLES, key, value, values, copies.get(key, ""))
    return writing.finish()


def _mini_batches(writing: Writing, key: str, count: object, values: Mapping[str, Any]) -> None:
    """AReaL counts the mini-batches of a batch, and we the prompts of a mini-batch."""
    batch = next((values[name] for name in _BATCH if name in values), None)
    if not isinstance(batch, int) or not isinstance(count, int) or count < 1 or batch % count:
        why = f"{count} mini-batches of {batch} prompts: not a whole number of prompts each"
        apply(writing, key, count, Becomes(refused=why))
    else:
        apply(writing, key, count, Becomes(writes={"trainer.policy_mini_batch_size": batch // count}))


def _dual_clip(value: object, values: Mapping[str, Any]) -> Becomes:
    """Convert `c_clip`, which acts in AReaL where it is given; here it belongs to a loss, or to a switch of the
    decoupled one.
    """
    is_decoupled = values.get("actor.use_decoupled_loss") or values.get("ppo.use_decoupled_loss")
    switch = {"decoupled.dual_clip": True} if is_decoupled else {"policy_loss_type": "dual_clip"}
    writes = {"clip_ratio_c": number(value), **switch}
    return Becomes(writes={ALGORITHM + name: each for name, each in writes.items()})


def _machines(writing: Writing, key: str, value: object, values: Mapping[str, Any]) -> None:
    """Nodes, GPUs and degrees of parallelism belong together; `allocation_mode` carries them all."""
    if key != "allocation_mode":
        why = "GPUs of models and engines follow from allocation_mode" if "allocation_mode" in values else ""
        apply(
            writing, key, value, Becomes(needless=why) if why else Becomes(not_yet="a cluster without allocation_mode")
        )
        return
    parts = read_allocation(str(value))
    if parts is None:
        apply(writing, key, value, Becomes(not_yet="this form of allocation_mode"))
        return
    per_node = values.get("cluster.n_gpus_per_node", values.get("n_gpus_per_node", 8))
    per_node = per_node if isinstance(per_node, int) and per_node > 0 else 8
    has_reference = any(number(values.get(name, 0)) for name in ("actor.kl_ctl", "ppo.kl_ctl"))
    models = ("policy", "ref") if has_reference else ("policy",)
    apply(writing, key, value, Becomes(writes=_placed(*parts, per_node, models)))


def _placed(engines: Part, learners: Part, per_node: int, models: tuple[str, ...]) -> dict[str, Any]:
    """Engines and learners have GPUs of their own, as in AReaL."""
    nodes, each = max(1, -(-learners.gpus // per_node)), min(learners.gpus, per_node)
    writes: dict[str, Any] = {
        "trainer.placement.colocate_all": False,
        _ENGINE + "backend": "vllm",
        _ENGINE + "num_engines": engines.data,
        _ENGINE + "tensor_parallel_size": engines.tensor,
        _ENGINE + "pipeline_parallel_size": engines.pipeline,
    }
    for model in models:
        writes |= {f"trainer.placement.{model}_num_nodes": nodes, f"trainer.placement.{model}_num_gpus_per_node": each}
    if learners.backend == "megatron" or learners.tensor > 1 or learners.pipeline > 1:
        megatron = "trainer.policy.megatron_config."
        degrees = {"tensor": learners.tensor, "pipeline": learners.pipeline}
        writes["trainer.strategy"] = "megatron"
        writes |= {f"{megatron}{name}_model_parallel_size": size for name, size in degrees.items()}
        writes |= {f"{megatron}context_parallel_size": learners.context}
    else:
        writes |= {"trainer.strategy": "fsdp2", "trainer.policy.sequence_parallel_size": learners.context}
    return writes
