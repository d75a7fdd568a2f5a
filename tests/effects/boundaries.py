"""Learners as a run makes them, up to the calls of FSDP and DeepSpeed, whose arguments are kept and which are not made.

The model is the nano model, which is read from its folder once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import nn

from skyrl.config.derive.model_tables import Role
from skyrl.experiments.preference import preference_objective
from skyrl.learners.ranks import Ranks
from skyrl.learners.workers.model_worker import ModelWorker
from skyrl.learners.workers.objectives import BradleyTerry, CrossEntropy, ReturnRegression
from skyrl.learners.workers.roles import PairReferenceWorker, RefWorker, TeacherWorker
from skyrl.models.files.loading import load_causal_lm
from skyrl.training.objective import policy_objective
from skyrl.tree import FrozenDict
from tests.effects.probe import Scene
from tests.learners.updating import CriticWorker, PolicyWorker, PreferenceWorker, RewardModelWorker, SFTWorker

STEPS = 12
"""Optimizer steps that the schedules of these learners are laid out over."""


class Reached(Exception):
    """A library was about to be called, with `arguments`."""

    def __init__(self, arguments: object) -> None:
        super().__init__()
        self.arguments = arguments


class CopySize(int):
    """How many ranks share a copy of the weights, in the place of the mesh of them."""

    mesh_dim_names = ()

    def __getitem__(self, names: tuple[str, ...]) -> CopySize:
        return self


@frozen(kw_only=True)
class Unmet(Ranks):
    """One of several ranks that never meet."""

    def join(self, device: torch.device) -> None:
        """Does nothing."""

    def leave(self) -> None:
        """Does nothing."""

    def row_sharing(self, *, sequence: int = 1, context: int = 1, tensor: int = 1) -> None:
        """Raises `Reached` where a group of several is wanted."""
        if sequence * context > 1:
            raise Reached((sequence, context))

    def mesh(self, device: torch.device, *, shard_size: int = -1, tensor: int = 1) -> Any:
        """The size of a copy of the weights. Raises `Reached` where ranks are to cut matrices."""
        if tensor > 1:
            raise Reached(tensor)
        return CopySize(shard_size)

    def expert_mesh(self, device: torch.device, experts: int) -> Any:
        """Raises `Reached`: ranks are to hold different experts."""
        raise Reached(experts)


def worker_of(scene: Scene, model: Role, ranks: Ranks = Unmet()) -> ModelWorker:
    """The learner of this model, on one of its ranks."""
    run, kind = scene.run, scene.run.kind
    match kind, model.path:
        case "rl", "trainer.policy":
            make: Any = partial(PolicyWorker, run.trainer, policy_objective(run.trainer.algorithm), STEPS)
        case "rl", "trainer.critic":
            objective = ReturnRegression(value_clip=run.trainer.algorithm.value_clip)
            make = partial(CriticWorker, run.trainer, objective, STEPS)
        case "rl", "trainer.ref":
            make = partial(RefWorker, run.trainer)
        case "rl", "trainer.teacher":
            make = partial(TeacherWorker, run.trainer)
        case "sft", _:
            make = partial(SFTWorker, run, CrossEntropy(), STEPS)
        case "preference", _:
            make = partial(PreferenceWorker, run, preference_objective(run), STEPS)
            make = make if model.learns else partial(PairReferenceWorker, run)
        case _:
            make = partial(RewardModelWorker, run, BradleyTerry(), STEPS)
    with read_once():
        worker: ModelWorker = make(ranks=ranks)
    return worker


def learner_of(
    scene: Scene, model: Role
) -> PolicyWorker | CriticWorker | SFTWorker | RewardModelWorker | PreferenceWorker:
    """The learner of a model that is trained, alone."""
    worker = worker_of(scene, model)
    assert isinstance(worker, PolicyWorker | CriticWorker | SFTWorker | RewardModelWorker | PreferenceWorker)
    return worker


@contextmanager
def read_once() -> Iterator[None]:
    """A block in which a model is a copy of the one that was read first, and rests in CPU memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.learners.workers.roles.load_causal_lm", _copy)
        yield


def _copy(
    path: str,
    *,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
    table: str = "trainer",
    overrides: Mapping[str, Any],
    init_seed: int | None,
) -> nn.Module:
    return copy.deepcopy(_loaded(path, dtype, attention, table, FrozenDict(overrides), init_seed))


@cache
def _loaded(
    path: str, dtype: torch.dtype, attention: str, table: str, overrides: FrozenDict, init_seed: int | None
) -> nn.Module:
    cpu = torch.device("cpu")
    return load_causal_lm(
        path, dtype=dtype, attention=attention, device=cpu, table=table, overrides=overrides, init_seed=init_seed
    )


def given_to_fsdp(scene: Scene, model: Role) -> object:
    """The unit, and the arguments, of every call of `fully_shard`, on the second of two ranks."""
    calls: list[object] = []

    def shard(module: nn.Module, **arguments: Any) -> None:
        calls.append([type(module).__name__, {name: str(value) for name, value in arguments.items()}])
        if len(calls) > 1 and isinstance(module, roots):
            raise Reached(calls)

    from transformers import PreTrainedModel

    from skyrl.models.value_head import ValueModel

    roots = (PreTrainedModel, ValueModel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.learners.fsdp2.fully_shard", shard)
        return reached(scene, model, Unmet(rank=1, size=model.ranks(scene.run)))


def given_to_deepspeed(scene: Scene, model: Role) -> object:
    """The configuration that `deepspeed.initialize` gets; None where it is not called."""

    class DeepSpeed:
        @staticmethod
        def initialize(*, model: nn.Module, optimizer: object, config: dict[str, Any], mpu: object) -> None:
            raise Reached(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skyrl.learners.zero.strategy.import_deepspeed", lambda *_: DeepSpeed)
        return reached(scene, model, Unmet(size=model.ranks(scene.run)))


def reached(scene: Scene, model: Role, ranks: Ranks) -> object:
    """What a worker of the model is stopped with while it is made; None where nothing stops it."""
    try:
        worker_of(scene, model, ranks)
    except Reached as stop:
        return stop.arguments
    return None
