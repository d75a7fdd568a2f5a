"""Compares two records of one step, quantity by quantity, and locates the first difference in each; and finds where two
runs diverge: the first step that differs, and within it the first token, tensor or key.

Quantities are compared in the order in which a step computes them:

    tokens, log-probabilities, rewards, advantages, losses, gradient norms, weights

A later difference may follow from an earlier one, so look at the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor

from skyrl.config.loading.code_digests import changed_code, stored_digests
from skyrl.errors import UserError
from skyrl.runs.run_folder import RunFolder
from skyrl.runs.stored_runs import stored_run
from skyrl.tracking.metric_table import depends_on_machine
from skyrl.tracking.recording import Computed, Update
from skyrl.training.step_trace import STAGES
from skyrl.trajectory import Trajectory, TrajectoryGroup
from skyrl.tree import differences

_GRADIENT = "grad_norm"


@frozen
class Difference:
    """The first place where one quantity differs between two records."""

    quantity: str
    """Name of the quantity, such as `rewards`, `policy loss`, `policy weights`."""

    where: str
    """Position, such as `row 17 (prompt 0:35, sample 1), token 12`, or the name of a weight."""

    one: str
    other: str


def differences_of_samples(one: Sequence[TrajectoryGroup], other: Sequence[TrajectoryGroup]) -> Iterator[Difference]:
    """Differences in the order of the data, then in each part of the trajectories; durations are not compared."""
    if len(one) != len(other):
        yield Difference("data order", "groups in the batch", str(len(one)), str(len(other)))
        return
    pairs = list(zip(one, other, strict=True))
    for name in ("id", "token_ids", "env_class", "data_source", "messages", "extras"):
        values = (
            (f"group {number}, {name.replace('_', ' ')}", getattr(a.prompt, name), getattr(b.prompt, name))
            for number, (a, b) in enumerate(pairs)
        )
        yield from _first_difference("data order" if name == "id" else "prompts", values)
    yield from _first_difference(
        "samples",
        ((f"group {n}, number of samples", len(a.trajectories), len(b.trajectories)) for n, (a, b) in enumerate(pairs)),
    )
    rows = [
        (f"group {number} (prompt {a.prompt.id}), sample {x.sample_index}", x, y)
        for number, (a, b) in enumerate(pairs)
        for x, y in zip(a.trajectories, b.trajectories, strict=False)
    ]
    for part in attrs.fields(Trajectory):
        if part.eq:
            quantity = _PARTS.get(part.name, part.name.replace("_", " "))
            yield from _first_difference(
                quantity, ((row, getattr(x, part.name), getattr(y, part.name)) for row, x, y in rows), per_token=True
            )
    baselines = ((f"group {number}", a.baseline, b.baseline) for number, (a, b) in enumerate(pairs))
    yield from _first_difference("baselines", baselines)


_PARTS = {
    "prompt_ids": "prompt tokens",
    "response_ids": "sampled tokens",
    "rollout_logprobs": "log-probabilities of the engine",
    "rewards": "raw rewards",
}


def differences_of_computing(one: Computed, other: Computed, groups: Sequence[TrajectoryGroup]) -> Iterator[Difference]:
    """Differences in the trainer's computations on a batch: tensors, updates, weights. `groups` name the rows."""
    names = [
        f"prompt {group.prompt.id}, sample {trajectory.sample_index}"
        for group in groups
        for trajectory in group.trajectories
    ]
    for stage in STAGES:
        yield from _tensor_differences(stage, one.tensors.get(stage), other.tensors.get(stage), names)
    yield from _update_differences(one.updates, other.updates)
    for learner in dict.fromkeys([*one.weights, *other.weights]):
        yield from _name_differences(f"{learner} weights", one.weights.get(learner, {}), other.weights.get(learner, {}))


def _tensor_differences(
    quantity: str, one: Tensor | None, other: Tensor | None, names: Sequence[str]
) -> Iterator[Difference]:
    if one is None or other is None:
        if one is not other:
            yield Difference(quantity, "the whole tensor", _presence(one), _presence(other))
        return
    if one.shape != other.shape:
        yield Difference(quantity, "shape", str(tuple(one.shape)), str(tuple(other.shape)))
        return
    unequal = ~((one == other) | (one.isnan() & other.isnan()))
    if unequal.any():
        row, token = (int(index) for index in unequal.nonzero()[0])
        name = f" ({names[row]})" if row < len(names) else ""
        count = f"; {int(unequal.sum())} of {unequal.numel()} differ" if int(unequal.sum()) > 1 else ""
        yield Difference(
            quantity, f"row {row}{name}, token {token}{count}", _number(one[row, token]), _number(other[row, token])
        )


def _update_differences(one: Sequence[Update], other: Sequence[Update]) -> Iterator[Difference]:
    """For each learner, the first differing update in its losses, in its gradient norm and in its other metrics."""
    for learner in dict.fromkeys(update.learner for update in (*one, *other)):
        metrics = ([update.metrics for update in updates if update.learner == learner] for updates in (one, other))
        pairs = list(zip_longest(*metrics, fillvalue={}))
        names = dict.fromkeys(name for pair in pairs for entries in pair for name in entries)
        for quantity, chosen in (
            ("loss", [name for name in names if "loss" in name]),
            (_GRADIENT, [_GRADIENT]),
            ("metrics", [name for name in names if "loss" not in name and name != _GRADIENT]),
        ):
            yield from _first_difference(
                f"{learner} {quantity}",
                (
                    (f"update {number}, {name}", a.get(name), b.get(name))
                    for number, (a, b) in enumerate(pairs)
                    for name in chosen
                ),
            )


def _name_differences(quantity: str, one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[Difference]:
    names = list(dict.fromkeys([*one, *other]))
    wrong = [name for name in names if one.get(name) != other.get(name)]
    if wrong:
        count = f"; {len(wrong)} of {len(names)} tensors differ" if len(wrong) > 1 else ""
        yield Difference(quantity, wrong[0] + count, str(one.get(wrong[0])), str(other.get(wrong[0])))


def _first_difference(
    quantity: str, cases: Iterator[tuple[str, Any, Any]], *, per_token: bool = False
) -> Iterator[Difference]:
    """The first of the cases (where, one, other) that differs; with `per_token`, the first entry of it that differs."""
    for where, one, other in cases:
        if _is_same(one, other):
            continue
        if per_token and isinstance(one, tuple) and isinstance(other, tuple):
            entries = list(zip_longest(one, other, fillvalue=_NOTHING))
            index, (a, b) = next((index, pair) for index, pair in enumerate(entries) if not _is_same(*pair))
            is_token = all(isinstance(item, (int, float)) or item is _NOTHING for item in (a, b))
            place = f"{where}, token {index}" if is_token else where
            yield Difference(quantity, place, _display_value(a), _display_value(b))
        else:
            yield Difference(quantity, where, _display_value(one), _display_value(other))
        return


_NOTHING = "nothing"


def _is_same(one: object, other: object) -> bool:
    return bool(one == other or (one != one and other != other))


def _presence(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else "present"


def _number(value: Tensor) -> str:
    return repr(value.item()) if value.dtype != torch.float32 else f"{value.item():.9g}"


def _display_value(value: object) -> str:
    text = repr(value) if value is not _NOTHING else _NOTHING
    return text if len(text) <= 100 else text[:97] + "..."


@frozen(kw_only=True)
class Parting:
    """Result of comparing two runs: the steps in common, and the first differences."""

    configuration: dict[str, tuple[Any, Any]]
    """Fields that differ and affect a run's numbers -> both values."""

    code: dict[str, tuple[str | None, str | None]]
    """Files of the runs' own code that differ -> both digests. See `skyrl.config.loading.code_digests`."""

    compared: tuple[int, ...]
    """Steps that were compared, up to the first that differs."""

    recorded: bool
    """Whether both runs have recordings. Otherwise only their metrics are compared, which is less precise."""

    differences: tuple[Difference, ...]
    """Differences in the first step that differs, in the order of the step's stages."""

    only_in_one: tuple[int, ...]
    """Steps that only one of the runs has."""


def bisect(one: Path, other: Path) -> Parting:
    """Compare two runs by their folders. Raises `UserError` for a folder that is not a run's and for runs of different
    kinds, and `DataError` for a damaged recording.
    """
    runs = stored_run(one), stored_run(other)
    if type(runs[0]) is not type(runs[1]):
        raise UserError(f"the runs differ in kind: {one} has kind = {runs[0].kind}, {other} has kind = {runs[1].kind}")
    changed = differences(*runs, roles=("identity", "numerics"))
    folders = RunFolder(one), RunFolder(other)
    recorded = all(folder.recording().steps() for folder in folders)
    metrics = () if recorded else tuple(map(_metrics, folders))
    steps_of = [set(metric) for metric in metrics or (folder.recording().steps() for folder in folders)]
    compared: list[int] = []
    result: tuple[Difference, ...] = ()
    for step in sorted(steps_of[0] & steps_of[1]):
        compared.append(step)
        if recorded:
            first, second = (folder.recording() for folder in folders)
            groups = first.sampled(step).groups
            samples = differences_of_samples(groups, second.sampled(step).groups)
            result = *samples, *differences_of_computing(first.computed(step), second.computed(step), groups)
        else:
            before, after = (run[step] for run in metrics)
            result = tuple(
                Difference("metrics", name, repr(before.get(name)), repr(after.get(name)))
                for name in dict.fromkeys([*before, *after])
                if before.get(name) != after.get(name)
            )
        if result:
            break
    return Parting(
        configuration=changed,
        code=changed_code(stored_digests(str(one)), stored_digests(str(other))),
        compared=tuple(compared),
        recorded=recorded,
        differences=result,
        only_in_one=tuple(sorted(steps_of[0] ^ steps_of[1])),
    )


def _metrics(folder: RunFolder) -> dict[int, dict[str, Any]]:
    return {
        record["step"]: {name: value for name, value in record.items() if not depends_on_machine(name)}
        for record in folder.metrics.read()
    }
