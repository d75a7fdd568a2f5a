"""Training runs of reward models: pairs, a value head, and an export that transformers loads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from skyrl.batch import TrainingBatch
from skyrl.config import RewardModelConfig
from skyrl.data.supervised_rows import Rows, load_preferences
from skyrl.experiments.full_length import made_up_pairs
from skyrl.experiments.sft import SCORED_AT_A_TIME, SupervisedExp
from skyrl.learners.workers.group import LearnerGroup
from skyrl.learners.workers.learning_worker import LearningWorker, Objective
from skyrl.learners.workers.objectives import BradleyTerry
from skyrl.learners.workers.roles import CriticWorker
from skyrl.training.collate import collate_pairs
from skyrl.training.supervised_evaluation import SupervisedEvaluation, preferences


class RewardModelExp(SupervisedExp):
    """Trains a model of which of two chats is better. Its learner is a critic: a body with a head for one number."""

    role: ClassVar[str] = "critic"
    cfg: RewardModelConfig

    def load(self, sources: tuple[str, ...]) -> Rows[Any]:
        return load_preferences(sources, self.tokenizer, self.cfg, self.max_length)

    def made_up_rows(self, vocabulary: int) -> Rows[Any]:
        return made_up_pairs(self.cfg, self.max_length, vocabulary)

    def collate(self, rows: Sequence[Any]) -> TrainingBatch:
        return collate_pairs(rows, share_prompts=self.cfg.use_sequence_packing)

    def get_learner(self) -> LearnerGroup[LearningWorker]:
        makers = [
            partial(CriticWorker, self.cfg.trainer, self.total_steps, ranks=ranks, config_path="")
            for ranks in self.ranks()
        ]
        # placed as the policy of a run is: there is no other model
        ranks = self.processes.start("policy", makers)
        return LearnerGroup(ranks, self.budget(), replicas=self.replicas, rows_of_an_item=self.cfg.rows_of_an_item)

    def get_objective(self) -> Objective:
        return BradleyTerry()

    def get_evaluation(self) -> SupervisedEvaluation | None:
        if not self.eval_datasets:
            return None
        sets = {name: dataset.rows for name, dataset in self.eval_datasets.items()}
        size = max(self.cfg.batch_size, SCORED_AT_A_TIME)
        return SupervisedEvaluation(sets, self.collate, preferences, batch_size=size)
