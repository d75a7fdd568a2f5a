"""Every leaf of the tree, and for each a value other than its default."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

import attrs
import pytest

from skyrl.config import SkyRLTrainConfig
from skyrl.errors import ConfigError
from skyrl.tree import Secret, evolve_at
from skyrl.tree.access import default_at
from skyrl.tree.classes import fields_of, is_config, leaf_paths
from skyrl.tree.types import bare, config_class, is_list, is_mapping, is_union

LEAVES: dict[str, attrs.Attribute[Any]] = dict(leaf_paths(SkyRLTrainConfig))

RUNNABLE: dict[str, Any] = {
    "trainer.device": "cpu",
    "trainer.logger": "console",
    "generator.inference_engine.backend": "torch",
}
"""What has to be written so that this version can run the default tree."""


def owner_of(path: str, root: type[Any] = SkyRLTrainConfig) -> type[Any]:
    """The class that declares the last name of a path."""
    cls: Any = root
    for name in path.split(".")[:-1]:
        cls = config_class(fields_of(cls)[name].type)
    owner: type[Any] = cls
    return owner


def another(path: str) -> Any:
    """A value of the leaf other than its default, as JSON and TOML spell it. Raises LookupError if there is none."""
    for value in other_values(SkyRLTrainConfig, path):
        return value
    raise LookupError(path)


def other_values(root: type[Any], path: str) -> Iterator[Any]:
    """Values that a leaf may have beside its default, one of each type at least."""
    owner, name = owner_of(path, root), path.rpartition(".")[2]
    default = default_at(root, path)
    for value in _candidates(fields_of(owner)[name].type, default):
        try:
            built = getattr(evolve_at(owner(), name, value), name)
        except ConfigError:
            continue
        if (type(built), built) != (type(default), default):
            yield value


_TABLES = (
    {"metric": "eval/all/avg_score"},
    {"command": ["server"]},
    {"weights": [1.0]},
    {"sampler": "mixture"},
    {"name": "other"},
)
"""An item of each list of tables; another list refuses it."""


def _candidates(kind: Any, default: Any) -> Iterator[Any]:
    kind = bare(kind)
    if is_union(kind):
        for arm in get_args(kind):
            if arm is not type(None):
                yield from _candidates(arm, default)
    elif get_origin(kind) is Literal:
        yield from get_args(kind)
    elif is_list(kind) and is_config(get_args(kind)[0]):
        yield from ([item] for item in _TABLES)
    elif is_list(kind):
        yield from ([item, item] for item in _candidates(get_args(kind)[0], None))
    elif is_mapping(kind):
        yield from ({"key": 1}, {"key": "http://other"})
    else:
        yield from {
            bool: (True, False),
            int: (3, 1),
            float: (0.25, 1.5, -1.5),
            str: ("other", "zero", "http://other", "vllm:d1|fsdp:d1", "{prompt}: {hint}"),
            Secret: (Secret("A_TOKEN"),),
        }[kind]


FIXED = {
    "kind",  # another one is another tree
    "trainer.sequence_parallel_backend",  # there is one
    *(path for path in LEAVES if path.endswith("deepspeed_config.gradient_clipping")),  # another setting decides
}
"""Leaves that have no other value."""

OTHERS: dict[str, Any] = {path: another(path) for path in LEAVES if path not in FIXED}


def each(cases: Iterable[Any], *, sampled: int = 1) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes one test of hundreds that take milliseconds: it calls the test with every case as its first argument, and
    fails with all cases that fail. With `sampled`, every n-th case runs, the others only if --long is given.
    """

    def made(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def of_all(request: pytest.FixtureRequest, **fixtures: Any) -> None:
            failed = {}
            for case in itertools.islice(cases, 0, None, 1 if request.config.getoption("--long") else sampled):
                try:
                    test(case, **fixtures)
                except Exception as error:  # noqa: BLE001 - it is shown beside the others
                    failed[str(case)] = f"{type(error).__name__}: {error}"
            if failed:
                raise AssertionError("\n".join(f"{case}: {error}" for case, error in failed.items()))

        _, *fixtures = inspect.signature(test).parameters.values()
        requested = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        of_all.__signature__ = inspect.Signature([requested, *fixtures])  # type: ignore[attr-defined]  # by which pytest finds fixtures
        return of_all

    return made
