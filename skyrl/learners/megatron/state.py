"""Converts Megatron-core's parameters and optimizer state to the names of the stored model, and back.

A parameter is a part of several stored weights joined, or of the experts of a layer; each data-parallel rank has a
stretch of its state. For writing, one stored tensor at a time is assembled and cut into equal stretches, one for each
rank that has it. Importing this module requires Megatron-core.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from megatron.core import parallel_state
from torch import Tensor, nn

from skyrl.checkpoint.shards import TensorShard, TensorSource
from skyrl.errors import ResumeError
from skyrl.learners.offloading import HOST
from skyrl.learners.ranks import Ranks
from skyrl.learners.sharing import check_complete, even_share, slots_of
from skyrl.learners.strategy import ModelSource
from skyrl.models.files.naming import named_weights, place_in_files
from skyrl.models.megatron.adapter_layout import COMMON, different, new_adapters_in_common
from skyrl.models.megatron.gpt import MegatronDecoder
from skyrl.models.megatron.layout import Layout, RowBlock, block_of, fill, local_part, matrix_of, put

STEP = "step"
"""The only part of an optimizer's state that is a number."""

BIASES = "router."
"""Prefix of the stored names of router biases, which are learned outside the loss."""


@frozen(eq=False)
class _Stretch:
    """This rank's part of a parameter in the optimizer: the numbers from `start` on, in the optimizer's type."""

    start: int
    main: Tensor
    state: dict[str, Any]

    def of(self, full: Tensor) -> Tensor:
        """This rank's numbers of a tensor with the layout of the parameter."""
        return full.flatten()[self.start : self.start + self.main.numel()].view(self.main.shape)


@frozen(kw_only=True, eq=False)
class ParameterSplit:
    """How the ranks of a group divide parameters."""

    layouts: Sequence[Layout]
    """Layouts of all ranks of the group, in their order."""

    group: dist.ProcessGroup

    @property
    def own(self) -> Layout:
        """The layout of this rank."""
        return self.layouts[self.group.rank()]


class MegatronState:
    """One model's weights and optimizer state. All methods except `parts` are collective."""

    def __init__(
        self,
        model: MegatronDecoder,
        optimizer: Any,
        dense: ParameterSplit,
        experts: ParameterSplit,
        meta_model: Any,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        """`experts` covers the parameters of experts, `dense` all others; `optimizer` is Megatron-core's chain, None
        for a model that never changes.
        """
        self._model, self._optimizer, self._dense, self._experts = model, optimizer, dense, experts
        self._kind = meta_model.config.get_text_config().model_type
        self._ranks, self._device = ranks, device
        self.shapes: Mapping[str, Tensor] = {
            name: torch.empty(weight.shape, device="meta") for name, weight in named_weights(meta_model)
        }
        self._parameters = dict(model.named_parameters_of_all())
        self._parameter_of: dict[str, str] = {}  # stored weight -> the first parameter here that has a part of it
        for name in self._parameters:
            for piece in self._pieces(name):
                self._parameter_of.setdefault(piece.weight, name)

    @cached_property
    def _stage_of(self) -> dict[str, int]:
        """Stored weight -> the first pipeline stage that has it."""
        group = parallel_state.get_pipeline_model_parallel_group()
        names_by_stage: list[list[str]] = [[] for _ in range(group.size())]
        dist.all_gather_object(names_by_stage, list(self._parameter_of), group=group)
        return {name: stage for stage, names in reversed(list(enumerate(names_by_stage))) for name in names}

    def load_weights(self, source: ModelSource) -> None:
        """Fill every parameter from the stored model, of which each rank reads its own rows. A model with random
        weights is drawn whole on every rank.
        """
        stored = source.stored
        drawn = dict(named_weights(source.load(HOST))) if stored is None else source.random_weights()
        drawn = new_adapters_in_common(drawn, self._dense.own)

        def read(piece: RowBlock) -> Tensor:
            if piece.weight in drawn:
                return _columns(matrix_of(drawn[piece.weight])[piece.rows.start : piece.rows.stop], piece)
            assert stored is not None
            name, shape = piece.weight.replace(".base_layer.", "."), self.shapes[piece.weight].shape
            return _columns(stored.rows(*place_in_files(name, piece.rows, shape, self._kind)), piece)

        with torch.no_grad():
            for name, parameter in self._parameters.items():
                fill(parameter.data, self._pieces(name), read)
        if self._optimizer is not None:
            self._optimizer.reload_model_params()

    def parts(self, *, optimizer: bool) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of every weight, and of the optimizer's state if `optimizer`, by the stored names."""
        for name, parameter in self._parameters.items():
            for piece in self._pieces(name):
                yield f"model.{piece.weight}", block_of(parameter.detach(), piece)
            stretch = self._stretch(parameter) if optimizer else None
            for slot, value in ({} if stretch is None else stretch.state).items():
                if isinstance(value, Tensor):
                    yield f"optimizer.{self._pieces(name)[0].weight}.{slot}", value

    def gather(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole on every rank of every stage, one at a time, in float32 or rounded to `dtype`."""
        group = parallel_state.get_pipeline_model_parallel_group()
        for name, like in self.shapes.items():
            stage = self._stage_of[name]
            if group.rank() == stage:
                parameter = self._parameters[self._parameter_of[name]]
                local = self._master(parameter) if dtype is None else parameter.detach().to(dtype)
                full = self._gather_full(name, local)
            else:
                full = torch.empty(like.shape, dtype=dtype or torch.float32, device=self._device)
            if group.size() > 1:
                dist.broadcast(full, dist.get_global_rank(group, stage), group=group)
            yield name, full

    def tensor_shards(self) -> Iterator[TensorShard]:
        """This rank's stretch of each tensor of its stage; the ranks of the stage have equal stretches."""
        stage = parallel_state.get_pipeline_model_parallel_rank()
        names = [name for name in self.shapes if self._stage_of[name] == stage]
        for name in names:
            parameter = self._parameters[self._parameter_of[name]]
            full = self._gather_full(name, self._master(parameter))
            yield from even_share(f"model.{name}", full, self._number, self._copies)
        slots, steps = self._slots_and_steps()
        for name in names:
            parameter = self._parameters[self._parameter_of[name]]
            stretch = self._stretch(parameter)
            for slot in slots if parameter.requires_grad else ():
                local = self._joined(parameter, None if stretch is None else stretch.state[slot], stretch)
                full = self._gather_full(name, local)
                yield from even_share(f"optimizer.{name}.{slot}", full, self._number, self._copies)
            if steps is not None and parameter.requires_grad and self._number == 0:
                yield TensorShard.from_full_tensor(f"optimizer.{name}.{STEP}", torch.tensor(steps))
        for name, bias in self._model.expert_biases().items() if self._number == 0 else ():
            yield TensorShard.from_full_tensor(BIASES + name, bias)

    def load(self, source: TensorSource) -> None:
        """Load the state; see `Strategy.load_state`. Every rank reads only its own parts.

        Raises `ResumeError` also if the adapters of joined layers must share a factor A, and the stored ones differ.
        """
        for name, pieces in self._dense.own.items():
            if name.endswith(COMMON):
                first, *others = [piece.weight for piece in pieces]
                for other in others:
                    if not torch.equal(source.read(f"model.{first}"), source.read(f"model.{other}")):
                        raise ResumeError(different(first, other))
        slots = slots_of(check_complete(source, self.shapes))
        for name, parameter in self._parameters.items():
            local = self._read_parameter(source, name, "model.{}")
            parameter.data.copy_(local)
            stretch = self._stretch(parameter)
            if stretch is None:
                continue
            stretch.main.data.copy_(stretch.of(local))
            stretch.state.clear()
            weight = self._pieces(name)[0].weight
            for slot in slots.get(weight, ()):
                if slot == STEP:
                    stretch.state[slot] = source.read(f"optimizer.{weight}.{slot}").view(())
                else:
                    read = self._read_parameter(source, name, f"optimizer.{{}}.{slot}")
                    stretch.state[slot] = stretch.of(read).clone()
        for name, bias in self._model.expert_biases().items():
            if BIASES + name in source.shapes:
                bias.copy_(source.read(BIASES + name))
            else:  # the state comes from a learner without biases
                bias.zero_()

    def _read_parameter(self, source: TensorSource, name: str, pattern: str) -> Tensor:
        """The numbers of a parameter, or of a part of its state, from the stored tensors, in float32."""
        local = torch.zeros(self._parameters[name].shape, device=self._device)

        def read(piece: RowBlock) -> Tensor:
            width = matrix_of(self.shapes[piece.weight])[:1].numel()
            start = piece.rows.start * width
            rows = source.read(pattern.format(piece.weight), start, len(piece.rows) * width)
            return _columns(rows.view(len(piece.rows), -1), piece)

        fill(local, self._pieces(name), read)
        return local

    def _pieces(self, name: str) -> tuple[RowBlock, ...]:
        return self._cut(name).own[name]

    def _cut(self, name: str) -> ParameterSplit:
        return self._experts if name in self._experts.own else self._dense

    def _gather_full(self, weight: str, local: Tensor) -> Tensor:
        """A whole stored tensor, assembled from the parameters, or their state, of all ranks that hold parts of it."""
        name = self._parameter_of[weight]
        full = torch.empty(self.shapes[weight].shape, dtype=local.dtype, device=local.device)
        cut = self._cut(name)
        own = local_part(local, self._pieces(name), weight).contiguous()
        most = max(sum(len(item.rows) for item in layout[name] if item.weight == weight) for layout in cut.layouts)
        sent = torch.zeros((most, *own.shape[1:]), dtype=own.dtype, device=own.device)
        sent[: len(own)] = own
        received = [torch.empty_like(sent) for _ in cut.layouts] if len(cut.layouts) > 1 else [sent]
        if len(cut.layouts) > 1:
            dist.all_gather(received, sent, group=cut.group)
        for layout, part in zip(cut.layouts, received, strict=True):
            put(full, part, layout[name], weight)
        return full

    @property
    def _copies(self) -> int:
        """Number of ranks of a stage."""
        return self._ranks.size // int(parallel_state.get_pipeline_model_parallel_world_size())

    @property
    def _number(self) -> int:
        """Index of this rank in its stage; the ranks of a stage are consecutive."""
        return self._ranks.rank % self._copies

    def _master(self, parameter: nn.Parameter) -> Tensor:
        """A parameter in float32: the optimizer's master weight if the model computes in another type."""
        if parameter.dtype is torch.float32 or self._optimizer is None or not parameter.requires_grad:
            return parameter.detach().float()
        stretch = self._stretch(parameter)
        return self._joined(parameter, None if stretch is None else stretch.main.detach(), stretch)

    def _joined(self, parameter: nn.Parameter, own: Tensor | None, stretch: _Stretch | None) -> Tensor:
        """A part of a parameter's state in the parameter's shape, joined from the stretches of data-parallel ranks."""
        if not any(hasattr(inner, "model_param_gbuf_map") for inner in self._optimizer.chained_optimizers):
            assert own is not None
            return own.view(parameter.shape)
        flat = torch.zeros(parameter.numel(), device=self._device)
        if stretch is not None and own is not None:
            flat[stretch.start : stretch.start + own.numel()] = own.flatten()
        if getattr(parameter, "allreduce", True):
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        else:  # on experts
            group = parallel_state.get_expert_data_parallel_group()
        dist.all_reduce(flat, group=group)
        return flat.view(parameter.shape)

    def _stretch(self, parameter: nn.Parameter) -> _Stretch | None:
        """The stretch of a parameter that this rank updates; None if it has none, or the parameter never changes."""
        learns = self._optimizer is not None and parameter.requires_grad
        for inner in self._optimizer.chained_optimizers if learns else ():
            if hasattr(inner, "model_param_gbuf_map"):
                position = inner.model_param_group_index_map.get(parameter)
                if position is not None:
                    group, number = position
                    main = inner.optimizer.param_groups[group]["params"][number]
                    start = inner._get_model_param_range_map(parameter)["param"].start
                    return _Stretch(start, main, inner.optimizer.state[main])
            else:
                main = getattr(parameter, "main_param", parameter)
                return _Stretch(0, main, inner.optimizer.state[main])
        return None

    def _slots_and_steps(self) -> tuple[list[str], float | None]:
        """Names of the tensors in a parameter's state, and its number of steps; the same for all that learn."""
        own: tuple[list[str], float | None] = [], None
        for parameter in self._parameters.values():
            stretch = self._stretch(parameter)
            if stretch is not None and stretch.state:
                steps = stretch.state.get(STEP)
                own = sorted(set(stretch.state) - {STEP}), None if steps is None else float(steps)
        result = [own] * dist.get_world_size()
        dist.all_gather_object(result, own)
        return max(result, key=lambda item: len(item[0]))


def _columns(rows: Tensor, piece: RowBlock) -> Tensor:
    return rows if piece.columns is None else rows[:, piece.columns.start : piece.columns.stop]
