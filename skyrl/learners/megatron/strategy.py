"""Megatron-core: tensor, pipeline and context parallelism with the distributed optimizer, as a `Strategy`.

`skyrl.models.megatron.gpt` builds the modules, `skyrl.models.megatron.layout` names and lays out their weights, and
`megatron/state.py` reads and writes the state. Importing this module requires Megatron-core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from attrs import evolve
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from skyrl.checkpoint.shards import TensorShard, TensorSource
from skyrl.config import MegatronConfig, OptimizerConfig
from skyrl.errors import ModelError
from skyrl.learners.megatron.package import join_groups, leave_groups
from skyrl.learners.megatron.settings import MegatronSettings
from skyrl.learners.megatron.state import MegatronState, ParameterSplit
from skyrl.learners.offloading import HOST, BufferMemory, move_optimizer
from skyrl.learners.routing import RouterCosts, RouterWork
from skyrl.learners.row_layouts import MicroBatch
from skyrl.learners.schedule import StepSettings
from skyrl.learners.strategy import ModelSource, StrategyContext, nan_unless_finite
from skyrl.models.files.facts import parts_under_megatron
from skyrl.models.megatron.adapter_layout import Adapters, with_adapters
from skyrl.models.megatron.adapters import attach_adapters, let_gradients_pass
from skyrl.models.megatron.gpt import MegatronDecoder, transformer_config
from skyrl.models.megatron.layout import DecoderSizes, Mixture, expert_layout_of, layout_of
from skyrl.models.routers import RowLoads
from skyrl.planning.batches import uneven_parts

T = TypeVar("T")


class Megatron:
    """A model spread by Megatron-core. See `Strategy` for what each method does."""

    def __init__(self, source: ModelSource, config: MegatronConfig, context: StrategyContext) -> None:
        """Raises `ModelError` for a model without a converter, and for degrees or settings that do not fit it."""
        self._settings = MegatronSettings.of(config, context.degrees, context.optimizer, context.compute_dtype)
        self._degrees = self._settings.degrees
        self._refuse_uneven(source, context)
        join_groups(self._degrees, context.ranks.timeout)
        try:
            self._build(source, context)
        except BaseException:
            leave_groups(self._degrees)
            raise

    def _refuse_uneven(self, source: ModelSource, context: StrategyContext) -> None:
        """Raises `ModelError` for degrees that do not divide the model, before any group of ranks is made."""
        self._meta: Any = source.meta_model()
        parts = parts_under_megatron(self._meta.config.get_text_config().to_dict())
        table = context.section.path_of("megatron_config")
        degrees = {
            "tensor_model": self._degrees.tensor,
            "pipeline_model": self._degrees.pipeline,
            "expert_model": self._degrees.expert,
            "expert_tensor": self._degrees.expert_tensor,
        }
        if self._degrees.expert > 1 and "expert_model" not in parts:
            field = f"{table}.expert_model_parallel_size"
            raise ModelError(f"this model has no experts that ranks could share: set {field} = 1")
        for name, sizes_of_parts in parts.items():
            size = degrees[name]
            if problem := uneven_parts(sizes_of_parts, size, context.ranks.size):
                part_name, uneven = problem
                field = f"{table}.{name}_parallel_size"
                sizes = " or ".join(map(str, uneven.nearest))
                raise ModelError(
                    f"{size} ranks cannot share the model's {uneven.total} {part_name}: set {field} = {sizes}"
                )

    def _build(self, source: ModelSource, context: StrategyContext) -> None:
        self._ranks, self._device, self._mover = context.ranks, context.device, context.mover
        sizes = DecoderSizes.of(self._meta.config)
        table = context.section.path_of("megatron_config")
        megatron = transformer_config(
            self._meta.config,
            sizes,
            context.compute_dtype,
            self._settings.transformer,
            self._settings.experts,
            field=f"{table}.transformer_config_kwargs",
        )
        if self._device.type == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(0)  # required, though nothing is drawn
        head = getattr(self._meta, "head_name", None)
        self.model = MegatronDecoder(self._meta, sizes, megatron, self._device, is_critic=head is not None)
        self._watch: RouterWatch | None = None
        if sizes.mixture is not None:
            self._watch = RouterWatch(context.router_costs, sizes.mixture, self._device)
            self.model.watch_routers(self._watch)
        dense, experts = self._cuts(sizes, value_head=f"{head}.weight" if head else None)
        adapters = Adapters.of(self._meta, joined=self._settings.joins_adapters)
        if adapters is not None:
            attach_adapters(self.model.gpt, dense.own, adapters)
            dense = ParameterSplit(
                layouts=[with_adapters(layout, adapters) for layout in dense.layouts], group=dense.group
            )
        self._mark(dense, experts, only_adapters=adapters is not None)
        self._ddp: Any = None
        self._outer: Any = None
        self.optimizer: torch.optim.Optimizer | None = None
        self._max_grad_norm = float("inf")
        self._accumulated = False  # since the last step
        if context.optimizer is None:
            self.model.requires_grad_(False)
        else:
            if adapters is not None:
                self._refuse_stages_without_adapters(table)
                if self.model.is_first:
                    let_gradients_pass(self.model.gpt.embedding)
            reducing = DistributedDataParallelConfig(**self._settings.ddp or {})
            self._ddp = DistributedDataParallel(megatron, reducing, self.model.gpt)
            self._outer = make_megatron_optimizer(
                self._ddp, self._settings, context.optimizer, field=f"{table}.optimizer_config_kwargs"
            )
            self._buffers = BufferMemory(self._ddp)
            # the schedule sets the learning rate of this one; that of the experts follows it
            self.optimizer = self._outer.chained_optimizers[0].optimizer
            self._max_grad_norm = context.optimizer.max_grad_norm or float("inf")
            self._config = megatron
            megatron.finalize_model_grads_func = self._finish_pass
            self._overlap(megatron, reducing)
        self._state = MegatronState(self.model, self._outer, dense, experts, self._meta, self._ranks, self._device)
        self._state.load_weights(source)

    def _mark(self, dense: ParameterSplit, experts: ParameterSplit, *, only_adapters: bool) -> None:
        """Tell Megatron-core which parameters are parts of a cut matrix, and which learn."""
        named: list[tuple[str, Any]] = list(self.model.named_parameters_of_all())
        for name, parameter in named:
            # marks parameters that the norm counts on every rank; Megatron-core sets it only when it draws weights
            differs = len(dense.layouts) > 1 and dense.layouts[0].get(name) != dense.layouts[1].get(name)
            parameter.tensor_model_parallel = name in experts.own or differs
            if only_adapters:
                [first, *_] = (experts.own if name in experts.own else dense.own)[name]
                parameter.requires_grad = self._meta.get_parameter(first.weight).requires_grad

    def _cuts(self, sizes: DecoderSizes, value_head: str | None) -> tuple[ParameterSplit, ParameterSplit]:
        """How ranks divide the parameters that all data-parallel ranks have, and the parameters of experts."""
        parts, degrees = self._degrees.tensor, self._degrees
        layouts = [layout_of(sizes, parts=parts, part=item, value_head=value_head) for item in range(parts)]
        among = parallel_state.get_expert_tensor_and_model_parallel_group()
        experts = [
            expert_layout_of(sizes, groups=degrees.expert, parts=degrees.expert_tensor, rank=entry)
            for entry in range(among.size())
        ]
        dense = ParameterSplit(layouts=layouts, group=parallel_state.get_tensor_model_parallel_group())
        return dense, ParameterSplit(layouts=experts, group=among)

    def _refuse_stages_without_adapters(self, table: str) -> None:
        """Raises `ModelError` on every rank: Megatron-core has no optimizer for a stage that learns nothing."""
        learns = [False] * self._ranks.size
        dist.all_gather_object(learns, any(parameter.requires_grad for parameter in self.model.parameters()))
        if not all(learns):
            raise ModelError(
                "a pipeline stage has no adapter: choose layers of all stages in model.lora.target_modules, or set "
                f"{table}.pipeline_model_parallel_size = 1"
            )

    def _finish_pass(self, *arguments: object, **named: object) -> None:
        """Megatron-core's work after the last micro-batch, but for the experts' biases: these move with the step."""
        moves, self._config.moe_router_enable_expert_bias = self._config.moe_router_enable_expert_bias, False
        try:
            finalize_model_grads(*arguments, **named)
        finally:
            self._config.moe_router_enable_expert_bias = moves

    def _overlap(self, megatron: TransformerConfig, reducing: DistributedDataParallelConfig) -> None:
        """Overlap gradient reductions and weight gathers with computation, if that is configured."""
        if reducing.overlap_grad_reduce:
            megatron.no_sync_func = self._ddp.no_sync
        if reducing.overlap_param_gather and self.model.is_last and self.model.head_parameter.requires_grad:
            matrix = self.model.head_parameter
            self.model.before_head = lambda: self._ddp.param_to_bucket_group[matrix].finish_param_sync()

    def _settle(self) -> None:
        """Gather the weights that data-parallel ranks have updated but not gathered yet."""
        if self._ddp is not None and self._ddp.ddp_config.overlap_param_gather:
            self._ddp.start_param_sync(force_sync=True)

    @property
    def hf_model(self) -> nn.Module:
        module: nn.Module = self._meta
        return module

    def probe(self, look: Callable[[Any], T]) -> T:
        """`look(model)`, without gradient; each call of the model runs all pipeline stages one after the other."""
        self._settle()
        self.model.relays = self._degrees.pipeline > 1
        self.model.eval()
        try:
            with torch.no_grad():
                return look(self.model)
        finally:
            self.model.relays = False

    def forward(self, micro_batches: Sequence[MicroBatch], read: Callable[[Any, MicroBatch], T]) -> list[T]:
        """`read(model, micro_batch)` of each micro-batch on the last stage; an empty list on the others."""
        results: list[T] = []

        def step(micro: MicroBatch) -> Tensor:
            if not self.model.is_last:
                return self._hidden(micro)
            results.append(read(self.model, micro))
            return torch.zeros((), device=self._device)

        self._settle()
        self.model.eval()
        with torch.no_grad():
            self._run(micro_batches, step, forward_only=True)
        return results

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        read: Callable[[Any, MicroBatch], T],
        loss_of: Callable[[T, MicroBatch], Tensor],
    ) -> RouterWork | None:
        """Add the gradient of the sum of all losses, in the order of Megatron-core's schedule (1F1B)."""
        # Megatron-core averages over micro-batches and over data-parallel ranks, including context-parallel ranks
        factor = len(micro_batches) * parallel_state.get_data_parallel_world_size()

        def step(micro: MicroBatch) -> Tensor:
            if not self.model.is_last:
                return self._hidden(micro)
            loss: Tensor = nan_unless_finite(loss_of(read(self.model, micro), micro)) * factor
            return loss

        self.model.train()  # Megatron-core recomputes only in training mode; there is no dropout
        # Ranks sum their gradients at the end of a pass, in the buffers: those of earlier passes are added afterwards,
        # lest they be summed twice.
        earlier: list[Tensor] = []
        if self._accumulated:
            earlier = [buffer.grad_data.clone() for buffer in self._buffers.all]
            self._ddp.zero_grad_buffer()
        if self._watch is not None:
            self._watch.begin(factor)
        self._run(micro_batches, step, forward_only=False)
        for buffer, gradient in zip(self._buffers.all if earlier else (), earlier, strict=True):
            buffer.grad_data.add_(gradient)
        self._accumulated = True
        return None if self._watch is None else self._watch.work()

    def _run(
        self, micro_batches: Sequence[MicroBatch], step: Callable[[MicroBatch], Tensor], *, forward_only: bool
    ) -> None:
        def forward_step(batches: Iterator[MicroBatch], _: object) -> tuple[Tensor, Callable[[Tensor], Any]]:
            return step(self._begin(next(batches))), lambda loss: (loss, {})

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.model.gpt if forward_only else self._ddp,
            num_microbatches=len(micro_batches),
            seq_length=1,  # both are unused: stages send each other the shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _begin(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch on the device, after announcing to the model which tokens its routers will see."""
        layout = micro.layout
        if layout.routed is not None:
            layout = evolve(layout, routed=self.model.local_tokens(layout.routed, layout.inputs["input_ids"].shape))
        micro = evolve(micro, layout=layout).to(self._device)
        self.model.routed, self.model.row_weights = micro.layout.routed, micro.rows.row_weights
        return micro

    def zero_grad(self) -> None:
        if self._ddp is not None:
            self._ddp.zero_grad_buffer()
            self._outer.zero_grad()
            self.model.forget_expert_loads()
        self._accumulated = False

    def _hidden(self, micro: MicroBatch) -> Tensor:
        inputs = {name: value for name, value in micro.layout.inputs.items() if name != "logits_to_keep"}
        hidden: Tensor = self.model(**inputs).logits
        return hidden

    def shards(self, *, optimizer: bool) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of every weight, and of the optimizer's state if `optimizer`; not collective."""
        return self._state.parts(optimizer=optimizer)

    def step(self, settings: StepSettings) -> float:
        """Clip, step and return the norm before clipping. If it is not finite, nothing changes on any rank."""
        self._outer.prepare_grads()
        norm = float(self._outer.get_grad_norm())
        if math.isfinite(norm):
            max_norm = settings.bound(self._max_grad_norm)
            if math.isfinite(max_norm):
                for inner in self._outer.chained_optimizers:
                    clip_grad_by_total_norm_fp32(inner.get_parameters(), max_norm, norm)
            assert self.optimizer is not None
            for group in self._outer.param_groups:
                group["lr"] = self.optimizer.param_groups[0]["lr"]
            with settings.applied(self._outer.param_groups):
                self._outer.step_with_ready_grads()
            self.model.move_expert_biases()
        self.zero_grad()
        if self._settings.empties_cache and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return norm

    def named_shapes(self) -> dict[str, Tensor]:
        """Every stored weight by name, each tied weight once: meta tensors in float32."""
        return dict(self._state.shapes)

    def gather(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every stored weight by name, whole on every rank, one at a time."""
        self._settle()
        return self._state.gather(dtype)

    def tensor_shards(self) -> Iterator[TensorShard]:
        self._settle()
        return self._state.tensor_shards()

    def load_state(self, source: TensorSource) -> None:
        self._settle()
        self._state.load(source)

    def offload(self, *, model: bool, optimizer: bool) -> int:
        if self._device.type == "cpu":
            return 0
        moved = 0
        if model:
            moved += self._move_parameters(HOST) + (0 if self._ddp is None else self._buffers.leave())
        if optimizer and self._outer is not None:
            moved += move_optimizer(self._outer, HOST, self._mover)
        self._mover.settle(self._device)
        return moved

    def onload(self, *, model: bool, optimizer: bool) -> int:
        if self._device.type == "cpu":
            return 0
        moved = 0
        if model:
            moved += self._move_parameters(self._device) + (0 if self._ddp is None else self._buffers.come_back())
        if optimizer and self._outer is not None:
            moved += move_optimizer(self._outer, self._device, self._mover)
        return moved

    def _move_parameters(self, device: torch.device) -> int:
        """Move the parameters that are not views of a buffer. Returns the bytes moved."""
        in_buffers = self._settings.ddp is not None and self._settings.ddp["use_distributed_optimizer"]
        moved = 0
        for parameter in self.model.parameters():
            if in_buffers and parameter.requires_grad:
                continue
            parameter.data, count = self._mover.move(parameter.data, device)
            moved += count
        return moved

    def close(self) -> None:
        leave_groups(self._degrees)


def make_megatron_optimizer(
    ddp: DistributedDataParallel, settings: MegatronSettings, optimizer: OptimizerConfig, *, field: str
) -> ChainedOptimizer:
    """Megatron-core's chain of optimizers over the parameters of `ddp` that learn, with our weight decay. Raises
    `ModelError`, which names `field`, for settings that Megatron-core does not have.
    """
    try:
        ours = MegatronOptimizerConfig(**settings.optimizer or {})
    except TypeError as error:
        raise ModelError(f"{field}: Megatron-core's OptimizerConfig does not take it: {error}") from error
    overrides = get_standard_config_overrides(ours) if optimizer.weight_decay_on == "matrices" else {}
    outer = get_megatron_optimizer(ours, [ddp], config_overrides=overrides, use_gloo_process_groups=False)
    for inner in outer.chained_optimizers:
        for group in inner.optimizer.param_groups:  # Megatron-core's own scheduler would do this
            group["weight_decay"] = optimizer.weight_decay * group.get("wd_mult", 1.0)
    return outer


class RouterWatch:
    """Collects the loads of the routers of a pipeline stage; see `skyrl.models.megatron.routers.LoadWatch`.

    Every pipeline stage has its own routers, but only the last stage has the loss. Costs are therefore added on the
    stage of their router, and metrics are summed once, at the end of the step.
    """

    def __init__(self, costs: RouterCosts, mixture: Mixture, device: torch.device) -> None:
        """`mixture` describes the experts of the whole model, not only of this stage."""
        self._costs, self._mixture, self._device = costs, mixture, device
        self.begin(1.0)

    def begin(self, factor: float) -> None:
        """Reset the sums. `factor` is the divisor that Megatron-core applies to the sum of all losses."""
        self._factor = factor
        self._parts = dict.fromkeys(self._costs.parts, torch.zeros((), device=self._device))
        shape = (len(self._mixture.layers), self._mixture.experts)
        self._loads = torch.zeros(shape, device=self._device, dtype=torch.float64)

    def __call__(self, layer: int, loads: RowLoads, row_weights: Tensor) -> Tensor:
        """Cost of a layer for a micro-batch, times the factor."""
        parts: dict[str, Tensor] = {}
        layers = len(self._mixture.layers)
        cost = self._costs.added(row_weights.new_zeros(()), parts, loads, row_weights) / layers
        for name, value in parts.items():
            self._parts[name] = self._parts[name] + value.detach() / layers
        self._loads[layer] += (loads.chosen[0] * (row_weights != 0)[:, None]).sum(0)
        return nan_unless_finite(cost) * self._factor

    def work(self) -> RouterWork:
        """The collected sums over all ranks that together hold one copy of the model. Collective."""
        own = [part.double().reshape(1) for part in self._parts.values()]
        everything = torch.cat([*own, self._loads.flatten()])
        groups = (
            parallel_state.get_tensor_and_context_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        )
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(everything, group=group)
        parts, loads = everything[: len(own)], everything[len(own) :]
        return RouterWork(parts=dict(zip(self._parts, parts, strict=True)), loads=loads.view_as(self._loads))
