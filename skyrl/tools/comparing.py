"""Compares two records of one step, quantity by quantity, and locates the first difference in each.

Quantities are compared in the order in which a step computes them:

    tokens, log-probabilities, rewards, advantages, losses, gradient norms, weights

A later difference may follow from an earlier one, so look at the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import attrs
import torch
from attrs import frozen
from torch import Tensor

from skyrl.tracking.recording import Computed, Update
from skyrl.training.step_trace import STAGES
from skyrl.trajectory import Trajectory, TrajectoryGroup

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
        yield from _first_difference(
            ("data order" if name == "id" else "prompts"),
            (
                (f"group {number}, {name.replace('_', ' ')}", getattr(a.prompt, name), getattr(b.prompt, name))
                for number, (a, b) in enumerate(pairs)
            ),
        )
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
    yield from _first_difference(
        "baselines", ((f"group {number}", a.baseline, b.baseline) for number, (a, b) in enumerate(pairs))
    )


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
        pairs = list(zip_longest(*(_metrics_of(learner, updates) for updates in (one, other)), fillvalue={}))
        names = dict.fromkeys(name for pair in pairs for metrics in pair for name in metrics)
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


def _metrics_of(learner: str, updates: Sequence[Update]) -> list[Mapping[str, float]]:
    return [update.metrics for update in updates if update.learner == learner]


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
            yield Difference(
                quantity, f"{where}, token {index}" if _is_token(a, b) else where, _display_value(a), _display_value(b)
            )
        else:
            yield Difference(quantity, where, _display_value(one), _display_value(other))
        return


_NOTHING = "nothing"


def _is_token(one: object, other: object) -> bool:
    return all(isinstance(item, (int, float)) or item is _NOTHING for item in (one, other))


def _is_same(one: object, other: object) -> bool:
    return bool(one == other or (one != one and other != other))


def _presence(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else "present"


def _number(value: Tensor) -> str:
    return repr(value.item()) if value.dtype != torch.float32 else f"{value.item():.9g}"


def _display_value(value: object) -> str:
    text = repr(value) if value is not _NOTHING else _NOTHING
    return text if len(text) <= 100 else text[:97] + "..."
