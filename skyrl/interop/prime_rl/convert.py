"""Converts prime-rl's `rl.toml`: `keys.py` has the settings that convert independently, `teachers.py` those of
distillation, and this module those that depend on others. Tasks are environments of verifiers, which have no
counterpart that could be written: their lines are refused, with what to set in their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve

from skyrl.errors import ConfigError, Problem
from skyrl.interop.prime_rl.keys import KEYS, rate
from skyrl.interop.prime_rl.teachers import TEACHERS, hint_by_default, teachers_by_source
from skyrl.interop.report import Conversion
from skyrl.interop.systems import System, convert_settings
from skyrl.interop.translation import (
    ENGINE,
    OPTIMIZER,
    SAMPLING,
    Dependent,
    Translation,
    Values,
    count,
    number,
    redundant,
    refused,
    unsupported,
)
from skyrl.interop.values import flat_file, is_script
from skyrl.interop.writing import Writing

_ANSWER = "orchestrator.train.sampling.max_completion_tokens"
_DEFAULTS: dict[str, Any] = {
    "orchestrator.batch_size": 128,
    "orchestrator.group_size": 1,
    "orchestrator.max_off_policy_steps": 8,
    "orchestrator.algo.type": "grpo",
    "trainer.optim.type": "adamw",
    "trainer.optim.lr": 1e-6,
    "trainer.optim.weight_decay": 0.01,
    "trainer.optim.max_norm": 1.0,
    "trainer.scheduler.type": "constant",
    "trainer.loss.type": "default",
    "trainer.loss.dppo_mask_low": 0.2,
    "trainer.loss.dppo_mask_high": 0.2,
    "deployment.num_train_gpus": 1,
    "deployment.num_infer_gpus": 1,
    "seq_len": 2048,
}
"""Settings that change what is learned or where, with prime-rl's defaults."""

_DRIFT = (
    "prime-rl adds trainer.loss.kl_tau (1e-3 by default) x the square of each token's log-ratio to the engine to the "
    "loss; here there is no such term."
)
_TASK = "The rows of a data source need its name in their column data_source, by which its teacher is found."


def convert_prime_rl(name: str) -> Conversion:
    """Convert a TOML file of prime-rl's `rl`. Raises `ConfigError` if it cannot be read or is another one."""
    if is_script(name):
        raise _refusal(name, "is a script, which is not read", "convert the TOML file that it names after @")
    keys = flat_file(name, of="prime-rl")
    if not any(key.startswith("orchestrator") for key in keys):
        raise _refusal(name, "has no table orchestrator", "only files of prime-rl's `rl` are converted")
    return convert_keys(keys, name)


def _refusal(name: str, message: str, hint: str) -> ConfigError:
    return ConfigError([Problem(path=name, message=message, hint=hint)], title="Nothing was converted")


def convert_keys(keys: Values, where: str = "arguments") -> Conversion:
    """Convert prime-rl's settings, given by their dotted keys."""
    system = System(
        keys=KEYS,
        dependent=(TEACHERS, _DEPENDENT),
        unknown=lambda key, writing: "not a setting of prime-rl's rl.toml of August 2026",
        defaults=_left_out,
        implied=_implied,
    )
    converted = convert_settings(system, keys, Writing(where))
    remarks = [_TASK] if teachers_by_source(keys) else []
    if keys.get("orchestrator.algo.type", "grpo") in ("grpo", "max_rl"):
        remarks.append(_DRIFT)
    return evolve(converted, remarks=tuple(remarks))


def _left_out(values: Values) -> Values:
    known = {key: value for key, value in _DEFAULTS.items() if key not in values}
    if "orchestrator.token_batch_size" in values:
        known.pop("orchestrator.batch_size", None)
    return {**known, **hint_by_default(values)}


def _samples(key: str, value: object, values: Values) -> Translation:
    """Convert the batch, which prime-rl counts in samples."""
    group = count(values.get("orchestrator.group_size"))
    if not isinstance(value, int) or value % group:
        return refused(f"{value} samples are no whole number of groups of {group}")
    prompts = value // group
    return Translation(
        writes={"trainer.train_batch_size": prompts, "trainer.policy_mini_batch_size": prompts},
        note=f"{prompts} prompts with {group} samples each",
    )


def _length(key: str, value: object, values: Values) -> Translation:
    """Convert the length of prompt and answer together."""
    answer = values.get(_ANSWER)
    if not isinstance(answer, int) or not isinstance(value, int) or answer >= value:
        return unsupported(
            "a bound of prompt and answer together: set trainer.max_prompt_length and "
            "generator.sampling_params.max_generate_length"
        )
    return Translation(writes={"trainer.max_prompt_length": value - answer}, note=f"without the {answer} of an answer")


def _betas(key: str, value: object, values: Values) -> Translation:
    second = 0.95 if values.get("trainer.optim.type") == "muon" else 0.999
    betas = [number(values.get(f"trainer.optim.betas{n}", default)) for n, default in ((1, 0.9), (2, second))]
    return Translation(writes={OPTIMIZER + "adam_betas": betas})


def _schedule(key: str, value: object, values: Values) -> Translation:
    kind = values.get("trainer.scheduler.type")
    match key.removeprefix("trainer.scheduler."):
        case "type":
            names = {"constant": "constant", "linear": "warmup_stable_decay", "cosine": "cosine"}
            if value not in names:
                return unsupported(f"the schedule {value}")
            writes: dict[str, Any] = {OPTIMIZER + "scheduler": names[value]}
            if value != "constant":
                writes[OPTIMIZER + "num_warmup_steps"] = values.get("trainer.scheduler.warmup_steps", 10)
            if value == "linear":
                writes[OPTIMIZER + "num_decay_steps"] = values.get("trainer.scheduler.decay_steps", 10) or None
            return Translation(writes=writes)
        case "warmup_steps" | "decay_steps":
            return redundant("written with the schedule" if kind != "constant" else "no effect on a constant rate")
        case "min_lr":
            share = rate(value, values.get("trainer.optim.lr"))
            return Translation(writes={OPTIMIZER + "min_lr_ratio": share})
    return unsupported("this setting of a schedule")


def _gpus(key: str, value: object, values: Values) -> Translation:
    tensor = count(values.get("inference.vllm.tensor_parallel_size")) * count(
        values.get("inference.vllm.data_parallel_size")
    )
    several = values.get("deployment.type") == "multi_node"
    match key.removeprefix("deployment."), several:
        case ("num_train_gpus", False) | ("gpus_per_node", True):
            return Translation(writes={"trainer.placement.policy_num_gpus_per_node": value})
        case "num_infer_gpus", False:
            return Translation(writes={ENGINE + "num_engines": max(1, count(value) // tensor)})
        case ("num_train_gpus" | "num_infer_gpus", True) | ("gpus_per_node", False):
            return redundant("not read in this deployment")
        case "num_train_nodes", _:
            return Translation(writes={"trainer.placement.policy_num_nodes": value})
        case "num_infer_nodes" | "num_infer_replicas", _:
            nodes = count(values.get("deployment.num_infer_nodes")) * count(values.get("deployment.num_infer_replicas"))
            engines = nodes * count(values.get("deployment.gpus_per_node"), default=8) // tensor
            return Translation(writes={ENGINE + "num_engines": max(1, engines)})
    return unsupported("this setting of a deployment")


def _implied(values: Values) -> Iterator[tuple[str, str, Any]]:
    yield "prime-rl", "trainer.placement.colocate_all", False
    yield "prime-rl", "trainer.fully_async.enabled", True
    yield "prime-rl", "trainer.algorithm.loss_reduction", "token_mean"
    yield "prime-rl", "trainer.algorithm.use_kl_loss", False
    yield "prime-rl", SAMPLING + "top_p", 1.0
    if isinstance(values.get("max_steps"), int):
        yield "max_steps", "trainer.epochs", values["max_steps"]
    sources = teachers_by_source(values)
    if sources:
        yield "orchestrator.train.source", "trainer.teacher.endpoint.sources", sources


_DEPENDENT: dict[str, Dependent] = {
    "orchestrator.batch_size": _samples,
    "seq_len": _length,
    **dict.fromkeys(("trainer.optim.betas1", "trainer.optim.betas2"), _betas),
    "trainer.scheduler.*": _schedule,
    **dict.fromkeys(
        (
            "deployment.num_train_gpus", "deployment.num_infer_gpus", "deployment.gpus_per_node",
            "deployment.num_train_nodes", "deployment.num_infer_nodes", "deployment.num_infer_replicas",
        ),
        _gpus,
    ),
}  # fmt: skip
"""Settings whose meaning depends on others."""
