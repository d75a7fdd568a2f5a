"""AReaL's teacher of on-policy distillation. Its role is `trainer.teacher` here, its weights are those of
`trainer.algorithm.distillation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from skyrl.interop.peer_trees import peer_trees
from skyrl.interop.translation import ALGORITHM, Translation, Values, number, redundant, refused, unsupported

PATH = "teacher.path"
_WEIGHT, _OF_REWARDS = "teacher.distill_loss_weight", "teacher.rl_loss_weight"
_DEFAULT_WEIGHT = 0.005
_JOINT = (
    "added to the advantage of each token: in AReaL's loss beside rewards, log pi - log nu, the teacher has no part in "
    "the gradient"
)


def teacher(key: str, value: object, values: Values) -> Translation:
    """Convert a setting of the teacher, which exists where its path is given."""
    if not values.get(PATH) and key != PATH:
        return redundant("no effect: without teacher.path there is no teacher")
    match key:
        case "teacher.path":
            return Translation(writes={"trainer.teacher.model.path": value}) if value else redundant("not set")
        case "teacher.distill_loss_weight":
            return _weight(value, values)
        case "teacher.rl_loss_weight":
            return Translation(writes={ALGORITHM + "distillation.task_coef": number(value)})
        case "teacher.engine_type":
            return redundant("the teacher is a model that scores tokens, on ranks of its own or in turn with others")
        case "teacher.offload":
            return redundant("models that take turns on GPUs leave them between their turns")
        case "teacher.train.path" | "teacher.rollout.model" if value in ("", None, values.get(PATH)):
            return redundant("set by teacher.path")
    if any(value == tree.defaults.get(key, _NOT_THERE) for tree in peer_trees("areal", "GRPOConfig")):
        return redundant("AReaL's default, for a teacher")
    name = key.removeprefix("teacher.")
    return unsupported(
        f"the teacher's {name}: set what it stands for in trainer.teacher and trainer.placement.teacher_*"
    )


def weight_of_teacher(values: Values) -> Iterator[tuple[str, str, Any]]:
    """The weight of a teacher in a file that does not name it."""
    if values.get(PATH) and _WEIGHT not in values:
        yield "teacher", ALGORITHM + "distillation.coef", _DEFAULT_WEIGHT


def _weight(value: object, values: Values) -> Translation:
    weight = number(value)
    if not isinstance(weight, int | float) or weight <= 0:
        return refused("a teacher with this weight teaches nothing: leave the table out, or give a positive weight")
    beside_rewards = number(values.get(_OF_REWARDS, 1.0)) != 0
    return Translation(writes={ALGORITHM + "distillation.coef": weight}, note=_JOINT if beside_rewards else "")


_NOT_THERE = object()
