from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from skyrl.config import SkyRLTrainConfig
from skyrl.experiments.ppo import BasePPOExp
from skyrl.training.middleware import layered, run_before
from skyrl.training.time_sharing import TimeSharing, is_room_for_all
from skyrl.tree import evolve_at


class Device:
    """Records who comes and goes."""

    def __init__(self) -> None:
        self.events: list[str] = []


class Model:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    async def offload(self, *, model: bool = True, optimizer: bool = True) -> int:
        return self._record("-", model, optimizer)

    async def onload(self, *, model: bool = True, optimizer: bool = True) -> int:
        return self._record("+", model, optimizer)

    async def score(self, rows: int) -> int:
        self.device.events.append(f"{self.name} scores")
        return rows

    def _record(self, sign: str, model: bool, optimizer: bool) -> int:
        parts = [part for part, moved in (("weights", model), ("optimizer", optimizer)) if moved]
        self.device.events.append(f"{sign}{self.name} {'+'.join(parts)}")
        return 0


class Engines:
    def __init__(self, device: Device) -> None:
        self.device = device
        device.events.append("engines start")

    async def pause(self) -> None:
        self.device.events.append("engines pause")

    async def resume(self) -> None:
        self.device.events.append("engines resume")

    async def sleep(self) -> None:
        self.device.events.append("engines sleep")

    async def wake(self) -> None:
        self.device.events.append("engines wake")


def sharing(device: Device, **options: Any) -> TimeSharing:
    models = {name: Model(device, name) for name in ("policy", "ref")}
    return TimeSharing(models, partial(Engines, device), **options)


async def test_a_step_moves_each_part_once_and_nobody_comes_before_the_others_have_left() -> None:
    device = Device()
    turns = sharing(device)
    await turns.for_transfer("policy")
    start, device.events[:] = [*device.events], []
    await turns.for_engines()
    await turns.for_scoring("ref")
    await turns.for_learning("policy")
    await turns.for_learning("policy")
    await turns.for_transfer("policy")
    assert start == ["-policy weights+optimizer", "-ref weights+optimizer", "engines start", "+policy weights"]
    assert device.events == [
        "-policy weights",
        "engines pause",
        "engines sleep",
        "+ref weights",
        "-ref weights",
        "+policy weights+optimizer",
        "-policy optimizer",
        "engines wake",
    ]
    device.events.clear()
    await turns.for_engines()
    await turns.for_engines()
    assert device.events == ["-policy weights", "engines resume"]


async def test_optimizer_state_may_stay_on_the_device() -> None:
    device = Device()
    turns = sharing(device, keep_optimizers=["policy", "ref"])
    await turns.for_engines()
    await turns.for_learning("policy")
    assert [event for event in device.events if "optimizer" in event] == []


async def test_a_collaborator_is_called_once_there_is_room_for_it() -> None:
    device = Device()
    turns = sharing(device)
    await turns.for_engines()
    device.events.clear()
    model = Model(device, "policy")
    score = layered(model.score, run_before(partial(turns.for_scoring, "policy")))
    assert await score(3) == 3
    assert device.events == ["engines pause", "engines sleep", "+policy weights", "policy scores"]


async def test_models_may_share_without_the_engines_and_others_are_left_alone() -> None:
    device = Device()
    turns = TimeSharing({"policy": Model(device, "policy"), "ref": Model(device, "ref")}, None)
    for turn in (
        turns.for_engines(),
        turns.for_scoring("ref"),
        turns.for_learning("critic"),
        turns.for_transfer("policy"),
    ):
        await turn
    assert device.events == ["-policy weights+optimizer", "-ref optimizer", "-ref weights", "+policy weights"]


async def test_engines_leave_before_a_model_learns() -> None:
    device = Device()
    turns = sharing(device)
    await turns.for_engines()
    device.events.clear()
    await turns.for_learning("policy")
    assert device.events == ["engines pause", "engines sleep", "+policy weights+optimizer"]


async def test_engines_that_are_closed_are_neither_put_to_sleep_nor_started_again() -> None:
    device = Device()
    turns = sharing(device)
    await turns.for_engines()
    device.events.clear()
    turns.engines_closed()
    await turns.for_learning("policy")
    await turns.for_engines()
    assert device.events == ["+policy weights+optimizer"]


@pytest.mark.parametrize(
    ("weights", "memory", "fits"), [(0.54, 141, True), (6, 80, True), (12, 80, False), (28, 141, False)]
)
def test_a_gpu_has_room_for_all_if_half_of_it_holds_six_times_the_weights(
    weights: float, memory: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, int(memory * 1e9)))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: int(weights * 1e9))
    assert is_room_for_all() is fits


@pytest.mark.parametrize(
    ("changes", "moves"),
    [
        ({}, False),
        ({"trainer.placement.executor": "ray"}, True),
        ({"trainer.device": "cpu"}, True),
    ],
)
def test_one_process_moves_nothing_where_its_gpu_has_room_for_all(
    changes: dict[str, str], moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"trainer.placement.executor": "in_process", "trainer.device": "cuda"} | changes
    experiment: Any = BasePPOExp.__new__(BasePPOExp)
    experiment.cfg = SkyRLTrainConfig()
    for path, value in values.items():
        experiment.cfg = evolve_at(experiment.cfg, path, value)
    vars(experiment).update(policy=Model(Device(), "policy"), reference=None, critic=None)
    monkeypatch.setattr("skyrl.experiments.ppo.is_room_for_all", lambda: True)
    assert bool(experiment.get_time_sharing()._models) is moves
