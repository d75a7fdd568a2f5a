"""The weights and the optimizer's state out of a DeepSpeed engine and back, whole and by name.

DeepSpeed keeps them in flat pieces, over ranks from stage 1 (optimizer) or 3 (weights) on, in float32 beside the
weights that it computes with. Nobody else reads or writes those pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from skyrl.learners.moving import HOST
from skyrl.learners.ranks import Ranks
from skyrl.learners.sharing import check_complete, slots_of, whole
from skyrl.models.naming import named_weights

SLOTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight, besides the number of steps."""


class ZeroState:
    """One model's weights and optimizer state. Every method is collective."""

    def __init__(
        self, deepspeed: Any, engine: Any, module: Any, *, stage: int, learns: bool, ranks: Ranks, device: torch.device
    ) -> None:
        """`engine` is None where `module` is not under one: a model that never changes, below stage 3."""
        self._deepspeed, self._engine, self._module = deepspeed, engine, module
        self._stage, self._learns, self._ranks, self._device = stage, learns, ranks, device

    def named_shapes(self) -> dict[str, Tensor]:
        """Meta tensors of the shape of each whole weight, float32."""
        return {name: torch.empty(_shape(weight), device="meta") for name, weight in self.weights()}

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by name, whole and in float32, one at a time."""
        for name, weight in self.weights():
            yield name, self._master(weight)

    def read(self) -> dict[str, Tensor]:
        """As `Strategy.state`."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._named_state():
            if self._ranks.rank == 0:
                tensors[name] = tensor.detach().to(HOST, copy=True)
        return tensors

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """As `Strategy.load_state`."""
        names = check_complete(tensors, self.named_shapes(), self._ranks)
        if self._learns:
            self._reset_optimizer(tensors, slots_of(names))
        with torch.no_grad():
            for name, weight in self.weights():
                self._write(name, weight, tensors)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names as `named_weights` gives them, with the parameters themselves."""
        parameters = dict(self._module.named_parameters())
        for name, tensor in named_weights(self._module):
            yield name, parameters.get(name, tensor)

    def _gathered(self, weight: Tensor, *, write: bool = False) -> AbstractContextManager[Any]:
        enabled = _is_sharded(weight)
        rank = 0 if write else None
        context: AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(
            [weight] if enabled else [], modifier_rank=rank, enabled=enabled
        )
        return context

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        steps = self._step_of_the_optimizer()
        for name, weight in self.gather():
            yield f"model.{name}", weight
        for name, weight in self.weights():
            if steps is not None and weight.requires_grad:
                for slot in SLOTS:
                    yield f"optimizer.{name}.{slot}", self._slot(weight, slot)
                yield f"optimizer.{name}.step", steps

    def _master(self, weight: Tensor) -> Tensor:
        """In float32, whatever type is computed in."""
        if not self._learns or self._stage == 0 or not weight.requires_grad:
            with self._gathered(weight):
                return weight.detach().clone()
        value: Tensor = self._deepspeed.utils.safe_get_full_fp32_param(weight)
        return value.view(_shape(weight))

    def _slot(self, weight: Tensor, slot: str) -> Tensor:
        if self._stage == 0:
            value: Tensor = self._torch_optimizer.state[weight][slot]
            return value
        value = self._deepspeed.utils.safe_get_full_optimizer_state(weight, slot)
        return value.view(_shape(weight))

    def _step_of_the_optimizer(self) -> Tensor | None:
        """AdamW's count of steps, which all weights share; None before the first."""
        states = () if not self._learns else self._torch_optimizer.state.values()
        return next((slots["step"] for slots in states if "step" in slots), None)

    @property
    def _torch_optimizer(self) -> Any:
        wrapper = self._engine.optimizer
        return wrapper.optimizer if self._stage else wrapper

    def _flat_masters(self) -> list[Tensor]:
        """What the optimizer steps on this rank: flat pieces of the weights, in stage 0 the weights."""
        wrapper = self._engine.optimizer
        match self._stage:
            case 0:
                return [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            case 3:
                return list(wrapper.fp32_partitioned_groups_flat)
        return list(wrapper.single_partition_of_fp32_groups)

    def _reset_optimizer(self, tensors: Mapping[str, Tensor], slots: Mapping[str, list[str]]) -> None:
        """Empty slots for every piece, or none at all where the stored optimizer had not stepped."""
        state = self._torch_optimizer.state
        state.clear()
        if self._stage in (1, 2):
            self._engine.optimizer._hp_optimizer_states_linked = False  # by name, to pieces that are gone now
        if not slots:
            return
        first = next(iter(slots))
        step = whole(tensors.get(f"optimizer.{first}.step"), torch.zeros(()), HOST, self._ranks)
        for piece in self._flat_masters():
            state[piece] = {"step": step.clone()} | {slot: torch.zeros_like(piece) for slot in SLOTS}
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _write(self, name: str, weight: Tensor, tensors: Mapping[str, Tensor]) -> None:
        like = torch.empty(_shape(weight), dtype=torch.float32, device="meta")
        value = whole(tensors.get(f"model.{name}"), like, self._device, self._ranks).to(self._device)
        with self._gathered(weight, write=True):
            if not _is_sharded(weight) or self._ranks.rank == 0:
                weight.copy_(value)
        if not self._learns or (self._stage == 0 and not self._torch_optimizer.state):
            return
        if self._stage:
            self._write_piece(weight, value, None)
        for slot in SLOTS if self._torch_optimizer.state else ():
            stored = whole(tensors.get(f"optimizer.{name}.{slot}"), like, self._device, self._ranks).to(self._device)
            if self._stage:
                self._write_piece(weight, stored, slot)
            else:
                self._torch_optimizer.state[weight][slot].copy_(stored)

    def _write_piece(self, weight: Any, value: Tensor, slot: str | None) -> None:
        """This rank's piece of a master weight or of one of its slots."""
        utils = self._deepspeed.utils
        if self._stage < 3:
            change = utils.safe_set_full_fp32_param if slot is None else utils.safe_set_full_optimizer_state
            change(weight, value, *([] if slot is None else [slot]))
            return
        size = weight.ds_tensor.numel()  # the last rank's piece is padded
        padded = torch.zeros(size * self._ranks.size, device=value.device)
        padded[: value.numel()] = value.flatten()
        piece = padded[size * self._ranks.rank : size * (self._ranks.rank + 1)]
        change = utils.safe_set_local_fp32_param if slot is None else utils.safe_set_local_optimizer_state
        change(weight, piece, *([] if slot is None else [slot]))


def _is_sharded(weight: Any) -> bool:
    return hasattr(weight, "ds_id")


def _shape(weight: Any) -> torch.Size:
    shape: torch.Size = weight.ds_shape if _is_sharded(weight) else weight.shape
    return shape
