"""The roles of a preference run: the policy, and the reference that it is compared with."""

from __future__ import annotations

from functools import partial

import attrs
from torch import Tensor

from skyrl.batch import TrainingBatch
from skyrl.config import PreferenceConfig, SkyRLLoraConfig
from skyrl.config.settings.learners import ShardedModelConfig
from skyrl.config.settings.models import ModelConfig
from skyrl.learners.forward import compute_logprobs
from skyrl.learners.offloading import DeviceMover
from skyrl.learners.ranks import ALONE, Ranks
from skyrl.learners.workers.group import LearnerGroup
from skyrl.learners.workers.model_worker import ModelWorker
from skyrl.learners.workers.roles import TextWorker, causal_lm, section_beside
from skyrl.models.lora import adapters_off


class PreferenceWorker(TextWorker):
    """The model that learns from pairs. With a new adapter, it is its own reference without the adapter."""

    def __init__(
        self,
        run: PreferenceConfig,
        num_training_steps: int | None = None,
        *,
        ranks: Ranks = ALONE,
        mover: DeviceMover | None = None,
    ) -> None:
        """Loads `run.model`. See `LearningWorker` for the arguments."""
        super().__init__(run, num_training_steps, ranks=ranks, mover=mover)
        if run.use_weighting:
            self._read = partial(self._read, collisions=True)  # type: ignore[call-arg]  # it is compute_logprobs

    async def score_reference(self, batch: TrainingBatch) -> Tensor:
        """`score` without the adapter."""
        with adapters_off(self.model):
            return await self.score(batch)


class PreferenceLearner(LearnerGroup[PreferenceWorker]):
    """All ranks of the policy of a preference run."""

    async def score_reference(self, batch: TrainingBatch) -> Tensor:
        """`score` without the adapter."""
        return await self.scored_by(PreferenceWorker.score_reference, batch)


class PairReferenceWorker(ModelWorker):
    """The frozen model that the policy is compared with, on one of the ranks on which the policy is, too."""

    def __init__(self, run: PreferenceConfig, *, ranks: Ranks = ALONE, mover: DeviceMover | None = None) -> None:
        """Loads the reference of the run; the adapter that training starts from, if there is one, is merged into its
        weights.
        """
        section = reference_section(run)
        read = partial(compute_logprobs, temperature=1.0, measured=False)
        super().__init__(run, section, causal_lm(run, section), read, ranks, role="ref", mover=mover)


def reference_section(run: PreferenceConfig) -> ShardedModelConfig:
    """The table of the reference: another model, sharded as the policy is."""
    return section_beside(run, reference_model(run))


def reference_model(run: PreferenceConfig) -> ModelConfig:
    """The weights of the reference: by default those that training starts from, with its stored adapter."""
    if run.ref_model_path is not None:
        return ModelConfig(path=run.ref_model_path)
    adapter = run.model.lora if run.model.lora.path is not None else SkyRLLoraConfig()
    return attrs.evolve(run.model, lora=adapter)
