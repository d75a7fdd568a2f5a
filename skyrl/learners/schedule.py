"""Training settings that all strategies share: optimizer, learning rate schedule and activation recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from skyrl.config import OptimizerConfig
from skyrl.config.settings.learners import DECAYING, OURS
from skyrl.errors import UserError
from skyrl.learners.cpu_adam import cpu_adamw
from skyrl.learners.gradients import mesh_of
from skyrl.learners.muon import Muon, hidden_matrices
from skyrl.models.attention.varlen_attention import attention_operators

KEPT_FROM = 16_384
"""Tokens of a sequence from which recomputation keeps the outputs of attention. Selecting what is kept takes a call in
Python for each operator, which shorter sequences do not repay: 0.25 s for 8,192 tokens in a model of 28 layers."""

SCALE_WITHOUT_WARMUP = 10_000
"""Steps after which inverse_sqrt has fallen to the root of a half, where there is no warm-up; transformers' value."""


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The configured optimizer, with decoupled weight decay, over the parameters that learn."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    beta1, beta2 = config.adam_betas
    fused = True if len({parameter.device.type for parameter in model.parameters()}) == 1 else None
    adam: dict[str, Any] = {"betas": (beta1, beta2), "eps": config.adam_eps, "fused": fused}
    match config.optimizer:
        case "adamw":
            return torch.optim.AdamW(_decayed(learning, config), lr=config.lr, **adam)
        case "cpu_adamw":
            return cpu_adamw(_decayed(learning, config), lr=config.lr, betas=(beta1, beta2), eps=config.adam_eps)
        case "sgd":
            return torch.optim.SGD(_decayed(learning, config), lr=config.lr)
        case "muon":
            inner = hidden_matrices(model)
            matrices = _decayed([item for item in learning if item in inner], config)
            others = _decayed([entry for entry in learning if entry not in inner], config)
            return Muon(matrices, others, lr=config.lr, momentum=config.muon_momentum, adam=adam)


def _decayed(parameters: list[nn.Parameter], config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups of parameters by whether they decay and by their mesh of ranks: torch updates a group in one call, which
    accepts tensors of one mesh only.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in parameters:
        decays = config.weight_decay_on == "all" or parameter.dim() >= 2  # a matrix
        groups.setdefault((decays, mesh_of(parameter)), []).append(parameter)
    return [
        {"params": members, "weight_decay": config.weight_decay if decays else 0.0, "decays": decays}
        for (decays, _), members in groups.items()
    ]


@frozen(kw_only=True)
class StepSettings:
    """Settings of one optimizer step. None stands for the configured value, and for the schedule's learning rate."""

    lr: float | None = None
    """Learning rate. The schedule advances all the same."""

    betas: tuple[float, float] | None = None
    """AdamW's decay rates of the two moments."""

    eps: float | None = None
    """Number that AdamW adds to the root of the second moment."""

    weight_decay: float | None = None
    """Decoupled weight decay, of the weights that the configuration lets decay."""

    max_grad_norm: float | None = None
    """Bound of the gradient's L2 norm; 0 turns clipping off."""

    def bound(self, configured: float) -> float:
        """Bound of the gradient's norm, infinite without clipping; `configured` is the learner's own."""
        return configured if self.max_grad_norm is None else self.max_grad_norm or float("inf")

    @contextmanager
    def applied(self, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
        """A context in which an optimizer's groups of parameters have these settings."""
        before = [dict(group) for group in groups]
        for group in groups:
            settings = {"lr": self.lr, "betas": self.betas, "eps": self.eps}
            if group.get("decays", group.get("wd_mult", 1.0)):
                settings["weight_decay"] = self.weight_decay
            group.update({name: value for name, value in settings.items() if value is not None and name in group})
        try:
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update({name: values[name] for name in ("lr", "betas", "eps", "weight_decay") if name in values})

    def refuse_unknown(self, optimizer: Optimizer, name: str) -> None:
        """Raises `UserError` for a setting that no parameter of the optimizer called `name` has."""
        for setting in ("betas", "eps"):
            if getattr(self, setting) is not None and not any(setting in group for group in optimizer.param_groups):
                raise UserError(f"{setting}: the optimizer {name} has none; choose adamw, or leave {setting} out")


@frozen(kw_only=True)
class Shape:
    """A learning rate schedule, as a fraction of the peak rate over steps counted from 0.

    Warm-up is linear from `start` to 1 over `warmup` steps; decaying schedules fall from 1 to `least` at `total`, over
    the last `decay` steps; inverse_sqrt falls with the root of the step from the end of the warm-up (as transformers
    does: arXiv:1706.03762, section 5.3). The others are AReaL's and Megatron's schedules; cosine: arXiv:1608.03983,
    eq. 5, without restarts.
    """

    name: str
    total: int | None
    warmup: int
    start: float
    least: float
    decay: int | None = None

    def __call__(self, step: float) -> float:
        """The fraction of the peak rate at this step; constant after the last step."""
        if step < self.warmup:
            return self.start + (1 - self.start) * step / self.warmup
        if self.name == "inverse_sqrt":
            scale = self.warmup or SCALE_WITHOUT_WARMUP
            return 1 / math.sqrt((step + (scale - self.warmup)) / scale)
        if self.name not in DECAYING:
            return 1.0
        assert self.total is not None
        length = self.total - self.warmup if self.decay is None else min(self.decay, self.total - self.warmup)
        progress = min(1.0, max(0.0, (step - (self.total - length)) / max(length, 1)))
        if "cosine" in self.name:
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.least + (1 - self.least) * (1 - progress)


def learning_rate_schedule(
    optimizer: Optimizer, config: OptimizerConfig, num_training_steps: int | None, updates_per_step: int = 1
) -> LambdaLR:
    """A torch scheduler that is stepped once for each optimizer step.

    `num_training_steps` counts optimizer steps; `updates_per_step` of them are a training step. Raises ValueError if
    the schedule needs `num_training_steps` and it is None.
    """
    per = updates_per_step if config.schedule_unit == "training_step" else 1
    total = None if num_training_steps is None else -(-num_training_steps // per)
    warmup = config.num_warmup_steps
    if config.warmup_steps_proportion is not None:
        warmup = int(config.warmup_steps_proportion * _require_total(total, config))
    if config.scheduler in OURS:
        if config.scheduler in DECAYING:
            _require_total(total, config)
        start = config.warmup_start_ratio
        if start is None:
            from_least = config.scheduler in ("cosine", "cosine_warmup_with_min_lr")
            start = config.min_lr_ratio if from_least else 0.0
        decay = config.num_decay_steps if config.scheduler == "warmup_stable_decay" else None
        shape: Callable[[float], float] = Shape(
            name=config.scheduler,
            total=total,
            warmup=0 if config.scheduler == "constant" else warmup,
            start=start,
            least=config.min_lr_ratio,
            decay=decay,
        )
        return LambdaLR(optimizer, partial(_step_by_unit, shape, per))
    from transformers import get_scheduler  # imports peft and accelerate

    scheduler: LambdaLR = get_scheduler(config.scheduler, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    return scheduler if per == 1 else LambdaLR(optimizer, partial(_step_by_unit, scheduler.lr_lambdas[0], per))


def _step_by_unit(shape: Callable[[int], float], per: int, optimizer_step: int) -> float:
    return shape(optimizer_step // per)


def _require_total(total: int | None, config: OptimizerConfig) -> int:
    if total is None:
        raise ValueError(f"the schedule {config.scheduler} ends somewhere: it needs the number of steps")
    return total


def move_schedule(schedule: LambdaLR, optimizer_steps: int) -> None:
    """Set the schedule to its position and rate after `optimizer_steps` steps."""
    schedule.last_epoch = optimizer_steps
    groups = schedule.optimizer.param_groups
    for group, base, rate in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * rate(optimizer_steps)


def recompute_activations(model: Any, *, use_reentrant: bool, draws: bool) -> None:
    """Keep no activations inside a layer and compute them again in the backward pass (arXiv:1604.06174), except the
    outputs of attention over long sequences, which cost more than they take.

    `draws` says whether layers draw random numbers, for dropout, which must then be the same again. transformers
    recomputes only in training mode. Only the layers themselves enter it; their submodules, dropout in particular, stay
    in evaluation mode, in which a forward pass can be repeated.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    settings = {"use_reentrant": use_reentrant, "preserve_rng_state": draws}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
            if not use_reentrant:
                layer: Any = module
                layer._gradient_checkpointing_func = partial(_keeping_attention, layer._gradient_checkpointing_func)


def _keeping_attention(checkpointed: Callable[..., object], layer: partial[object], *inputs: object) -> object:
    """Run a checkpointed layer. `layer` is its call with all keyword arguments."""
    segments = layer.keywords.get("segments")
    if segments is None or max(segments.sizes) < KEPT_FROM:
        return checkpointed(layer, *inputs)
    keep = partial(create_selective_checkpoint_contexts, attention_operators())
    return checkpointed(layer, *inputs, context_fn=keep)
