"""A user's sampler: imported by its path, called with the rows, and never able to end a run in a traceback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from skyrl.data.samplers import Iterated, Sampler, Scored
from skyrl.errors import RunError, UserError
from skyrl.processes.calls import summary
from skyrl.tree.imports import import_object

R = TypeVar("R")


class CustomSampler(Sampler):
    """A user's sampler, whose errors name it, and whose rows are checked."""

    def __init__(self, name: str, rows: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        """`name` is the import path of a class or function that makes the sampler. Raises `UserError` if it cannot be
        imported or called, or makes something else.
        """
        self._name, self._count = name, len(rows)
        make = import_object(name)
        try:
            sampler = make(rows, **arguments)
        except Exception as error:
            raise UserError(
                f"the sampler {name}, called with the rows and sampler_kwargs, raised {summary(error)}"
            ) from error
        if not isinstance(sampler, Sampler) and not hasattr(sampler, "__iter__"):
            raise UserError(
                f"the sampler {name} is a {type(sampler).__name__}, which is neither a skyrl.data.samplers.Sampler nor "
                "something whose iterator yields numbers of rows"
            )
        self._user_sampler = sampler if isinstance(sampler, Sampler) else Iterated(sampler)

    def draw(self, count: int, step: int) -> Sequence[int]:
        """Raises `RunError` unless the sampler gives `count` numbers of rows."""
        drawn = self._call_user(lambda: list(self._user_sampler.draw(count, step)), "draw")
        wrong = [row for row in drawn if not isinstance(row, int | np.integer) or not 0 <= row < self._count]
        if wrong or len(drawn) != count:
            description = f"the row {wrong[0]!r}" if wrong else f"{len(drawn)} rows"
            raise RunError(
                f"the sampler {self._name} drew {description} for step {step}; a batch needs {count} numbers from 0 to "
                f"{self._count - 1}"
            )
        return [int(row) for row in drawn]

    def observe(self, group: Scored) -> None:
        self._call_user(lambda: self._user_sampler.observe(group), "observe")

    def state_dict(self) -> dict[str, Any]:
        return self._call_user(self._user_sampler.state_dict, "state_dict")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._call_user(lambda: self._user_sampler.load_state_dict(state), "load_state_dict")

    def metrics(self) -> dict[str, float]:
        return self._call_user(self._user_sampler.metrics, "metrics")

    @property
    def observes(self) -> bool:
        return self._user_sampler.observes

    def _call_user(self, call: Callable[[], R], method: str) -> R:
        try:
            return call()
        except Exception as error:
            raise RunError(f"{method} of the sampler {self._name} raised {summary(error)}") from error
