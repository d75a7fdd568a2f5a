"""Converts verl's asynchronous trainers: `trainer.v1` of verl 0.9, and the programs `fully_async_policy` and
`one_step_off_policy`.

A step of `separate_async` is `parameter_sync_step` mini-batches between two transfers of weights, which is one training
step of several mini-batches here. A sample that the weights of step s - 1 begin in step s may be trained on in step
s + max_off_policy_threshold - 1 (trainer/ppo/v1/replay_buffer.py:602). `fully_async_policy` starts at most
(1 + staleness_threshold) x trigger_parameter_sync_step batches between two transfers
(fully_async_rollouter.py:492), which bounds the age of a sample.
"""

from __future__ import annotations

from functools import partial
from math import ceil, prod
from typing import Any

from skyrl.interop.translation import (
    ENGINE,
    Dependent,
    Translation,
    Values,
    count,
    idle,
    independent,
    is_off,
    real,
    redundant,
    refused,
    unsupported,
    when_on,
    word,
)
from skyrl.tree.types import display_value

ROLLOUT = "actor_rollout_ref.rollout."
_MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
_OURS = "trainer.fully_async."
_MODES = ("sync", "colocate_async", "separate_async")
_SYNC_STEP = "async_training.trigger_parameter_sync_step"
_PROXIMAL = "async_training.compute_prox_log_prob"
BYPASS = "algorithm.rollout_correction.bypass_mode"
_REQUIRED = "async_training.require_batches"

FULLY_ASYNC: dict[str, Any] = {
    "async_training.staleness_threshold": 0.1,
    _SYNC_STEP: 4,
    _REQUIRED: 1,
    "async_training.partial_rollout": True,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "rollout.total_rollout_steps": 100,
    BYPASS: True,
}
"""What `fully_async_ppo_trainer.yaml` adds to verl's defaults, and changes what is learned."""

ONE_STEP_OFF: dict[str, Any] = {
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    BYPASS: True,
}
"""What `one_step_off_ppo_trainer.yaml` adds."""

V1: dict[str, dict[str, Any]] = {
    "colocate_async": {"trainer.v1.colocate_async.num_warmup_batches": 1},
    "separate_async": {
        "trainer.v1.separate_async.num_warmup_batches": 1,
        "trainer.v1.separate_async.parameter_sync_step": 4,
        ROLLOUT + "n_gpus_per_node": 8,
    },
}
"""Mode of `trainer.v1` -> verl's defaults for it, beside that of the threshold."""

THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold"
DEFAULT_THRESHOLD = 8


def mode_of(values: Values) -> str:
    """How sampling and training take place: a mode of `trainer.v1`, fully_async or one_step_off."""
    if any(key.startswith("async_training.") for key in values):
        return "fully_async"
    if "rollout.nnodes" in values or "rollout.n_gpus_per_node" in values:
        return "one_step_off"
    return str(values.get("trainer.v1.trainer_mode", "sync")) if values.get("trainer.use_v1", True) else "sync"


def engine_gpus(values: Values) -> int:
    """Number of GPUs that engines have for themselves; 0: those of the learners, in turns."""
    match mode_of(values):
        case "fully_async" | "one_step_off":
            return count(values.get("rollout.nnodes")) * count(values.get("rollout.n_gpus_per_node"), default=8)
        case "separate_async":
            return count(values.get(ROLLOUT + "nnodes")) * count(values.get(ROLLOUT + "n_gpus_per_node"), default=8)
    return 0


def steps_of_a_sync(values: Values) -> int:
    """Training steps here for one of verl's steps, in which `test_freq` and `save_freq` count."""
    return count(values.get(_SYNC_STEP), default=4) if mode_of(values) == "fully_async" else 1


def _trainer_mode(key: str, value: object, values: Values) -> Translation:
    if word(value, _MODES) not in _MODES:
        return unsupported(f"the trainer {display_value(value)} of verl's v1")
    if value == "sync":
        return redundant("samples are drawn and trained on in turns")
    return Translation(writes={_OURS + "enabled": True})


def _threshold(key: str, value: object, values: Values) -> Translation:
    if value is None:
        return unsupported("asynchronous training without a bound on the age of samples")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return refused("verl needs a whole number above 0, or null")
    return Translation(writes={_OURS + "max_staleness_steps": value - 1}, note="verl counts the first step, too")


def _prefetched(key: str, value: object, values: Values) -> Translation:
    """Convert the batches of prompts that are sampled ahead of the one that a step waits for."""
    size = count(values.get("data.train_batch_size"), default=1024)
    ahead = max(real(value), 0.0)
    return Translation(writes={_OURS + "queue_size": size + int(ahead * size)})


def _parameter_sync_step(key: str, value: object, values: Values) -> Translation:
    batch, mini = values.get("data.train_batch_size", 1024), values.get(_MINI, 256)
    if isinstance(value, int) and isinstance(batch, int) and isinstance(mini, int) and batch != value * mini:
        return refused(f"verl needs train_batch_size = parameter_sync_step x ppo_mini_batch_size, not {batch}")
    return redundant("the mini-batches of one step: trainer.train_batch_size / trainer.policy_mini_batch_size")


def _strategy(key: str, value: object, values: Values) -> Translation:
    if value not in ("drop", "wait"):
        return refused(f"unknown strategy {display_value(value)}; verl supports: drop, wait")
    return redundant("no sample gets older than trainer.fully_async.max_staleness_steps: it is not started before")


def _staleness(key: str, value: object, values: Values) -> Translation:
    """Convert the share of samples that may be started before the weights they are trained with exist."""
    ahead = (1 + real(value)) * steps_of_a_sync(values)
    writes: dict[str, Any] = {_OURS + "enabled": True, _OURS + "max_staleness_steps": max(ceil(ahead - 1e-9) - 1, 0)}
    batch = _batch(values)
    if abs(ahead - round(ahead)) > 1e-9 and batch:
        writes[_OURS + "queue_size"] = int(ahead * batch)
    return Translation(writes=writes, note="in training steps")


def _batch(values: Values) -> int:
    """Prompts of a training step of `fully_async_policy`."""
    return count(values.get(_MINI), default=256) * count(values.get(_REQUIRED))


def _rollout_steps(key: str, value: object, values: Values) -> Translation:
    """Convert the number of prompts to sample in the whole run."""
    if value is None:
        return redundant("not set")
    steps = steps_of_a_sync(values)
    rounds = count(value) // (_batch(values) * steps)
    return Translation(writes={"trainer.max_training_steps": max(rounds, 1) * steps})


def _concurrency(key: str, value: object, values: Values) -> Translation:
    engines = max(engine_gpus(values) // gpus_of_an_engine(values), 1)
    return Translation(writes={_OURS + "num_parallel_generation_workers": count(value, default=16) * engines})


def _engines(key: str, value: object, values: Values) -> Translation:
    """Convert the nodes or GPUs of engines, which say together how many engines there are."""
    if key.startswith(ROLLOUT) and mode_of(values) != "separate_async":
        return redundant("no effect: the engines have no GPUs of their own, or others name them")
    if not isinstance(value, int):
        return refused(f"{display_value(value)} is not a number of nodes or GPUs: replace it with its value")
    gpus, of_one = engine_gpus(values), gpus_of_an_engine(values)
    if gpus % of_one:
        return refused(f"{gpus} GPUs cannot be split into engines of {of_one} GPUs")
    return Translation(writes={ENGINE + "num_engines": gpus // of_one})


def gpus_of_an_engine(values: Values) -> int:
    """GPUs of one engine: the product of its degrees."""
    return prod(count(values.get(ROLLOUT + name)) for name in ENGINE_SIZES)


ENGINE_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")


def _switching(key: str, value: object, values: Values) -> Translation:
    if is_off(value):
        return redundant("learners and engines keep their GPUs")
    return unsupported("GPUs that change between learners and engines during a run")


def _interval(ours: str, key: str, value: object, values: Values) -> Translation | None:
    if "rollout." + key.removeprefix("trainer.") in values:
        return redundant("verl 0.7 reads that of the table rollout")
    steps = steps_of_a_sync(values) if ours else 1
    if steps == 1 or not isinstance(value, int) or value <= 0:
        return None
    return Translation(writes={ours: value * steps}, note="verl counts transfers of weights")


def _convert_engine_ratio(key: str, value: object, values: Values) -> Translation:
    """Convert whether ratios are to the engine's log-probabilities, as before verl 0.8 under this name."""
    if values.get(_PROXIMAL):
        return redundant("compute_prox_log_prob is on, so that the learner scores the tokens again")
    return Translation(writes={"trainer.algorithm.old_logprobs": "engine" if value else "learner"})


def is_bypassed(values: Values) -> bool:
    """Whether the engine's log-probabilities are those of the old policy."""
    of_engine = values.get("async_training.use_rollout_log_probs", values.get(BYPASS))
    return bool(of_engine) and not values.get(_PROXIMAL)


ASYNCHRONOUS: dict[str, Dependent] = {
    "trainer.v1.*": idle(
        lambda values: mode_of(values) in ("fully_async", "one_step_off"), "no effect: the program is not verl's v1"
    ),
    "trainer.use_v1": independent(redundant("chooses between versions of one trainer")),
    "trainer.save_freq": partial(_interval, "trainer.ckpt_interval"),
    "trainer.test_freq": partial(_interval, "trainer.eval_interval"),
    "trainer.total_epochs": partial(_interval, ""),
    "rollout.test_freq": lambda key, value, values: Translation(
        writes={"trainer.eval_interval": count(value) * steps_of_a_sync(values)},
        note="verl counts transfers of weights",
    ),
    "rollout.total_epochs": lambda key, value, values: Translation(writes={"trainer.epochs": value}),
    "data.train_batch_size": idle(
        lambda values: mode_of(values) == "fully_async", "set by ppo_mini_batch_size and async_training.require_batches"
    ),
    "actor_rollout_ref.hybrid_engine": idle(
        engine_gpus, "engines have GPUs of their own; the learners' engines of verl only serve evaluation"
    ),
    ROLLOUT + "gpu_memory_utilization": idle(
        lambda values: values.get(ROLLOUT + "standalone_gpu_memory_utilization") is not None,
        "no effect: standalone_gpu_memory_utilization is set",
    ),
    **{table + name: _engines for table in (ROLLOUT, "rollout.") for name in ("nnodes", "n_gpus_per_node")},
    "rollout.n": independent(redundant("verl reads actor_rollout_ref.rollout.n")),
    "rollout.total_rollout_steps": _rollout_steps,
    "async_training.staleness_threshold": _staleness,
    _SYNC_STEP: lambda key, value, values: Translation(writes={_OURS + "steps_per_sync": value}),
    _REQUIRED: lambda key, value, values: Translation(writes={"trainer.train_batch_size": _batch(values)}),
    "async_training.partial_rollout": lambda key, value, values: Translation(
        writes={_OURS + "interrupt_generation": bool(value)}
    ),
    "async_training.use_trainer_do_validate": independent(redundant("which engines evaluate does not affect results")),
    _PROXIMAL: independent(when_on("trainer.algorithm.old_logprobs", "learner")),
    "async_training.use_rollout_log_probs": _convert_engine_ratio,
    "async_training.checkpoint_engine.*": independent(
        redundant("set by generator.inference_engine.weight_sync_backend")
    ),
    "async_training.use_dynamic_resource_scheduling": _switching,
    "async_training.concurrent_samples_per_replica": _concurrency,
}
"""Settings of asynchronous training, and those with another meaning in it. They come before the other tables."""

OF_V1: dict[str, Dependent] = {
    "trainer.v1.trainer_mode": _trainer_mode,
    THRESHOLD: _threshold,
    "trainer.v1.sampler.max_off_policy_strategy": _strategy,
    "trainer.v1.separate_async.num_warmup_batches": _prefetched,
    "trainer.v1.colocate_async.num_warmup_batches": _prefetched,
    "trainer.v1.separate_async.parameter_sync_step": _parameter_sync_step,
    "trainer.v1.separate_async.hybrid_rollout.enable_switch": _switching,
}
"""Settings of `trainer.v1`."""
