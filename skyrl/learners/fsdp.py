"""The torch learner: a policy that is scored and updated, a reference that is only scored.

With one rank nothing is sharded and nothing is wrapped. Each worker is built from its own configuration: it knows
nothing of how batches were generated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import ModelConfig, OptimizerConfig, TrainerConfig
from skyrl.errors import NonFiniteError
from skyrl.learners.forward import probe_forward, sampled_logprobs
from skyrl.learners.schedule import learning_rate_schedule, move_schedule
from skyrl.models.loading import load_causal_lm
from skyrl.models.naming import named_weights
from skyrl.tree import required

Metrics = dict[str, float]


class Objective(Protocol):
    """What an update minimises: weights for the whole mini-batch, then the loss of each micro-batch."""

    def weigh(self, batch: TrainingBatch) -> TrainingBatch: ...

    def __call__(self, logprobs: Tensor, batch: TrainingBatch) -> tuple[Tensor, Metrics]: ...


class ModelWorker:
    """A causal language model on one device, and how it scores a batch. The policy and the reference are its kinds."""

    def __init__(self, trainer: TrainerConfig, model: ModelConfig) -> None:
        self.device = torch.device(required_device(trainer))
        self.temperature = required(trainer.algorithm.temperature, "trainer.algorithm.temperature")
        self.compute_dtype = getattr(torch, required(trainer.compute_dtype, "trainer.compute_dtype"))
        self._pack = trainer.use_sample_packing
        self._forward_rows = trainer.micro_forward_batch_size_per_gpu
        if trainer.deterministic:
            torch.use_deterministic_algorithms(True)
        self.model: Any = load_causal_lm(
            required(model.path, "model.path"),
            dtype=torch.float32,
            attention=required(trainer.attention, "trainer.attention"),
            device=self.device,
        )
        self.model.eval()
        probe_forward(self.model, pack=self._pack)

    async def score(self, batch: TrainingBatch) -> Tensor:
        """Log-probabilities (B, L) of the sampled tokens, in nats, without gradient; 0 elsewhere."""
        scored = torch.zeros(batch.input_ids.shape)
        with torch.no_grad():
            start = 0
            for micro in batch.split(self._forward_rows):
                values, _ = self._logprobs(micro)
                scored[start : start + len(micro), : values.shape[1]] = values.cpu()
                start += len(micro)
        return scored

    def _logprobs(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        with self._autocast():
            return sampled_logprobs(self.model, batch.to(self.device), temperature=self.temperature, pack=self._pack)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.compute_dtype, enabled=self.compute_dtype is not torch.float32)


class RefWorker(ModelWorker):
    """A model that never changes and scores what the policy wrote: pi_ref of the KL penalty."""

    def __init__(self, trainer: TrainerConfig) -> None:
        """Loads `trainer.ref.model`. Raises `ConfigError` if something that `resolve()` derives is unset."""
        super().__init__(trainer, trainer.ref.model)


class PolicyWorker(ModelWorker):
    """The model that learns: scoring, optimizer steps, and its weights and state for others to copy."""

    def __init__(self, trainer: TrainerConfig, objective: Objective, num_training_steps: int | None = None) -> None:
        """Loads `trainer.policy.model` with a new optimizer.

        `num_training_steps` counts optimizer steps; only schedules that end somewhere (linear, cosine, ...) need it.
        """
        super().__init__(trainer, trainer.policy.model)
        self.objective = objective
        self._train_rows = trainer.micro_train_batch_size_per_gpu
        if trainer.recompute_activations:
            recompute_activations(self.model, use_reentrant=trainer.gradient_checkpointing_use_reentrant)
        optimizer = trainer.policy.optimizer_config
        self._max_grad_norm = optimizer.max_grad_norm or math.inf  # 0 turns clipping off
        self.optimizer = adamw(self.model, optimizer)
        self.schedule = learning_rate_schedule(self.optimizer, optimizer, num_training_steps)

    async def update(self, batch: TrainingBatch) -> Metrics:
        """One optimizer step over the mini-batch, in micro-batches whose number changes nothing but memory.

        Raises `NonFiniteError` before the step if the gradient is not finite; the weights are then as they were.
        """
        totals: Metrics = {}
        entropy, drift = [], []
        self.optimizer.zero_grad(set_to_none=True)
        weighed = self.objective.weigh(batch)
        for micro in weighed.split(self._train_rows):
            micro = micro.to(self.device)
            logprobs, entropies = self._logprobs(micro)
            loss, parts = self.objective(logprobs, micro)
            loss.backward()
            for name, value in parts.items():
                totals[name] = totals.get(name, 0.0) + value
            entropy.append(entropies[micro.loss_mask])
            drift.append((logprobs.detach() - micro.rollout_logprobs)[micro.loss_mask])
        learning_rate = self.optimizer.param_groups[0]["lr"]
        totals["grad_norm"] = self._step(totals)
        return {
            **totals,
            **_spread("rollout_train_logprobs_abs_diff", torch.cat(drift).abs()),
            "policy_entropy": torch.cat(entropy).mean().item(),
            "policy_lr": learning_rate,
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of every weight, tied ones once, in the order and under the names of the stored model."""
        return named_weights(self.model)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a resumed learner needs: tensors by name, and numbers."""
        tensors = {f"model.{name}": tensor.detach() for name, tensor in named_weights(self.model)}
        optimizer = self.optimizer.state_dict()
        for index, slots in optimizer["state"].items():
            tensors |= {f"optimizer.{index}.{slot}": tensor for slot, tensor in slots.items()}
        return tensors, {"optimizer_steps": self.schedule.last_epoch}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Become the learner that `state()` described, bit for bit."""
        model = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
        with torch.no_grad():
            for name, weight in named_weights(self.model):
                weight.copy_(model[name])
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = _optimizer_slots(tensors)
        self.optimizer.load_state_dict(optimizer)
        move_schedule(self.schedule, numbers["optimizer_steps"])

    def _step(self, totals: Metrics) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        if not torch.isfinite(norm):
            raise NonFiniteError(
                f"the gradient norm is {norm.item()} (loss {totals.get('final_loss')}): "
                "the optimizer step was not taken. "
                "Lower trainer.policy.optimizer_config.lr, or look at the rewards and log-probabilities of this step."
            )
        self.optimizer.step()
        self.schedule.step()
        return float(norm)


def recompute_activations(model: Any, *, use_reentrant: bool) -> None:
    """Keep no activations inside a layer and compute them again in the backward pass (arXiv:1604.06174).

    transformers does so in training mode only. Only the layers themselves enter it: what is inside them, dropout above
    all, stays in evaluation mode, where a forward pass can be repeated.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def adamw(model: Any, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) over the parameters that learn, with the configured decoupled weight decay."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    beta1, beta2 = config.adam_betas
    return torch.optim.AdamW(learning, lr=config.lr, betas=(beta1, beta2), weight_decay=config.weight_decay)


def required_device(trainer: TrainerConfig) -> str:
    """`trainer.device` once `resolve()` has replaced `auto`. Raises `ConfigError` if it has not."""
    return required(None if trainer.device == "auto" else trainer.device, "trainer.device")


def _optimizer_slots(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    slots: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, slot = name.split(".", 2)
            slots.setdefault(int(index), {})[slot] = tensor
    return slots


def _spread(name: str, values: Tensor) -> Metrics:
    return {
        f"{name}_mean": values.mean().item(),
        f"{name}_max": values.max().item(),
        f"{name}_std": values.std(correction=0).item(),
    }
