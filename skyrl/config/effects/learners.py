"""Conditions under which the settings of a reinforcement-learning run's models and their placement have an effect."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl.config.derive.model_tables import GRID, Role
from skyrl.config.derive.rl_models import (
    CRITIC,
    POLICY,
    REFERENCE,
    RL_ROLES,
    TEACHER,
    has_served_teacher,
    shares_gpus,
)
from skyrl.config.derive.sizes import models_of, on_ray
from skyrl.config.effects.algorithm import TEACHES
from skyrl.config.effects.models import effect_where, exists, model_effects
from skyrl.config.settings.strategies import facts_of
from skyrl.tree.rules import Condition, Effect, effects, fields_in

_DEVICES = Condition("the run is on Ray or the device is cuda", lambda run: on_ray(run) or run.trainer.device == "cuda")
_NOT_ALL_TOGETHER = Condition(
    "colocate_all is false and there is a reference, a critic or a teacher",
    lambda run: not run.trainer.placement.colocate_all and len(models_of(run)) > 1,
)


def _optimizer(model: Role) -> Iterator[Effect]:
    # Other models or engines share the GPU that holds the optimizer's state.
    makes_room = Condition(
        f"the device is cuda, others share the {model.title}'s GPUs (trainer.placement.colocate_all or "
        "colocate_policy_ref), and the optimizer is not offloaded all the time",
        lambda run: model.on_cuda(run) and shares_gpus(run) and model.optimizer_may_leave(run),
    )
    yield Effect(model.at("optimizer_config.offload_after_step"), makes_room)
    not_abort = Condition(
        "trainer.faults.on_non_finite is skip or roll_back", lambda run: run.trainer.faults.on_non_finite != "abort"
    )
    yield Effect(model.at("optimizer_config.max_skipped_updates"), not_abort)


LEARNER_EFFECTS: tuple[Effect, ...] = (
    *effects(TEACHES, *fields_in("trainer.teacher", "model sources endpoint")),
    *effects(
        Condition("a teacher has an address (url or sources)", has_served_teacher),
        *fields_in("trainer.teacher.endpoint", "protocol timeout max_requests"),
    ),
    Effect("trainer.placement.gpu_kind", Condition("the device is cuda", POLICY.on_cuda)),
    effect_where(REFERENCE.path, *exists(REFERENCE)),
    *(
        effect_where(model.at(name), *exists(model))
        for model in (CRITIC, TEACHER)
        for name in (
            *(f"{kind}_parallel_size" for kind in ("sequence", "context", "tensor", "expert")),
            "model.init_from_scratch",
        )
    ),
    effect_where(CRITIC.at("use_dropout"), *exists(CRITIC)),
    *(effect for role in RL_ROLES.values() for effect in model_effects(role)),
    *(effect for role in RL_ROLES.values() if role.learns for effect in _optimizer(role)),
    effect_where(
        "trainer.policy.use_torch_compile",
        Condition("trainer.policy.tensor_parallel_size is 1", lambda run: run.trainer.policy.tensor_parallel_size == 1),
        Condition(
            "the device is a CPU or the strategy is fsdp2",
            lambda run: run.trainer.device != "cuda" or facts_of(run.trainer).compiles,
        ),
    ),
    Effect(
        "trainer.policy.record_memory",
        Condition("trainer.profile_steps has a step", lambda run: bool(run.trainer.profile_steps)),
    ),
    *(effect_where(f"{role.placement}{name}", *exists(role)) for role in (REFERENCE, CRITIC, TEACHER) for name in GRID),
    Effect("trainer.placement.colocate_all", _DEVICES),
    Effect("trainer.placement.colocate_policy_ref", _DEVICES & _NOT_ALL_TOGETHER),
)
