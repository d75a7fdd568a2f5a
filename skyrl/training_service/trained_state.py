"""What one model of the training service learns: weights, accumulated gradients, and the state of Adam."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
from attrs import define, field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.adamw import adamw

from skyrl.errors import RequestError
from skyrl.learners.gradients import CLIP_EPS
from skyrl.storage.modes import save_tensors
from skyrl.training_service.backend import AdamSettings

Tensors = dict[str, Tensor]

_STEPS = "steps"


@define
class TrainedState:
    """Weights by name, and what belongs to each of them; all float32."""

    weights: Tensors
    gradients: Tensors = field(factory=dict)
    """Sums over the passes since the last step; empty if there was none."""

    first: Tensors = field(factory=dict)
    """Adam's mean of gradients; empty before the first step."""

    second: Tensors = field(factory=dict)
    """Adam's mean of squared gradients."""

    steps: int = 0

    def add(self, gradients: Tensors) -> None:
        """Add the gradients of a pass, whose tensors the state keeps."""
        for name, gradient in gradients.items():
            existing = self.gradients.get(name)
            self.gradients[name] = gradient if existing is None else existing.add_(gradient)

    @torch.no_grad()
    def step(self, settings: AdamSettings) -> float:
        """One step of AdamW with the accumulated gradients, which are dropped. Returns their L2 norm before clipping.

        Raises `RequestError` without gradients.
        """
        if not self.gradients:
            raise RequestError("there are no gradients to step with: call forward_backward first")
        gradients = list(self.gradients.values())
        # In double, in which no float32 overflows.
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        if settings.max_grad_norm and norm + CLIP_EPS > settings.max_grad_norm:
            torch._foreach_mul_(gradients, settings.max_grad_norm / (norm + CLIP_EPS))
        if not self.first:
            self.first = {name: torch.zeros_like(gradient) for name, gradient in self.gradients.items()}
            self.second = {name: torch.zeros_like(item) for name, item in self.gradients.items()}
        weights, first, second = (
            [tensors[name] for name in self.gradients] for tensors in (self.weights, self.first, self.second)
        )
        adamw(
            weights,
            gradients,
            first,
            second,
            [],
            [torch.tensor(float(self.steps), device=weight.device) for weight in weights],
            fused=True,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            maximize=False,
        )
        self.steps, self.gradients = self.steps + 1, {}
        return norm

    def to(self, device: torch.device) -> None:
        """Move all tensors to a device."""
        for item in (self.weights, self.gradients, self.first, self.second):
            item.update({name: tensor.to(device) for name, tensor in item.items()})

    def write(self, file: Path, *, weights: bool) -> None:
        """Store everything, or everything but the weights."""
        slots = {"gradients": self.gradients, "first": self.first, "second": self.second}
        slots |= {"weights": self.weights} if weights else {}
        tensors = {f"{slot}.{name}": tensor.cpu() for slot, state in slots.items() for name, tensor in state.items()}
        save_tensors({_STEPS: torch.tensor(self.steps), **tensors}, file)

    @classmethod
    def read(cls, file: Path, weights: Tensors | None = None) -> Self:
        """The state in a file, with these weights if it stores none. Raises `RequestError` if there is no such file, or
        if it belongs to other weights.
        """
        try:
            stored = load_file(file)
            steps = int(stored.pop(_STEPS))
        except (OSError, KeyError, SafetensorError) as error:
            raise RequestError(
                f"{file.parent} holds no optimizer state ({type(error).__name__}: {error}): load the weights alone"
            ) from error
        slots: dict[str, Tensors] = {"weights": weights or {}, "gradients": {}, "first": {}, "second": {}}
        for key, tensor in stored.items():
            slot, _, name = key.partition(".")
            like = tensor if weights is None else weights.get(name)
            if slot not in slots or like is None or like.shape != tensor.shape:
                raise RequestError(f"the optimizer state in {file.parent} belongs to another model")
            slots[slot][name] = tensor.to(like.device)
        return cls(steps=steps, **slots)


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether no tensor holds NaN or infinity."""
    return all(bool(tensor.sum(dtype=torch.float64).isfinite()) for tensor in tensors.values())
