"""Dynamic scaling of the loss, so that gradients in float16 neither vanish nor overflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.config import OptimizerConfig
from skyrl.config.settings.learners import LearnerConfig, ShardedModelConfig
from skyrl.config.settings.run_basics import RunBasics
from skyrl.config.settings.strategies import reads

LARGEST = 2.0**32
"""Largest factor that is reached by doubling, unless the run begins above it."""


def loss_scale_of(run: RunBasics, section: ShardedModelConfig, ranks: int) -> LossScale | None:
    """A new scale for a model whose gradients pass through float16, None for any other. Only the FSDP strategies
    compute in float16.
    """
    precision = section.fsdp_config.mixed_precision
    if not isinstance(section, LearnerConfig) or precision is None or not reads(run, "fsdp_config"):
        return None
    read = (precision.param_dtype, precision.reduce_dtype) if ranks > 1 else (precision.param_dtype,)
    return LossScale(section.optimizer_config) if {"float16", "fp16"}.intersection(read) else None


class LossScale:
    """Factor of the loss (arXiv:1710.03740, section 3.2), which gradients are divided by before they are clipped.

    It doubles after `loss_scale_window` steps in a row with finite gradients. It halves when gradients are not finite
    for the `hysteresis`-th time since it last doubled, and every time after that. These are Megatron's rules, under
    AReaL's names of the settings. The scale is the same on every rank, because the norm of the gradient is.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self.value = config.initial_loss_scale
        self._good_steps, self._patience = 0, config.hysteresis

    def adapt(self, *, finite: bool) -> bool:
        """Choose the scale of the next step. Returns whether the scale may have caused a gradient that is not finite,
        which is so as long as the scale can still decrease.
        """
        config = self._config
        if finite:
            self._good_steps += 1
            if self._good_steps == config.loss_scale_window:
                self.value = max(min(2 * self.value, LARGEST), self.value)
                self._good_steps, self._patience = 0, config.hysteresis
            return False
        could_fall = self.value > config.min_loss_scale
        self._good_steps = 0
        self._patience -= 1
        if self._patience <= 0:
            self.value = max(self.value / 2, config.min_loss_scale)
        return could_fall

    def state(self) -> dict[str, float]:
        """The state of the scale, for `load`."""
        return {"value": self.value, "good_steps": self._good_steps, "patience": self._patience}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state()` returned."""
        self.value = float(state["value"])
        self._good_steps, self._patience = int(state["good_steps"]), int(state["patience"])
