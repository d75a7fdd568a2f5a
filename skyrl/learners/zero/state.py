"""Reads the weights and the optimizer's state from a DeepSpeed engine by name, and writes them back.

DeepSpeed keeps them in flat pieces, sharded over ranks from stage 1 (optimizer) or 3 (weights) on, in float32 beside
the weights that it computes with. Only this module reads or writes those pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from skyrl.checkpoint.shards import TensorShard, TensorSource
from skyrl.learners.ranks import Ranks
from skyrl.learners.sharing import check_complete, even_share, slots_of
from skyrl.models.files.naming import named_weights

SLOTS = ("exp_avg", "exp_avg_sq")
"""Names of the state that AdamW keeps for each weight, besides the number of steps."""


@frozen(eq=False)
class Cut:
    """One of the equal parts of a tensor along a dimension, and the ranks that have the others."""

    dim: int
    group: dist.ProcessGroup

    def whole_shape(self, own: torch.Size) -> torch.Size:
        """Shape of the whole tensor, given the shape `own` of a part."""
        return torch.Size(n * self.group.size() if dim == self.dim else n for dim, n in enumerate(own))

    def gathered(self, own: Tensor) -> Tensor:
        """The whole tensor on every rank. Collective."""
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.group.size())]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return torch.cat(parts, dim=self.dim)

    def start_of(self, own: torch.Size) -> int:
        """Index of the part's first number in the flattened whole. The part must consist of whole rows (`dim` 0)."""
        assert self.dim == 0
        return self.group.rank() * own.numel()

    def read(self, source: TensorSource, name: str, own: torch.Size, start: int, count: int) -> Tensor:
        """(count,): numbers from `start` of the flattened part of shape `own`, read from the whole stored tensor."""
        if self.dim == 0:
            return source.read(name, self.start_of(own) + start, count)
        width = own[1:].numel()
        whole_width, first_column = width * self.group.size(), width * self.group.rank()
        first, last = start // width, math.ceil((start + count) / width)
        rows = source.read(name, first * whole_width, (last - first) * whole_width).view(-1, whole_width)
        return rows[:, first_column : first_column + width].reshape(-1)[start - first * width :][:count]


class ZeroState:
    """One model's weights and optimizer state. Every method is collective."""

    def __init__(
        self,
        deepspeed: ModuleType,
        engine: Any,
        module: nn.Module,
        *,
        stage: int,
        learns: bool,
        ranks: Ranks,
        device: torch.device,
        cuts: Mapping[str, Cut],
        tensor_parallel: int,
    ) -> None:
        """`engine` is None for a model that never changes, below stage 3. `cuts` are the cuts, by name, of the weights
        that are divided among `tensor_parallel` consecutive ranks.
        """
        self._deepspeed, self._engine, self._module = deepspeed, engine, module
        self._stage, self._learns, self._ranks, self._device = stage, learns, ranks, device
        self._cuts = cuts
        self._copy, self._part = divmod(ranks.rank, tensor_parallel)  # which copy of which part

    def named_shapes(self) -> dict[str, Tensor]:
        """Meta tensors of the shape of each whole weight, float32."""
        named = ((name, _shape(weight), self._cuts.get(name)) for name, weight in self.weights())
        shapes = {name: shape if cut is None else cut.whole_shape(shape) for name, shape, cut in named}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def gather(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Every weight by name, in its whole shape and rounded to `dtype`, one at a time."""
        for name, weight in self.weights():
            own = self._master(weight).to(dtype)
            cut = self._cuts.get(name)
            yield name, (own if cut is None else cut.gathered(own))

    def take_gradients(self) -> list[Tensor]:
        """The gradients of stage 1 or 2 that this rank holds after a pass; the next pass starts from zero."""
        optimizer: Any = self._engine.optimizer
        if optimizer.cpu_offload:
            result = [flat.grad.clone() for flat in optimizer.single_partition_of_fp32_groups]
        else:
            groups = [group for group in optimizer.averaged_gradients.values() if group is not None]
            result = [gradient.clone() for group in groups for gradient in group]
        optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)
        optimizer.all_grad_tensors = dict.fromkeys(optimizer.all_grad_tensors)
        optimizer.micro_step_id = -1  # the next micro-batch is the first of a step, which adds to no earlier one
        return result

    def add_gradients(self, earlier: Sequence[Tensor]) -> None:
        """Add what `take_gradients` returned before the pass that has just ended."""
        optimizer: Any = self._engine.optimizer
        if optimizer.cpu_offload:
            held = [master.grad for master in optimizer.single_partition_of_fp32_groups]
        else:
            held = [gradient for group in optimizer.averaged_gradients.values() for gradient in group]
        for gradient, before in zip(held, earlier, strict=True):
            gradient.add_(before)
        norms = optimizer.norm_for_param_grads if optimizer.cpu_offload else {}  # kept to clip by
        for parameter, (group, _, start, count) in optimizer.grad_position.items() if norms else ():
            if parameter in norms:
                part = held[group].view(-1)[start : start + count]
                norms[parameter] = part.to(norms[parameter].dtype).norm(2)

    def tensor_shards(self) -> Iterator[TensorShard]:
        """Shards of this rank, see `Strategy.tensor_shards`: in stage 0 the first rank has all of them, from stage 1 on
        each rank has its own stretches.
        """
        for name, weight in self.weights():
            yield from self._stored_shards(f"model.{name}", name, weight, None)
        states = () if not self._learns else self._torch_optimizer.state.values()
        steps = next((slots["step"] for slots in states if "step" in slots), None)
        if steps is not None:
            self._link_optimizer_state()
        for name, weight in self.weights():
            if steps is None or not weight.requires_grad:
                continue
            for slot in SLOTS:
                yield from self._stored_shards(f"optimizer.{name}.{slot}", name, weight, slot)
            if self._ranks.rank == 0:
                yield TensorShard.from_full_tensor(f"optimizer.{name}.step", steps.detach())

    def load(self, source: TensorSource) -> None:
        """Load the state; see `Strategy.load_state`."""
        names = check_complete(source, self.named_shapes())
        if self._learns:
            self._reset_optimizer(source, slots_of(names))
        with torch.no_grad():
            for name, weight in self.weights():
                self._load(name, weight, source)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names as `named_weights` gives them, with the parameters themselves, in the shape of this rank's part."""
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

    def _stored_shards(self, key: str, name: str, weight: Tensor, slot: str | None) -> Iterator[TensorShard]:
        """The stretch of the flattened weight or slot that this rank stores under `key`, if it has one that no other
        rank stores.
        """
        cut = self._cuts.get(name)
        if cut is not None and cut.dim:  # columns are not contiguous in the whole
            full = cut.gathered(self._whole_part(weight, slot))
            yield from even_share(key, full, self._ranks.rank, self._ranks.size)
            return
        if cut is None and self._part:
            return  # another rank has the same
        shape = _shape(weight)
        start: int = 0
        numbers: Tensor | None
        if (slot is None and self._is_whole(weight)) or self._stage == 0:
            whole = self._whole_part(weight, slot)
            numbers = None if self._copy else whole
        else:
            start, numbers = self._stretch(weight, slot)
        if cut is not None:
            start, shape = start + cut.start_of(shape), cut.whole_shape(shape)
        if numbers is not None and numbers.numel():
            yield TensorShard(name=key, shape=tuple(shape), start=start, numbers=numbers)

    def _stretch(self, weight: Any, slot: str | None) -> tuple[int, Tensor | None]:
        """Start of this rank's stretch of a weight or slot, and its numbers."""
        if self._stage < 3:
            mapping = weight._hp_mapping
            return (0, None) if mapping is None else (mapping.lp_fragment_address.start, mapping.get_hp_fragment(slot))
        utils = self._deepspeed.utils
        if slot is None:
            numbers = utils.safe_get_local_fp32_param(weight)
        else:
            numbers = utils.safe_get_local_optimizer_state(weight, slot)
        start, count = self._share_of(weight)
        return start, numbers.view(-1)[:count]

    def _whole_part(self, weight: Tensor, slot: str | None) -> Tensor:
        """A master weight or one of its slots, or this rank's part of it if it is cut, gathered from the ranks that
        shard it.
        """
        if slot is None:
            return self._master(weight)
        if self._stage == 0:
            value: Tensor = self._torch_optimizer.state[weight][slot]
        else:
            value = self._deepspeed.utils.safe_get_full_optimizer_state(weight, slot)
        return value.view(_shape(weight))

    def _share_of(self, weight: Any) -> tuple[int, int]:
        """Start and count of this rank's part in stage 3, without the padding of the last ranks."""
        size = weight.ds_tensor.numel()
        start = min(size * self._copy, _shape(weight).numel())
        return start, min(size, _shape(weight).numel() - start)

    def _master(self, weight: Tensor) -> Tensor:
        """A weight in float32, whatever the type of the computation."""
        if self._is_whole(weight):
            with self._gathered(weight):
                return weight.detach().clone()
        value: Tensor = self._deepspeed.utils.safe_get_full_fp32_param(weight)
        return value.view(_shape(weight))

    def _is_whole(self, weight: Tensor) -> bool:
        """Whether the weight has no master weight in flat pieces."""
        return not self._learns or self._stage == 0 or not weight.requires_grad

    @property
    def _torch_optimizer(self) -> Any:
        wrapper = self._engine.optimizer
        return wrapper.optimizer if self._stage else wrapper

    def _reset_optimizer(self, source: TensorSource, slots: Mapping[str, list[str]]) -> None:
        """Create empty slots for every piece, or none if the stored optimizer had not taken a step."""
        state = self._torch_optimizer.state
        state.clear()
        if not slots:
            return
        step = source.read(f"optimizer.{next(iter(slots))}.step").view(())
        # the flat pieces of the weights that the optimizer updates on this rank; in stage 0 the weights themselves
        wrapper = self._engine.optimizer
        match self._stage:
            case 0:
                masters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            case 3:
                masters = wrapper.fp32_partitioned_groups_flat
            case _:
                masters = wrapper.single_partition_of_fp32_groups
        for shard in masters:
            state[shard] = {"step": step.clone()} | {slot: torch.zeros_like(shard) for slot in SLOTS}
        self._link_optimizer_state()

    def _link_optimizer_state(self) -> None:
        """Point each weight to its stretch of the optimizer's state, in stages 1 and 2. DeepSpeed does so only once,
        after updating the first group of weights, when the second group has no state yet.
        """
        if self._stage in (1, 2):
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _load(self, name: str, weight: Tensor, source: TensorSource) -> None:
        with self._gathered(weight, write=True):
            if not _is_sharded(weight) or self._copy == 0:
                self._read_into(weight, name, source, f"model.{name}")
        if not self._learns or not weight.requires_grad:
            return
        if self._stage:
            self._load_stretch(name, weight, source, f"model.{name}", None)
        for slot in SLOTS if self._torch_optimizer.state else ():
            if self._stage:
                self._load_stretch(name, weight, source, f"optimizer.{name}.{slot}", slot)
            else:
                self._read_into(self._torch_optimizer.state[weight][slot], name, source, f"optimizer.{name}.{slot}")

    def _read_into(self, target: Tensor, name: str, source: TensorSource, key: str) -> None:
        """Fill `target`, which has the shape of this rank's part of a weight, from the stored tensor `key`."""
        target.copy_(self._read_part(name, target.shape, source, key, 0, target.numel()).view(target.shape))

    def _read_part(self, name: str, own: torch.Size, source: TensorSource, key: str, start: int, count: int) -> Tensor:
        """(count,): numbers from `start` of this rank's flattened part of a weight, a part of shape `own`."""
        cut = self._cuts.get(name)
        return source.read(key, start, count) if cut is None else cut.read(source, key, own, start, count)

    def _load_stretch(self, name: str, weight: Any, source: TensorSource, key: str, slot: str | None) -> None:
        """Load this rank's part of a master weight or of one of its slots."""
        if self._stage < 3:
            start, numbers = self._stretch(weight, slot)
            if numbers is not None:
                numbers.copy_(self._read_part(name, weight.shape, source, key, start, numbers.numel()))
            return
        start, count = self._share_of(weight)
        padded = torch.zeros(weight.ds_tensor.numel(), device=self._device)
        padded[:count] = self._read_part(name, _shape(weight), source, key, start, count)
        utils = self._deepspeed.utils
        if slot is None:
            utils.safe_set_local_fp32_param(weight, padded)
        else:
            utils.safe_set_local_optimizer_state(weight, padded, slot)


def _is_sharded(weight: Tensor) -> bool:
    return hasattr(weight, "ds_id")


def _shape(weight: Any) -> torch.Size:
    shape: torch.Size = weight.ds_shape if _is_sharded(weight) else weight.shape
    return shape
