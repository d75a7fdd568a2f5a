"""Entries of AReaL's tables, for single values."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from skyrl.interop.areal.machines import LINES_OF_BASH, without_own_folder
from skyrl.interop.environment import Read, read_environment
from skyrl.interop.translation import (
    ALGORITHM,
    ENGINE,
    Dependent,
    Entry,
    Translation,
    Values,
    fixed,
    number,
    numeric,
    redundant,
    refused,
    word,
)

LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Fields of an optimizer table that count only in float16, in both systems."""


def switch(path: str, *, off: str) -> Entry:
    """Entry of a switch that is off by default in both systems; `off` describes that state."""
    usual = fixed(False, None, does=off, otherwise=off)
    return lambda value: Translation(writes={path: True}) if value is True else usual(value)


def kl(value: object, estimator: object = "k1") -> Translation:
    """Convert `kl_ctl`. AReaL subtracts it times the divergence, estimated by `kl_estimator`, from the rewards."""
    weight = number(value)
    if weight == 0:
        return Translation(writes={ALGORITHM + "use_kl_loss": False, ALGORITHM + "use_kl_in_reward": False})
    return Translation(
        writes={
            ALGORITHM + "use_kl_loss": False,
            ALGORITHM + "use_kl_in_reward": True,
            ALGORITHM + "kl_loss_coef": weight,
            ALGORITHM + "kl_estimator_type": estimator,
        }
    )


def optimizer_keys(source: str, target: str, cpu_offload: str) -> dict[str, Entry]:
    """Entries for the optimizer table `source`, which corresponds to ours at `target`; both prefixes end with a dot."""
    usual = fixed("adam", "adamw", does="AdamW is the default optimizer", otherwise="other optimizers")

    def scheduler(value: object) -> Translation:
        names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
        if word(value, names) not in names:
            return refused(f"unknown schedule {value!r}; AReaL supports: {', '.join(names)}")
        return Translation(writes={f"{target}scheduler": names[str(value)]})

    def warmup(value: object) -> Translation:  # AReaL gives it as a share of the training steps
        share = number(value)
        if share == 0:
            return Translation(writes={f"{target}num_warmup_steps": 0})
        return Translation(
            writes={f"{target}warmup_steps_proportion": share, f"{target}schedule_unit": "training_step"}
        )

    def warmup_steps(value: object) -> Translation:
        if value is None:
            return redundant("set by warmup_steps_proportion")
        return Translation(writes={f"{target}num_warmup_steps": value, f"{target}schedule_unit": "training_step"})

    return {
        f"{source}type": lambda value: (
            Translation(writes={f"{target}optimizer": "sgd"}) if value == "sgd" else usual(value)
        ),
        f"{source}lr": numeric(f"{target}lr"),
        f"{source}weight_decay": numeric(f"{target}weight_decay"),
        f"{source}beta1": numeric(f"{target}adam_betas.0"),
        f"{source}beta2": numeric(f"{target}adam_betas.1"),
        f"{source}eps": numeric(f"{target}adam_eps"),
        f"{source}lr_scheduler_type": scheduler,
        f"{source}gradient_clipping": numeric(f"{target}max_grad_norm"),
        f"{source}warmup_steps_proportion": warmup,
        f"{source}warmup_steps": warmup_steps,
        f"{source}offload": cpu_offload,
        f"{source}min_lr_ratio": numeric(f"{target}min_lr_ratio"),
        **{f"{source}{name}": redundant("no effect: loss scaling applies only to float16") for name in LOSS_SCALING},
    }


def warmup_share(key: str, value: object, values: Values) -> Translation | None:
    """Convert the share of the steps that is warm-up, which a number of steps takes the place of."""
    steps = f"{key.removesuffix('_proportion')}"
    return redundant(f"{steps} takes precedence, as in AReaL") if values.get(steps) is not None else None


def least_micro_batches(value: object) -> Translation:
    """Convert the least number of micro-batches, which is 1 by default in both systems."""
    if value in (None, 1):
        return redundant("the number of micro-batches is derived from their tokens")
    return Translation(writes={"trainer.min_microbatches": value})


def top_k(path: str) -> Entry:
    """Entry of top_k, for which AReaL writes a huge number for "all tokens"."""
    return lambda value: Translation(
        writes={path: -1 if value is None or (isinstance(value, int) and value >= 100_000) else value}
    )


def recovery(path: str) -> Entry:
    """Entry of the ways to resume after a failure."""
    modes = {"off": "disabled", "on": "auto"} | {mode: mode for mode in ("disabled", "auto", "fault", "resume")}

    def become(value: object) -> Translation:
        if isinstance(value, bool):  # YAML 1.1 reads `off` and `on` as booleans
            value = "on" if value else "off"
        if not isinstance(value, str) or value not in modes:
            return refused(f"unknown recovery mode {value!r}; AReaL supports: {', '.join(modes)}")
        return Translation(writes={path: modes[value]})

    return become


def success_rate(bound: str, *, everything: float) -> Entry:
    """Entry of a bound on the share of good samples in a group; the value `everything` keeps all groups."""

    def become(value: object) -> Translation:
        if number(value) in (None, everything):
            return redundant("every group is kept")
        table = ALGORITHM + "dynamic_sampling."
        note = "groups whose rewards are all equal are dropped, too"
        return Translation(writes={f"{table}type": "filter", f"{table}{bound}": number(value)}, note=note)

    return become


def checkpoints(path: str) -> Dependent:
    """Entry of the folder of all experiments; each has its own for checkpoints, so that none continues from another."""

    def become(key: str, value: object, values: Values) -> Translation:
        names = [read_environment(values.get(name), name).value for name in ("experiment_name", "trial_name")]
        if not all(
            isinstance(name, str) and name and not name.startswith("env:") and "$" not in name for name in names
        ):
            return redundant("checkpoints are kept in the run's folder, since the file does not name its trial")
        return Translation(writes={path: "/".join([str(value).rstrip("/"), "checkpoints", *names])})

    return become


def device(values: Values) -> str:
    """The device of a run: a file for CPUs asks for no GPU."""
    gpus = [value for key, value in values.items() if key.endswith((".n_gpus_per_node", ".scheduling_spec[0].gpu"))]
    return "cpu" if 0 in gpus and not any(gpus) else "cuda"


def read_areal(key: str, value: Any, values: Values) -> Read:
    """The value with references to the environment in our form, unless a shell evaluates it here, too, or it refers to
    a list of tables: `${actor.scheduling_spec}`.
    """
    name = value[2:-1] if isinstance(value, str) and value.startswith("${") and value.endswith("}") else ""
    is_table = bool(name) and any(other.startswith((f"{name}.", f"{name}[")) for other in values)
    if is_table or key.endswith(LINES_OF_BASH):
        return Read(value)
    return read_environment(without_own_folder(key, value), key)


def level(path: str) -> Entry:
    """Entry of the level of a normalization: batch, group, or none at all."""
    return lambda value: Translation(writes={path: None if value == "none" else value})


def prefill_chunk(value: object) -> Translation:
    """Convert the size of prefill chunks; -1 computes a whole prompt at a time."""
    if value == -1:
        return Translation(writes={ENGINE + "enable_chunked_prefill": False})
    return Translation(writes={ENGINE + "max_num_batched_tokens": value})


def negated(value: object) -> object:
    """The negated bias, since AReaL's older system subtracts it and we add it."""
    bias = number(value)
    return -bias if isinstance(bias, int | float) else bias


def data_source(name: str, split: object) -> str:
    """The data source `name`, with its split appended: a file has none, and a name may hold its split already."""
    is_file = PurePath(name).suffix in (".json", ".jsonl", ".parquet")
    return name if is_file or ":" in name or not split else f"{name}:{split}"
