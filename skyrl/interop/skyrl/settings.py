"""Converts SkyRL's settings one at a time, and reports the outcome.

Settings of later versions whose outcome depends on others have tables here: features that are off, the profiler's
schedule, tables of answers, asynchronous batches. What does not depend on others is followed by the tree itself
(`skyrl/config/loading/newer_upstream_fields.py`). Lines of SkyRL are those of version 0.4.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from skyrl.config.foundation.entry import RunConfig
from skyrl.config.loading.newer_upstream_fields import NEWER_UPSTREAM_FIELDS
from skyrl.config.settings.strategies import has_own_modules
from skyrl.errors import Problem
from skyrl.interop.report import Line, Outcome
from skyrl.interop.systems import Switch, System
from skyrl.interop.translation import (
    Dependent,
    Entry,
    Translation,
    UnexpectedValue,
    Values,
    fixed,
    redundant,
    translate,
    unsupported,
)
from skyrl.interop.values import read_environment
from skyrl.interop.writing import Writing, apply
from skyrl.tree.access import default_at

POLICY = "trainer.policy."
_PROFILER = "torch_profiler_config."
_SCHEDULE = {"skip_first": 10, "wait": 0, "warmup": 1, "active": 1, "repeat": 1}
"""Steps before the first cycle; steps of a cycle that are not recorded, that warm up, that are recorded; cycles."""

_MOST_STEPS = 1000
_DETAILS = "a trace has shapes and memory, of every rank, in the run's folder"
_TRACE: Mapping[str, Entry] = {
    **dict.fromkeys(
        ("ranks", "save_path", "activities", "record_shapes", "profile_memory", "use_gzip"), redundant(_DETAILS)
    ),
    "with_stack": redundant("traces have no stacks of Python, which cost most of their size"),
    "export_type": fixed("chrome_trace", does="traces are Chrome's", otherwise="traces as folded stacks"),
    "with_flops": fixed(False, does=_DETAILS, otherwise="counts of operations in a trace"),
    "with_modules": fixed(False, does=_DETAILS, otherwise="names of modules in a trace"),
}

_ROWS = ("trainer.num_logger_eval_samples", "trainer.num_logger_train_samples")
_OF_MEGATRON = tuple(item.old for item in NEWER_UPSTREAM_FIELDS if ".megatron_config." in item.old)
_FULL, _DYNAMIC = "trainer.fully_async.sample_full_batch", "trainer.algorithm.dynamic_sampling."


def switches(policy: str, strategy: str) -> tuple[Switch, ...]:
    """Features that exist here too, with the newer settings that only they read. `policy` begins the names of the
    policy's settings; `strategy` is SkyRL's default.
    """
    lora = f"{policy}megatron_config.lora_config."
    return (
        Switch(f"{policy}{_PROFILER}enable", (f"{policy}{_PROFILER}*",), "backends/skyrl_train/utils/profiler.py:21"),
        Switch(
            "trainer.strategy" if policy else "strategy",
            _OF_MEGATRON if policy else ("megatron_config.*",),
            "train/config/sft_config.py:651; backends/skyrl_train/workers/fsdp reads none of them",
            default=strategy,
            is_off=lambda value: not has_own_modules(value),
        ),
        *(
            Switch(
                f"{model}megatron_config.moe_router_load_balancing_type",
                (f"{model}megatron_config.moe_aux_loss_coeff",),
                "train/config/config.py:510",
                default="none",
                is_off=lambda value: value in (None, "none"),
            )
            for model in ((policy, "trainer.ref.") if policy else ("",))
        ),
        *(
            Switch(
                f"{model}model.lora.rank",
                (f"{model}model.lora.max_loras", f"{model}model.lora.max_cpu_loras"),
                "backends/skyrl_train/inference_servers/utils.py:250",
                default=0,
            )
            for model in ((policy, "trainer.ref.", "trainer.critic.") if policy else ("",))
        ),
        Switch(
            f"{policy}model.lora.rank",
            (f"{lora}experts_shared_outer_loras", f"{lora}normalize_moe_lora"),
            "backends/skyrl_train/workers/megatron/megatron_worker.py:536 and 889",
            default=0,
        ),
        Switch(
            "trainer.fully_async.enabled",
            ("trainer.fully_async.sample_full_batch", "trainer.fully_async.simulate_*"),
            "train/fully_async_trainer.py:340",
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
        return translate(_TRACE[name], value)
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
    return Translation(writes={"trainer.trackers.sample_rows": max(rows)}, note=note)


def _full_batches(key: str, value: object, values: Values) -> Translation | None:
    """Convert batches of groups whose rewards differ, which the asynchronous trainer fills without a limit."""
    if value is not True:
        return None
    return Translation(writes={_DYNAMIC + "type": "filter", _DYNAMIC + "max_sample_batches": -1})


def _convert_dynamic_sampling(key: str, value: object, values: Values) -> Translation | None:
    """SkyRL's asynchronous trainer refuses any other dynamic sampling (train/fully_async_trainer.py:381)."""
    is_full = values.get(_FULL) is True and values.get("trainer.fully_async.enabled") is True
    return redundant(f"{_FULL} decides") if is_full else None


def profiler(policy: str) -> dict[str, Dependent]:
    """Entries of the profiler's schedule. `policy` begins the names of the policy's settings."""
    table = policy + _PROFILER
    return {f"{table}*": partial(_traced, table, "trainer.profile_steps" if policy else "profile_steps")}


RL = System(
    keys={},
    dependent=(
        {
            **profiler(POLICY),
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


_OWN_FIELD = (
    "a custom field: define it in your own class (docs/configuration.md, 'Fields of your own'), and set "
    'class = "module:Name"'
)
_NULL = "empty, which SkyRL reads as null and treats as false"
_EMPTY = "the script gives no value: one of its variables is empty"
_NAMES = ("run_name", "project_name", "ckpt_path", "export_path")
"""Suffixes of settings for names and folders, where empty text means that there is none."""

_EXAMPLES = {
    f"trainer.algorithm.{prefix}{name}": "trainer.algorithm.reward_shaping.overlong." + ours
    for prefix in ("overlong_buffer.", "overlong_buffer_")
    for name, ours in (("len", "buffer_len"), ("penalty_factor", "penalty_factor"))
}
"""Fields that SkyRL's own examples define, and that exist in our tree."""


def convert_one(
    writing: Writing,
    key: str,
    value: object,
    others: Mapping[str, object],
    text: str | None = None,
    *,
    added: bool = False,
) -> None:
    """Write one setting, or record why not. `others` are all settings of the source. `text` is the value as written in
    a script; None for a file.
    """
    read = read_environment(value, key)
    if read.refused:
        writing.note(Line(outcome="refused", source=key, value=value, reason=read.refused))
        return
    if reason := _idle_reason(key, value, others):
        writing.note(Line(outcome="needless", source=key, value=value, reason=reason))
        return
    if newer := RL.translated(key, read.value, others):
        apply(writing, key, value, newer)
        return
    text = text if read.value == value else None
    paths, problems = writing.write(key, _EXAMPLES.get(key, key), read.value)
    if read.value == "" and paths and _is_null_by_default(writing.root, paths[0]):  # both are false to SkyRL
        paths, problems = writing.write(key, paths[0], None)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors and text and not isinstance(value, str | list | dict):  # `run_name=1e5`: a text that looks like a number
        new_paths, text_problems = writing.write(key, key, text, text=True)
        if new_paths:
            writing.undo_problems(errors)
            paths, problems, errors = new_paths, text_problems, []
    if errors and value is None and text == "":  # SkyRL reads null, which counts as false for a boolean
        new_paths, _ = writing.write(key, key, False)
        if new_paths and isinstance(default_at(writing.root, new_paths[0]), bool):
            writing.undo_problems(errors)
            paths, problems, errors = new_paths, [Problem(path=key, message="", hint=_NULL)], []
    if errors:
        writing.note(refusal(key, value, errors, text, added=added))
    elif not paths:
        writing.note(Line(outcome="needless", source=key, value=value, reason=problems[0].hint if problems else ""))
    else:
        is_kept = all(f"{path}.".startswith(f"{key}.") for path in paths)
        reason = "; ".join(problem.hint for problem in problems if problem.hint)
        outcome: Outcome = "kept" if is_kept else "renamed"
        writing.note(Line(outcome=outcome, source=key, value=value, targets=paths, reason=reason))


def _is_null_by_default(root: type[RunConfig], path: str) -> bool:
    try:
        return default_at(root, path) is None
    except AttributeError:  # a name in a table of any names
        return False


def _idle_reason(key: str, value: object, others: Mapping[str, object]) -> str:
    """Why a setting has no effect, given the others; empty if it has an effect."""
    if value in (None, "") and key.endswith(_NAMES):
        return "empty, so the default applies"
    if key == "generator.retokenize_chat_history" and others.get("generator.step_wise_trajectories") is True:
        return "step_wise_trajectories re-tokenizes every turn"
    return ""


def refusal(key: str, value: object, errors: list[Problem], text: str | None = None, *, added: bool = False) -> Line:
    """The report line of a setting that our tree does not accept, with all its problems."""
    if value is None and text == "":
        return Line(outcome="refused", source=key, value="", reason=_EMPTY)
    reason = "; ".join("; ".join(filter(None, (problem.message, problem.hint))) for problem in errors)
    is_unknown = any(problem.code == "unknown field" for problem in errors)
    is_later = any(problem.code == "not implemented" for problem in errors)
    full_reason = f"{reason}; {_OWN_FIELD}" if is_unknown and (added or not errors[0].hint) else reason
    return Line(outcome="not yet" if is_later else "refused", source=key, value=value, reason=full_reason)
