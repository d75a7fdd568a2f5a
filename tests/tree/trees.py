"""A small tree with a field of every kind, and how the tests of this folder write to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from skyrl.errors import ConfigError, Problem
from skyrl.tree import FREE, IDENTITY, FrozenDict, field, frozen
from skyrl.tree.arguments import read_argument, read_python
from skyrl.tree.builder import TreeBuilder
from skyrl.tree.files import read_file
from skyrl.tree.validators import non_negative, positive

T = TypeVar("T")


@frozen
class Optimizer:
    """One of several tables of the same class."""

    lr: float = field(default=1e-6, validator=non_negative)
    """Learning rate."""

    decay: float = 0.01
    """Weight decay."""

    betas: tuple[float, ...] = (0.9, 0.999)
    """Decay rates."""


@frozen
class Model:
    """A table of tables."""

    path: str | None = field(default=None, metadata=IDENTITY)
    """Where it is."""

    optimizer: Optimizer = Optimizer()
    """How it learns."""

    extra: Mapping[str, Any] = FrozenDict()
    """Anything."""


@frozen
class Run:
    """The root."""

    seed: int = 42
    name: str = field(default="run", metadata=FREE)
    on: bool = True
    steps: int | None = field(default=None, validator=positive)
    mode: Literal["none", "latest"] | None = "latest"
    logprobs: Literal[0, 1] = 1
    stop: tuple[str, ...] | None = None
    modules: str | tuple[str, ...] = "all"
    shard: bool | int = True
    weights: Mapping[str, float] = FrozenDict()
    options: Mapping[str, Any] | None = None
    policy: Model = Model(path="start")
    critic: Model = Model(optimizer=Optimizer(lr=5e-6))
    judge: Model | None = None


def arguments(*args: str) -> TreeBuilder[Run]:
    """A draft of `Run` to which these command-line arguments were assigned."""
    builder = TreeBuilder(Run())
    builder.assign_all(read_argument(argument, number) for number, argument in enumerate(args, start=1))
    return builder


def values(**kwargs: Any) -> TreeBuilder[Run]:
    """A draft of `Run` to which these values were assigned from Python; `policy__path` stands for policy.path."""
    builder = TreeBuilder(Run())
    builder.assign_all(read_python({path.replace("__", "."): value for path, value in kwargs.items()}))
    return builder


def toml(folder: Path, *texts: str) -> TreeBuilder[Run]:
    """A draft of `Run` to which TOML files of these texts were assigned: 1.toml, 2.toml, ..."""
    builder = TreeBuilder(Run())
    for number, text in enumerate(texts, start=1):
        file = folder / f"{number}.toml"
        file.write_text(text, encoding="utf-8")
        builder.assign(read_file(str(file))[0])
    return builder


def built(builder: TreeBuilder[T]) -> T:
    """The tree, of which nothing may have been refused."""
    assert builder.problems == []
    return builder.build()


def only_problem(builder: TreeBuilder[Any]) -> Problem:
    """The one problem of a draft."""
    builder.build()
    [problem] = builder.problems
    return problem


def paths_of(error: ConfigError) -> list[str]:
    """What the problems of an error are about."""
    return [problem.path for problem in error.problems]
