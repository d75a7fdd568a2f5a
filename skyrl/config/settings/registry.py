"""The user's own policy losses and advantage estimators, named by import path or by a registered name.

Functions in the signatures of SkyRL and verl are taken as they are: `skyrl.config.foundation.peer_signatures`.

    @register_policy_loss("soft_clip")
    @frozen
    class SoftClip:
        width: float = 0.2

        def __call__(self, inputs: LossInputs) -> Tensor: ...

Once the module with this code has been imported, `policy_loss_type = "soft_clip"` means this class, and
`trainer.algorithm.policy_loss` holds its fields. `policy_loss_type = "my_pkg.losses:SoftClip"` means the same class and
needs no import first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs

from skyrl.config.foundation.import_paths import Imported, is_import_path
from skyrl.config.foundation.peer_signatures import (
    ESTIMATOR_SIGNATURES,
    LOSS_SIGNATURES,
    PeerSignature,
    peer_signature_of,
)
from skyrl.config.settings.estimators import ADVANTAGE_ESTIMATORS
from skyrl.config.settings.losses import POLICY_LOSSES
from skyrl.errors import ConfigError, Problem, UserError
from skyrl.tree.builder import structure
from skyrl.tree.classes import is_config
from skyrl.tree.imports import follows, import_class, import_object

T = TypeVar("T", bound=Callable[..., Any])

_SPELLING = "module:name or file.py:name, of a class or a function"


@attrs.frozen(kw_only=True)
class Registry:
    """Names of one kind of component: the built-in ones, and those that a program registers."""

    kind: str
    """Name of the kind in messages."""

    field: str
    """Dotted path of the field that holds the name; `table` is where settings are."""

    table: str
    built_in: tuple[str, ...]
    signatures: tuple[PeerSignature, ...] = ()
    """Signatures of other systems in which it may be written."""

    _own: dict[str, Any] = attrs.field(factory=dict, init=False)

    def register(self, name: str, thing: T) -> T:
        """Give a class or function a name. Raises ValueError for a name that is taken, or that is an import path."""
        if is_import_path(name) or not name:
            raise ValueError(f"{name!r} is not a valid {self.kind} name: a colon marks an import path")
        known = self._own.get(name, thing)
        if name in self.built_in or _place(known) != _place(thing):
            raise ValueError(f"the {self.kind} {name!r} is already registered")
        self._own[name] = thing
        return thing

    def names(self) -> tuple[str, ...]:
        """Built-in names, then registered ones."""
        return (*self.built_in, *self._own)

    def is_own(self, name: str) -> bool:
        """Whether the name stands for code of the user's: an import path, or a name that a program registered."""
        return is_import_path(name) or name in self._own

    def settings_class(self, name: Any, may_import: bool) -> type[Any] | None:
        """The configuration class that the user's own name stands for; its fields are the settings.

        None for built-in names, for objects without settings, and for names that cannot or may not be imported:
        `problems` tells why.
        """
        if not isinstance(name, str) or name in self.built_in:
            return None
        may_import = may_import and follows("all")
        try:
            cls: Any = self._own.get(name) or (import_class(name) if may_import and is_import_path(name) else None)
        except ConfigError:
            return None
        is_usable = is_config(cls) and any("__call__" in vars(base) for base in cls.__mro__)
        return cls if is_usable else None

    def object(self, name: str, settings: Any) -> Any:
        """The object that the user's own name stands for.

        `settings` is the table in the tree, or the object itself if its class was known when the tree was read. Raises
        `ConfigError`.
        """
        if not isinstance(settings, Mapping):
            return settings
        instance = self._instantiate(name, settings)
        if not callable(instance):
            message = f"{name} is not a valid {self.kind}: it has no __call__"
            raise ConfigError([Problem(path=self.field, message=message)])
        return instance

    def declaring(self, name: str, settings: Any) -> Any:
        """The object whose attributes declare facts: an instance with its settings, or the class or function itself.

        None if it cannot be imported, which `object` reports.
        """
        if not isinstance(settings, Mapping):
            return settings
        try:
            return self._look_up(name)
        except ConfigError:
            return None

    def _instantiate(self, name: str, settings: Mapping[str, Any]) -> Any:
        target = self._look_up(name)
        if is_config(target):
            return structure(settings, target)
        if settings:
            hint = "make it a class, decorated with skyrl.tree.frozen, whose fields are the settings"
            raise ConfigError([Problem(path=self.table, message=f"{name} takes no settings", hint=hint)])
        try:
            if name not in self._own:
                return Imported(name)
            return target() if isinstance(target, type) else target
        except TypeError as error:
            message = f"{name} cannot be created without arguments: {error}"
            raise ConfigError([Problem(path=self.field, message=message)]) from error

    def _look_up(self, name: str) -> Any:
        target = self._own.get(name) or self._imported(name)
        try:
            peer_signature_of(target, self.signatures)
        except ValueError as error:
            raise ConfigError([Problem(path=self.field, message=str(error))]) from error
        return target

    def _imported(self, name: str) -> Any:
        if not is_import_path(name):
            raise ConfigError([Problem(path=self.field, message=f"no {self.kind} {name!r}")])
        try:
            target = import_object(name)
            import_class(name)  # refuses a class without its decorator
        except (ConfigError, UserError) as error:
            message = error.problems[0].message if isinstance(error, ConfigError) else str(error)
            raise ConfigError([Problem(path=self.field, message=message, hint=_SPELLING)]) from error
        if not callable(target):
            message = f"{name} is not a class or function"
            raise ConfigError([Problem(path=self.field, message=message, hint=_SPELLING)])
        return target


PolicyLossRegistry = Registry(
    kind="policy loss",
    field="trainer.algorithm.policy_loss_type",
    table="trainer.algorithm.policy_loss",
    built_in=tuple(POLICY_LOSSES),
    signatures=LOSS_SIGNATURES,
)
AdvantageEstimatorRegistry = Registry(
    kind="advantage estimator",
    field="trainer.algorithm.advantage_estimator",
    table="trainer.algorithm.advantage",
    built_in=tuple(ADVANTAGE_ESTIMATORS),
    signatures=ESTIMATOR_SIGNATURES,
)


def register_policy_loss(name: str) -> Callable[[T], T]:
    """Registers a loss: a callable that takes `LossInputs` and returns the loss of each token."""
    return lambda thing: PolicyLossRegistry.register(name, thing)


def register_advantage_estimator(name: str) -> Callable[[T], T]:
    """Registers an estimator: a callable that takes a `TrainingBatch` and returns the advantage of each token."""
    return lambda thing: AdvantageEstimatorRegistry.register(name, thing)


def _place(thing: Any) -> tuple[str, str]:
    """Location of an object, which stays the same if its module is executed again."""
    return thing.__module__, thing.__qualname__
