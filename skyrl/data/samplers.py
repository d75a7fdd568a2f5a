"""Samplers: which rows a run draws next. `Sampler` is the interface, for all kinds of run.

    Permutation        every row once in an epoch; a function of the step alone
    Pools              rows by the mean reward that they had last
    TargetDifficulty   rows nearest to a difficulty that follows the rewards (AdaRFT)
    Mixture            sources by weights that change with the step
    Schedule           one sampler after another
    SkipSolved         another sampler without the rows that were solved
    Iterated           a class of the user that is only iterated over
    CustomSampler      a sampler of the user, which cannot end a run in a traceback

Random choices are a function of (seed, step), so that the state of a sampler is what it has observed and nothing else.
`skyrl.data.cursor` says when observations are applied.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import tanh
from typing import Any, TypeVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from skyrl.data.order import Indices, pass_of_source
from skyrl.errors import RunError, UserError
from skyrl.processes.calls import summary
from skyrl.tree.imports import import_object

Floats = NDArray[np.float64]
R = TypeVar("R")


@frozen
class Scored:
    """The rewards of one group."""

    row: int
    """Number of the row that was drawn, counted from 0 over all sources."""

    rewards: tuple[float, ...]
    """Raw reward of each sample that was judged."""

    @property
    def mean(self) -> float:
        """Mean reward of the samples."""
        return sum(self.rewards) / len(self.rewards)


class Sampler:
    """Chooses the rows of each batch. A sampler of your own overrides `draw` and, if it follows rewards, `observe` with
    `state_dict` and `load_state_dict`.

    It is called with the rows and `sampler_kwargs`. Equal states have to draw equally: derive random choices from
    `step`, or keep their state. Example:

        class Newest(Sampler):
            def __init__(self, rows, window=100):
                self.rows, self.window = rows, window

            def draw(self, count, step):
                last = len(self.rows)
                return [last - 1 - (step * count + place) % self.window for place in range(count)]
    """

    def draw(self, count: int, step: int) -> Sequence[int]:
        """Numbers of the `count` rows of a batch, counted from 0. `step` is the number of batches drawn before."""
        raise NotImplementedError(f"{type(self).__name__} has no draw(count, step)")

    def observe(self, group: Scored) -> None:
        """Take note of the rewards of a group, also of one that is not trained on. Groups come in the order in which
        their rows were drawn. Does nothing by default.
        """

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state for a checkpoint, as JSON has it. Empty by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""

    def metrics(self) -> dict[str, float]:
        """Numbers that are logged with each step, below `curriculum/`."""
        return {}

    @property
    def observes(self) -> bool:
        """Whether draws depend on rewards."""
        return type(self).observe is not Sampler.observe


class Permutation(Sampler):
    """Every row once in an epoch."""

    def __init__(self, epoch: Callable[[int], Indices], length: int, position: Callable[[int], int]) -> None:
        """`epoch` gives the rows of an epoch, which are `length`; `position` is the number of rows before a step."""
        self._epoch, self._length, self._position = epoch, length, position

    def draw(self, count: int, step: int) -> Sequence[int]:
        start = self._position(step)
        positions = (divmod(index, self._length) for index in range(start, start + count))
        return [int(self._epoch(epoch)[position]) for epoch, position in positions]


@frozen
class Pool:
    """Rows with a mean reward above the pool before it, and of at most `threshold`."""

    name: str
    threshold: float
    weight: float


class Pools(Sampler):
    """Draws a row in proportion to the weight of its pool, which is that of its mean reward; no row twice in a batch,
    as long as there are others of positive weight.
    """

    def __init__(self, rows: int, pools: Sequence[Pool], unseen: float, memory: float, seed: int) -> None:
        """`unseen` is the weight of rows that were not drawn yet, `memory` the share of its earlier mean reward that a
        row keeps with each new group.
        """
        self._pools, self._unseen, self._memory, self._seed = tuple(pools), unseen, memory, seed
        self._means: dict[int, float] = {}
        self._weights = np.full(rows, unseen, dtype=np.float64)

    def draw(self, count: int, step: int) -> Sequence[int]:
        return weighted(self._weights, count, np.random.default_rng([self._seed, step, 2]))

    def observe(self, group: Scored) -> None:
        before = self._means.get(group.row, group.mean)
        mean = self._means[group.row] = self._memory * before + (1 - self._memory) * group.mean
        self._weights[group.row] = self._pool(mean).weight

    def state_dict(self) -> dict[str, Any]:
        return {"rows": list(self._means), "rewards": list(self._means.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means = dict(zip(state["rows"], state["rewards"], strict=True))
        self._weights.fill(self._unseen)
        for row, mean in self._means.items():
            self._weights[row] = self._pool(mean).weight

    def metrics(self) -> dict[str, float]:
        """Share of all rows that is in each pool, and of those that were not drawn yet."""
        counts, rows = Counter(self._pool(reward).name for reward in self._means.values()), len(self._weights)
        shares = {f"pool_{pool.name}": counts[pool.name] / rows for pool in self._pools}
        return {"pool_unseen": 1 - len(self._means) / rows, **shares}

    def _pool(self, reward: float) -> Pool:
        return next((pool for pool in self._pools if reward <= pool.threshold), self._pools[-1])


def weighted(weights: Floats, count: int, draw: np.random.Generator) -> Sequence[int]:
    """`count` places in proportion to their weights, without repetition while enough have a positive one; all weigh the
    same if none has.

    Of independent exponential times with these rates, the earliest (Efraimidis and Spirakis, 2006).
    """
    times = draw.exponential(size=len(weights))
    usable = np.flatnonzero(weights) if weights.any() else np.arange(len(weights))
    rates = weights[usable] if weights.any() else np.ones(len(usable))
    arrivals = times[usable] / rates
    earliest = np.argpartition(arrivals, count)[:count] if count < len(usable) else np.arange(len(usable))
    first = usable[earliest[np.argsort(arrivals[earliest])]]
    more = draw.choice(usable, count - len(first), p=rates / rates.sum()) if len(first) < count else usable[:0]
    return [int(index) for index in (*first, *more)]


class TargetDifficulty(Sampler):
    """Draws the rows nearest to a target difficulty, which rises while rewards are above `reward` and falls while they
    are below: T + step_size * tanh(sensitivity * (mean reward - reward)), after each batch.

    AdaRFT, arXiv:2504.05520, section 3. Rows at the same distance are drawn in random order.
    """

    def __init__(
        self,
        difficulties: Floats,
        *,
        initial: float,
        bounds: tuple[float, float],
        step_size: float,
        sensitivity: float,
        reward: float,
        batch: int,
        seed: int,
    ) -> None:
        """`batch` is the number of groups after which the target moves."""
        self._difficulties, self._target, self._bounds = difficulties, initial, bounds
        self._step_size, self._sensitivity, self._reward = step_size, sensitivity, reward
        self._batch, self._seed = batch, seed
        self._means: list[float] = []

    def draw(self, count: int, step: int) -> Sequence[int]:
        mixed = np.random.default_rng([self._seed, step, 3]).permutation(len(self._difficulties))
        nearest = mixed[np.argsort(np.abs(self._difficulties[mixed] - self._target), kind="stable")]
        return [int(nearest[index % len(nearest)]) for index in range(count)]

    def observe(self, group: Scored) -> None:
        self._means.append(group.mean)
        if len(self._means) == self._batch:
            ahead = sum(self._means) / self._batch - self._reward
            moved = self._target + self._step_size * tanh(self._sensitivity * ahead)
            self._target = min(max(moved, self._bounds[0]), self._bounds[1])
            self._means = []

    def state_dict(self) -> dict[str, Any]:
        return {"target": self._target, "means": [*self._means]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._target, self._means = float(state["target"]), [*state["means"]]

    def metrics(self) -> dict[str, float]:
        return {"target_difficulty": self._target}


class Mixture(Sampler):
    """Draws the source of each row by weights that change evenly from one stage to the next, and reads each source in
    passes, reshuffled for each pass.
    """

    def __init__(self, sizes: Sequence[int], stages: Sequence[tuple[int, Sequence[float]]], seed: int) -> None:
        """`sizes` are the numbers of rows of the sources, which are concatenated; `stages` are steps in rising order,
        each with a weight for each source.
        """
        self._sizes, self._seed = tuple(sizes), seed
        self._steps = [step for step, _ in stages]
        self._shares = [np.asarray(weights, dtype=np.float64) / sum(weights) for _, weights in stages]
        self._drawn = [0 for _ in sizes]
        self._current = self._shares[0]

    def draw(self, count: int, step: int) -> Sequence[int]:
        columns = np.stack(self._shares).T
        self._current = np.array([np.interp(step, self._steps, column) for column in columns])
        self._current /= self._current.sum()
        sources = np.random.default_rng([self._seed, step, 4]).choice(len(self._sizes), count, p=self._current)
        return [self._next_row(int(source)) for source in sources]

    def _next_row(self, source: int) -> int:
        number, index = divmod(self._drawn[source], self._sizes[source])
        self._drawn[source] += 1
        return sum(self._sizes[:source]) + int(pass_of_source(self._seed, source, number, self._sizes[source])[index])

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": [*self._drawn]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = [*state["drawn"]]

    def metrics(self) -> dict[str, float]:
        """Share of each source in the last batch, as its weights have it."""
        return {f"share_of_source_{number}": float(share) for number, share in enumerate(self._current)}


class Schedule(Sampler):
    """Draws by the sampler of the last stage that has begun; all samplers observe."""

    def __init__(self, stages: Sequence[tuple[int, Sampler]]) -> None:
        """`stages` are steps in rising order, the first of which is 0."""
        self._stages, self._current = tuple(stages), 0

    def draw(self, count: int, step: int) -> Sequence[int]:
        self._current = max(number for number, (begins, _) in enumerate(self._stages) if begins <= step)
        return self._stages[self._current][1].draw(count, step)

    def observe(self, group: Scored) -> None:
        for _, sampler in self._stages:
            sampler.observe(group)

    def state_dict(self) -> dict[str, Any]:
        return {"stages": [sampler.state_dict() for _, sampler in self._stages]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for (_, sampler), own in zip(self._stages, state["stages"], strict=True):
            sampler.load_state_dict(own)

    def metrics(self) -> dict[str, float]:
        return {"stage": self._current, **self._stages[self._current][1].metrics()}

    @property
    def observes(self) -> bool:
        return any(sampler.observes for _, sampler in self._stages)


class SkipSolved(Sampler):
    """Leaves out the rows whose last `times` groups were solved by every sample; once all are, it leaves out none."""

    def __init__(self, inner: Sampler, rows: int, *, times: int, reward: float) -> None:
        """A sample with at least `reward` is solved."""
        self._inner, self._rows, self._times, self._reward = inner, rows, times, reward
        self._streaks: Counter[int] = Counter()
        self._solved: set[int] = set()
        self._waiting: deque[int] = deque()
        self._batches = 0

    def draw(self, count: int, step: int) -> Sequence[int]:
        """Whole batches of the inner sampler, whose steps are counted apart, until enough rows are left over."""
        chosen: list[int] = []
        most = self._batches + 2 * -(-self._rows // count) + 2  # two passes: a sampler may never draw what is left
        while len(chosen) < count:
            if not self._waiting:
                self._waiting.extend(self._inner.draw(count, self._batches))
                self._batches += 1
            row = self._waiting.popleft()
            if row not in self._solved or len(self._solved) == self._rows or self._batches > most:
                chosen.append(row)
        return chosen

    def observe(self, group: Scored) -> None:
        self._inner.observe(group)
        solved = all(reward >= self._reward for reward in group.rewards)
        self._streaks[group.row] = self._streaks[group.row] + 1 if solved else 0
        if self._streaks[group.row] >= self._times:
            self._solved.add(group.row)
        else:
            self._solved.discard(group.row)

    def state_dict(self) -> dict[str, Any]:
        streaks = {row: streak for row, streak in self._streaks.items() if streak}
        return {
            "rows": list(streaks),
            "streaks": list(streaks.values()),
            "waiting": list(self._waiting),
            "batches": self._batches,
            "inner": self._inner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._streaks = Counter(dict(zip(state["rows"], state["streaks"], strict=True)))
        self._solved = {row for row, streak in self._streaks.items() if streak >= self._times}
        self._waiting, self._batches = deque(state["waiting"]), int(state["batches"])
        self._inner.load_state_dict(state["inner"])

    def metrics(self) -> dict[str, float]:
        return {"rows_solved": len(self._solved) / self._rows, **self._inner.metrics()}


class Iterated(Sampler):
    """A sampler in the form of SkyRL and torch: an object whose iterator yields the numbers of rows of one pass.

    `state_dict` and `load_state_dict` are called if the object has them; without, a resumed run draws again, unused,
    what it has drawn before.
    """

    def __init__(self, iterable: Iterable[int]) -> None:
        self._made = iterable
        self._rows: Iterator[int] = iter(())
        self._passes, self._taken = 0, 0

    def draw(self, count: int, step: int) -> Sequence[int]:
        return [self._next_row() for _ in range(count)]

    def _next_row(self) -> int:
        for _ in range(2):
            row = next(self._rows, None)
            if row is not None:
                self._taken += 1
                return int(row)
            self._rows = iter(self._made)
            self._passes, self._taken = self._passes + 1, 0
        raise ValueError("it yields no row")

    def state_dict(self) -> dict[str, Any]:
        own = getattr(self._made, "state_dict", None)
        return {"passes": self._passes, "taken": self._taken, **({} if own is None else {"own": own()})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "own" in state:
            self._made.load_state_dict(state["own"])  # type: ignore[attr-defined]  # it has both methods or none
            self._rows = iter(self._made)
            self._passes, self._taken = int(state["passes"]), int(state["taken"])
            return
        while self._passes < state["passes"] or self._taken < state["taken"]:
            self._next_row()


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
