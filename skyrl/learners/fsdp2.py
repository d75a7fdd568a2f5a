"""PyTorch's fully sharded data parallelism, second version: weights, gradients and optimizer state sharded over ranks.

With one rank nothing is sharded or wrapped. With several, only rank 0 reads the weights; the others build the model
without values and receive the weights one by one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import combinations
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from skyrl.checkpoint.shards import TensorShard, TensorSource
from skyrl.config import FSDPConfig
from skyrl.errors import ModelError
from skyrl.learners.data_parallel import DataParallel, computing_in
from skyrl.learners.gradients import clip, divide, is_on_experts, sum_over
from skyrl.learners.offloading import HOST
from skyrl.learners.ranks import EXPERT, REPLICATE, SHARD, TENSOR
from skyrl.learners.schedule import StepSettings, make_optimizer
from skyrl.learners.sharing import check_complete, full_tensor, piece_of, read_into, share_of, slots_of
from skyrl.learners.strategy import ModelSource, StrategyContext
from skyrl.models.files.naming import named_weights, tied_names
from skyrl.models.onednn import compute_with_onednn
from skyrl.models.parallel.expert_parallel import local_part, refuse_unspreadable, spread
from skyrl.models.parallel.tensor_parallel import cut, refuse_uncuttable, refuse_wrong_cut

T = TypeVar("T")

IN_FLIGHT_BYTES = 256 * 2**20
"""Bytes of whole weights that may be gathered ahead of the one in use: few for a model, many for one matrix."""

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}
"""Name of a type in the configuration, long or short -> torch's type."""


class Fsdp2(DataParallel):
    """A model that is sharded over its ranks, or whole on a single rank. See `Strategy` for what each method does."""

    def __init__(self, source: ModelSource, config: FSDPConfig, context: StrategyContext) -> None:
        self._ranks, self._device, self._mover = context.ranks, context.device, context.mover
        self._sharded = max(context.ranks.size, context.degrees.tensor, context.degrees.expert) > 1
        self._tensor_parallel = context.degrees.tensor
        self._stored_on_host = config.cpu_offload and self._sharded
        self._compute_dtype = (
            DTYPES[config.mixed_precision.param_dtype] if config.mixed_precision else context.compute_dtype
        )
        self._partial: list[str] = []
        self._expert_parallel = context.degrees.expert
        self.model: nn.Module = self._shard(source, config, context) if self._sharded else source.load(context.device)
        if self._device == HOST:
            compute_with_onednn(self.model)
        if config.mixed_precision:  # FSDP2 leaves buffers in their type
            for name, buffer in list(self.model.named_buffers()):
                if buffer.is_floating_point():
                    _set(self.model, name, buffer.to(DTYPES[config.mixed_precision.buffer_dtype]))
        self.model.eval()
        self.optimizer = None
        self._loss_scale = context.loss_scale
        self._max_grad_norm = float("inf")
        if context.optimizer is None:
            self.model.requires_grad_(False)
        else:
            self.optimizer = make_optimizer(self.model, context.optimizer)
            self._max_grad_norm = context.optimizer.max_grad_norm or float("inf")  # 0 turns clipping off

    @property
    def hf_model(self) -> nn.Module:
        return self.model

    def computing(self) -> AbstractContextManager[Any]:
        """Several ranks gather their shards in the type of the computation; a single rank computes with copies."""
        return nullcontext() if self._sharded else computing_in(self.model, self._compute_dtype)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        with torch.no_grad():
            yield
        self._reshard()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of the sum of all ranks' `loss`, a scalar that is the same within a tensor-parallel group.

        FSDP2 averages gradients over ranks; the factor makes the average a sum.
        """
        scaled = loss if self._loss_scale is None else loss * self._loss_scale.value
        (scaled * (self._ranks.size // self._tensor_parallel)).backward()

    def step(self, settings: StepSettings) -> float:
        assert self.optimizer is not None, "this model never changes"
        if self._partial:
            sum_over(self._mesh.get_group(TENSOR), [self.model.get_parameter(name) for name in self._partial])
        learning = [item for group in self.optimizer.param_groups for item in group["params"]]
        if self._expert_parallel > 1:  # FSDP2 averaged over the ranks with the same experts, not over all ranks
            divide((entry for entry in learning if is_on_experts(entry)), self._expert_parallel)
        if self._loss_scale is not None:
            divide(learning, self._loss_scale.value)
        norm = clip(learning, settings.bound(self._max_grad_norm))
        if math.isfinite(norm):
            with settings.applied(self.optimizer.param_groups):
                self.optimizer.step()
        self.zero_grad()
        return norm

    def shards(self, *, optimizer: bool) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of every weight, in any shape, and of the optimizer's state if `optimizer`."""
        for name, tensor in self._named_state():
            if optimizer or name.startswith("model."):
                yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def zero_grad(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def named_shapes(self) -> dict[str, Tensor]:
        """Every weight by name, each tied weight once: tensors with the shape and type of the whole weight."""
        return dict(self._stored_weights())

    def gather(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight by name, in its whole shape, one at a time, while the next ones are being gathered. Weights are
        rounded before they are sent.
        """
        gathered = ((name, _start_gather(weight, dtype)) for name, weight in self._stored_weights())
        for name, weight in prefetched(gathered, lambda named: named[1].nbytes, IN_FLIGHT_BYTES):
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            yield name, local.wait() if isinstance(local, AsyncCollectiveTensor) else local

    def tensor_shards(self) -> Iterator[TensorShard]:
        copy = self._ranks.rank % self._tensor_parallel
        tensor_shards = (piece_of(name, tensor, copy=copy) for name, tensor in self._named_state())
        return (shard for shard in tensor_shards if shard is not None)

    def load_state(self, source: TensorSource) -> None:
        names = check_complete(source, self.named_shapes())
        with torch.no_grad():
            for name, weight in self._stored_weights():
                read_into(weight, source, f"model.{name}")
        if self.optimizer is None:
            return
        slots = slots_of(names)
        self.optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            for slot in slots.get(name, ()):
                if slot == "step":
                    value = torch.zeros((), device=parameter.device)  # where a fused optimizer counts
                else:
                    value = torch.zeros_like(parameter, requires_grad=False)
                read_into(value, source, f"optimizer.{name}.{slot}")
                self.optimizer.state[parameter][slot] = value

    def offload(self, *, model: bool, optimizer: bool) -> int:
        self._reshard()
        moved = self._move(HOST, model=model, optimizer=optimizer)
        self._mover.settle(self._device)
        return moved

    def onload(self, *, model: bool, optimizer: bool) -> int:
        return self._move(self._device, model=model, optimizer=optimizer)

    def close(self) -> None:
        """Does nothing: no resource outlives the model."""

    def _shard(self, source: ModelSource, config: FSDPConfig, context: StrategyContext) -> nn.Module:
        """The model, built without values, split over the ranks, and filled with the weights of rank 0."""
        model: nn.Module = source.meta_model()
        self._mesh = self._ranks.mesh(self._device, shard_size=config.fsdp_size, tensor=self._tensor_parallel)
        if self._tensor_parallel > 1:
            field = context.section.path_of("tensor_parallel_size")
            refuse_uncuttable(model, self._tensor_parallel, self._ranks.size, field)
            refuse_wrong_cut(model, self._mesh[TENSOR], field)
            self._partial = cut(model, self._mesh[TENSOR])
        if self._expert_parallel > 1:  # each rank has some of the experts, sharded over the ranks with the same ones
            mesh = self._ranks.expert_mesh(self._device, self._expert_parallel)
            field = context.section.path_of("expert_parallel_size")
            refuse_unspreadable(model, self._expert_parallel, self._ranks.size, field)
            for experts in spread(model, mesh[EXPERT]):
                fully_shard(experts, **self._fsdp_options(config) | {"mesh": mesh[SHARD]})
        complete = source.load(HOST) if self._ranks.rank == 0 else None
        ties = tied_names(model)
        _shard_modules(model, config, self._fsdp_options(config))
        model.to_empty(device=HOST if self._stored_on_host else self._device)
        for second, first in ties.items():  # materialising unties them
            _set(model, second, model.get_parameter(first))
        self.model = model
        weights = {} if complete is None else dict(named_weights(complete))
        with torch.no_grad():
            for name, weight in self._stored_weights():  # one whole weight at a time
                whole = full_tensor(weights.get(name), weight, self._device, self._ranks)
                local_part(weight).copy_(share_of(whole, weight))
        # buffers that are not stored, such as rotary frequencies, have lost their values on the meta device
        buffers = {} if complete is None else dict(complete.named_buffers())
        for name, buffer in list(model.named_buffers()):
            _set(model, name, full_tensor(buffers.get(name), buffer, self._device, self._ranks))
        if complete is not None and hasattr(complete, "generation_config"):
            model.generation_config = complete.generation_config
        return model

    def _fsdp_options(self, config: FSDPConfig) -> dict[str, Any]:
        offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if config.cpu_offload else OffloadPolicy()
        reduce = DTYPES[config.mixed_precision.reduce_dtype] if config.mixed_precision else torch.float32
        return {
            "mesh": self._mesh[tuple(name for name in (REPLICATE, SHARD) if name in (self._mesh.mesh_dim_names or ()))],
            "reshard_after_forward": config.reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self._compute_dtype, reduce_dtype=reduce),
            "offload_policy": offload,
        }

    def _stored_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._reshard()
        return named_weights(self.model)

    def _named_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._stored_weights():
            yield f"model.{name}", weight.detach()
        if self.optimizer is not None:
            for name, parameter in self.model.named_parameters():
                for slot, value in self.optimizer.state.get(parameter, {}).items():
                    yield f"optimizer.{name}.{slot}", value

    def _reshard(self) -> None:
        """Free gathered weights, so that the next reads and writes go to the shards."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _move(self, device: torch.device, *, model: bool, optimizer: bool) -> int:
        moved = 0
        moved_tensors: dict[int, Tensor] = {}  # a tied weight occurs twice

        def move(tensor: Tensor) -> Tensor:
            nonlocal moved
            if id(tensor) not in moved_tensors:
                moved_tensors[id(tensor)], count = self._mover.move(tensor, device)
                moved += count
            return moved_tensors[id(tensor)]

        if self._stored_on_host or self._mover.is_host(self._device):
            return 0
        if model:
            self.model._apply(move)
        if optimizer and self.optimizer is not None:
            for slots in self.optimizer.state.values():
                slots.update({slot: move(value) for slot, value in slots.items() if slot != "step"})
        return moved


def _shard_modules(model: nn.Module, config: FSDPConfig, options: dict[str, Any]) -> None:
    """Make each layer a unit that is gathered and freed as a whole, and everything outside the layers another one, to
    which layers with common weights (Zamba) belong.
    """
    named = config.wrap_policy.get("transformer_layer_cls_to_wrap") or getattr(model, "_no_split_modules", None) or ()
    classes = {named} if isinstance(named, str) else set(named)
    layers = {name: module for name, module in model.named_modules() if type(module).__name__ in classes}
    if classes and not layers:
        raise ModelError(
            f"fsdp_config.wrap_policy names {', '.join(sorted(classes))}, but the model has no such module: "
            "use the class name of its decoder layers"
        )
    common = _weight_sharing_layers(layers)
    units = [layer for name, layer in layers.items() if name not in common]
    for module in (*reversed(units), model):  # those within another one first
        fully_shard(module, **options)


def _weight_sharing_layers(layers: Mapping[str, nn.Module]) -> set[str]:
    """Names of the layers that have a weight which another layer has, too, unless one is within the other."""
    holders: dict[int, list[str]] = {}
    for name, layer in layers.items():
        for weight in layer.parameters():
            holders.setdefault(id(weight), []).append(name)
    pairs = {pair for names in holders.values() for pair in combinations(names, 2)}
    return {name for outer, inner in pairs if not inner.startswith(f"{outer}.") for name in (outer, inner)}


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    """Set the parameter or buffer of this name."""
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, value)


def _start_gather(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The weight, of any shape, in `dtype`; begins to gather it if it is sharded.

    On a CPU the gathering is complete on return: gloo's background collectives corrupt the heap of a process that
    allocates meanwhile (torch 2.13), which then crashes some steps later.
    """
    rounded = weight.detach() if dtype is None else weight.detach().to(dtype)
    if not isinstance(rounded, DTensor):
        return rounded
    in_background = rounded.device.type != "cpu"
    return rounded.redistribute(placements=[Replicate()] * rounded.device_mesh.ndim, async_op=in_background)


def prefetched(items: Iterable[T], bytes_of: Callable[[T], int], limit: int) -> Iterator[T]:
    """The items in order, taken from `items` ahead of their use as long as they need at most `limit` bytes together."""
    waiting: deque[T] = deque()
    waiting_bytes = 0
    for item in items:
        waiting.append(item)
        waiting_bytes += bytes_of(item)
        while waiting_bytes > limit:
            first = waiting.popleft()
            waiting_bytes -= bytes_of(first)
            yield first
    yield from waiting
