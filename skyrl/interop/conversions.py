"""Converts one value of AReaL's: to paths of ours, or to the reason why there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from attrs import field, frozen

ALGORITHM = "trainer.algorithm."
OPTIMIZER = "trainer.policy.optimizer_config."
ENGINE = "generator.inference_engine."
SAMPLING = "generator.sampling_params."
SHAPING = ALGORITHM + "reward_shaping."
LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Fields of an optimizer table that count only in float16, in both systems."""


@frozen(kw_only=True)
class Becomes:
    """The outcome for one value: paths to write, or why there are none."""

    writes: dict[str, Any] = field(factory=dict)
    cluster: dict[str, Any] = field(factory=dict)
    """Paths to write in the description of the cluster (`cluster.toml`)."""

    command: str = ""
    """Command of skyrl that does what the setting asks for."""

    note: str = ""
    """Remark about the written value, for the report."""

    needless: str = ""
    not_yet: str = ""
    refused: str = ""


Entry = str | Callable[[Any], Becomes]


def goes_to(*paths: str, convert: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Becomes]:
    """Conversion that writes the value to each of the paths; null writes nothing."""

    def become(value: object) -> Becomes:
        if value is None:
            return Becomes(needless="not set")
        return Becomes(writes=dict.fromkeys(paths, convert(value)))

    return become


def only(*usual: object, does: str, otherwise: str) -> Callable[[Any], Becomes]:
    """Conversion where the values `usual` match the built-in behaviour (`does`), and others need what is missing
    (`otherwise`).
    """

    def become(value: object) -> Becomes:
        if any(type(value) is type(each) and value == each for each in usual):
            return Becomes(needless=does)
        return Becomes(not_yet=otherwise)

    return become


def inverted(path: str, *, on: str) -> Callable[[Any], Becomes]:
    """Conversion of an inverted switch: false there writes true here; otherwise it is needless, for the reason `on`."""
    return lambda value: Becomes(writes={path: True}) if value is False else Becomes(needless=on)


def unless_empty(path: str) -> Callable[[Any], Becomes]:
    """Conversion that writes the value to the path; empty text and null write nothing."""
    return lambda value: goes_to(path)(None if value == "" else value)


def switches_on(path: str, *, off: str) -> Callable[[Any], Becomes]:
    """Conversion of a switch that is off by default in both systems; `off` describes that state."""
    return lambda value: (
        Becomes(writes={path: True}) if value is True else only(False, None, does=off, otherwise=off)(value)
    )


def later(capability: str, *nothing: object) -> Callable[[Any], Becomes]:
    """Conversion of a setting whose capability is missing; null and the values `nothing` do not need it."""
    return only(None, *nothing, does="no effect at this value", otherwise=capability)


def number(value: object) -> Any:
    """The number in a text, else the value unchanged. AReaL writes `1e-5`, which YAML 1.1 reads as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def kl(value: object, estimator: object = "k1") -> Becomes:
    """Convert `kl_ctl`. AReaL subtracts it times the divergence, estimated by `kl_estimator`, from the rewards."""
    weight = number(value)
    if weight == 0:
        return Becomes(writes={ALGORITHM + "use_kl_loss": False, ALGORITHM + "use_kl_in_reward": False})
    return Becomes(
        writes={
            ALGORITHM + "use_kl_loss": False,
            ALGORITHM + "use_kl_in_reward": True,
            ALGORITHM + "kl_loss_coef": weight,
            ALGORITHM + "kl_estimator_type": estimator,
        }
    )


def optimizer_keys(theirs: str, ours: str, cpu_offload: str) -> dict[str, Entry]:
    """Entries for the optimizer table `theirs`, which corresponds to ours at `ours`; both prefixes end with a dot."""
    return {
        f"{theirs}type": lambda value: _optimizer(value, ours),
        f"{theirs}lr": goes_to(f"{ours}lr", convert=number),
        f"{theirs}weight_decay": goes_to(f"{ours}weight_decay", convert=number),
        f"{theirs}beta1": goes_to(f"{ours}adam_betas.0", convert=number),
        f"{theirs}beta2": goes_to(f"{ours}adam_betas.1", convert=number),
        f"{theirs}eps": goes_to(f"{ours}adam_eps", convert=number),
        f"{theirs}lr_scheduler_type": lambda value: _scheduler(value, ours),
        f"{theirs}gradient_clipping": goes_to(f"{ours}max_grad_norm", convert=number),
        f"{theirs}warmup_steps_proportion": lambda value: _warmup(value, ours),
        f"{theirs}offload": goes_to(cpu_offload),
        f"{theirs}min_lr_ratio": goes_to(f"{ours}min_lr_ratio", convert=number),
        **{f"{theirs}{name}": not_there("no effect: loss scaling applies only to float16") for name in LOSS_SCALING},
    }


def least_micro_batches(value: object) -> Becomes:
    """Convert the least number of micro-batches, which is 1 by default in both systems."""
    if value in (None, 1):
        return Becomes(needless="the number of micro-batches is derived from their tokens")
    return Becomes(writes={"trainer.min_microbatches": value})


def _optimizer(value: object, ours: str) -> Becomes:
    """Convert the type of optimizer; AdamW is the default in both systems."""
    if value == "sgd":
        return Becomes(writes={f"{ours}optimizer": "sgd"})
    return only("adam", "adamw", does="AdamW is the default optimizer", otherwise="other optimizers")(value)


def _scheduler(value: object, ours: str) -> Becomes:
    """Convert the learning-rate schedule."""
    names = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    if value not in names:
        return Becomes(refused=f"unknown schedule {value!r}; AReaL supports: {', '.join(names)}")
    return Becomes(writes={f"{ours}scheduler": names[value]})


def _warmup(value: object, ours: str) -> Becomes:
    """Convert the warmup, which AReaL gives as a share of the training steps."""
    share = number(value)
    if share == 0:
        return Becomes(writes={f"{ours}num_warmup_steps": 0})
    return Becomes(writes={f"{ours}warmup_steps_proportion": share, f"{ours}schedule_unit": "training_step"})


def top_k_at(path: str) -> Callable[[Any], Becomes]:
    """Conversion of top_k to the path, where AReaL writes a huge number for "all tokens"."""
    return lambda value: Becomes(
        writes={path: -1 if value is None or (isinstance(value, int) and value >= 100_000) else value}
    )


def recovery(path: str) -> Callable[[Any], Becomes]:
    """Convert the ways to resume after a failure."""
    return lambda value: _recovery(value, path)


def _recovery(value: object, path: str) -> Becomes:
    modes = {"off": "disabled", "on": "auto"} | {mode: mode for mode in ("disabled", "auto", "fault", "resume")}
    if value is False or value is True:  # YAML 1.1 reads `off` and `on` as booleans
        value = "on" if value else "off"
    if not isinstance(value, str) or value not in modes:
        return Becomes(refused=f"unknown recovery mode {value!r}; AReaL supports: {', '.join(modes)}")
    return Becomes(writes={path: modes[value]})


def batch_of_one_source(path: str) -> Callable[[Any], Becomes]:
    """Conversion of a single file path to our list of paths."""
    return lambda value: Becomes(writes={path: value if isinstance(value, list) else [value]})


def source_of(name: str, split: object) -> str:
    """The data source `name`, with its split appended: a file has none, and a name may hold its split already."""
    is_file = PurePath(name).suffix in (".json", ".jsonl", ".parquet")
    return name if is_file or ":" in name or not split else f"{name}:{split}"


def level(path: str) -> Callable[[Any], Becomes]:
    """Convert the level of a normalization: batch, group, or none at all."""
    return lambda value: Becomes(writes={path: None if value == "none" else value})


def dynamic(value: object) -> Becomes:
    """Convert dynamic sampling, in which AReaL drops uniform groups without sampling replacements."""
    return Becomes(writes={ALGORITHM + "zero_variance_filter": True}) if value else Becomes(needless="off")


def success_rate(bound: str, *, everything: float) -> Callable[[Any], Becomes]:
    """Conversion of a bound on the share of good samples in a group; the value `everything` keeps all groups."""

    def become(value: object) -> Becomes:
        if number(value) in (None, everything):
            return Becomes(needless="every group is kept")
        table = ALGORITHM + "dynamic_sampling."
        note = "groups whose rewards are all equal are dropped, too"
        return Becomes(writes={f"{table}type": "filter", f"{table}{bound}": number(value)}, note=note)

    return become


def decoupled(value: object) -> Becomes:
    """Convert the decoupled loss, which is a switch in AReaL and a loss type here."""
    return Becomes(writes={ALGORITHM + "policy_loss_type": "decoupled"}) if value else Becomes(needless="off")


def overlong(value: object) -> Becomes:
    """Convert the overlong penalty, which keeps growing beyond the limit in AReaL."""
    return Becomes(writes={ALGORITHM + "reward_shaping.overlong.floor": False}) if value else Becomes(needless="off")


def whole_prefill(value: object) -> Becomes:
    """Convert the size of prefill chunks; -1 computes a whole prompt at a time."""
    if value == -1:
        return Becomes(writes={ENGINE + "enable_chunked_prefill": False})
    return Becomes(writes={ENGINE + "max_num_batched_tokens": value})


def not_there(why: str) -> Callable[[Any], Becomes]:
    """Conversion of a setting that is needless with any value, for the reason `why`."""
    return lambda value: Becomes(needless=why)


def negated(value: object) -> Any:
    """The negated bias, since AReaL's older system subtracts it and we add it."""
    found = number(value)
    return -found if isinstance(found, int | float) else found
