"""One rank of a model that is scored: what the policy, the critic and the reference have in common."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import DeepSpeedConfig, FSDPConfig, OptimizerConfig, TrainerConfig
from skyrl.learners.budget import TokenBudget, micro_batches
from skyrl.learners.forward import Outputs, Reading, probe_forward
from skyrl.learners.fsdp2 import Fsdp2
from skyrl.learners.moving import Mover
from skyrl.learners.ranks import Ranks
from skyrl.learners.strategy import ModelSource, Setting, Strategy
from skyrl.learners.zero import Zero
from skyrl.tree import required


class ModelWorker:
    """A model on the ranks of its role, and how it scores a batch."""

    def __init__(
        self,
        trainer: TrainerConfig,
        source: ModelSource,
        read: Reading,
        sharding: tuple[FSDPConfig, DeepSpeedConfig],
        ranks: Ranks,
        *,
        optimizer: OptimizerConfig | None = None,
        mover: Mover | None = None,
    ) -> None:
        """`read` says what is scored; `sharding` is the model's own part of the configuration, for either strategy.

        Raises `ModelError` if the model cannot be loaded or is not causal, `ConfigError` if something that `resolve()`
        derives is unset, `ProcessError` if the ranks do not meet.
        """
        self.ranks, self._read = ranks, read
        self.device = torch.device(required_device(trainer))
        self._forward_rows = trainer.micro_forward_batch_size_per_gpu
        self._budget = token_budget(trainer)
        if trainer.deterministic:
            torch.use_deterministic_algorithms(True)
        setting = Setting(
            ranks=ranks,
            device=self.device,
            compute_dtype=getattr(torch, required(trainer.compute_dtype, "trainer.compute_dtype")),
            optimizer=optimizer,
            micro_batch_rows=trainer.micro_train_batch_size_per_gpu,
            mover=mover or Mover(),
        )
        with ExitStack() as failed:
            self._joined = ranks.size > 1 or trainer.strategy == "deepspeed"
            if self._joined:
                ranks.join(self.device)
                failed.callback(ranks.leave)
            fsdp, zero = sharding
            self.strategy: Strategy = (
                Zero(source, zero, setting) if trainer.strategy == "deepspeed" else Fsdp2(source, fsdp, setting)
            )
            with self.strategy.scoring():  # not in the type it computes in, where that is a choice
                self._reads = probe_forward(
                    self.strategy.model,
                    pack=trainer.use_sample_packing,
                    share_prompts=trainer.share_group_prompts,
                    device=self.device,
                )
            failed.pop_all()

    @property
    def model(self) -> Any:
        """The transformers model, as this rank holds it."""
        return self.strategy.skeleton

    async def score(self, batch: TrainingBatch) -> Tensor:
        """What the model says of the sampled tokens, (B, L) float32 without gradient; 0 elsewhere."""
        if batch.micro_batches is None:
            [batch] = self._budget.plan([batch])
        scored = torch.zeros(batch.input_ids.shape)
        with self.strategy.scoring():
            for index, micro in micro_batches(batch, self._forward_rows):
                values = self._forward(micro.to(self.device)).values
                scored[index, : values.shape[1]] = values.cpu()
        return scored

    async def offload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """Give the device to others: weights, optimizer state, or both go to host memory. Bytes moved on this rank."""
        return self.strategy.offload(model=model, optimizer=optimizer)

    async def onload(self, *, model: bool = True, optimizer: bool = True) -> int:
        """Take it back. Bytes moved on this rank."""
        return self.strategy.onload(model=model, optimizer=optimizer)

    def metadata(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and type of every weight, in the order in which `stream` sends them."""
        shapes = self.strategy.named_shapes()
        return [(name, tuple(each.shape), str(each.dtype).removeprefix("torch.")) for name, each in shapes.items()]

    def close(self) -> None:
        """Leave the other ranks. Nothing but this may be called afterwards, and this once more does nothing."""
        if self._joined:
            self._joined = False
            self.strategy.close()
            self.ranks.leave()

    def _forward(self, batch: TrainingBatch) -> Outputs:
        with self.strategy.computing():
            return self._read(self.strategy.model, batch, self._reads)


def token_budget(trainer: TrainerConfig) -> TokenBudget:
    """What the configuration says of micro-batches bounded by tokens."""
    limit = trainer.max_tokens_per_microbatch
    return TokenBudget(
        tokens=limit if limit > 0 else None, keep_groups=trainer.use_sample_packing and trainer.share_group_prompts
    )


def required_device(trainer: TrainerConfig) -> str:
    """`trainer.device` once `resolve()` has replaced `auto`. Raises `ConfigError` if it has not."""
    return required(None if trainer.device == "auto" else trainer.device, "trainer.device")
