"""Kinds of run: the tree, its rules, checks and effects, and the experiment that runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal

from attrs import frozen

from skyrl.config.derive.model_tables import Role
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.unimplemented import Unimplemented
from skyrl.planning.topology import Sizes
from skyrl.tree.classes import leaf_paths
from skyrl.tree.rules import Check, Effect, Rule


@frozen(kw_only=True)
class RunKind:
    """One kind of run, such as reinforcement learning. `skyrl.config.loading.kinds` lists all of them."""

    name: str
    """Value of `kind` at the top of a file."""

    root: type[RunConfig]
    """Class of the tree."""

    rules: tuple[Rule[Any], ...]
    """Derivation rules in order: a rule comes after those that write what it reads."""

    checks: tuple[Check[Any], ...]
    """Checks of the resolved tree."""

    effects: tuple[Effect, ...]
    """Conditions under which fields have an effect."""

    unimplemented: tuple[Unimplemented, ...]
    """Paths that no component of this version reads."""

    sizes: Callable[[Any], Sizes]
    """Function that counts the ranks and engines that a resolved tree asks for."""

    roles: tuple[Role, ...]
    """Its models. The first one learns, and is what the run produces."""

    rows: Literal["prompts", "chats", "pairs"]
    """Content of a row of its data: a prompt for the policy, a chat to learn, or a better and a worse chat."""

    data: str
    """Path of the list of sources to train on."""

    length: tuple[str, ...]
    """Paths that make a run longer."""

    experiment: str
    """Import path of the class that runs this kind, as `package.module:Class`. The configuration imports no experiment.
    """

    preflight: str
    """Import path of the checks that look at the machine before a run starts."""

    doctor: str
    """Import path of the checks of `skyrl doctor`: those of `preflight`, and others that run the user's own code."""

    @property
    def trained(self) -> Role:
        """The model that the run produces."""
        return self.roles[0]

    @property
    def trainer(self) -> str:
        """Path of the table with fields such as `device` and `run_path`; empty for the root itself."""
        return self.trained.trainer

    @property
    def model(self) -> str:
        """Path of the table that names the model that the run produces."""
        return self.trained.at("model")

    @property
    def all_checks(self) -> tuple[Check[Any], ...]:
        """All checks, including those that refuse what is not implemented."""
        root: Any = self.root
        return (*self.checks, *(_refusal(entry, root) for entry in self.unimplemented))

    @property
    def unimplemented_paths(self) -> tuple[str, ...]:
        """Every leaf of the tree that no component of this version reads."""
        entries = [entry.path for entry in self.unimplemented]
        leaves = (path for path, _ in leaf_paths(self.root))
        return tuple(leaf for leaf in leaves if any(leaf == path or leaf.startswith(path + ".") for path in entries))

    def path(self, field: str) -> str:
        """The path of a field that every kind of run has, such as `run_path`."""
        return f"{self.trainer}.{field}" if self.trainer else field

    def experiment_class(self) -> type[object]:
        """The experiment class, imported by this call."""
        found: type[object] = imported(self.experiment)
        return found

    def preflight_checks(self) -> tuple[Check[Any], ...]:
        """The checks of the machine, imported by this call."""
        found: tuple[Check[Any], ...] = imported(self.preflight)
        return found

    def doctor_checks(self) -> tuple[Check[Any], ...]:
        """The checks of `skyrl doctor`, imported by this call."""
        found: tuple[Check[Any], ...] = imported(self.doctor)
        return found


@cache
def _refusal(entry: Unimplemented, root: Any) -> Check[Any]:
    return partial(entry.check, leaves=entry.leaves(root))


def imported(path: str) -> Any:
    """The object of an import path, as `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
