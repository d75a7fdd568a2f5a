"""Kinds of run: the tree, its rules, checks and effects, and the experiment that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import frozen

from skyrl.config.derive.model_tables import Role
from skyrl.config.foundation.entry import RunConfig
from skyrl.config.foundation.import_paths import load_builtin
from skyrl.planning.topology import Sizes
from skyrl.tree import joined
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

    unread_code: Callable[[Any], Mapping[str, str]] = lambda run: {}
    """Function that lists code of the user's own that was not imported: its name, keyed by the path of its settings.
    What reads that path follows from facts that only the code declares."""

    sizes: Callable[[Any], Sizes]
    """Function that counts the ranks and engines that a resolved tree asks for."""

    roles: tuple[Role, ...]
    """Its models. The first one learns, and is what the run produces."""

    rows: Literal["prompts", "chats", "pairs"]
    """Content of a row of its data: a prompt for the policy, a chat to learn, or a better and a worse chat."""

    reader: str = ""
    """Import path of the function that makes a `RowReader` of sources, tokenizer, run and length; empty for prompts.
    """

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

    def path(self, field: str) -> str:
        """The path of a field that every kind of run has, such as `run_path`."""
        return joined(self.trainer, field)

    def experiment_class(self) -> type[object]:
        """The experiment class, imported by this call."""
        cls: type[object] = load_builtin(self.experiment)
        return cls

    def row_reader(self) -> Callable[..., Any]:
        """The function that makes a reader of its rows, imported by this call."""
        reader: Callable[..., Any] = load_builtin(self.reader)
        return reader

    def preflight_checks(self) -> tuple[Check[Any], ...]:
        """The checks of the machine, imported by this call."""
        checks: tuple[Check[Any], ...] = load_builtin(self.preflight)
        return checks

    def doctor_checks(self) -> tuple[Check[Any], ...]:
        """The checks of `skyrl doctor`, imported by this call."""
        checks: tuple[Check[Any], ...] = load_builtin(self.doctor)
        return checks
