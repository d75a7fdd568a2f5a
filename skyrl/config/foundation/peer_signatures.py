"""Signatures of policy losses and advantage estimators of SkyRL and verl, recognised by the names of parameters.

Read from the module `ppo_utils` of NovaSky-AI/SkyRL a9564572e and the module `core_algos` of volcengine/verl b178a3cd5;
verl's `cliprange`, `cliprange_low` and `cliprange_high` are of its versions before 0.6.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import attrs

from skyrl.config.foundation.import_paths import Imported
from skyrl.tree.frames import defined_at


@attrs.frozen(kw_only=True)
class Form:
    """One signature of a kind of function."""

    system: str
    """The system that calls its functions so."""

    marks: tuple[str, ...]
    """Parameters by which it is recognised."""

    gives: tuple[str, ...]
    """All parameters that a function may ask for, `marks` among them, in their order."""


LOSS_FORMS = (
    Form(
        system="SkyRL",
        marks=("log_probs", "old_log_probs"),
        gives=("log_probs", "old_log_probs", "advantages", "config", "loss_mask", "rollout_logprobs"),
    ),
    Form(
        system="verl",
        marks=("old_log_prob", "log_prob"),
        gives=(
            *("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config"),
            *("rollout_is_weights", "rollout_log_probs"),
            *("cliprange", "cliprange_low", "cliprange_high", "clip_ratio_c"),
        ),
    ),
)
ESTIMATOR_FORMS = (
    Form(
        system="SkyRL",
        marks=("token_level_rewards", "grpo_norm_by_std"),
        gives=(
            *("token_level_rewards", "response_mask", "index", "values", "grpo_norm_by_std", "gamma", "lambd"),
            "config",
        ),
    ),
    Form(
        system="SkyRL or verl",
        marks=("token_level_rewards",),
        gives=(
            *("token_level_rewards", "response_mask", "index", "config", "values", "gamma", "lam", "lambd"),
            *("norm_adv_by_std_in_grpo", "reward_baselines"),
        ),
    ),
)


def form_of(function: object, forms: tuple[Form, ...]) -> Form | None:
    """The form that the function, or the class whose instances are called, has; None for skyrl's own: it takes one
    thing, the inputs or the batch. Raises `ValueError`, saying where it is defined and what would be right.
    """
    parameters = parameters_of(function)
    kind = type(function.object) if isinstance(function, Imported) else function
    if isinstance(kind, type) and _call_of(kind) is None:
        raise ValueError(f"{kind.__name__} has no __call__: its instances are called")
    if parameters is None:  # a builtin, of which nothing is known
        return None
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in _REST
    ]
    form = next((form for form in forms if {*form.marks} <= {parameter.name for parameter in parameters}), None)
    if form is None:
        positional = [item for item in parameters if item.kind in _BY_POSITION]
        if positional and set(required) <= {positional[0].name}:
            return None
        rights = [f"{form.system}'s ({', '.join(form.gives)})" for form in forms]
        raise ValueError(
            f"{_signature_text(function, parameters)} has no known form: right are one parameter (skyrl's), "
            f"{', or '.join(rights)}"
        )
    unknown = [name for name in required if name not in form.gives]
    if unknown:
        raise ValueError(
            f"{_signature_text(function, parameters)} asks for {', '.join(unknown)}: {form.system}'s form has "
            f"{', '.join(form.gives)}, and others need a default"
        )
    return form


def parameters_of(function: object) -> tuple[inspect.Parameter, ...] | None:
    """Parameters that a call gives; for a class, those of its instances. None if Python knows none."""
    if isinstance(function, Imported):
        function = function.object
    kind = function if isinstance(function, type) else type(function)
    call = _call_of(kind)
    if inspect.isfunction(call):  # not the signature of the class, which its instances inherit
        return tuple(inspect.signature(call).parameters.values())[1:]
    try:
        return (
            None
            if isinstance(function, type)
            else tuple(inspect.signature(_require_callable(function)).parameters.values())
        )
    except (TypeError, ValueError):
        return None


def _call_of(kind: type) -> object:
    """Function that is run when an instance is called; None for instances that cannot be called."""
    return next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)


def _require_callable(function: object) -> Callable[..., object]:
    if not callable(function):
        raise TypeError(f"{function!r:.100} cannot be called")
    return function


def _signature_text(function: object, parameters: tuple[inspect.Parameter, ...]) -> str:
    """`losses.py:3 mine(a, b)`."""
    kind = function if isinstance(function, type) else type(function)
    code = function if inspect.isfunction(function) else kind.__call__
    name = getattr(function, "__name__", kind.__name__)
    return f"{defined_at(code)} {name}({', '.join(parameter.name for parameter in parameters)})".strip()
