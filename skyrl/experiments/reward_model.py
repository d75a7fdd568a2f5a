"""Training runs of reward models: pairs, a value head, and an export that transformers loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import RewardModelConfig
from skyrl.data.supervised_rows import TokenizedRows, load_preferences
from skyrl.experiments.full_length import synthetic_pairs
from skyrl.experiments.sft import SupervisedExp
from skyrl.learners.workers.learning_worker import Objective
from skyrl.learners.workers.objectives import BradleyTerry
from skyrl.learners.workers.roles import RewardModelWorker
from skyrl.training.collate import collate_pairs
from skyrl.training.supervised import Sums, preferences


class RewardModelExp(SupervisedExp):
    """Trains a model of which of two chats is better. Its learner is a critic: a body with a head for one number."""

    role: ClassVar[str] = "critic"
    cfg: RewardModelConfig
    worker = RewardModelWorker

    def load(self, sources: tuple[str, ...]) -> TokenizedRows[Any]:
        return load_preferences(sources, self.tokenizer, self.cfg, self.max_length)

    def synthetic_rows(self, vocabulary: int) -> TokenizedRows[Any]:
        return synthetic_pairs(self.cfg, self.max_length, vocabulary)

    def collate(self, rows: Sequence[Any]) -> TrainingBatch:
        return collate_pairs(rows, share_prompts=self.cfg.use_sequence_packing)

    def get_objective(self) -> Objective:
        return BradleyTerry()

    def measure(self, scores: Tensor, batch: TrainingBatch) -> Sums:
        return preferences(scores, batch)
