"""Settings of later versions of SkyRL whose outcome depends on other settings: features that are off, the profiler's
schedule, tables of answers, asynchronous batches.

What does not depend on others is followed by the tree itself (`skyrl/config/loading/newer_upstream_fields.py`). Lines
of SkyRL are those of version 0.4.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from skyrl.config.loading.newer_upstream_fields import NEWER_UPSTREAM_FIELDS
from skyrl.config.settings.strategies import has_own_modules
from skyrl.errors import ConfigError
from skyrl.interop.switches import Switch
from skyrl.interop.systems import System
from skyrl.interop.translation import (
    Dependent,
    Translation,
    UnexpectedValue,
    Values,
    fixed,
    redundant,
    unsupported,
)
from skyrl.tree.arguments import split_path
from skyrl.tree.migrations import follow
from skyrl.tree.origins import Assignment, Origin, dotted

POLICY = "trainer.policy."
_PROFILER = "torch_profiler_config."
_SCHEDULE = {"skip_first": 10, "wait": 0, "warmup": 1, "active": 1, "repeat": 1}
"""Steps before the first cycle; steps of a cycle that are not recorded, that warm up, that are recorded; cycles."""

_MOST_STEPS = 1000
_DETAILS = "a trace has shapes and memory, of every rank, in the run's folder"
_TRACE: Mapping[str, Any] = {
    **dict.fromkeys(
        ("ranks", "save_path", "activities", "record_shapes", "profile_memory", "use_gzip"),
        lambda value: redundant(_DETAILS),
    ),
    "with_stack": lambda value: redundant("traces have no stacks of Python, which cost most of their size"),
    "export_type": fixed("chrome_trace", does="traces are Chrome's", otherwise="traces as folded stacks"),
    "with_flops": fixed(False, does=_DETAILS, otherwise="counts of operations in a trace"),
    "with_modules": fixed(False, does=_DETAILS, otherwise="names of modules in a trace"),
}

_ROWS = ("trainer.num_logger_eval_samples", "trainer.num_logger_train_samples")
_SAMPLE_ROWS = "trainer.trackers.sample_rows"
_OF_MEGATRON = tuple(item.old for item in NEWER_UPSTREAM_FIELDS if ".megatron_config." in item.old)
_FULL, _DYNAMIC = "trainer.fully_async.sample_full_batch", "trainer.algorithm.dynamic_sampling."


def switches(policy: str, strategy: str) -> tuple[Switch, ...]:
    """Features that exist here too, with the newer settings that only they read. `policy` begins the names of the
    policy's settings; `strategy` is SkyRL's default.
    """
    return (
        Switch(
            key=policy + _PROFILER + "enable",
            settings=(policy + _PROFILER + "*",),
            source="backends/skyrl_train/utils/profiler.py:21",
        ),
        Switch(
            key="trainer.strategy" if policy else "strategy",
            settings=_OF_MEGATRON if policy else ("megatron_config.*",),
            default=strategy,
            is_off=lambda value: not has_own_modules(value),
            source="train/config/sft_config.py:651; backends/skyrl_train/workers/fsdp reads none of them",
        ),
        *(
            Switch(
                key=f"{model}megatron_config.moe_router_load_balancing_type",
                settings=(f"{model}megatron_config.moe_aux_loss_coeff",),
                default="none",
                is_off=lambda value: value in (None, "none"),
                source="train/config/config.py:510",
            )
            for model in ((policy, "trainer.ref.") if policy else ("",))
        ),
        *(
            Switch(
                key=f"{model}model.lora.rank",
                settings=(f"{model}model.lora.max_loras", f"{model}model.lora.max_cpu_loras"),
                default=0,
                source="backends/skyrl_train/inference_servers/utils.py:250",
            )
            for model in ((policy, "trainer.ref.", "trainer.critic.") if policy else ("",))
        ),
        Switch(
            key=policy + "model.lora.rank",
            settings=tuple(
                f"{policy}megatron_config.lora_config.{name}"
                for name in ("experts_shared_outer_loras", "normalize_moe_lora")
            ),
            default=0,
            source="backends/skyrl_train/workers/megatron/megatron_worker.py:536 and 889",
        ),
        Switch(
            key="trainer.fully_async.enabled",
            settings=("trainer.fully_async.sample_full_batch", "trainer.fully_async.simulate_*"),
            source="train/fully_async_trainer.py:340",
        ),
    )


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnexpectedValue("expected a whole number")
    return value


def _traced(table: str, path: str, key: str, value: object, values: Values) -> Translation | None:
    """Convert the schedule of torch.profiler to the list of traced steps, counted from 1."""
    name = key.removeprefix(table)
    if name in _TRACE:
        return _TRACE[name](value)  # type: ignore[no-any-return]  # an entry
    if name not in ("enable", *_SCHEDULE) or values.get(table + "enable") is not True:
        return None
    skipped, wait, warmup, active, repeat = (
        _whole(values.get(table + item, default)) for item, default in _SCHEDULE.items()
    )
    if not repeat or repeat * active > _MOST_STEPS:
        return unsupported(f"traces of more than {_MOST_STEPS} steps")
    cycle = wait + warmup + active
    first = range(skipped + wait + warmup + 1, skipped + repeat * cycle + 1, cycle or 1)
    return Translation(writes={path: [step for begin in first for step in range(begin, begin + active)]})


def _sample_rows(key: str, value: object, values: Values) -> Translation:
    """Convert the rows of tables of answers, which are the same number for training and evaluation here."""
    rows = [max(_whole(values.get(name, -1)), 0) for name in _ROWS]
    note = "" if rows[0] == rows[1] else "of training and of evaluation alike"
    return Translation(writes={_SAMPLE_ROWS: max(rows)}, note=note)


def _full_batches(key: str, value: object, values: Values) -> Translation | None:
    """Convert batches of groups whose rewards differ, which the asynchronous trainer fills without a limit."""
    if value is not True:
        return None
    return Translation(writes={_DYNAMIC + "type": "filter", _DYNAMIC + "max_sample_batches": -1})


def _convert_dynamic_sampling(key: str, value: object, values: Values) -> Translation | None:
    """SkyRL's asynchronous trainer refuses any other dynamic sampling (train/fully_async_trainer.py:381)."""
    is_full = values.get(_FULL) is True and values.get("trainer.fully_async.enabled") is True
    return redundant(f"{_FULL} decides") if is_full else None


def _settings(policy: str) -> dict[str, Dependent]:
    path = "trainer.profile_steps" if policy else "profile_steps"
    table = policy + _PROFILER
    return {f"{table}*": partial(_traced, table, path)}


RL = System(
    keys={},
    dependent=(
        {
            **_settings(POLICY),
            **dict.fromkeys(_ROWS, _sample_rows),
            _FULL: _full_batches,
            _DYNAMIC + "type": _convert_dynamic_sampling,
            _DYNAMIC + "max_sample_batches": _convert_dynamic_sampling,
        },
    ),
    switches=switches(POLICY, "fsdp"),
    unknown=lambda key, writing: "",
)
"""Newer settings of reinforcement learning."""

SFT = System(keys={}, dependent=(_settings(""),), switches=switches("", "megatron"), unknown=lambda key, writing: "")
"""Newer settings of `main_sft`."""


def of_a_policy(key: str, value: object) -> Translation | None:
    """Outcome of a newer setting of `main_sft` that is the policy's in reinforcement learning; None for any other."""
    assignment = Assignment(path=split_path(POLICY + key), value=value, origin=Origin(kind="file"))
    try:
        followed = follow(NEWER_UPSTREAM_FIELDS, assignment)
    except ConfigError as error:
        return unsupported(error.problems[0].hint)
    if followed is None:
        return None
    moved, warnings = followed
    if moved:
        return Translation(writes={dotted(item.path).removeprefix(POLICY): item.value for item in moved})
    return redundant(warnings[0].hint)
