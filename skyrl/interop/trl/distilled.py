"""Converts TRL's `DistillationConfig`, which is reinforcement learning without rewards here, and its `GKDConfig` on
given rows, which is `kind = "sft"` with a teacher beside the model.

The divergence and `beta` mean the same: 0 is KL(teacher || student), 1 KL(student || teacher), both averaged over all
tokens of a batch (trl/trainer/distillation_trainer.py:203, trl/experimental/gkd/gkd_trainer.py:260 of TRL 1.16.0).
`GKDTrainer` takes the divergence at temperature 1 whatever `temperature` says (line 320).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skyrl.interop.translation import (
    ALGORITHM,
    SAMPLING,
    Dependent,
    Entry,
    Translation,
    Values,
    fixed,
    is_off,
    number,
    numeric,
    redundant,
    table,
    unsupported,
)
from skyrl.interop.trl import supervised
from skyrl.interop.trl.dependent import implied
from skyrl.interop.trl.keys import KEYS as KEYS_OF_GRPO

_TEACHER = "trainer.teacher.model.path"
_OURS = ALGORITHM + "distillation."
_REVISION = fixed("main", None, does="the default revision", otherwise="other revisions of a teacher")
_SAMPLED = (
    "answers that the model samples for a share lmbda of the batches; 0 learns from given rows, and where all answers "
    "are sampled, DistillationConfig is converted"
)


def _teacher(path: str) -> Dependent:
    return lambda key, value, values: (
        unsupported("a teacher that is not named in the file") if value is None else Translation(writes={path: value})
    )


def _teacher_arguments(value: object) -> Translation:
    """Convert arguments of the teacher's `from_pretrained`; its dtype is that of the computation."""
    rest = {*table(value)} - {"torch_dtype", "dtype", "use_cache"}
    listed = ", ".join(sorted(map(str, rest)))
    return unsupported(f"arguments of the teacher {listed}") if rest else redundant("set by bf16")


OF_DISTILLATION: dict[str, Dependent] = {
    "teacher_model_name_or_path": _teacher(_TEACHER),
    # answers are sampled and distributions are compared at one temperature
    "temperature": lambda key, value, values: Translation(
        writes={SAMPLING + "temperature": number(value), _OURS + "temperature": number(value)}
    ),
    "beta": lambda key, value, values: Translation(writes={_OURS + "type": "loss", _OURS + "beta": number(value)}),
}
"""Settings of `DistillationConfig` that mean something else in GRPO."""

KEYS: dict[str, Entry] = {
    **KEYS_OF_GRPO,
    "teacher_model_revision": _REVISION,
    "teacher_model_init_kwargs": _teacher_arguments,
}
"""Settings of `DistillationConfig` that convert independently."""


def implied_by_distillation(values: Values) -> Iterator[tuple[str, str, Any]]:
    """Our paths that follow from several settings."""
    for source, path, value in implied({**values, "beta": 0.0}):
        yield source, path, value
        if path.startswith("trainer.placement.policy_"):
            yield source, path.replace("policy_", "teacher_"), value
    yield "distillation", _OURS + "task_coef", 0.0
    yield "distillation", ALGORITHM + "use_kl_loss", False
    yield "distillation", ALGORITHM + "loss_reduction", "token_mean"


GKD: dict[str, Entry] = {
    **{key: entry for key, entry in supervised.KEYS.items() if key != "assistant_only_loss"},
    "teacher_model_init_kwargs": _teacher_arguments,
    "lmbda": lambda share: redundant("rows are given") if is_off(number(share)) else unsupported(_SAMPLED),
    "seq_kd": fixed(False, does="off", otherwise="answers of the teacher; `skyrl generate` writes them"),
    "beta": numeric("distillation.beta"),
    **dict.fromkeys(("temperature", "max_new_tokens"), redundant("no answers are sampled")),
    "assistant_only_loss": redundant("the last message is learned"),
}
"""Settings of `GKDConfig` that convert independently."""

OF_GKD: dict[str, Dependent] = {
    **supervised.SUPERVISED,
    "teacher_model_name_or_path": _teacher("distillation.teacher_path"),
}
"""Settings of `GKDConfig` whose meaning depends on others."""


def implied_by_gkd(values: Values) -> Iterator[tuple[str, str, Any]]:
    """Our paths that follow from several settings of `GKDConfig`."""
    yield from supervised.implied_by_rows(values)
    yield "gkd", "too_long", "truncate"
    yield "gkd", "distillation.task_coef", 0.0
