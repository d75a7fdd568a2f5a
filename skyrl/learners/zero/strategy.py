"""DeepSpeed's Zero Redundancy Optimizer (arXiv:1910.02054), stages 0 to 3, behind the same contract as FSDP2.

DeepSpeed is imported when the first model is made. Its engine gets torch's optimizer and our schedule; `engine_config`
makes its other settings, and `zero/state.py` reads and writes its state.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from skyrl.checkpoint.shards import TensorShard, TensorSource
from skyrl.config import DeepSpeedConfig, OptimizerConfig
from skyrl.config.settings.deepspeed import OffloadConfig, ZeroOptimizationConfig
from skyrl.errors import UserError
from skyrl.installation import install_command
from skyrl.learners.data_parallel import DataParallel, computing_in
from skyrl.learners.offloading import HOST
from skyrl.learners.ranks import SHARD, TENSOR
from skyrl.learners.row_layouts import MicroBatch
from skyrl.learners.schedule import StepSettings, make_optimizer
from skyrl.learners.strategy import ModelSource, StrategyContext
from skyrl.learners.zero.state import Cut, ZeroState
from skyrl.models.parallel.auto_tp import cut_by_deepspeed
from skyrl.models.parallel.tensor_parallel import refuse_uncuttable, refuse_wrong_cut
from skyrl.tree.classes import fields_of

T = TypeVar("T")


@frozen(eq=False)
class ParallelUnit:
    """The object that DeepSpeed and Megatron call `mpu`, with the methods that DeepSpeed uses."""

    mesh: DeviceMesh
    """Device mesh with the dimensions `shard`, the ranks with the same part of every matrix, and `tensor`."""

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """This rank's group of ranks that cut matrices among them."""
        return self.mesh.get_group(TENSOR)

    def get_model_parallel_world_size(self) -> int:
        """Number of ranks that cut matrices among them."""
        return self.mesh.size(list(self.mesh.mesh_dim_names or ()).index(TENSOR))

    def get_model_parallel_rank(self) -> int:
        """Index of this rank among the ranks that cut matrices, counted from 0."""
        return self.mesh.get_local_rank(TENSOR)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks with the same part of every matrix, over which gradients are averaged and state is sharded."""
        return self.mesh.get_group(SHARD)

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks with the same part of every matrix."""
        return self.get_data_parallel_group().size()

    def get_data_parallel_rank(self) -> int:
        """Index of this rank among the ranks with the same part of every matrix, counted from 0."""
        return self.mesh.get_local_rank(SHARD)


class Zero(DataParallel):
    """A model under a DeepSpeed engine. See `Strategy` for what each method does."""

    def __init__(self, source: ModelSource, config: DeepSpeedConfig, context: StrategyContext) -> None:
        """Every rank reads the weights: the engine starts from whole models, or from parts that are cut from whole
        models in host memory. Raises `UserError` without DeepSpeed, `ModelError` for a model that cannot be cut.
        """
        deepspeed = import_deepspeed(context.device, context.run.path_of("strategy"))
        self._ranks, self._device = context.ranks, context.device
        self._replicas = context.ranks.size // context.degrees.tensor
        zero = config.zero_optimization
        self._stage = zero.stage
        offloads_weights = zero.offload_param.device != "none" and self._stage == 3
        self._offloads = offloads_weights or zero.offload_optimizer.device != "none"
        has_engine = context.optimizer is not None or self._stage == 3  # below stage 3 it only shards training
        self._copies_dtype = None if has_engine and self._stage else context.compute_dtype
        self._unit: ParallelUnit | None = None
        cuts: dict[str, Cut] = {}
        if context.degrees.tensor > 1:
            model, cuts = self._cut(source, context)
        else:
            model = source.load(context.device)
        model.eval()
        self.model: Any = model
        self._module: Any = model
        self._engine: Any = None
        self._accumulated = False  # since the last step
        self.optimizer = make_optimizer(model, context.optimizer) if context.optimizer else None
        self._max_grad_norm = (context.optimizer.max_grad_norm if context.optimizer else 0) or float("inf")
        if context.optimizer is None:
            model.requires_grad_(False)
        if has_engine:
            settings = engine_config(
                config,
                context.optimizer,
                compute_dtype=context.compute_dtype,
                micro_batch_rows=context.micro_batch_rows,
                device=context.device,
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # DeepSpeed's warnings about torch
                _take_groups(self._unit)  # replaces the groups of another model of this process
                self._engine, *_ = deepspeed.initialize(
                    model=model, optimizer=self.optimizer, config=settings, mpu=self._unit
                )
            self._engine.eval()
            self.model = self._engine
        self._held = ZeroState(
            deepspeed,
            self._engine,
            model,
            stage=self._stage,
            learns=context.optimizer is not None,
            ranks=context.ranks,
            device=context.device,
            cuts=cuts,
            tensor_parallel=context.degrees.tensor,
        )

    def _cut(self, source: ModelSource, context: StrategyContext) -> tuple[nn.Module, dict[str, Cut]]:
        """The model with this rank's parts of its matrices, and how each is cut."""
        size, field = context.degrees.tensor, context.section.path_of("tensor_parallel_size")
        refuse_uncuttable(source.meta_model(), size, context.ranks.size, field)
        self._unit = ParallelUnit(context.ranks.mesh(context.device, tensor=size))
        model: nn.Module = source.load(HOST)
        refuse_wrong_cut(model, self._unit.mesh[TENSOR], field)
        dimensions = cut_by_deepspeed(model, self._unit.mesh[TENSOR], field)
        group = self._unit.get_model_parallel_group()
        return model.to(context.device), {name: Cut(dim, group) for name, dim in dimensions.items()}

    @property
    def hf_model(self) -> nn.Module:
        module: nn.Module = self._module
        return module

    def computing(self) -> AbstractContextManager[Any]:
        """Above stage 0 DeepSpeed's engine has the weights in the type of the computation."""
        return nullcontext() if self._copies_dtype is None else computing_in(self._module, self._copies_dtype)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        with torch.no_grad():
            yield
        if self._stage == 3:
            self._engine.empty_partition_cache()

    def zero_grad(self) -> None:
        if self._engine is not None and self.optimizer is not None:
            self._engine.optimizer.zero_grad(set_to_none=True)
        if self._accumulated and self._stage in (1, 2):
            self._held.take_gradients()
        self._accumulated = False

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        read: Callable[[Any, MicroBatch], T],
        loss_of: Callable[[T, MicroBatch], Tensor],
    ) -> None:
        # Stages 1 and 2 complete a gradient with the last micro-batch of a pass; another pass would replace it.
        earlier = self._held.take_gradients() if self._accumulated and self._stage in (1, 2) else []
        super().accumulate(micro_batches, read, loss_of)
        if earlier:
            self._held.add_gradients(earlier)
        self._accumulated = True

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of the sum of all ranks' `loss`, a scalar that is the same within a tensor-parallel group.

        DeepSpeed averages gradients over ranks; the factor makes the average a sum.
        """
        _take_groups(self._unit)  # stage 0 looks for its ranks there
        # Stage 0 would sum the gradients of the module's parameters, which are copies until the pass has ended.
        self._engine.set_gradient_accumulation_boundary(last and self._stage > 0)
        self._engine.backward(loss * self._replicas, scale_wrt_gas=False)

    def step(self, settings: StepSettings) -> float:
        """Step, unless the gradient is not finite. The engine itself skips such a step, on all ranks, above stage 0."""
        assert self.optimizer is not None, "this model never changes"
        self._accumulated = False
        if self._stage == 0:
            _take_groups(self._unit)
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.allreduce_gradients()
            parameters = [parameter for parameter in self._module.parameters() if parameter.grad is not None]
            norm = self._norm(parameters)
            if not torch.isfinite(norm):
                self._engine.zero_grad()
                return norm.item()
            clip_grads_with_norm_(parameters, settings.bound(self._max_grad_norm), norm)
            with settings.applied(self.optimizer.param_groups):
                self._engine.step()
            return norm.item()
        usual = self._engine.optimizer.clip_grad
        self._engine.optimizer.clip_grad = usual if settings.max_grad_norm is None else settings.max_grad_norm
        try:
            with settings.applied(self.optimizer.param_groups):
                self._engine.step()
        finally:
            self._engine.optimizer.clip_grad = usual
        return float("nan") if self._engine.optimizer.overflow else float(self._engine.get_global_grad_norm())

    def _norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Norm of all gradients over the ranks that hold parts of cut matrices."""
        named = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        if self._unit is None:
            return get_total_norm([gradient for _, gradient in named])
        squares = torch.zeros(2, device=self._device)
        for parameter, gradient in named:
            squares[int(getattr(parameter, "tensor_model_parallel", False))] += gradient.float().square().sum()
        dist.all_reduce(squares[1], group=self._unit.get_model_parallel_group())
        return squares.sum().sqrt()

    def shards(self, *, optimizer: bool) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of every weight, in any shape, and of the optimizer's state if `optimizer`."""
        for name, parameter in self._module.named_parameters():
            yield f"model.{name}", getattr(parameter, "ds_tensor", parameter.detach())  # the former in stage 3
        if optimizer and self.optimizer is not None:
            for number, slots in enumerate(self.optimizer.state.values()):
                tensors = ((slot, value) for slot, value in slots.items() if isinstance(value, Tensor))
                yield from ((f"optimizer.{number}.{slot}", value) for slot, value in tensors)

    def named_shapes(self) -> dict[str, Tensor]:
        """Every weight by name, each tied weight once: tensors with the shape and type of the whole weight."""
        return self._held.named_shapes()

    def gather(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight by name, in its whole shape, in float32 or rounded to `dtype`, one at a time."""
        return self._held.gather(dtype or torch.float32)

    def tensor_shards(self) -> Iterator[TensorShard]:
        return self._held.tensor_shards()

    def load_state(self, source: TensorSource) -> None:
        self._held.load(source)

    def offload(self, *, model: bool, optimizer: bool) -> int:
        return self._count_freed(lambda: self._leave(model=model, optimizer=optimizer))

    def onload(self, *, model: bool, optimizer: bool) -> int:
        """Move everything that DeepSpeed offloaded back to the device. Returns the bytes moved."""
        return -self._count_freed(self._engine.reload_states) if self._moves else 0

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()

    @property
    def _moves(self) -> bool:
        """Whether parts can be offloaded: for a model that learns, above stage 0, unless DeepSpeed offloads anyway."""
        return self._engine is not None and self.optimizer is not None and self._stage > 0 and not self._offloads

    def _leave(self, *, model: bool, optimizer: bool) -> None:
        if self._moves:
            kinds = importlib.import_module("deepspeed.runtime.zero.offload_config").OffloadStateTypeEnum
            include = [kinds.optim_states] if optimizer else []
            include += [kinds.hp_params, kinds.lp_params, kinds.lp_grads] if model else []
            include += [kinds.contiguous_grad_buffer] if model and self._stage == 3 else []
            self._engine.offload_states(include=include, pin_memory=self._device.type == "cuda")

    def _count_freed(self, action: Callable[[], object]) -> int:
        """Run the action and return the bytes that it frees on the device."""
        if self._device.type != "cuda":
            return 0
        before = torch.cuda.memory_allocated(self._device)
        action()
        return before - torch.cuda.memory_allocated(self._device)


def _take_groups(unit: ParallelUnit | None) -> None:
    """Tell DeepSpeed a model's groups of ranks; None: all ranks form one group."""
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    groups.mpu = unit


def import_deepspeed(device: torch.device, field: str = "trainer.strategy") -> ModuleType:
    """Import DeepSpeed, set to build no operators. Raises `UserError`, which names `field`, if it is not installed.

    On a CPU it would compile an operator for communication in shared memory; a process that is killed meanwhile leaves
    a lock, on which every later process waits forever without a message. Gloo does the same work.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # DeepSpeed reads both only from here
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    warnings.filterwarnings("ignore", message=r"`torch\.distributed", category=FutureWarning)  # deprecated calls
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deepspeed = importlib.import_module("deepspeed")
            importlib.import_module("deepspeed.utils")
    except ImportError as error:
        raise UserError(
            f'{field} = "deepspeed" needs DeepSpeed, which is not installed: {install_command("deepspeed")}, '
            f'or set {field} = "fsdp2"'
        ) from error
    operators: dict[str, bool] = importlib.import_module("deepspeed.ops").__compatible_ops__
    operators["deepspeed_shm_comm"] = False
    return deepspeed


def engine_config(
    config: DeepSpeedConfig,
    optimizer: OptimizerConfig | None,
    *,
    compute_dtype: torch.dtype,
    micro_batch_rows: int,
    device: torch.device,
) -> dict[str, Any]:
    """The configuration of `deepspeed.initialize` for one model; `optimizer` is None for a model that never changes.

    Sizes that are `"auto"` are left out, so that DeepSpeed's defaults apply. `gradient_clipping` comes from
    `optimizer_config.max_grad_norm`; 0 disables clipping in DeepSpeed, too. Stage 0 shards nothing and keeps its
    weights in float32: it computes under autocast and clips as a single process does.
    """
    zero, stage = config.zero_optimization, config.zero_optimization.stage
    named = {name: getattr(zero, name) for name in fields_of(ZeroOptimizationConfig)}
    sharding = {name: value for name, value in named.items() if not isinstance(value, OffloadConfig | str)}
    places = (("offload_param", zero.offload_param, 3), ("offload_optimizer", zero.offload_optimizer, 1))
    for name, offload, first_stage in places:
        if offload.device != "none" and stage >= first_stage:
            pins = offload.pin_memory and device.type == "cuda"  # pinning only speeds up copies to a GPU
            nvme = {"nvme_path": offload.nvme_path} if offload.nvme_path else {}
            sharding[name] = {"device": offload.device, "pin_memory": pins, **nvme}
    clipping = optimizer.max_grad_norm if optimizer and stage else 0.0
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_rows,
        "gradient_accumulation_steps": 1,  # each micro-batch says whether its mini-batch ends
        "steps_per_print": sys.maxsize,
        "zero_optimization": sharding,
        "zero_allow_untested_optimizer": True,  # the optimizer is torch's, as under every strategy
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": config.gradient_clipping or clipping,
        "bf16": {"enabled": compute_dtype is torch.bfloat16 and stage > 0},
        "prescale_gradients": config.prescale_gradients,
        "wall_clock_breakdown": config.wall_clock_breakdown,
    }
    if config.communication_data_type is not None:
        dtype, short = config.communication_data_type, {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
        settings["communication_data_type"] = short.get(dtype, dtype)  # DeepSpeed accepts the short names alone
    return settings
