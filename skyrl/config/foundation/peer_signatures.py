"""Signatures of policy losses and advantage estimators of peers, other RL libraries (SkyRL, verl), whose functions run
here unchanged. They are recognised by the names of parameters.

Read from the module `ppo_utils` of NovaSky-AI/SkyRL a9564572e and the module `core_algos` of volcengine/verl b178a3cd5;
verl's `cliprange`, `cliprange_low` and `cliprange_high` are of its versions before 0.6.
"""

from __future__ import annotations

import inspect
from typing import Any

import attrs

from skyrl.config.foundation.import_paths import Imported
from skyrl.tree.frames import defined_at


@attrs.frozen(kw_only=True)
class PeerSignature:
    """One signature of a kind of function."""

    system: str
    """The library that calls its functions with it."""

    identifying: tuple[str, ...]
    """Parameters by which the signature is recognised."""

    parameters: tuple[str, ...]
    """All parameters that a function may ask for, `identifying` ones among them, in their order."""


LOSS_SIGNATURES = (
    PeerSignature(
        system="SkyRL",
        identifying=("log_probs", "old_log_probs"),
        parameters=("log_probs", "old_log_probs", "advantages", "config", "loss_mask", "rollout_logprobs"),
    ),
    PeerSignature(
        system="verl",
        identifying=("old_log_prob", "log_prob"),
        parameters=(
            *("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config"),
            *("rollout_is_weights", "rollout_log_probs"),
            *("cliprange", "cliprange_low", "cliprange_high", "clip_ratio_c"),
        ),
    ),
)
ESTIMATOR_SIGNATURES = (
    PeerSignature(
        system="SkyRL",
        identifying=("token_level_rewards", "grpo_norm_by_std"),
        parameters=(
            *("token_level_rewards", "response_mask", "index", "values", "grpo_norm_by_std", "gamma", "lambd"),
            "config",
        ),
    ),
    PeerSignature(
        system="SkyRL or verl",
        identifying=("token_level_rewards",),
        parameters=(
            *("token_level_rewards", "response_mask", "index", "config", "values", "gamma", "lam", "lambd"),
            *("norm_adv_by_std_in_grpo", "reward_baselines"),
        ),
    ),
)


def peer_signature_of(function: object, signatures: tuple[PeerSignature, ...]) -> PeerSignature | None:
    """The signature of the function, or of the class whose instances are called; None for skyrl's own, which has one
    parameter: the inputs or the batch. Raises `ValueError`, saying where it is defined and what would be right.
    """
    parameters = parameters_of(function)
    kind = type(function.object) if isinstance(function, Imported) else function
    if isinstance(kind, type) and _call_of(kind) is None:
        raise ValueError(f"{kind.__name__} has no __call__: its instances are called")
    if parameters is None:  # a builtin, of which nothing is known
        return None
    required = [item.name for item in parameters if item.default is item.empty and item.kind not in _REST]
    names = {item.name for item in parameters}
    signature = next((item for item in signatures if {*item.identifying} <= names), None)
    if signature is None:
        positional = [item for item in parameters if item.kind in _BY_POSITION]
        if positional and set(required) <= {positional[0].name}:
            return None
        known = [f"{item.system}'s ({', '.join(item.parameters)})" for item in signatures]
        raise ValueError(
            f"{_signature_text(function, parameters)} has no known signature: it must have one parameter (skyrl's), or "
            f"the parameters {', or '.join(known)}"
        )
    unknown = [name for name in required if name not in signature.parameters]
    if unknown:
        raise ValueError(
            f"{_signature_text(function, parameters)} asks for {', '.join(unknown)}: {signature.system}'s signature "
            f"has {', '.join(signature.parameters)}, and other parameters need a default"
        )
    return signature


def parameters_of(function: Any) -> tuple[inspect.Parameter, ...] | None:
    """Parameters that a call gives; for a class, those of its instances. None if Python knows none."""
    if isinstance(function, Imported):
        function = function.object
    is_class = isinstance(function, type)
    call = _call_of(function if is_class else type(function))
    if inspect.isfunction(call):  # not the signature of the class, which its instances inherit
        return tuple(inspect.signature(call).parameters.values())[1:]
    try:
        return None if is_class else tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # it cannot be called, or Python knows no parameters of it
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


def _signature_text(function: object, parameters: tuple[inspect.Parameter, ...]) -> str:
    """`losses.py:3 mine(a, b)`."""
    kind = function if isinstance(function, type) else type(function)
    code = function if inspect.isfunction(function) else kind.__call__
    name = getattr(function, "__name__", kind.__name__)
    return f"{defined_at(code)} {name}({', '.join(parameter.name for parameter in parameters)})".strip()
