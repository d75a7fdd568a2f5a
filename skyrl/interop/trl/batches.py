"""Converts TRL's batch sizes and intervals, in samples and optimizer steps, to ours in prompts and training steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.interop.translation import (
    Dependent,
    Translation,
    Values,
    count,
    is_off,
    real,
    redundant,
    refused,
    unsupported,
)

_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")
_COMPUTED = "a batch size is not a number in the file: replace it with its value"


def are_known(values: Values) -> bool:
    """Whether all batch sizes in the file have known values."""
    names = (*_SIZES, "num_generations", "num_iterations", "num_processes")
    return all(isinstance(values.get(name), int | float | None) for name in names)


def processes(values: Values) -> int:
    """Number of processes of a run, one for each GPU; set by `accelerate launch`, not by TRL's arguments."""
    return max(count(values.get("num_processes")), 1)


def samples_per_update(values: Values) -> int:
    """Number of samples of an optimizer step, over all processes."""
    rows = count(values.get("per_device_train_batch_size"), default=8)
    return rows * processes(values) * count(values.get("gradient_accumulation_steps"))


def samples_per_batch(values: Values) -> int:
    """Number of samples that are generated at a time."""
    if not is_off(values.get("generation_batch_size")):
        return count(values["generation_batch_size"])
    rows = count(values.get("per_device_train_batch_size"), default=8)
    steps = values.get("steps_per_generation") or values.get("gradient_accumulation_steps", 1)
    return rows * processes(values) * count(steps)


def updates_per_batch(values: Values) -> int:
    """Number of optimizer steps per generated batch."""
    passes = count(values.get("num_iterations"))
    return max(samples_per_batch(values) * passes // max(samples_per_update(values), 1), 1)


def batches(values: Values) -> Mapping[str, Any]:
    """Our paths that follow from all of TRL's batch sizes together, with values in prompts."""
    group = count(values.get("num_generations"), default=8)
    used = samples_per_update(values)
    drawn = max(samples_per_batch(values), used)  # an optimizer step may use several generated batches
    if not are_known(values) or drawn % group or used % group:
        return {}
    return {"trainer.train_batch_size": drawn // group, "trainer.policy_mini_batch_size": used // group}


def _batch(key: str, value: object, values: Values) -> Translation:
    """Convert a batch size; all of TRL's batch sizes together determine ours."""
    if value is None:
        return redundant("not set: derived from the other batch sizes")
    if not are_known(values):
        return refused(_COMPUTED)
    group = count(values.get("num_generations"), default=8)
    if not batches(values):
        drawn, used = samples_per_batch(values), samples_per_update(values)
        reason = f"{drawn} samples per generation and {used} per optimizer step are not whole groups of {group}"
        return refused(f"{reason}; here both are counted in prompts")
    if key == "per_device_train_batch_size":
        return Translation(writes={**batches(values), "trainer.micro_train_batch_size_per_gpu": value})
    return redundant("trainer.train_batch_size and trainer.policy_mini_batch_size are derived from it")


def _steps(path: str) -> Dependent:
    """Conversion of a number of optimizer steps to training steps, each of which may have several optimizer steps."""

    def become(key: str, value: object, values: Values) -> Translation:
        if is_off(value) or value == -1:
            return redundant("no effect at this value")
        if not are_known(values):
            return refused(_COMPUTED)
        updates, steps = updates_per_batch(values), real(value)
        if not float(steps).is_integer():
            return unsupported("a fraction of all steps")
        note = f"in training steps of {updates} optimizer steps" if updates > 1 else ""
        return Translation(writes={path: -(-int(steps) // updates)}, note=note)

    return become


def _strategy(path: str, steps: str) -> Dependent:
    def become(key: str, value: object, values: Values) -> Translation:
        match value:
            case "no" | False:
                return Translation(writes={path: -1})
            case "epoch":
                return Translation(writes={path: "1 epoch"})
            case "steps":
                return redundant(f"set by {steps}")
        return unsupported(f"strategy {value!r}")

    return become


def _steps_only(switch: str, value_there: str, become: Dependent) -> Dependent:
    """Conversion of a number of steps that has an effect only under the strategy `steps`."""
    return lambda key, value, values: (
        become(key, value, values)
        if values.get(switch, value_there) == "steps"
        else redundant(f"{switch} is not steps")
    )


BATCHES: dict[str, Dependent] = {
    **dict.fromkeys(_SIZES, _batch),
    "max_steps": _steps("trainer.max_training_steps"),
    "save_strategy": _strategy("trainer.ckpt_interval", "save_steps"),
    "eval_strategy": _strategy("trainer.eval_interval", "eval_steps"),
    "save_steps": _steps_only("save_strategy", "steps", _steps("trainer.ckpt_interval")),
    "eval_steps": _steps_only("eval_strategy", "no", _steps("trainer.eval_interval")),
}
